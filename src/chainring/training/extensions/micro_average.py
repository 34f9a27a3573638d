"""MicroAverage: reports a ratio of sums, where a mean of ratios would be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainring._messages import OneTimeWarning
from chainring.reporting.reporter import report
from chainring.reporting.summary import MeanSummary, is_scalar
from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training.extension import PRIORITY_EDITOR, Extension
from chainring.training.triggers import TriggerLike, get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class MicroAverage(Extension):
    """Reports the sum of one reported value divided by the sum of another, both since it last fired.

    It observes each iteration in which both are reported, and reads no value from its device before it fires. If
    the denominators sum to zero, the result is NaN. An interval in which the two were not reported together has no
    result; the first one gives a warning.

    Example::

        trainer.extend(extensions.MicroAverage("main/correct", "main/words", "main/accuracy"))

    Args:
        numerator_key: the key of the numerator; a scalar.
        denominator_key: the key of the denominator.
        result_key: the key under which the ratio is reported.
        trigger: when to report. ``extend(MicroAverage(...), trigger=t)`` means the same and takes precedence.

    Raises:
        TypeError: a key is not a string, or ``trigger`` is not a trigger.
        ValueError: the period or unit of the trigger is invalid.
    """

    priority = PRIORITY_EDITOR

    def __init__(
        self, numerator_key: str, denominator_key: str, result_key: str, trigger: TriggerLike = (1, "epoch")
    ) -> None:
        for key in (numerator_key, denominator_key, result_key):
            if not isinstance(key, str):
                raise TypeError(f'a key is that of a reported value, such as "main/correct"; got {key!r}')
        self.keys = numerator_key, denominator_key
        self.result_key = result_key
        self.trigger = get_trigger(trigger)
        self._sums = MeanSummary(), MeanSummary()
        self._warning = OneTimeWarning()

    @property
    def watched_keys(self) -> Sequence[str]:
        return self.keys

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (self.result_key, *self.keys)

    def observe(self, trainer: Trainer) -> None:
        if trainer.comm.rank > 0 and getattr(trainer.updater, "virtual_ranks", None) is not None:
            return  # what virtual ranks report is on every rank the mean of all of them, of which one counts
        values: list[Any] = [trainer.observation.get(key) for key in self.keys]
        if all(map(is_scalar, values)):
            for summary, value in zip(self._sums, values, strict=True):
                summary.add(value)

    def __call__(self, trainer: Trainer) -> None:
        numerator, denominator = (summary.over_ranks(trainer.comm).compute_sum() for summary in self._sums)
        self._sums = MeanSummary(), MeanSummary()
        if numerator is not None:
            report({self.result_key: numerator / denominator if denominator else math.nan})
            return
        if trainer.is_rehearsing:  # which raises where a key is not reported
            return
        self._warning.give(
            f"MicroAverage has nothing to report as {self.result_key!r} at iteration {trainer.updater.iteration}: "
            f"since its interval began {self.keys[0]!r} and {self.keys[1]!r} were not reported together, as single numbers; "
            f"reported now are {sorted(trainer.observation)}. This warning is given once; check the keys",
        )

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved_keys = serializer("keys", list(self.keys))
        self._warning.serialize(serializer)
        for name, summary in zip(("numerator", "denominator"), self._sums, strict=True):
            summary.serialize(serializer[name])
        if not isinstance(serializer, Serializer) and list(saved_keys) != list(self.keys):
            self._sums = MeanSummary(), MeanSummary()  # settings are never state: sums of other values say nothing
