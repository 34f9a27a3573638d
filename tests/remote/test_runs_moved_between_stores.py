"""A run in an object store is shown by the commands, and continues elsewhere; one from elsewhere continues there."""

import json
from pathlib import Path

import pytest
import torch
from synced import read, sync_down, sync_up

import report_runs
from chainring import report_text, serializers, training
from chainring.cli import main
from chainring.training import extensions


def trainer_of(out, epochs):
    """A run that takes a snapshot each epoch, from the newest of which it begins."""
    trainer = report_runs.part(out, epochs, 0.1)
    trainer.extend(lambda trainer: report_text("words", f"at {trainer.updater.iteration}"), name="words")
    trainer.extend(extensions.snapshot("state_{.updater.iteration}", autoload=True), trigger=(1, "epoch"))
    return trainer


def rows_of(text):
    rows = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]


def is_same(one, other):
    one, other = (trainer.updater.get_model("main").state_dict() for trainer in (one, other))
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def whole(tmp_path):
    """The run of four epochs on a disk, and the rows of its log."""
    trainer = trainer_of(tmp_path / "whole", 4)
    trainer.run()
    return trainer, rows_of((tmp_path / "whole" / "log.jsonl").read_text())


def test_the_commands_show_a_run_that_was_written_there(s3, tmp_path, monkeypatch, capsys):
    """Its snapshots, log, texts, graph, profile and settings; nothing else is left on this machine."""
    monkeypatch.chdir(tmp_path)
    trainer_of(f"{s3}/run", 2).run()
    capsys.readouterr()
    assert main(["report", "--json", f"{s3}/run"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["rows"], about["snapshots"], about["damaged"]) == (2, 4, [])
    page = (tmp_path / "report.html").read_text()
    for words in ("at 5", "main/predictor/0/weight", "forward", "&lt;b&gt;bold", "snapshot_iter_6", "state_3"):
        assert words in page, words
    assert main(["verify", f"{s3}/run"]) == 0
    assert capsys.readouterr().out.count("is what was written") == 4
    assert main(["inspect", f"{s3}/run"]) == 0
    assert "iteration 6" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_a_trainer_on_a_disk_continues_a_run_in_a_store(s3, tmp_path, whole, capsys):
    """With the bits and all rows of the log, which the snapshot in the store refers to."""
    report_runs.part(f"{s3}/run", 2, 0.1).run()
    continued = report_runs.part(tmp_path / "out", 4, 0.1)
    serializers.load(f"{s3}/run/snapshot_iter_6", continued)
    continued.run()
    trainer, rows = whole
    assert is_same(continued, trainer)
    assert rows_of((tmp_path / "out" / "log.jsonl").read_text()) == rows


def test_a_run_copied_to_a_disk_continues_there(s3, tmp_path, whole, capsys):
    """By autoload, as if it had always been there; what it takes next lies beside what it took in the store."""
    trainer_of(f"{s3}/run", 2).run()
    copy = sync_down(f"{s3}/run", tmp_path / "copy")
    continued = trainer_of(copy, 4)
    continued.run()
    trainer, rows = whole
    assert is_same(continued, trainer)
    assert rows_of((copy / "log.jsonl").read_text()) == rows
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out.count("is what was written") == 8


def test_a_run_copied_to_a_store_continues_there(s3, tmp_path, whole, capsys):
    """And ends as the one on the disk."""
    trainer_of(tmp_path / "part", 2).run()
    sync_up(tmp_path / "part", f"{s3}/run")
    continued = trainer_of(f"{s3}/run", 4)
    continued.run()
    trainer, rows = whole
    assert is_same(continued, trainer)
    assert rows_of(read(f"{s3}/run/log.jsonl").decode()) == rows
    capsys.readouterr()
    assert main(["verify", f"{s3}/run"]) == 0
    assert capsys.readouterr().out.count("is what was written") == 8


def test_an_earlier_run_is_shown_where_it_was_moved(s3, tmp_path, monkeypatch, capsys):
    """All of its snapshots, whose files have stayed where they were, or one of them."""
    monkeypatch.chdir(tmp_path)
    for epochs in (2, 1):
        report_runs.part(f"{s3}/run", epochs, 0.1).run()
    capsys.readouterr()
    assert main(["verify", f"{s3}/run/previous/1"]) == 0
    assert capsys.readouterr().out.count("is what was written") == 2
    assert main(["inspect", f"{s3}/run/previous/1/snapshot_iter_6"]) == 0
    assert main(["report", f"{s3}/run/previous/1"]) == 0
    assert "2 rows, 2 snapshots" in (shown := capsys.readouterr().out)
    assert "damaged" not in shown


def test_a_trainer_is_not_given_an_address_as_a_path(tmp_path, monkeypatch):
    """Which would become a directory."""
    monkeypatch.chdir(tmp_path)
    updater = report_runs.part("unused", 1, 0.1).updater
    with pytest.raises(ValueError, match="given as text"):
        training.Trainer(updater, (1, "epoch"), Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())
