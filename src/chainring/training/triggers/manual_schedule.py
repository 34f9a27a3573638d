"""ManualScheduleTrigger: fires at given points of the training."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from chainring._progress import UNITS, check_epoch_period, count_progress, to_fraction
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class ManualScheduleTrigger(Trigger):
    """Fires when one of the points was reached since it was last asked; several at once fire once.

    Example::

        trainer.extend(extensions.ExponentialShift("lr", 0.1), trigger=ManualScheduleTrigger([30, 60], "epoch"))

    Args:
        points: one number, or any iterable of numbers, in iterations or epochs since the start of training.
        unit: ``"iteration"`` or ``"epoch"``.

    Attributes:
        points: the points in ascending order.

    Raises:
        ValueError: the unit is unknown.
        TypeError: a point is not a number.
    """

    predictable = True

    def __init__(self, points: float | Iterable[float], unit: str) -> None:
        if unit not in UNITS:
            raise ValueError(f'the unit of a schedule is "iteration" or "epoch", got {unit!r}')
        self.points = sorted(points if isinstance(points, Iterable) else [points], key=to_fraction)
        self.unit = unit
        self._points = [to_fraction(point) for point in self.points]
        self._passed: int | Fraction | None = None  # the progress when it was last asked

    @property
    def finished(self) -> bool:
        """True if the last point has been passed."""
        return not self._points or (self._passed is not None and self._passed >= self._points[-1])

    def forget(self) -> None:
        self._passed = None

    def initialize(self, trainer: Trainer) -> None:
        if self.unit == "epoch":
            for point in self._points:
                check_epoch_period(trainer.updater, point)
        super().initialize(trainer)
        if self._passed is None:
            self._passed = count_progress(trainer.updater, self.unit)

    def ask(self, trainer: Trainer) -> bool:
        if self.finished:
            return False
        before, now = self._passed or 0, count_progress(trainer.updater, self.unit)
        self._passed = now
        return any(before < point <= now for point in self._points)

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        passed = None if self._passed is None else list(self._passed.as_integer_ratio())
        saved_passed, saved_unit = serializer("passed", passed), serializer("unit", self.unit)
        if not isinstance(serializer, Serializer):
            self._passed = Fraction(*saved_passed) if saved_passed is not None and saved_unit == self.unit else None

    def __repr__(self) -> str:
        return f"ManualScheduleTrigger({self.points}, {self.unit!r})"
