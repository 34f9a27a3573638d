"""MicroAverage: a quotient of sums, where a mean of quotients would be wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from chainring._messages import OneTimeWarning
from chainring.reporting._scalars import is_scalar, sum_of
from chainring.reporting.reporter import report
from chainring.reporting.summary import Summary
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.extension import PRIORITY_EDITOR, Extension
from chainring.training.triggers import get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class MicroAverage(Extension):
    """Reports the sum of one reported value over the sum of another, both since it last fired.

    It observes each iteration in which both are reported, and no value is read from its device before it fires. Where
    the denominators sum to zero, the result is NaN. An interval in which the two were not reported together has no result,
    which is warned about once.

    Args:
        numerator_key: of the value above the line, such as ``"main/correct"``; a single number.
        denominator_key: of the value below it, such as ``"main/words"``.
        result_key: under which the quotient is reported.
        trigger: when. ``extend(MicroAverage(...), trigger=t)`` means the same and comes first.

    Raises:
        TypeError: a key is no string, or the trigger is of another form.
        ValueError: the trigger's unit or period is none.
    """

    priority = PRIORITY_EDITOR

    def __init__(self, numerator_key: str, denominator_key: str, result_key: str, trigger: Any = (1, "epoch")) -> None:
        for key in (numerator_key, denominator_key, result_key):
            if not isinstance(key, str):
                raise TypeError(f'a key is that of a reported value, such as "main/correct"; got {key!r}')
        self.keys = numerator_key, denominator_key
        self.result_key = result_key
        self.trigger = get_trigger(trigger)
        self._sums = Summary(), Summary()
        self._warning = OneTimeWarning()

    def observe(self, trainer: Trainer) -> None:
        values = [trainer.observation.get(key) for key in self.keys]
        if all(map(is_scalar, values)):
            for each, value in zip(self._sums, values, strict=True):
                each.add(value)

    def __call__(self, trainer: Trainer) -> None:
        numerators, denominators = (each.over(trainer.comm).state_dict()["values"].tolist() for each in self._sums)
        self._sums = Summary(), Summary()
        if not numerators:
            self._warn(trainer)
            return
        total = sum_of(denominators)
        report({self.result_key: sum_of(numerators) / total if total else math.nan})

    def _warn(self, trainer: Trainer) -> None:
        keys = " and ".join(map(repr, self.keys))
        self._warning.give(
            f"MicroAverage has nothing to report as {self.result_key!r} at iteration {trainer.updater.iteration}: "
            f"since its interval began {keys} were not reported together, as single numbers; reported now are "
            f"{sorted(trainer.observation)}. This warning is given once; check the keys",
            stacklevel=3,
        )

    def serialize(self, serializer: AbstractSerializer) -> None:
        keys = serializer("keys", list(self.keys))
        self._warning.serialize(serializer)
        for name, each in zip(("numerator", "denominator"), self._sums, strict=True):
            each.serialize(serializer[name])
        if not isinstance(serializer, Serializer) and list(keys) != list(self.keys):
            self._sums = Summary(), Summary()  # settings are never state: sums of other values say nothing
