"""What `get_trigger` takes, and how it refuses the rest."""

import re

import pytest
from counting import a_trainer, answers

from chainring import training
from chainring.training import triggers


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ((2, "iteration"), "IntervalTrigger(2, 'iteration')"),
        ([0.5, "epoch"], "IntervalTrigger(0.5, 'epoch')"),
        ((3, "second"), "TimeTrigger(3)"),
    ],
)
def test_a_pair_becomes_the_trigger_of_its_unit(setting, text):
    """Iterations and epochs are an interval, seconds are by the clock."""
    assert str(training.get_trigger(setting)) == text


def test_a_callable_is_its_own_trigger(tmp_path):
    """A lambda and a trigger object are returned as they are."""
    mine, once = lambda trainer: True, triggers.OnceTrigger()
    assert (training.get_trigger(mine), training.get_trigger(once)) == (mine, once)


def test_none_never_fires(tmp_path):
    """The trigger that None stands for is false in every iteration."""
    assert answers(training.get_trigger(None), a_trainer(tmp_path), 5) == [False] * 5


@pytest.mark.parametrize("setting", [5, "epoch", ("epoch", 1), (1,), (1, "epoch", 2), {1: "epoch"}, ("1", "epoch"), True])
def test_another_form_of_trigger_is_refused_with_the_forms(setting):
    """The error lists what a trigger may be and shows what was given."""
    with pytest.raises(
        TypeError, match=rf'a trigger is None, a callable.*\(seconds, "second"\).*got {re.escape(repr(setting))}'
    ):
        training.get_trigger(setting)


def test_a_misspelt_unit_is_refused_with_the_units():
    """`(1, "epochs")` says which units there are."""
    with pytest.raises(ValueError, match=r"\"iteration\", \"epoch\" or \"second\", got 'epochs'; write"):
        training.get_trigger((1, "epochs"))


def test_a_class_in_the_place_of_a_trigger_is_refused():
    """The error asks for an object of it."""
    with pytest.raises(TypeError, match="got the class OnceTrigger: pass an object of it"):
        training.get_trigger(triggers.OnceTrigger)


@pytest.mark.parametrize("mine", [lambda: True, lambda trainer, epoch: True])
def test_a_trigger_that_cannot_be_asked_with_the_trainer_is_refused(mine):
    """At construction, not when it is first asked; the error shows what to write."""
    with pytest.raises(TypeError, match=r"called with one argument, the trainer.*write lambda trainer"):
        training.get_trigger(mine)
