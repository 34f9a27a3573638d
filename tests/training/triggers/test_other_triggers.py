"""Schedules, once, by the clock, and the spellings that `get_trigger` takes."""

import time
from itertools import product

import numpy as np
import pytest
from counting import CountingUpdater, DataUpdater, Fires, UncountedUpdater, a_trainer, answers, fires_in_run, pattern

from chainring import report
from chainring.training import triggers

SCHEDULES = [  # iterations an epoch, points, unit, answers in iterations 1 to 7
    (2, 2, "iteration", "F T F F F F F"),
    (2, [2, 4], "iteration", "F T F T F F F"),
    (3, 1, "epoch", "F F T F F F F"),
    (3, [1, 2], "epoch", "F F T F F T F"),
    (2, 1.5, "epoch", "F F T F F F F"),
    (2, [1.5, 2.5], "epoch", "F F T F T F F"),
    (2.5, 1, "epoch", "F F T F F F F"),
    (2.5, [1, 2], "epoch", "F F T F T F F"),
    (0.5, 1, "epoch", "T F F F F F F"),
    (0.5, [1, 2], "epoch", "T F F F F F F"),
]
schedules = pytest.mark.parametrize(("per_epoch", "points", "unit", "expected"), SCHEDULES)


def reloaded(trigger, *settings):
    """A fresh trigger of the same class with the state of another."""
    fresh = type(trigger)(*settings)
    fresh.load_state_dict(trigger.state_dict())
    return fresh


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that stands still until it is set: ``clock.now = 1.5``."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


@schedules
def test_a_schedule_fires_when_a_point_is_reached(tmp_path, per_epoch, points, unit, expected):
    """At the first iteration at or after a point; several points at once fire once."""
    trainer = a_trainer(tmp_path, CountingUpdater(per_epoch))
    assert answers(triggers.ManualScheduleTrigger(points, unit), trainer, 7) == pattern(expected)


@schedules
def test_a_fresh_schedule_with_saved_state_goes_on_as_the_first(tmp_path, per_epoch, points, unit, expected):
    """Saved and loaded after every iteration, it fires and is finished at the same ones."""
    last = max(k for k, fires in enumerate(pattern(expected)) if fires)
    for saved_after in range(8):
        trainer, trigger = a_trainer(tmp_path, CountingUpdater(per_epoch)), triggers.ManualScheduleTrigger(points, unit)
        given, finished = [], []
        for iteration in range(7):
            if iteration == saved_after:
                trigger = reloaded(trigger, points, unit)
            given += answers(trigger, trainer, 1)
            finished.append(trigger.finished)
        assert (given, finished) == (pattern(expected), [k >= last for k in range(7)]), saved_after


@schedules
def test_a_schedule_asked_sparsely_fires_at_the_next_question(tmp_path, per_epoch, points, unit, expected):
    """Whichever iterations it is asked in, also when reloaded before each question, no point is lost."""
    for asked in product((False, True), repeat=7):
        trainer, trigger = a_trainer(tmp_path, CountingUpdater(per_epoch)), triggers.ManualScheduleTrigger(points, unit)
        given, wanted, missed = [], [], False
        for is_asked, would_fire in zip(asked, pattern(expected), strict=True):
            trainer.updater.update()
            missed = missed or would_fire
            if is_asked:
                trigger = reloaded(trigger, points, unit)
                given.append(trigger(trainer))
                wanted.append(missed)
                missed = False
        assert given == wanted, asked


@pytest.mark.parametrize(
    "points", [(4, 2), [4, 2], {2, 4}, range(2, 5, 2), np.array([2, 4]), (p for p in (2, 4)), {2: "a", 4: "b"}]
)
def test_points_are_any_iterable(tmp_path, points):
    """Tuples, arrays and generators are accepted, in any order; Chainer takes anything but a list for one point."""
    assert fires_in_run(tmp_path, triggers.ManualScheduleTrigger(points, "iteration"), 6) == [2, 4]


def test_fractional_points_fire_at_their_exact_iterations(tmp_path):
    """0.29 of an epoch of 100 iterations is iteration 29, where floats are one off."""
    points = [k / 100 for k in range(1, 300)]
    fired = fires_in_run(tmp_path, triggers.ManualScheduleTrigger(points, "epoch"), 300, DataUpdater(100))
    assert fired == list(range(1, 300))


def test_a_schedule_resumed_with_other_points_does_not_fire_for_those_behind(tmp_path):
    """Points are settings: the new ones hold, from the resume on."""
    saved, resumed, fires = a_trainer(tmp_path, stop=(4, "iteration")), a_trainer(tmp_path, stop=(9, "iteration")), Fires()
    saved.extend(Fires(), trigger=triggers.ManualScheduleTrigger([2, 5], "iteration"))
    saved.run()
    resumed.extend(fires, trigger=triggers.ManualScheduleTrigger([3, 6, 8], "iteration"))
    resumed.load_state_dict(saved.state_dict())
    resumed.run()
    assert fires.iterations == [6, 8]


@pytest.mark.parametrize(
    ("points", "unit", "error", "message"),
    [
        ([1], "epochs", ValueError, '"iteration" or "epoch", got \'epochs\''),
        (["1"], "epoch", TypeError, "a number is needed.*'1'"),
        ([1, None], "epoch", TypeError, "a number is needed.*None"),
        ([1, float("nan")], "epoch", ValueError, "finite number is needed, got nan"),
    ],
)
def test_a_schedule_of_something_else_is_refused(points, unit, error, message):
    """The error is raised at construction and shows the value."""
    with pytest.raises(error, match=message):
        triggers.ManualScheduleTrigger(points, unit)


def test_a_schedule_of_epochs_on_an_updater_without_is_refused_at_the_start(tmp_path):
    """The run ends before its first update, with the remedies in the error."""
    with pytest.raises(ValueError, match=r'UncountedUpdater has no iterator "main".*use "iteration"'):
        fires_in_run(tmp_path, triggers.ManualScheduleTrigger([1], "epoch"), 3, UncountedUpdater())


@pytest.mark.parametrize("call_on_resume", [False, True])
@pytest.mark.parametrize("saved_after", range(1, 7))
def test_once_fires_once_and_if_asked_for_once_more_on_resume(tmp_path, call_on_resume, saved_after):
    """True, then False; with call_on_resume one more True after each load, and `finished` says so."""
    trainer, trigger = a_trainer(tmp_path), triggers.OnceTrigger(call_on_resume)
    given = answers(trigger, trainer, saved_after)
    fresh = reloaded(trigger, call_on_resume)
    is_finished = fresh.finished
    given += answers(fresh, trainer, 7 - saved_after)
    again = (call_on_resume and [0, saved_after]) or [0]
    assert (given, is_finished, fresh.finished) == ([k in again for k in range(7)], not call_on_resume, True)


def test_once_saved_before_it_fired_fires_after_the_load(tmp_path):
    """State of a trigger that was never asked is that of a fresh one."""
    assert answers(reloaded(triggers.OnceTrigger()), a_trainer(tmp_path), 3) == pattern("T F F")


@pytest.mark.parametrize(
    "make",
    [lambda: triggers.OnceTrigger(), lambda: triggers.ManualScheduleTrigger([1, 3], "iteration")],
    ids=["once", "schedule"],
)
def test_an_object_shared_or_reused_fires_for_everyone(tmp_path, make):
    """Two extensions of one trainer, then a second trainer: each sees what a trigger of its own would tell."""
    own, shared, first, second = fires_in_run(tmp_path, make(), 4), make(), Fires(), Fires()
    trainer = a_trainer(tmp_path, stop=(4, "iteration"))
    trainer.extend(first, trigger=shared)
    trainer.extend(second, trigger=shared)
    trainer.run()
    assert [first.iterations, second.iterations, fires_in_run(tmp_path, shared, 4)] == [own] * 3


def test_a_trigger_that_also_stops_the_run_fires_before_it_does(tmp_path):
    """One schedule for an extension and as stop trigger: the extension runs at the point, and then the run ends."""
    trigger = triggers.ManualScheduleTrigger([3], "iteration")
    trainer, fires = a_trainer(tmp_path, stop=trigger), Fires()
    trainer.extend(fires, trigger=trigger)
    trainer.run()
    assert (fires.iterations, trainer.updater.iteration) == ([3], 3)


def test_time_fires_at_the_points_of_its_grid(tmp_path, clock):
    """With a period of 1 s: not at 0 and 0.9 s, at 1.2, not at 1.3, at 2.1."""
    trainer, trigger = a_trainer(tmp_path), triggers.TimeTrigger(1)
    given = []
    for seconds in (0, 0.9, 1.2, 1.3, 2.1):
        clock.now = 100.0 + seconds
        given += answers(trigger, trainer, 1)
    assert given == pattern("F F T F T")


@pytest.mark.parametrize("saved_after", range(6))
def test_a_fresh_time_trigger_with_saved_state_goes_on_as_the_first(tmp_path, clock, saved_after):
    """Hours may lie between the two runs and do not count."""
    trainer, trigger, given, idle = a_trainer(tmp_path), triggers.TimeTrigger(1), [], 0.0
    for number, seconds in enumerate((0, 0.9, 1.2, 1.3, 2.1)):
        if number == saved_after:
            state, idle = trigger.state_dict(), 5000.0
            clock.now += idle
            trigger = triggers.TimeTrigger(1)
            trigger.load_state_dict(state)
        clock.now = 100.0 + seconds + idle
        given += answers(trigger, trainer, 1)
    assert given == pattern("F F T F T")


def test_after_a_long_pause_time_fires_once(tmp_path, clock):
    """5.5 s of silence with a period of 1 s give one fire, not five in a row, and the next at 6 s."""
    trainer, trigger, given = a_trainer(tmp_path), triggers.TimeTrigger(1), []
    for seconds in (5.5, 5.6, 5.7, 5.99, 6.0, 6.1):
        clock.now = 100.0 + seconds
        given += answers(trigger, trainer, 1)
    assert given == pattern("T F F F T F")


@pytest.mark.parametrize("period", [0.1, 0.7, 1.1])
def test_at_a_point_of_the_grid_time_fires_once(tmp_path, clock, period):
    """A clock that stands on k * period fires once, whatever k * period / period rounds to."""
    clock.now = 0.0
    trainer, trigger = a_trainer(tmp_path), triggers.TimeTrigger(period)
    given = []
    for k in range(1, 500):
        clock.now = k * period
        given += answers(trigger, trainer, 2)
    assert given == [True, False] * 499


@pytest.mark.parametrize(("saved", "resumed", "expected"), [(100, 1, [1.6, 2.2]), (1, 100, [])])
def test_time_resumed_with_another_period_keeps_to_the_new_one(tmp_path, clock, saved, resumed, expected):
    """A period is a setting: after 1.2 s of an earlier run the new grid holds, not the saved point."""
    trainer, trigger, fresh = a_trainer(tmp_path), triggers.TimeTrigger(saved), triggers.TimeTrigger(resumed)
    clock.now += 0.6
    answers(trigger, trainer, 1)
    fresh.load_state_dict(trigger.state_dict())
    given = {}
    for seconds in (0.8, 1.6, 1.8, 2.2):
        clock.now = 100.0 + seconds
        given[seconds] = answers(fresh, trainer, 1)[0]
    assert [seconds for seconds, fires in given.items() if fires] == expected


def run_by_the_clock(out, clock, trigger, iterations=4, state=None):
    """A run of 0.625 s an iteration, whose trigger serves two extensions: where they were called, and the state after."""
    trainer, fires = a_trainer(out, stop=(iterations, "iteration")), [Fires(), Fires()]
    trainer.extend(lambda _: setattr(clock, "now", clock.now + 0.625), "clock", priority=500)
    for number, each in enumerate(fires):
        trainer.extend(each, f"fires{number}", trigger=trigger)
    if state is not None:
        trainer.load_state_dict(state)
    trainer.run()
    return [each.iterations for each in fires], trainer.state_dict()


def test_time_counts_from_the_start_of_each_run(tmp_path, clock):
    """Neither construction long before the run nor an earlier trainer shifts the grid of a shared object."""
    trigger = triggers.TimeTrigger(1)
    clock.now += 1000
    first, _ = run_by_the_clock(tmp_path, clock, trigger)
    second, _ = run_by_the_clock(tmp_path, clock, trigger)
    assert (first, second) == ([[2, 4]] * 2, [[2, 4]] * 2)


def test_time_shared_by_two_extensions_goes_on_after_a_resume(tmp_path, clock):
    """What the saved run had counted since its last fire counts once for both."""
    _, state = run_by_the_clock(tmp_path, clock, triggers.TimeTrigger(1), 3)
    clock.now += 1000
    assert run_by_the_clock(tmp_path, clock, triggers.TimeTrigger(1), 6, state)[0] == [[4, 5]] * 2


@pytest.mark.parametrize(
    ("period", "error"), [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("1", TypeError)]
)
def test_a_time_that_is_not_above_zero_is_refused(period, error):
    """The error is raised at construction and shows the value."""
    with pytest.raises(error, match=f"got '?{period}"):
        triggers.TimeTrigger(period)


STOPS = {  # a stop trigger, every so many iterations, and the iterations of the calls
    "a length in iterations": (lambda: (7, "iteration"), (3, "iteration"), [3, 6, 7]),
    "a length that is a multiple": (lambda: (6, "iteration"), (3, "iteration"), [3, 6]),
    "a length in epochs": (lambda: (2, "epoch"), (4, "iteration"), [4, 6]),
    "an interval in epochs": (lambda: (7, "iteration"), (1, "epoch"), [3, 6, 7]),
    "a function": (lambda: lambda trainer: trainer.updater.iteration >= 5, (3, "iteration"), [3, 5]),
    "early stopping": (
        lambda: triggers.EarlyStoppingTrigger((1, "iteration"), "loss", 4, max_trigger=None),
        (3, "iteration"),
        [3, 5],
    ),
}


class Constant(CountingUpdater):
    def update_core(self):
        report({"loss": 1.0})


@pytest.mark.parametrize(("stop", "period", "expected"), STOPS.values(), ids=STOPS)
def test_an_interval_or_the_stop_trigger_fires_every_so_often_and_at_the_end(tmp_path, stop, period, expected):
    """The stop trigger is asked twice in an iteration, and answers alike."""
    fires, every = Fires(), triggers.IntervalTrigger(*period)
    trainer = a_trainer(tmp_path, Constant(3), stop())
    trainer.extend(fires, trigger=lambda trainer: every(trainer) or trainer.stop_trigger(trainer))
    trainer.run()
    assert fires.iterations == expected
