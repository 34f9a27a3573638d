"""ReachedTrigger: what a pair means as a stop trigger."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chainring._progress import UNITS, check_epoch_period, count_epochs, to_fraction

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class ReachedTrigger:
    """True from a point on: so many iterations, epochs or seconds of training, those before a resume included.

    It answers from the trainer alone and has no state: a run that is resumed at or past its point does nothing more.

    Args:
        length: the point, 0 or above; 0 is reached before the first update.
        unit: ``"iteration"``, ``"epoch"`` or ``"second"``.

    Raises:
        ValueError: the length is below 0, or the unit is another.
    """

    predictable = True

    def __init__(self, length: float, unit: str) -> None:
        if unit not in (*UNITS, "second"):
            raise ValueError(
                f'the unit of a training length is "iteration", "epoch" or "second", got {unit!r}; '
                f'write for example ({length!r}, "epoch")'
            )
        self.length = length
        self.unit = unit
        self._length = to_fraction(length)
        if self._length < 0:
            raise ValueError(f"a training length is 0 or above, got {length!r}; None trains until the data end")
        self._iterations = math.ceil(self._length)
        self._seconds = float(length)
        self._wait = self._seconds * (1 - 2**-50)  # a little before the point: only from there on is it asked exactly

    def __call__(self, trainer: Trainer) -> bool:
        """Whether the point is reached."""
        if self.unit == "iteration":
            return trainer.updater.iteration >= self._iterations
        if self.unit == "second":
            is_reached = trainer.elapsed_time >= self._seconds
            return is_reached if trainer.comm.size == 1 else bool(trainer.comm.broadcast_object(is_reached))
        updater = trainer.updater
        return updater.epoch_detail >= self._wait and count_epochs(updater) >= self._length

    def initialize(self, trainer: Trainer) -> None:
        """Refuses epochs where the updater does not count them."""
        if self.unit == "epoch" and self._length:
            check_epoch_period(trainer.updater, self._length)

    def get_training_length(self) -> tuple[float, str]:
        """The length and its unit, for an extension that shows how far training is."""
        return self.length, self.unit

    def __str__(self) -> str:
        return f"ReachedTrigger({self.length}, {self.unit!r})"

    __repr__ = __str__
