"""Trainer.stop_at_epoch_end: the run ends with the epoch that is under way, as if its stop trigger fired there."""

import contextlib

import pytest
import torch
from toys import same_regression, updater_of

from chainring import iterators, training
from chainring.training import extensions, triggers


def trainer_of(out, *, at=(), killed=None, stop=(5, "epoch"), **settings):
    """A run of three updates an epoch, which is asked to stop after these iterations."""
    trainer = training.Trainer(updater_of(**settings), stop, out=str(out))

    def ask(trainer):
        if trainer.updater.iteration in at:
            trainer.stop_at_epoch_end()
        if trainer.updater.iteration == killed:
            raise KeyboardInterrupt

    trainer.extend(ask, priority=400)
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
    return trainer


def outcome(trainer):
    state = trainer.state_dict()
    log = [{key: row[key] for key in row if key != "elapsed_time"} for row in trainer.get_extension("LogReport").log]
    return log, {key: value for key, value in state.items() if "model:" in key or "optimizer" in key or "last_epoch" in key}


@pytest.mark.parametrize(("at", "end"), [(1, 3), (4, 6), (5, 6), (6, 6)])
def test_the_run_ends_with_the_epoch_under_way(tmp_path, at, end):
    """In the middle of an epoch at its end, and at the end at once; without an error, its last state saved."""
    trainer = trainer_of(tmp_path, at=(at,))
    trainer.run()
    assert trainer.updater.iteration == end
    assert (tmp_path / f"snapshot_iter_{end}").exists()


def test_an_earlier_stop_trigger_still_ends_the_run(tmp_path):
    """It prolongs nothing."""
    trainer = trainer_of(tmp_path, at=(4,), stop=(5, "iteration"))
    trainer.run()
    assert trainer.updater.iteration == 5


@pytest.mark.parametrize("killed", [4, 5, 6])
def test_it_is_saved_and_holds_in_a_resumed_run(tmp_path, killed):
    """Which does not ask again, and ends with the same epoch, to the same bits; asked again, it trains no further."""
    whole = trainer_of(tmp_path / "whole", at=(4,))
    whole.run()
    first = trainer_of(tmp_path / "cut", at=(4,), killed=killed + 1)
    with pytest.raises(KeyboardInterrupt) if killed < 6 else contextlib.nullcontext():
        first.run()
    resumed = trainer_of(tmp_path / "cut")
    resumed.run()
    assert resumed.updater.iteration == 6
    for ours, theirs in zip(outcome(resumed), outcome(whole), strict=True):
        assert str(ours) == str(theirs)


def test_another_stop_trigger_trains_further(tmp_path, capsys):
    """As after one that has fired; the same one says so."""
    trainer_of(tmp_path, at=(2,)).run()
    again = trainer_of(tmp_path)
    again.run()
    assert again.updater.iteration == 3
    assert "stop_at_epoch_end() has ended the training here; give another stop trigger" in capsys.readouterr().out
    further = trainer_of(tmp_path, stop=(3, "epoch"))
    further.run()
    assert further.updater.iteration == 9


def test_the_state_of_the_stop_trigger_stays(tmp_path):
    """That of early stopping goes on counting in the epoch under way, and in the run that continues it."""
    stop = triggers.EarlyStoppingTrigger((1, "iteration"), "main/loss", patience=4, mode="max")
    trainer = trainer_of(tmp_path, at=(2,), stop=stop)
    trainer.run()
    assert trainer.updater.iteration == 3
    stop = triggers.EarlyStoppingTrigger((1, "iteration"), "main/loss", patience=5, mode="max")
    further = trainer_of(tmp_path, stop=stop)
    further.run()
    assert further.updater.iteration > 3


def test_a_rehearsal_asks_for_nothing(tmp_path):
    """What an extension calls in it is not carried into the run."""
    trainer = trainer_of(tmp_path, at=(1, 2))
    trainer.rehearse()
    assert trainer_length(trainer) == 3


def trainer_length(trainer):
    trainer.run()
    return trainer.updater.iteration


def test_it_refuses_a_stream_and_a_run_that_has_not_begun(tmp_path):
    """A stream has no epochs; before the run there is a stop trigger."""
    with pytest.raises(RuntimeError, match="give a stop trigger"):
        trainer_of(tmp_path).stop_at_epoch_end()
    model = same_regression()
    stream = iterators.FunctionIterator(lambda index: (torch.zeros(2, 3).double(), torch.zeros(2, 1).double()))
    updater = training.StandardUpdater(stream, torch.optim.SGD(model.parameters(), lr=0.1), model)
    trainer = training.Trainer(updater, (3, "iteration"), out=str(tmp_path))
    trainer.extend(lambda trainer: trainer.stop_at_epoch_end(), "ask")
    with pytest.raises(ValueError, match="counts epochs"):
        trainer.run()
