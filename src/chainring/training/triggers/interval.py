"""IntervalTrigger: fires every so many iterations or epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chainring._progress import UNITS, check_epoch_period, count_progress, to_fraction
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class IntervalTrigger(Trigger):
    """Fires when a multiple of the period was crossed since it was last asked.

    It counts exactly: a period of 0.1 epochs is one tenth. Several multiples crossed at once fire once. It never fires
    before the first update, and a resumed run fires at the iterations at which the uninterrupted one does.

    Example::

        trainer.extend(extensions.LogReport(), trigger=IntervalTrigger(0.1, "epoch"))  # or trigger=(0.1, "epoch")

    Args:
        period: iterations or epochs between two fires, above 0; it may be a fraction.
        unit: ``"iteration"`` or ``"epoch"``.

    Attributes:
        is_every_iteration: True if it fires after each iteration, so that the trainer need not ask it; always False for
            a subclass, which may answer otherwise.

    Raises:
        ValueError: the period is not above 0, or the unit is unknown.
        TypeError: the period is not a number.
    """

    predictable = True

    def __init__(self, period: float, unit: str) -> None:
        if unit not in UNITS:
            raise ValueError(f'the unit of an interval is "iteration" or "epoch", got {unit!r}')
        self.period = period
        self.unit = unit
        self._ratio = to_fraction(period).as_integer_ratio()
        if self._ratio[0] <= 0:
            raise ValueError(f'the period of an interval is above 0, got {period!r}; None as a trigger means "never"')
        self._is_of_iterations = unit == "iteration"
        self.is_every_iteration = type(self) is IntervalTrigger and self._is_of_iterations and self._ratio == (1, 1)
        self.forget()

    def forget(self) -> None:
        self._crossed: int | None = None  # multiples of the period
        self._next_check = -math.inf  # in iterations or epochs; up to there no multiple is crossed

    def initialize(self, trainer: Trainer) -> None:
        if self.unit == "epoch":
            check_epoch_period(trainer.updater, to_fraction(self.period))
        super().initialize(trainer)
        if self._crossed is None:
            self._set_crossed(self._count_multiples(trainer))

    def __call__(self, trainer: Trainer) -> bool:
        """Return True if a multiple was crossed."""
        # hot path: "the script's extensions" of benchmarks/overhead.py. Far from the next multiple there is no more to do.
        updater = trainer.updater
        progress = updater.iteration if self._is_of_iterations else updater.epoch_detail
        if progress < self._next_check:
            return False
        return progress > 0 if self.is_every_iteration else super().__call__(trainer)

    def ask(self, trainer: Trainer) -> bool:
        before, now = self._crossed or 0, self._count_multiples(trainer)
        self._set_crossed(now, fires=now != before)
        return now != before

    def _count_multiples(self, trainer: Trainer) -> int:
        """Return how many multiples of the period have been reached, exactly."""
        numerator, denominator = self._ratio
        return count_progress(trainer.updater, self.unit) * denominator // numerator

    def _set_crossed(self, crossed: int, fires: bool = False) -> None:
        numerator, denominator = self._ratio
        self._crossed = crossed
        if fires or self.is_every_iteration:  # asked again in the same iteration it repeats its answer
            self._next_check = -math.inf
        else:
            self._next_check = (crossed + 1) * numerator / denominator * (1 - 2**-50)  # a little less, for the rounding

    def get_training_length(self) -> tuple[float, str]:
        """Return the period and its unit, for an extension that shows the progress of training."""
        return self.period, self.unit

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        period = [*self._ratio, self.unit]
        saved_crossed, saved_period = serializer("crossed", self._crossed), serializer("period", period)
        # Settings are never state: a saved count of other multiples says nothing, and the trigger starts from here.
        if not isinstance(serializer, Serializer):
            self.forget()
            if saved_crossed is not None and list(saved_period) == period:
                self._set_crossed(saved_crossed, fires=self._answer)

    def __repr__(self) -> str:
        return f"IntervalTrigger({self.period}, {self.unit!r})"
