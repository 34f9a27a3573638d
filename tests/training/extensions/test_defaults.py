"""extensions.defaults: what most scripts register, in one call."""

import json

from snapshots import trainer_of

from chainring.training import extensions


def test_run_is_logged_shown_and_continued(tmp_path, capsys):
    """The same command continues from the newest snapshot, of which two are kept, with the rows of the log."""
    for stop in (4, 9):
        trainer = trainer_of(tmp_path, stop)
        for each in extensions.defaults():
            trainer.extend(each)
        trainer.run()
    assert [row["iteration"] for row in json.loads((tmp_path / "log").read_text())] == [3, 6, 9]
    assert len(list(tmp_path.glob("snapshot_iter_*"))) == 2
    shown = capsys.readouterr().out
    assert "resumed from" in shown
    assert "main/loss" in shown


def test_own_extensions_come_first_and_a_trigger_is_for_rows_and_snapshots(tmp_path):
    """On a stream, which has no epochs, a number of iterations."""
    seen = []
    trainer = trainer_of(tmp_path, 4)
    for each in extensions.defaults(lambda trainer: seen.append(trainer.updater.iteration), trigger=(2, "iteration")):
        trainer.extend(each)
    trainer.run()
    assert seen == [1, 2, 3, 4]
    assert [row["iteration"] for row in json.loads((tmp_path / "log").read_text())] == [2, 4]
