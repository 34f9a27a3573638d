"""The page of several runs: which runs, what is compared, and that it stays one small file."""

import base64
import json
import math
import re
import time

import numpy as np
import pytest

from chainring import html_report
from chainring.cli import main
from report_runs import falling, logged, part, recorded, trained

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def section(text, name):
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found))


def numbers(text):
    return np.frombuffer(base64.b64decode(text[1:]), {"f": "<f4", "d": "<f8"}[text[0]])


@pytest.fixture
def runs(tmp_path):
    """Two runs of six epochs, one of them resumed, with other learning rates."""
    part(tmp_path / "b", 6, 0.2).run()
    return [str(trained(tmp_path / "a")), str(tmp_path / "b")]


def test_several_runs_are_one_page_in_the_current_directory(runs, tmp_path, monkeypatch, capsys):
    """With the points of both, and the names that tell them apart; nothing is written into the runs."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--json", *runs]) == 0
    about = json.loads(capsys.readouterr().out)
    page = (tmp_path / "report.html").read_text()
    assert about == {"file": "report.html", "bytes": len(page.encode()), "rows": 12, "runs": 2}
    found = data_of(page)["runs"]
    assert [run["name"] for run in found] == ["a", "b"]
    for run in found:
        keys = [curve["key"] for curve in run["logs"][0]["curves"]]
        assert {"main/loss", "validation/main/loss"} <= set(keys)
        assert numbers(run["logs"][0]["axes"]["iteration"]).tolist() == [3, 6, 9, 12, 15, 18]
    assert not list(tmp_path.glob("*/report.html"))


def test_settings_that_differ_are_a_table_and_the_others_are_left_out(runs, tmp_path):
    """Of few runs each is a column."""
    text = section(html_report.write_several(runs, tmp_path / "x.html").file.read_text(), "settings")
    assert "config.lr 0.5 0.2" in text
    assert "config.note" not in text


def test_of_many_runs_each_is_a_row_of_the_settings(tmp_path):
    """Which a screen has room for."""
    outs = [recorded(logged(tmp_path / f"r{i}", falling(3)), config={"lr": i / 10, "same": 1}) for i in range(8)]
    text = section(html_report.write_several(outs, tmp_path / "x.html").file.read_text(), "settings")
    assert "run config.lr r0 0" in text
    assert "r7 0.7" in text
    assert "same" not in text.replace("are the same", "")


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path):
    """As many as it takes; a run that is given twice is a slip."""
    outs = [logged(tmp_path / folder / "result", falling(3)) for folder in ("one", "two")]
    page = html_report.write_several(outs, tmp_path / "x.html").file.read_text()
    assert [run["name"] for run in data_of(page)["runs"]] == ["one/result", "two/result"]
    with pytest.raises(ValueError, match=f"^{outs[0]}/ is given twice; give each run once"):
        html_report.write_several([outs[0], outs[1], f"{outs[0]}/"], tmp_path / "y.html")


def test_what_is_no_run_is_skipped_with_one_line(tmp_path, monkeypatch, capsys):
    """Such as the database of a sweep beside its runs; what is not there at all is a slip, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        logged(tmp_path / "sweep" / name, falling(3))
    (tmp_path / "sweep" / "plots").mkdir()
    (tmp_path / "sweep" / "sweep.db").touch()
    assert main(["report", *sorted(map(str, (tmp_path / "sweep").iterdir()))]) == 0
    skipped, written = capsys.readouterr().out.splitlines()
    assert skipped.startswith("skipped, because there is no run: ")
    assert skipped.endswith("sweep.db")
    assert "2 runs" in written
    (tmp_path / "report.html").unlink()
    assert main(["report", "sweep/a", "sweep/nowhere"]) == 2
    assert "there is no directory sweep/nowhere" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_directory_of_runs_stands_for_them(tmp_path, monkeypatch, capsys):
    """By their names; one that is a run and has runs below it is that run."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a/inside"):
        logged(tmp_path / "sweep" / name, falling(3))
    assert main(["report", "sweep"]) == 0
    assert [run["name"] for run in data_of((tmp_path / "report.html").read_text())["runs"]] == ["a", "b"]
    assert main(["report", "sweep/a"]) == 0
    assert (tmp_path / "sweep" / "a" / "report.html").exists()


def test_the_best_of_the_last_values_is_marked(tmp_path):
    """Least or greatest by the name of the key; a key that tells neither has no best, and NaN is none."""
    values = [(0.5, 0.25), (0.25, 0.5), (math.nan, 0.125)]
    outs = [
        logged(tmp_path / f"r{i}", [{"iteration": 1, "main/loss": loss, "main/accuracy": accuracy, "lr": accuracy}])
        for i, (loss, accuracy) in enumerate(values)
    ]
    page = html_report.write_several(outs, tmp_path / "x.html").file.read_text()
    assert re.findall(r'<td class="number best">([^<]*)<', page) == ["0.25", "0.5"]


def test_the_shapes_of_parameters_are_one_number_among_the_settings_that_differ(tmp_path):
    """Where models differ in size."""
    shapes = [{"models": {"main": {"class": "A", "parameters": {"l1/weight": f"{n}x3", "l1/bias": f"{n}"}}}} for n in (2, 4)]
    outs = [recorded(logged(tmp_path / f"r{i}", falling(3)), **shape) for i, shape in enumerate(shapes)]
    text = section(html_report.write_several(outs, tmp_path / "x.html").file.read_text(), "settings")
    assert "models.main.parameters 8 16" in text
    assert "l1" not in text


def test_the_iteration_in_which_two_runs_part_is_on_the_page(tmp_path, monkeypatch, capsys):
    """The first row that differs; of runs that are the same it says so."""
    monkeypatch.chdir(tmp_path)
    rows = falling(50)
    logged(tmp_path / "a", rows)
    logged(tmp_path / "same", rows)
    logged(tmp_path / "b", [{**row, "main/loss": row["main/loss"] + (row["iteration"] >= 17)} for row in rows])
    assert main(["report", "a", "b"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert data_of(page)["partings"] == [{"run": 1, "iteration": 17}]
    assert "a and b: different from iteration 17 on: the loss main/loss" in section(page, "curves")
    assert main(["report", "a", "same", "b"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert data_of(page)["partings"] == [{"run": 2, "iteration": 17}]
    assert "A dashed line is where the run of its colour parts from a" in section(page, "curves")
    assert re.search(r"b (0.73576|1.7358) 50 5 .* 17 ", section(page, "runs"))
    assert "a and same: same up to iteration 50" in section(page, "runs")


def test_runs_that_differ_in_their_first_row_are_not_said_to_agree_before(tmp_path, monkeypatch, capsys):
    """Of the iterations before the first row nothing was compared; of those before a later row, the row before."""
    monkeypatch.chdir(tmp_path)
    rows = falling(20)[4::5]
    logged(tmp_path / "a", rows)
    for name, first in (("b", 5), ("c", 15)):
        logged(tmp_path / name, [{**row, "main/loss": row["main/loss"] + (row["iteration"] >= first)} for row in rows])
    assert main(["diff", "a", "b"]) == 1
    assert capsys.readouterr().out.startswith("different by iteration 5, the first to compare: the loss main/loss")
    for name, text in (("b", "5, the first to compare:"), ("c", "15, and the same in iteration 10:")):
        assert main(["report", "a", name]) == 0
        page = (tmp_path / "report.html").read_text()
        assert f"a and {name}: different by iteration {text} the loss main/loss" in section(page, "curves")


def test_a_run_that_cannot_be_compared_is_still_shown(tmp_path, monkeypatch):
    """Its log has a damaged line; the page says why no line is drawn."""
    monkeypatch.chdir(tmp_path)
    logged(tmp_path / "a", falling(5))
    logged(tmp_path / "b", falling(5), end="{damaged\n")
    assert main(["report", "a", "b"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Where a and b part is not known" in section(page, "curves")
    assert "b: 1 lines of log.jsonl are not rows" in section(page, "runs")
    assert len(data_of(page)["runs"]) == 2


def test_the_table_of_runs_has_their_last_values(tmp_path):
    """Validation first, and how long each has trained."""
    outs = [logged(tmp_path / f"r{i}", falling(10, **{"validation/main/loss": i + 0.5})) for i in range(3)]
    text = section(html_report.write_several(outs, tmp_path / "x.html").file.read_text(), "runs")
    assert "validation/main/loss main/loss" in text
    assert "r2 2.5 0.73576 10 1 0.1 s 10 0 0" in text


def test_what_a_file_or_a_name_holds_is_text_on_a_page_of_several(tmp_path):
    """In names, settings, keys, values and notes."""
    outs = []
    for number in range(2):
        out = logged(tmp_path / f"<script>alert({number})", [{HOSTILE: 1.0, "iteration": 1, "a": HOSTILE}])
        recorded(out, config={HOSTILE: number, "note": f"{HOSTILE}{number}"})
        (out / "notes.md").write_text(HOSTILE)
        outs.append(out)
    page = html_report.write_several(outs, tmp_path / "x.html").file.read_text()
    assert page.count("<script") == 3
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(1)") > 4


def test_notes_of_a_person_are_shown(tmp_path):
    """From notes.md in the directory of the run, on the page of one and of several; a link out of it is not followed."""
    outs = [logged(tmp_path / name, falling(3)) for name in ("a", "b")]
    (outs[0] / "notes.md").write_text("the <better> one")
    (tmp_path / "secret").write_text("secret")
    (outs[1] / "notes.md").symlink_to(tmp_path / "secret")
    for page in (html_report.write(outs[0]), html_report.write_several(outs, tmp_path / "x.html")):
        assert "the &lt;better&gt; one" in page.file.read_text()
        assert "secret" not in section(page.file.read_text(), "notes")


def test_a_rollback_is_not_a_start(tmp_path):
    """It has a row of its own among the starts, with its reason."""
    starts = [{"iteration": 0}, {"iteration": 5, "rollback": "NaN in iteration 7"}, {"iteration": 6}]
    out = recorded(logged(tmp_path / "a", falling(9)), starts=starts)
    page = html_report.write(out).file.read_text()
    assert re.search(r"<dt>starts</dt><dd>2</dd>.*<dt>rollbacks</dt><dd>1</dd>", page, re.DOTALL)
    assert re.search(r"started 0 .* rolled back 5 NaN in iteration 7 .* resumed 6 nothing", section(page, "starts"))


def test_phases_are_sorted_by_their_time(tmp_path):
    """Also those that look the same when they are rounded."""
    seconds = {"b": 9.5, "a": 10.25, "c": 0.00011, "d": 0.00012}
    (logged(tmp_path, falling(2)) / "profile.json").write_text(json.dumps({"iterations": 3, "seconds": seconds}))
    page = html_report.write(tmp_path).file.read_text()
    assert re.findall(r'<th scope="row">(\w)</th>', re.search(r'<section id="time".*?</section>', page, re.DOTALL)[0]) == [
        "a", "b", "d", "c",
    ]  # fmt: skip


def test_many_runs_share_the_room_of_a_page(tmp_path):
    """Thirty runs of twenty thousand rows stay below 4 MB, and no spike is lost."""
    rows = falling(20_000, b=0.5)
    rows[777]["main/loss"] = 99.0
    text = "".join(json.dumps(row) + "\n" for row in rows)
    outs = [logged(tmp_path / f"r{i}", [], text) for i in range(30)]
    started = time.process_time()
    written = html_report.write_several(outs, tmp_path / "x.html")
    assert time.process_time() - started < 30  # 600,000 rows
    assert written.size < 4_000_000
    assert written.rows == 600_000
    for run in data_of(written.file.read_text())["runs"]:
        assert numbers(run["logs"][0]["curves"][0]["y"]).max() == 99
