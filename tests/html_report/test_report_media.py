"""Images, texts and histograms on the page of a run: what is shown of them, and that nothing in their file is trusted."""

import base64
import itertools
import json
import re

import numpy as np
import pytest

from chainring import html_report, report, report_histogram, report_image, report_text, training
from chainring.training import extensions
from report_runs import falling, logged

HOSTILE = "</pre><script>alert(1)</script>\"'&amp;"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAICAIAAABPmPnhAAAAD0lEQVR4nGNIwwsYhqs0AFUqX6FwAudgAAAAAElFTkSuQmCC"  # 10 x 8


class Showing(training.Updater):
    """Reports one of each kind, under hostile keys."""

    def update_core(self):
        report({"loss": 1.0})
        report_image(HOSTILE, np.full((4, 6, 3), self.iteration, np.uint8))
        report_text("text", HOSTILE + f" of {self.iteration + 1}")
        report_histogram("histogram", [0.0, 1.0, 1.0, float("nan")])


def section(out):
    page = html_report.write(out).file.read_text()
    assert page.count("<script") == 3  # the points and the page's own two
    return re.search(r'<section id="media".*?</section>', page, re.DOTALL)[0]


def written(out, *media, number=5):
    """A log of five rows, and this content beside it, one line a row."""
    lines = [each if isinstance(each, str) else json.dumps(each) + "\n" for each in media]
    (logged(out, falling(number)) / "log.media.jsonl").write_text("".join(lines))
    return out


def row(number, **media):
    return {"row": number, "iteration": number + 1, "media": media}


def text(content):
    return {"kind": "text", "text": content}


def test_images_texts_and_histograms_are_shown_by_key_in_their_order(tmp_path):
    """Escaped, whatever a key or a text holds; the images are in the page itself."""
    training.Trainer(Showing(), (3, "iteration"), str(tmp_path), [extensions.LogReport(trigger=(1, "iteration"))]).run()
    found = section(tmp_path)
    assert [len(found.split(f"iteration {k}<")) - 1 for k in (1, 2, 3)] == [3, 3, 3]
    assert found.index("iteration 1<") < found.index("iteration 2<") < found.index("iteration 3<")
    images = re.findall(r"data:image/png;base64,([^\"]+)", found)
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert (len(images), found.count("<pre>"), found.count("<svg")) == (3, 3, 3)
    assert "&lt;script&gt;" in found
    assert "3 values from 0 to 1, 1 NaN" in found


def test_a_page_has_some_of_each_key_evenly_spaced(tmp_path):
    """The first and the newest among them; it says where all of them are."""
    out = written(tmp_path, *(row(k, a=text(f"of {k}.")) for k in range(150)), number=150)
    found = section(out)
    shown = [int(number) for number in re.findall(r"of (\d+)\.<", found)]
    assert len(shown) == 24
    assert (shown[0], shown[-1]) == (0, 149)
    assert all(3 <= after - before <= 12 for before, after in itertools.pairwise(shown))
    assert "24 of 150, evenly spaced" in re.sub(r"\s+", " ", found)
    assert "log.media.jsonl" in found


def test_a_long_text_is_cut_and_its_length_is_named(tmp_path):
    """To 4,000 characters."""
    found = section(written(tmp_path, row(0, a=text("x" * 10_000))))
    assert found.count("x" * 4000) == 1
    assert "(10,000 characters)" in found
    assert "x" * 4001 not in found


def test_all_of_them_stay_below_eight_megabytes(tmp_path):
    """Some of the largest are left out."""
    big = {"kind": "image", "png": PNG[:-2] + "A" * 3_000_000}
    found = section(written(tmp_path, *(row(k, big=big, small=text(f"of {k}.")) for k in range(5))))
    assert found.count("data:image/png") == 2
    assert len(re.findall(r"of \d\.<", found)) == 5


def test_a_row_that_the_log_has_not_shows_nothing(tmp_path):
    """A kill may come between the two files."""
    found = section(written(tmp_path, row(4, a=text("kept")), row(5, a=text("abandoned"))))
    assert "kept" in found
    assert "abandoned" not in found


@pytest.mark.parametrize(
    "line",
    [
        "{\n", "[1]\n", "[" * 100_000 + "\n", '{"row": true, "media": {}}\n', '{"row": 1, "media": [1]}\n', "\x00\n",
        '{"row": 1, "media": {"bad": {"kind": "text", "text": "cut',
        row(1, bad=3), row(1, bad={"kind": "text", "text": 3}), row(1, bad={"kind": "other"}), row(1, bad={"kind": []}),
        row(1, bad={"kind": "image", "png": 3}), row(1, bad={"kind": "image", "png": '"><script>' + PNG}),
        row(1, bad={"kind": "image", "png": "R0lGODlhAQABAAAAACw="}), row(1, bad={"kind": "histogram"}),
        row(1, bad={"kind": "histogram", "counts": [1], "edges": ["x", 2]}),
        row(1, bad={"kind": "histogram", "counts": [-1], "edges": [1, 2]}),
        row(1, bad={"kind": "histogram", "counts": [1], "edges": [1, 10**400]}),
        row(1, bad={"kind": "histogram", "counts": [1] * 100_000, "edges": [1]}),
    ],
)  # fmt: skip
def test_what_is_damaged_or_hostile_is_left_out(tmp_path, line):
    """The lines around it are shown."""
    found = section(written(tmp_path, row(0, a=text("before")), line))
    assert "before" in found
    assert "bad" not in found


def test_without_any_there_is_no_section(tmp_path):
    """Also where the file leads out of the directory."""
    (tmp_path / "secret").write_text(json.dumps(row(0, a=text("secret"))) + "\n")
    out = logged(tmp_path / "out", falling(3))
    (out / "log.media.jsonl").symlink_to(tmp_path / "secret")
    page = html_report.write(out).file.read_text()
    assert '<section id="media" hidden' in page
    assert "chainring.report_image" in page  # in the line at the end
    assert "secret" not in page
