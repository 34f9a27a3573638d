"""BestValue, MaxValue, MinValue: which mean is the best so far, and when it was reached."""

import math

import pytest
from scripted import Counting, run

from chainring.training import extensions

VALUES = [3.0, 5.0, 2.0, 2.0, math.nan, 1.0, 4.0, 4.0]


def counting(values=VALUES, epoch_length=2, weights=None):
    return Counting([{"x": value} for value in values], epoch_length, weights)


def found(extension):
    return extension.best_value, extension.best_iteration, extension.best_epoch


def test_the_best_mean_of_an_interval_is_kept_with_its_iteration_and_epoch(tmp_path):
    """Means of epochs of two iterations: 4, 2, NaN, 4; the first of equal ones stays, and NaN is never best."""
    least, greatest = extensions.MinValue("x"), extensions.MaxValue("x")
    run(counting(), 8, str(tmp_path), least, greatest)
    assert (found(least), found(greatest)) == ((2.0, 4, 2), (4.0, 2, 1))


def test_means_are_weighted_as_the_updates_are(tmp_path):
    """As in a log."""
    best = extensions.MinValue("x")
    run(counting([1.0, 4.0], weights=[1, 2]), 2, str(tmp_path), best)
    assert best.best_value == 3.0


def test_one_compares_as_one_likes(tmp_path):
    """Here an improvement by one does not count."""
    best = extensions.BestValue("x", lambda best, new: new < best - 1, trigger=(1, "iteration"))
    run(counting(), 8, str(tmp_path), best)
    assert found(best) == (1.0, 6, 3)
    best = extensions.BestValue("x", lambda best, new: new < best - 1, trigger=(1, "iteration"))
    run(counting(), 4, str(tmp_path / "short"), best)
    assert found(best) == (3.0, 1, 0)


def test_a_resumed_run_goes_on_with_the_best_so_far(tmp_path):
    """Also in the middle of an interval: it is resumed after every iteration."""
    whole = extensions.MinValue("x")
    run(counting(), 8, str(tmp_path / "whole"), whole)
    state = None
    for stop in range(1, 9):
        again = extensions.MinValue("x")
        state = run(counting(), stop, str(tmp_path / "out"), again, state=state).state_dict()
    assert found(again) == found(whole)


def test_before_there_is_one_each_attribute_is_an_error():
    """Which says so."""
    best = extensions.MaxValue("x")
    for name in ("best_value", "best_iteration", "best_epoch"):
        with pytest.raises(RuntimeError, match="there is no best value of 'x' yet"):
            getattr(best, name)


def test_a_key_that_is_never_reported_is_warned_about_once(tmp_path):
    """With those that are."""
    with pytest.warns(UserWarning, match=r"nothing to compare at iteration 2: .*'y'.*reported now are \['x'\]") as given:
        run(counting(), 8, str(tmp_path), extensions.MaxValue("y"))
    assert len(given) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", min), "min returns a number"),
        (("x", 3), "compare is called with"),
        ((3, lambda best, new: True), "the key is"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    """At construction."""
    with pytest.raises(TypeError, match=message):
        extensions.BestValue(*arguments)
