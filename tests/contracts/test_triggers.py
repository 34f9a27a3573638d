"""Every public trigger keeps to what `check_trigger` asks."""

import inspect

import pytest

from chainring.testing import check_trigger
from chainring.training import triggers

LOSS = "main/loss"
TRIGGERS = {
    "IntervalTrigger": lambda: triggers.IntervalTrigger(5, "iteration"),
    "IntervalTrigger of epochs": lambda: triggers.IntervalTrigger(0.7, "epoch"),
    "IntervalTrigger of every iteration": lambda: triggers.IntervalTrigger(1, "iteration"),
    "ManualScheduleTrigger": lambda: triggers.ManualScheduleTrigger([2, 0.5, 3], "epoch"),
    "OnceTrigger": triggers.OnceTrigger,
    "TimeTrigger": lambda: triggers.TimeTrigger(2.5),
    "ReachedTrigger": lambda: triggers.ReachedTrigger(7, "second"),
    "BestValueTrigger": lambda: triggers.BestValueTrigger(LOSS, lambda best, new: new < best, (2, "iteration")),
    "MaxValueTrigger": lambda: triggers.MaxValueTrigger("main/accuracy", (2, "iteration")),
    "MinValueTrigger": lambda: triggers.MinValueTrigger(LOSS, (0.5, "epoch")),
    "EarlyStoppingTrigger": lambda: triggers.EarlyStoppingTrigger((2, "iteration"), LOSS, 2, max_trigger=None),
    "EarlyStoppingTrigger at its end": lambda: triggers.EarlyStoppingTrigger(max_trigger=(3, "epoch")),
    "any_of": lambda: triggers.any_of((3, "iteration"), (1, "epoch"), triggers.MinValueTrigger(LOSS, (2, "iteration"))),
    "all_of": lambda: triggers.all_of((3, "iteration"), triggers.MinValueTrigger(LOSS, (3, "iteration"))),
    "a pair": (2, "epoch"),
}


@pytest.mark.parametrize("name", TRIGGERS)
def test_it_can_be_shared_saved_and_resumed(name):
    """At every iteration."""
    check_trigger(TRIGGERS[name])


def test_every_public_trigger_is_tried():
    """None is left out."""
    public = {name for name in triggers.__all__ if inspect.isclass(getattr(triggers, name))} - {"Trigger"}
    assert public == {name.partition(" ")[0] for name in TRIGGERS} - {"a", "any_of", "all_of"}
