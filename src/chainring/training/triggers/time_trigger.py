"""TimeTrigger: every so many seconds."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

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
        if not (math.isfinite(period) and period > 0):
            raise ValueError(f"a period in seconds is above 0, got {period!r}")
        self.period = period
        self._began = time.monotonic()
        self._before = 0.0  # seconds that the saved run had counted
        self._next = float(period)  # in seconds since _began

    def initialize(self, trainer: Trainer) -> None:
        self._began = time.monotonic() - self._before
        self._before = 0.0

    def ask(self, trainer: Trainer) -> bool:
        passed = time.monotonic() - self._began
        if passed < self._next:
            return False
        self._next = (math.floor(passed / self.period) + 1) * self.period
        return True

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self._before = serializer("passed", time.monotonic() - self._began)
        self._next = serializer("next", self._next)
        self._began = time.monotonic() - self._before

    def __str__(self) -> str:
        return f"TimeTrigger({self.period})"

    __repr__ = __str__
