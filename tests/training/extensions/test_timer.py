"""Timer: the run ends in the time of its job, with its state saved, and the next job continues it."""

import time

import pytest
from toys import updater_of

from chainring import training
from chainring.training import Interrupted, extensions
from chainring.training.extensions import Timer


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def trainer_of(out, timer=None, stop=(9, "iteration")):
    trainer = training.Trainer(updater_of(), stop, out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(100, "iteration"))
    if timer is not None:
        trainer.extend(timer)
    return trainer


def outcome(trainer):
    rows = trainer.get_extension("LogReport").log
    weights = [value.tolist() for value in trainer.updater.get_model("main").state_dict().values()]
    return weights, [{key: row[key] for key in row if key != "elapsed_time"} for row in rows]


def test_the_run_ends_before_the_limit_with_its_state_saved(tmp_path, capsys):
    """As by a signal, with Interrupted and the code 142, though nothing asks for the time in an iteration."""
    began, trainer = time.monotonic(), trainer_of(tmp_path, Timer(30.2, margin=30), stop=None)
    with pytest.raises(Interrupted) as caught:
        trainer.run()
    assert caught.value.code == 142
    assert 0.2 <= time.monotonic() - began < 25
    assert (tmp_path / f"snapshot_iter_{trainer.updater.iteration}").exists()
    told = capsys.readouterr().out
    assert "Timer: the run ends after this iteration, 30 seconds before its limit" in told
    assert f"SIGALRM ends the run after iteration {trainer.updater.iteration}: its state is saved" in told


def test_the_next_job_continues_bit_for_bit(tmp_path, monkeypatch):
    """The end of the job is read from Slurm's variable; the run of two jobs is that of one."""
    whole = trainer_of(tmp_path / "whole")
    whole.run()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))

    def shorten(trainer):  # as if the time of the job had come while it trains
        if trainer.updater.iteration == 4 and not trainer.is_resumed:
            other = Timer(1e-3, margin=0)
            other.initialize(trainer)
            while trainer.interruption.signum is None:
                pass
            other.finalize()

    first = trainer_of(tmp_path / "cut", Timer(margin=1))
    first.extend(shorten, priority=400)
    with pytest.raises(Interrupted):
        first.run()
    assert first.updater.iteration == 4
    second = trainer_of(tmp_path / "cut", Timer(margin=1))
    second.extend(shorten, priority=400)
    second.run()
    assert outcome(second) == outcome(whole)


def test_a_job_whose_time_is_over_makes_no_update(tmp_path, monkeypatch):
    """It ends as the one before, and saves again what it has found."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    trainer = trainer_of(tmp_path, Timer(margin=120))
    with pytest.raises(Interrupted):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_without_a_limit_it_says_so_and_ends_nothing(tmp_path, capsys):
    """Outside of a job the same script trains to its end, also with a rehearsal before."""
    trainer = trainer_of(tmp_path, Timer())
    trainer.rehearse()
    trainer.run()
    assert trainer.updater.iteration == 9
    assert capsys.readouterr().out.count("Timer: there is no limit") == 1


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Timer("10"), TypeError, "limit and margin of a Timer are numbers"),
        (lambda: Timer(60, margin=None), TypeError, "margin"),
        (lambda: Timer(60, margin=60), ValueError, "less than its limit"),
        (lambda: Timer(margin=-1), ValueError, "at least 0"),
    ],
)
def test_it_refuses_what_leaves_no_time(make, error, text):
    """A margin as long as the limit, and what is no number."""
    with pytest.raises(error, match=text):
        make()


def test_it_refuses_an_end_of_the_job_that_is_no_time(tmp_path, monkeypatch):
    """A date, in place of seconds."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2026-11-26T21:00")
    with pytest.raises(ValueError, match="give limit="):
        trainer_of(tmp_path, Timer()).run()
