"""IntervalTrigger: every so many iterations or epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chainring._progress import UNITS, check_epoch_period, count_epochs, to_fraction
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class IntervalTrigger(Trigger):
    """Fires when a multiple of the period was crossed since it was last asked.

    Exact: a period of 0.1 epochs is one tenth. Several multiples crossed at once fire once. It never fires before the
    first update, and a resumed run fires at the iterations at which the uninterrupted one does.

    Args:
        period: how many units lie between two fires, above 0; for epochs it may be a fraction.
        unit: ``"iteration"`` or ``"epoch"``.

    Attributes:
        is_every_iteration: whether it fires after each iteration, so that there is nothing to ask. Never for a subclass,
            which may answer otherwise.

    Raises:
        ValueError: the period is not above 0, or the unit is another.
    """

    predictable = True

    def __init__(self, period: float, unit: str) -> None:
        if unit not in UNITS:
            raise ValueError(f'the unit of an interval is "iteration" or "epoch", got {unit!r}')
        self.period = period
        self.unit = unit
        self._period = to_fraction(period)
        self._ratio = self._period.as_integer_ratio()
        if self._period <= 0:
            raise ValueError(f'the period of an interval is above 0, got {period!r}; None as a trigger means "never"')
        self._crossed: int | None = None
        self._wait: float = -math.inf
        self._is_of_iterations = unit == "iteration"
        is_own = type(self) is IntervalTrigger
        self.is_every_iteration = is_own and self._is_of_iterations and self._ratio == (1, 1)

    def __call__(self, trainer: Trainer) -> bool:
        """Whether a multiple was crossed; what most extensions ask most of the time is answered at once."""
        updater = trainer.updater
        progress = updater.iteration if self._is_of_iterations else updater.epoch_detail
        if progress < self._wait:  # the next multiple is not near, and nothing has to be counted or remembered
            return False
        if self.is_every_iteration:
            return progress > 0
        return super().__call__(trainer)

    def ask(self, trainer: Trainer) -> bool:
        before, now = self._crossed or 0, self._multiples(trainer)
        self._count(now)
        if now != before:
            self._wait = -math.inf  # asked again in this iteration it has to repeat its answer
        return now != before

    def _multiples(self, trainer: Trainer) -> int:
        """How many multiples of the period have been reached, exactly."""
        numerator, denominator = self._ratio
        if self.unit == "iteration":
            return trainer.updater.iteration * denominator // numerator
        return count_epochs(trainer.updater) * denominator // numerator

    def _count(self, crossed: int) -> None:
        numerator, denominator = self._ratio
        self._crossed = crossed
        if self.is_every_iteration:
            return
        if self.unit == "iteration":
            self._wait = -(-(crossed + 1) * numerator // denominator)
        else:
            self._wait = (crossed + 1) * numerator / denominator * (1 - 2**-50)

    def forget(self) -> None:
        self._crossed, self._wait = None, -math.inf

    def initialize(self, trainer: Trainer) -> None:
        if self.unit == "epoch":
            check_epoch_period(trainer.updater, self._period)
        super().initialize(trainer)
        if self._crossed is None:
            self._count(self._multiples(trainer))

    def get_training_length(self) -> tuple[float, str]:
        """The period and its unit, for an extension that shows how far training is."""
        return self.period, self.unit

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        own = [*self._ratio, self.unit]
        crossed, period = serializer("crossed", self._crossed), serializer("period", own)
        # Settings are never state: a saved count of other multiples says nothing, and the trigger starts from here.
        if not isinstance(serializer, Serializer):
            self.forget()
            if crossed is not None and list(period) == own:
                self._count(crossed)
                if self._answer:
                    self._wait = -math.inf  # as in ask

    def __str__(self) -> str:
        return f"IntervalTrigger({self.period}, {self.unit!r})"

    __repr__ = __str__
