"""TimeTrigger: every so many seconds."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from chainring._progress import to_fraction
from chainring.serializers.base import AbstractSerializer
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class TimeTrigger(Trigger):
    """Fires once for each stretch of ``period`` seconds of training, on a monotonic clock.

    The first fire comes after one period; after a long pause it fires once and goes on with the next point of its grid,
    never several times in a row to catch up. Time between two runs does not count.

    Args:
        period: seconds, above 0.

    Raises:
        ValueError: the period is not above 0.
    """

    def __init__(self, period: float) -> None:
        if to_fraction(period) <= 0:
            raise ValueError(f"a period in seconds is above 0, got {period!r}")
        self.period = period
        self._began = time.monotonic()
        self._before = 0.0  # seconds that the saved run had counted
        self._next = float(period)  # in seconds since _began

    def forget(self) -> None:
        self._before, self._next = 0.0, float(self.period)

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        self._began = time.monotonic() - self._before
        self._before = 0.0

    def ask(self, trainer: Trainer) -> bool:
        passed = time.monotonic() - self._began
        if trainer.comm.size > 1:  # clocks differ, and ranks must not
            passed = trainer.comm.broadcast_object(passed)
        if passed < self._next:
            return False
        self._next = self._after(passed)
        return True

    def _after(self, passed: float) -> float:
        """The first point of the grid that is later."""
        number = math.floor(passed / self.period) + 1
        # Rounding may make the quotient of a point on the grid fall short by one.
        return number * self.period if number * self.period > passed else (number + 1) * self.period

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self._before = serializer("passed", time.monotonic() - self._began)
        following, period = serializer("next", self._next), serializer("period", self.period)
        # Settings are never state: with another period the saved point says nothing.
        self._next = following if period == self.period else self._after(self._before)
        self._began = time.monotonic() - self._before

    def __str__(self) -> str:
        return f"TimeTrigger({self.period})"

    __repr__ = __str__
