"""The page is one file that holds all it needs, stays small, and shows what it reads as text."""

import base64
import datetime
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import chainring
from chainring import html_report
from report_runs import falling, logged, recorded, trained

VENDOR = Path(html_report.__file__).parent / "vendor"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp; `${x}` $title"


class Reader(HTMLParser):
    """What a page says, and what it is made of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.links = [], [], []
        self.scripts = 0
        self._inside = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data):
        if not self._inside:
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def page(out, **options):
    written = html_report.write(Path(out), **options)
    return written.file.read_text(encoding="utf-8")


def data_of(text):
    """The points, which a strict reader of JSON accepts."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1], parse_constant=refuse)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return page(trained(tmp_path_factory.mktemp("out") / "result"))


def test_the_function_that_reports_is_still_the_function(shown):
    """A module `chainring.report` would have taken its name."""
    assert callable(chainring.report)


def test_a_trained_run_shows_every_part(shown):
    """In words that its reader knows from the script."""
    text = Reader(shown).text
    expected = [
        "main/accuracy", "validation/main/loss", "<b>bold</b>", "config.lr", "lr of optimizer", "resumed",
        "ReachedTrigger(6, 'epoch')", "IntervalTrigger(1, 'epoch')", "extension:LogReport", "Classifier", "67", "8x4",
        "main/predictor/0/weight", "6 verified", "snapshot_iter_18",
    ]  # fmt: skip
    assert [word for word in expected if word not in text] == []


def test_the_page_refers_to_nothing_outside_itself(shown):
    """Links lead within the page or are data themselves. Styles fetch nothing."""
    reader = Reader(shown)
    assert [link for link in reader.links if not link.startswith(("#", "data:"))] == []
    styles = "".join(re.findall(r"<style>(.*?)</style>", shown, re.DOTALL))
    assert "url(" not in styles
    assert "@import" not in styles


def test_the_policy_of_the_page_names_exactly_its_own_scripts(shown):
    """By their hashes; nothing may be fetched."""
    policy = next(each["content"] for tag, each in Reader(shown).tags if each.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script>(.*?)</script>", shown, re.DOTALL)
    assert len(scripts) == 2
    assert policy.count("sha256-") == 2


def test_every_table_has_headings_and_a_caption(shown):
    """Of columns and rows, for who hears the page."""
    tags = Reader(shown).tags
    assert sum(tag == "table" for tag, _ in tags) == sum(tag == "caption" for tag, _ in tags) >= 7
    assert {each.get("scope") for tag, each in tags if tag == "th"} == {"col", "row"}


def test_sections_without_anything_are_hidden_and_the_last_line_says_how_to_get_them(tmp_path):
    """All in that line, with the calls to add; the bar of links has none of them."""
    shown = page(recorded(tmp_path))
    text = Reader(shown).text
    assert text.count("Also shown, once a run has it") == 1
    for words in ("extensions.LogReport()", "extensions.Profiler()", 'extensions.dump_graph("main/loss")'):
        assert words in text
    for words in ("extensions.snapshot(autoload=True)", "config=vars(args)", "notes.md"):
        assert words in text
    hidden = [each["id"] for tag, each in Reader(shown).tags if tag == "section" and "hidden" in each]
    assert {"system", "log", "media", "time", "graph", "snapshots", "notes"} <= set(hidden)
    links = [each["href"][1:] for tag, each in Reader(shown).tags if tag == "a" and "hidden" in each]
    assert links == hidden
    assert "Add " not in text


def test_the_head_has_the_last_and_the_best_value_of_an_evaluation(tmp_path):
    """Of an accuracy the greatest, with its iteration; of a loss, if there is no other, the least."""
    rows = [{"iteration": i, "epoch": i, "validation/main/accuracy": x} for i, x in enumerate([0.5, 0.75, 0.625], 1)]
    text = " ".join(Reader(page(logged(tmp_path / "a", rows))).text.split())
    assert "validation/main/accuracy 0.625 best 0.75, iteration 2" in text
    rows = [{"iteration": i, "main/loss": x, "lr": 0.1} for i, x in enumerate([0.5, math.nan, 0.25], 1)]
    text = " ".join(Reader(page(logged(tmp_path / "b", rows))).text.split())
    assert "main/loss 0.25 best 0.25, iteration 3" in text


def test_a_log_without_a_row_is_no_log_that_is_missing(tmp_path):
    """A run that has just begun."""
    assert "The log has no row yet." in Reader(page(logged(tmp_path, []))).text


def test_one_hundred_thousand_points_stay_below_a_megabyte(tmp_path):
    """Of ten curves; the page says how many are drawn, and that the log has all."""
    rows = [
        {**{f"model{k}/metric": (i * 7919 * (k + 1) % 10007) / 9973 for k in range(10)}, "iteration": i, "epoch": i // 100,
         "elapsed_time": i * 0.12345678}
        for i in range(10_000)
    ]  # fmt: skip
    text = page(logged(tmp_path, rows))
    assert len(text.encode()) < 1_000_000
    assert re.search(r"11,\d\d\d of 100,000 points are drawn", Reader(text).text)
    assert "All are in log.jsonl" in Reader(text).text


def test_one_curve_of_one_hundred_thousand_points_stays_below_a_megabyte(tmp_path):
    """The table shows its last rows, and says so."""
    text = page(logged(tmp_path, falling(100_000)))
    assert len(text.encode()) < 1_000_000
    assert "The last 1,000 of 100,000 rows" in Reader(text).text


def test_many_columns_long_texts_and_many_settings_stay_below_a_megabyte(tmp_path):
    """Everything that comes from a file has its bound."""
    out = logged(tmp_path, [{f"{'k' * 100}{k}": 1.5 for k in range(3000)} | {"iteration": i} for i in range(20)])
    starts = [{"iteration": i, "changed": {"config.x": ["a" * 5000, "b" * 5000]}} for i in range(2)]
    recorded(out, config={"long": "x" * 1_000_000} | {f"setting {k}": "v" * 500 for k in range(500)}, starts=starts)
    assert len(page(out).encode()) < 1_000_000


HOSTILE_PLACES = {
    "config": lambda out: recorded(out, config={HOSTILE: HOSTILE}),
    "starts": lambda out: recorded(
        out, starts=[{"iteration": HOSTILE, "time": HOSTILE, "changed": {HOSTILE: [HOSTILE, 1]}}]
    ),
    "versions": lambda out: recorded(out, versions={HOSTILE: HOSTILE}, argv=[HOSTILE], device=HOSTILE),
    "plan": lambda out: recorded(
        out, plan={"stop_trigger": HOSTILE, "extensions": [dict.fromkeys(["name", "trigger"], HOSTILE)]}
    ),
    "models": lambda out: recorded(out, models={HOSTILE: {"class": HOSTILE, "parameters": {HOSTILE: "3"}, "frozen": []}}),
    "keys": lambda out: logged(out, [{HOSTILE: 1.5, "iteration": 1}]),
    "values": lambda out: logged(out, [{"a": HOSTILE, "iteration": HOSTILE}]),
    "profile": lambda out: written(out, "profile.json", {"iterations": 3, "seconds": {HOSTILE: 1.5}}),
    "graph": lambda out: written(out, "cg.json", graph(HOSTILE)),
}


def written(out, name, content):
    (logged(out, []) / name).write_text(json.dumps(content))
    return out


def graph(label, operations=1):
    """Of a leaf of this label, and of operations of that label one after the other."""
    nodes = [{"kind": "operation", "label": label} for _ in range(operations)] + [
        {"kind": "leaf", "label": label, "shape": [3]}
    ]
    return {"nodes": nodes, "edges": [[index + 1, index] for index in range(operations)], "is_truncated": False}


@pytest.mark.parametrize("place", HOSTILE_PLACES)
def test_what_a_file_holds_is_shown_as_text(tmp_path, place):
    """It adds no element, closes none, and substitutes nothing."""
    reader = Reader(page(HOSTILE_PLACES[place](tmp_path / "run")))
    assert [tag for tag, _ in reader.tags].count("script") == 3
    assert not any("onerror" in name for _, attributes in reader.tags for name in attributes)
    assert "img" not in {tag for tag, _ in reader.tags}
    assert "alert(1)" in reader.text


def test_the_name_of_the_directory_is_text_too(tmp_path):
    """It is the heading."""
    reader = Reader(page(logged(tmp_path / "<b>x&y", falling(2))))
    assert "<b>x&y" in reader.text


START = {"iteration": 0, "time": "2026-01-01T00:00:00+00:00", "host": "here", "pid": 1}
COMMANDS = [
    {"id": "30", "iteration": 30, "command": "lr=0.02", "was": 0.001, "time": "2026-01-01T00:01:00+00:00"},
    {"id": "60", "iteration": 60, "command": "weights=a:1,b:3", "was": "a:0.75,b:0.25", "time": "2026-01-01T00:02:00+00:00"},
    {"id": "70", "iteration": 70, "command": "lr=2", "refused": "a schedule sets it", "time": "2026-01-01T00:03:00+00:00"},
    {"id": "100", "iteration": 100, "command": "stop", "time": "2026-01-01T00:04:00+00:00"},
]


@pytest.mark.parametrize(
    ("starts", "commands", "words"),
    [
        (1, COMMANDS, "An upright line is where a command was carried out."),
        (2, COMMANDS, "An upright line is where the run was resumed, or a command was carried out."),
        (2, COMMANDS[2:3], "An upright line is where the run was resumed."),
    ],
)
def test_the_page_says_what_was_commanded_and_which_lines_mark_it(tmp_path, starts, commands, words):
    """With what was there before, as a command writes it; what was refused has no line."""
    recorded(tmp_path, starts=[START] * starts, commands=commands)
    text = page(logged(tmp_path, falling(100)))
    shown = Reader(text)
    assert words in shown.text
    assert ("h3", {}) in shown.tags
    marks = [command["iteration"] for command in commands if "refused" not in command]
    assert data_of(text)["runs"][0]["marks"] == [0] * (starts - 1) + marks
    assert "refused: a schedule sets it" in shown.text
    if len(commands) > 1:
        assert "weights=a:1,b:3 60 a:0.75,b:0.25" in shown.text


def test_values_that_json_lacks_do_not_break_the_points(tmp_path):
    """They are gaps there, and counted beside the chart."""
    values = [1.0, float("nan"), "NaN", "Infinity", float("-inf"), 1e400, 2.0]
    text = page(logged(tmp_path, [{"main/loss": value, "iteration": i} for i, value in enumerate(values)]))
    (curve,) = data_of(text)["runs"][0]["logs"][0]["curves"]
    values = np.frombuffer(base64.b64decode(curve["y"][1:]), "<f4")
    assert np.isnan(values).tolist() == [False, True, True, True, True, True, False]
    assert curve["gaps"] == {"NaN": 2, "Infinity": 2, "-Infinity": 1}


def test_an_empty_value_that_was_replaced_is_seen(tmp_path):
    """Two quotes, and not nothing."""
    starts = [{"iteration": 0}, {"iteration": 5, "changed": {"config.resume": ["", "a"]}}]
    assert 'config.resume "" → a' in Reader(page(recorded(tmp_path, starts=starts))).text


def test_text_that_is_no_unicode_is_shown_escaped(tmp_path):
    """Half of a surrogate pair can stand in JSON, and not in a file of UTF-8."""
    assert "\\ud800" in Reader(page(logged(tmp_path, [{"a": "\ud800", "b\udfff": 1.5, "iteration": 1}]))).text


def test_the_vendored_files_are_those_that_were_published():
    """Their checksums are in the README beside them, and the page carries them unchanged."""
    listed = dict(
        reversed(line.split())
        for line in (VENDOR / "README.md").read_text().splitlines()
        if re.match(r"[0-9a-f]{64} ", line)
    )
    present = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir() if path.name != "README.md"
    }
    assert listed == present


def test_the_page_names_what_others_wrote(shown):
    """The chart library, its holder and its licence."""
    assert "Curves by uPlot, Copyright (c) 2022 Leon Sorokin, MIT licence" in Reader(shown).text


def test_the_page_says_when_it_was_made(shown):
    """Because the run may have gone on since."""
    assert f"As of {datetime.datetime.now().astimezone():%Y-}" in Reader(shown).text


def test_the_operations_of_the_graph_are_listed_with_their_inputs(tmp_path):
    """In the order of the forward; of thousands the last."""
    assert "Add #1 w (3,) Add #0 Add #1" in Reader(page(written(tmp_path, "cg.json", {**graph("w"), **named()}))).text
    text = Reader(page(written(tmp_path, "cg.json", graph("x", 5000)))).text
    assert "4,700 more are in cg.json" in text
    assert "x #0 x #1" in text


def named():
    nodes = [{"kind": "operation", "label": "Add"}, {"kind": "operation", "label": "Add"}]
    return {"nodes": [*nodes, {"kind": "leaf", "label": "w", "shape": [3]}], "edges": [[1, 0], [2, 1]]}


def test_the_picture_that_graphviz_has_drawn_is_in_the_page(tmp_path):
    """As an image, in which no script runs."""
    out = written(tmp_path, "cg.json", graph("x"))
    (out / "cg.svg").write_text("<svg><script>alert(3)</script></svg>")
    reader = Reader(page(out))
    (image,) = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert image["src"].startswith("data:image/svg+xml;base64,")
    assert image["alt"]
    assert [tag for tag, _ in reader.tags].count("script") == 3
