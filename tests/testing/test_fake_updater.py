"""FakeUpdater and ManualClock: training without models, time without waiting."""

import time

import pytest

from chainring import Reporter, training
from chainring.testing import FakeUpdater, ManualClock
from chainring.training.triggers import TimeTrigger


def observed(updater, updates):
    seen = []
    for _ in range(updates):
        with Reporter().scope(observation := {}):
            updater.update()
        seen.append(observation)
    return seen


def test_epochs_have_the_given_length():
    """All four attributes, also where an epoch is no whole number of iterations."""
    updater = FakeUpdater(2.5)
    assert (updater.epoch_detail, updater.previous_epoch_detail, updater.is_new_epoch) == (0.0, None, False)
    rows = []
    for _ in range(5):
        updater.update()
        rows.append((updater.epoch, updater.epoch_detail, updater.previous_epoch_detail, updater.is_new_epoch))
    assert rows == [
        (0, 0.4, 0.0, False),
        (0, 0.8, 0.4, False),
        (1, 1.2, 0.8, True),
        (1, 1.6, 1.2, False),
        (2, 2.0, 1.6, True),
    ]


def test_it_reports_the_values_of_the_iteration():
    """From a column, where None and what lies beyond its end are not reported, or from a function."""
    column = {"loss": [3.0, None, 1.0], "x": [7]}
    assert observed(FakeUpdater(values=column), 4) == [{"loss": 3.0, "x": 7}, {}, {"loss": 1.0}, {}]
    assert observed(FakeUpdater(values=lambda n: {"n": n}), 2) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"epoch_length": 0}, ValueError, "more than 0 iterations, got epoch_length=0"),
        ({"values": {"loss": 3.0}}, TypeError, "'loss' has 3.0. .*lambda iteration"),
        ({"values": [3.0]}, TypeError, "got list"),
    ],
)
def test_bad_settings_are_refused(settings, error, text):
    """When it is made."""
    with pytest.raises(error, match=text):
        FakeUpdater(**settings)


def test_a_manual_clock_goes_when_it_is_told_to(tmp_path):
    """It drives triggers and elapsed_time, and the real one is back afterwards."""
    real = time.monotonic, time.perf_counter
    with ManualClock() as clock:
        trainer = training.Trainer(FakeUpdater(), (10, "second"), out=str(tmp_path))
        trainer.extend(lambda _: clock.advance(4), name="time", priority=300)
        fires = []
        trainer.extend(lambda t: fires.append(t.updater.iteration), name="fires", trigger=TimeTrigger(6))
        trainer.run()
        assert (trainer.updater.iteration, trainer.elapsed_time, clock.now) == (3, 12.0, 12.0)
    assert fires == [2, 3]
    assert (time.monotonic, time.perf_counter) == real


def fail_inside(clock):
    with clock:
        clock.advance(0.5)
        assert time.monotonic() == time.perf_counter() == 7.5
        raise KeyError


def test_clocks_can_be_nested_and_survive_an_error():
    """The inner one holds, and then the outer one again."""
    with ManualClock(5.0):
        with pytest.raises(KeyError):
            fail_inside(ManualClock(7.0))
        assert time.monotonic() == 5.0


def test_a_clock_does_not_go_back():
    """With the value and the remedy."""
    with pytest.raises(ValueError, match="forward only; got -1"):
        ManualClock().advance(-1)
