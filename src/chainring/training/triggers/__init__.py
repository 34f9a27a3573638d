"""Triggers: callables of a trainer that decide when an extension is called, or when training stops."""

from chainring.training.triggers.base import (
    IntervalTrigger,
    ManualScheduleTrigger,
    OnceTrigger,
    ReachedTrigger,
    TimeTrigger,
    Trigger,
    all_of,
    any_of,
    get_stop_trigger,
    get_trigger,
)
from chainring.training.triggers.base import TriggerLike as TriggerLike
from chainring.training.triggers.best_value import BestValueTrigger, EarlyStoppingTrigger, MaxValueTrigger, MinValueTrigger

__all__ = [
    "BestValueTrigger",
    "EarlyStoppingTrigger",
    "IntervalTrigger",
    "ManualScheduleTrigger",
    "MaxValueTrigger",
    "MinValueTrigger",
    "OnceTrigger",
    "ReachedTrigger",
    "TimeTrigger",
    "Trigger",
    "all_of",
    "any_of",
    "get_stop_trigger",
    "get_trigger",
]
