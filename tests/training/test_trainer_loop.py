"""The order of the loop and what follows from it, when it stops, and how long it took."""

import time

import pytest
import torch
from counting import CountingUpdater, DataUpdater, Fires, a_trainer

from chainring import report, training
from chainring.training import triggers


class Step:
    """An extension that writes down that it was observed, asked and called."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def initialize(self, trainer):
        self.events.append(f"initialize {self.name}")

    def observe(self, trainer):
        self.events.append(f"observe {self.name}")

    def trigger(self, trainer):
        self.events.append(f"ask {self.name}")
        return trainer.updater.iteration == 2

    def __call__(self, trainer):
        self.events.append(f"call {self.name}")


class Snapshot(Step):
    """One that takes down the state of the run."""

    is_snapshot = True


def test_an_iteration_is_an_update_and_then_each_extension_observed_asked_and_called(tmp_path):
    """Descending priority, ties as registered; each trigger asked exactly once; snapshots last, all asked first."""
    events = []

    class Updating(CountingUpdater):
        def update_core(self):
            events.append("update")

    def stop(trainer):
        events.append("stop?")
        return trainer.updater.iteration == 2

    trainer = a_trainer(tmp_path, Updating(), stop)
    for kind, name, priority in [(Step, "c", 1), (Snapshot, "s", 900), (Snapshot, "z", 5), (Step, "a", 2), (Step, "d", 1)]:
        trainer.extend(kind(events, name), name, priority=priority)
    trainer.run()
    asked = [f"{what} {name}" for name in "acd" for what in ("observe", "ask")]
    called = [f"{what} {name}" for name in "acd" for what in ("observe", "ask", "call")]
    snapshots = [f"{what} {name}" for name in "sz" for what in ("observe", "ask")]
    expected = [f"initialize {name}" for name in "szacd"] + ["stop?", "update", *asked, *snapshots, "stop?", "update"]
    assert events == [*expected, *called, *snapshots, "call s", "call z", "stop?"]


def test_an_extension_sees_what_those_before_it_reported_in_the_iteration(tmp_path):
    """The updater's and the earlier extensions' values, in a fresh observation each iteration."""
    seen = []

    class Reporting(CountingUpdater):
        def update_core(self):
            report({"loss": self.iteration})

    trainer = a_trainer(tmp_path, Reporting(), (2, "iteration"))
    trainer.extend(lambda trainer: seen.append(dict(trainer.observation)), "reader", priority=100)
    trainer.extend(lambda trainer: report({"late": 1}), "last", priority=1)
    trainer.extend(lambda trainer: report({f"early{trainer.updater.iteration}": 2}), "first", priority=300)
    trainer.run()
    assert seen == [{"loss": 0, "early1": 2}, {"loss": 1, "early2": 2}]


@pytest.mark.parametrize(("priority", "expected"), [(99, [2, 4]), (100, [2, 4]), (301, [])])
def test_a_trigger_sees_the_values_of_the_extensions_before_it(tmp_path, priority, expected):
    """A trigger that looks at a value fires in its iteration if the value's extension has its turn first."""
    trainer, fires = a_trainer(tmp_path, stop=(5, "iteration")), Fires()
    trainer.extend(lambda trainer: report({"value": trainer.updater.iteration}), trigger=(2, "iteration"))
    trainer.extend(fires, trigger=lambda trainer: "value" in trainer.observation, priority=priority)
    trainer.run()
    assert fires.iterations == expected


def test_the_stop_trigger_sees_the_whole_observation_of_the_iteration_before(tmp_path):
    """A value that the last extension reported stops the run before the next update."""
    trainer = a_trainer(tmp_path, stop=lambda trainer: trainer.observation.get("enough", False))
    trainer.extend(lambda trainer: report({"enough": trainer.updater.iteration == 3}), priority=-1000)
    trainer.run()
    assert (trainer.updater.iteration, trainer.observation) == (3, {"enough": True})


def test_a_submodules_report_has_its_path_with_slashes(tmp_path):
    """`main/predictor/0/value`: every submodule of the updater's models is an observer."""
    model = torch.nn.Sequential()
    model.add_module("predictor", torch.nn.Sequential(torch.nn.Identity()))

    class Modelled(CountingUpdater):
        def get_model(self, name):
            return {"main": model}[name]

        def update_core(self):
            report({"value": 1}, model)
            report({"value": 2}, model.predictor)
            report({"value": 3}, model.predictor[0])

    trainer = a_trainer(tmp_path, Modelled(), (1, "iteration"))
    trainer.run()
    assert trainer.observation == {"main/value": 1, "main/predictor/value": 2, "main/predictor/0/value": 3}


STOPS = [((3, "iteration"), 3), ((2.5, "iteration"), 3), ((0.3, "epoch"), 3), ((0.35, "epoch"), 4), ((2, "epoch"), 20)]
STOPS += [(triggers.IntervalTrigger(*setting), updates) for setting, updates in STOPS]


@pytest.mark.parametrize(("stop", "updates"), STOPS)
def test_a_run_stops_as_soon_as_the_length_is_reached(tmp_path, stop, updates):
    """A pair and an interval alike, exactly, also for parts of an epoch."""
    trainer = a_trainer(tmp_path, DataUpdater(10), stop)
    trainer.run()
    assert trainer.updater.iteration == updates


@pytest.mark.parametrize(("stop", "reached"), STOPS)
@pytest.mark.parametrize("resumed_at", [1, 3, 4, 15, 20, 25])
def test_a_run_resumed_at_or_past_its_length_does_no_update(tmp_path, stop, reached, resumed_at):
    """Reached, not crossed: upstream goes on to the next multiple. A larger length goes on to it."""
    saved = a_trainer(tmp_path, DataUpdater(10), (resumed_at, "iteration"))
    saved.run()
    resumed = a_trainer(tmp_path, DataUpdater(10), stop)
    resumed.load_state_dict(saved.state_dict())
    resumed.run()
    assert resumed.updater.iteration == max(reached, resumed_at)


@pytest.mark.parametrize("unit", ["iteration", "epoch", "second"])
def test_a_length_of_zero_trains_nothing(tmp_path, unit):
    """No update, no division by zero."""
    trainer = a_trainer(tmp_path, stop=(0, unit))
    trainer.run()
    assert trainer.updater.iteration == 0


def test_an_observation_survives_a_resume_for_the_stop_trigger(tmp_path):
    """The head of the resumed run sees the values that the saved run ended with, so that a finished run does nothing."""
    saved = a_trainer(tmp_path, stop=(3, "iteration"))
    saved.extend(lambda trainer: report({"loss": 0.5}), "values")
    saved.run()
    resumed = a_trainer(tmp_path, stop=lambda t: t.observation.get("loss") == 0.5 or t.updater.iteration > 5)
    resumed.extend(lambda trainer: None, "values")
    resumed.load_state_dict(saved.state_dict())
    resumed.run()
    assert resumed.updater.iteration == 3


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ((20, "epochs"), ValueError, '"iteration", "epoch" or "second", got \'epochs\''),
        ((-1, "epoch"), ValueError, "0 or above, got -1; None trains until the data run out"),
        (20, TypeError, r'a trigger is None, a callable.*\(period, "epoch"\).*got 20'),
        (triggers.OnceTrigger, TypeError, "got the class OnceTrigger: pass an object of it"),
        (lambda: True, TypeError, "called with one argument, the trainer"),
    ],
)
def test_a_bad_stop_trigger_is_refused_at_construction(tmp_path, stop, error, message):
    """The error gives the rule, the value and the remedy."""
    with pytest.raises(error, match=message):
        a_trainer(tmp_path, stop=stop)


def test_the_end_of_the_data_ends_the_run_with_a_warning(tmp_path):
    """The iterator's StopIteration is no error: the run ends as by a stop trigger, with the number of iterations."""
    trainer, fires = a_trainer(tmp_path, DataUpdater(7, 3, repeat=False), (9, "epoch")), Fires()
    trainer.extend(lambda trainer: report({"value": trainer.updater.iteration}))
    trainer.extend(fires)
    with pytest.warns(UserWarning, match=r"ended after 3 iterations.*ReachedTrigger\(9, 'epoch'\).*repeat=True"):
        trainer.run()
    assert (fires.iterations, trainer.observation) == ([1, 2, 3], {"value": 3})


def test_without_a_stop_trigger_the_end_of_the_data_is_the_end(tmp_path):
    """Nothing to warn of: None means until the data end."""
    trainer = a_trainer(tmp_path, DataUpdater(7, 3, repeat=False))
    trainer.run()
    assert trainer.updater.iteration == 3


def test_a_stop_iteration_of_an_extension_is_an_error_and_not_the_end_of_the_data(tmp_path):
    """Only the update can say that the data have ended."""
    trainer = a_trainer(tmp_path, stop=(3, "iteration"))
    trainer.extend(lambda trainer: next(iter([])))
    with pytest.raises(StopIteration):
        trainer.run()


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that stands still until it is set: ``clock.now += 1.5``."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def timed(out, clock, stop):
    """A trainer whose iterations take 2 seconds, and what it says of the elapsed time in each."""
    trainer, seen = a_trainer(out, stop=stop), []

    @training.make_extension(default_name="timer")
    def timer(trainer):
        clock.now += 2
        seen.append(trainer.elapsed_time)

    trainer.extend(timer)
    return trainer, seen


def test_elapsed_time_counts_from_the_start_of_the_run_and_stands_still_after_it(tmp_path, clock):
    """0.0 before, growing in the run, then frozen."""
    trainer, seen = timed(tmp_path, clock, (3, "iteration"))
    clock.now += 50
    before = trainer.elapsed_time
    trainer.run()
    clock.now += 50
    assert (before, seen, trainer.elapsed_time) == (0.0, [2.0, 4.0, 6.0], 6.0)


def test_a_trainer_can_be_saved_before_it_has_run(tmp_path):
    """Its time is then 0.0; upstream raises."""
    assert a_trainer(tmp_path).state_dict()["elapsed_time"] == 0.0


def test_elapsed_time_counts_the_runs_before_a_resume(tmp_path, clock):
    """It goes on from the saved total, and the time in between does not count."""
    saved, _ = timed(tmp_path, clock, (2, "iteration"))
    saved.run()
    clock.now += 1000
    resumed, seen = timed(tmp_path, clock, (4, "iteration"))
    resumed.load_state_dict(saved.state_dict())
    loaded = resumed.elapsed_time
    resumed.run()
    assert (loaded, seen, resumed.elapsed_time) == (4.0, [6.0, 8.0], 8.0)


@pytest.mark.parametrize(("seconds", "updates"), [(5, 3), (6, 3), (3, 2)])
def test_a_length_in_seconds_counts_the_runs_before_a_resume(tmp_path, clock, seconds, updates):
    """`(6, "second")` after 4 seconds of an earlier run leaves one iteration of 2 seconds."""
    saved, _ = timed(tmp_path, clock, (2, "iteration"))
    saved.run()
    resumed, _ = timed(tmp_path, clock, (seconds, "second"))
    resumed.load_state_dict(saved.state_dict())
    resumed.run()
    assert resumed.updater.iteration == updates
