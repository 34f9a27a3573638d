"""TimeTrigger: fires every so many seconds."""

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
    """Fires once in each ``period`` seconds of training, by a monotonic clock.

    It first fires after one period. After a long pause it fires once and goes on with the next multiple of the period,
    never several times in a row to catch up. Time between two runs does not count.

    Example::

        trainer.extend(extensions.snapshot(), trigger=TimeTrigger(600))  # or trigger=(600, "second")

    Args:
        period: seconds, above 0.

    Raises:
        ValueError: the period is not above 0.
        TypeError: the period is not a number.
    """

    def __init__(self, period: float) -> None:
        if to_fraction(period) <= 0:
            raise ValueError(f"a period in seconds is above 0, got {period!r}")
        self.period = period
        self._started_at = time.monotonic()
        self.forget()

    def forget(self) -> None:
        self._restored_seconds = 0.0  # of the saved run, until this one starts
        self._next = float(self.period)  # in seconds since _started_at

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        self._started_at = time.monotonic() - self._restored_seconds
        self._restored_seconds = 0.0

    def ask(self, trainer: Trainer) -> bool:
        seconds = time.monotonic() - self._started_at
        if trainer.comm.size > 1:  # clocks differ, and ranks must agree
            seconds = trainer.comm.broadcast_object(seconds)
        if seconds < self._next:
            return False
        self._next = self._next_multiple(seconds)
        return True

    def _next_multiple(self, seconds: float) -> float:
        """Return the first multiple of the period that is later."""
        count = math.floor(seconds / self.period) + 1
        # Rounding may make the quotient of a multiple too small by one.
        return count * self.period if count * self.period > seconds else (count + 1) * self.period

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self._restored_seconds = serializer("passed", time.monotonic() - self._started_at)
        saved_next, saved_period = serializer("next", self._next), serializer("period", self.period)
        # Settings are never state: with another period the saved time of the next fire says nothing.
        self._next = saved_next if saved_period == self.period else self._next_multiple(self._restored_seconds)
        self._started_at = time.monotonic() - self._restored_seconds

    def __repr__(self) -> str:
        return f"TimeTrigger({self.period})"
