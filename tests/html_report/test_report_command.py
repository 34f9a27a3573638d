"""The command writes the page, and says what it cannot do."""

import json

import pytest

from chainring.cli import main
from report_runs import falling, logged, part, trained


def test_the_page_lies_in_the_directory_of_the_run(tmp_path, capsys):
    """Unless another place is given, whose directories are made."""
    out = logged(tmp_path / "run", falling(3))
    assert main(["report", str(out)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(out), "--out", str(tmp_path / "pages" / "a.html")]) == 0
    assert (tmp_path / "pages" / "a.html").exists()


def test_what_was_written_as_json(tmp_path, capsys):
    """For a script: where, how large, of how much."""
    out = trained(tmp_path / "run")
    (out / "snapshot_iter_3" / "state.json").write_bytes(b"{}")
    capsys.readouterr()
    assert main(["report", "--json", str(out)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about == {
        "file": str(out / "report.html"),
        "bytes": (out / "report.html").stat().st_size,
        "rows": 6,
        "snapshots": 6,
        "damaged": ["snapshot_iter_3"],
    }


def test_a_page_is_written_anew_and_any_other_file_stays(tmp_path, capsys):
    """`--out train.py` is a slip."""
    out = logged(tmp_path / "run", falling(3))
    assert main(["report", str(out)]) == main(["report", str(out)]) == 0
    other = tmp_path / "train.py"
    other.write_text("pass")
    assert main(["report", str(out), "--out", str(other)]) == 2
    assert "is not the page of a run" in capsys.readouterr().err
    assert other.read_text() == "pass"
    assert main(["report", str(out), "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize(("place", "words"), [("nowhere", "there is no directory"), ("empty", "holds no run")])
def test_a_directory_without_a_run_is_refused(tmp_path, place, words, capsys):
    """Exit status 2, a sentence with what to give instead, and no page."""
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / place)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / place / "report.html").exists()


def test_of_a_snapshot_the_directory_of_its_run_is_named(tmp_path, capsys):
    """A page is that of a run."""
    out = trained(tmp_path / "run")
    assert main(["report", str(out / "snapshot_iter_3")]) == 2
    assert f"give its run, such as {out}" in capsys.readouterr().err


def test_the_bytes_of_snapshots_are_left_alone_on_request(tmp_path, capsys):
    """Large ones take their time."""
    out = trained(tmp_path / "run")
    assert main(["report", "--no-verify", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "6 complete" in page
    assert "verified</span>" not in page


def test_the_help_teaches(capsys):
    """It shows an example, and says that the run may still be going on."""
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "chainring report result" in shown
    assert "may still be running" in shown


def test_the_page_of_a_run_that_is_under_way_shows_it_so_far(tmp_path, capsys):
    """Each time it is asked for; the run goes on as if nobody had looked, and the last page has all."""
    trainer, rows = part(tmp_path / "run", 5, 0.1), []

    def look(trainer):
        assert main(["report", "--json", trainer.out]) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])

    trainer.extend(look, trigger=(1, "epoch"), priority=-200)
    trainer.run()
    plain = part(tmp_path / "plain", 5, 0.1)
    plain.run()
    assert rows == [1, 2, 3, 4, 5]
    logs = [[without_time(row) for row in each.get_extension("LogReport").log] for each in (trainer, plain)]
    assert logs[0] == logs[1]


def without_time(row):
    return {key: value for key, value in row.items() if key != "elapsed_time"}


def test_nothing_else_in_the_directory_is_changed(tmp_path):
    """The log, the record and the snapshots are only read; a second page leaves the same."""
    out = trained(tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["report", str(out)]) == 0
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    del after[out / "report.html"]
    assert after == before
