"""ManualScheduleTrigger: at given points."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from chainring._progress import UNITS, check_epoch_period, count_epochs, to_fraction
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class ManualScheduleTrigger(Trigger):
    """Fires when one of the points was reached since it was last asked; several at once fire once.

    Args:
        points: one number, or any iterable of numbers, in units since the start of training.
        unit: ``"iteration"`` or ``"epoch"``.

    Raises:
        ValueError: the unit is another.
        TypeError: a point is no number.
    """

    predictable = True

    def __init__(self, points: float | Iterable[float], unit: str) -> None:
        if unit not in UNITS:
            raise ValueError(f'the unit of a schedule is "iteration" or "epoch", got {unit!r}')
        self.points = sorted(points if isinstance(points, Iterable) else [points], key=to_fraction)
        self.unit = unit
        self._points = [to_fraction(point) for point in self.points]
        self._passed: Fraction | None = None

    @property
    def finished(self) -> bool:
        """Whether the last point has been passed."""
        return not self._points or (self._passed is not None and self._passed >= self._points[-1])

    def ask(self, trainer: Trainer) -> bool:
        if self.finished:
            return False
        before, now = self._passed or Fraction(0), self._progress(trainer)
        self._passed = now
        return any(before < point <= now for point in self._points)

    def _progress(self, trainer: Trainer) -> Fraction:
        updater = trainer.updater
        return Fraction(updater.iteration) if self.unit == "iteration" else count_epochs(updater)

    def forget(self) -> None:
        self._passed = None

    def initialize(self, trainer: Trainer) -> None:
        if self.unit == "epoch":
            for point in self._points:
                check_epoch_period(trainer.updater, point)
        super().initialize(trainer)
        if self._passed is None:
            self._passed = self._progress(trainer)

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        passed = self._passed
        saved = serializer("passed", None if passed is None else [passed.numerator, passed.denominator])
        unit = serializer("unit", self.unit)
        if not isinstance(serializer, Serializer):
            self._passed = Fraction(*saved) if saved is not None and unit == self.unit else None

    def __str__(self) -> str:
        return f"ManualScheduleTrigger({self.points}, {self.unit!r})"

    __repr__ = __str__
