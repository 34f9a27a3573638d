"""ReachedTrigger: true from a point of the training on, which is the meaning of a pair as a stop trigger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainring._progress import UNITS, check_epoch_period, count_epochs, to_fraction

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class ReachedTrigger:
    """True from a point on: iterations, epochs or seconds of training, those before a resume included.

    It follows from the trainer alone and has no state: a run that is resumed at or past its point stops at once.

    Example::

        trainer = Trainer(updater, ReachedTrigger(20, "epoch"))  # or Trainer(updater, (20, "epoch"))

    Args:
        length: the point, 0 or above; 0 is reached before the first update.
        unit: ``"iteration"``, ``"epoch"`` or ``"second"``.

    Raises:
        ValueError: the length is below 0, or the unit is unknown.
        TypeError: the length is not a number.
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
        self._float_length = float(length)
        self._first_check = self._float_length * (1 - 2**-50)  # a little before the point; from there on epochs are exact

    def initialize(self, trainer: Trainer) -> None:
        """Refuse epochs if the updater does not count them."""
        if self.unit == "epoch" and self._length:
            check_epoch_period(trainer.updater, self._length)

    def __call__(self, trainer: Trainer) -> bool:
        """Return True if the point is reached."""
        if self.unit == "iteration":
            return trainer.updater.iteration >= self._float_length
        if self.unit == "second":
            is_reached = trainer.elapsed_time >= self._float_length
            return is_reached if trainer.comm.size == 1 else bool(trainer.comm.broadcast_object(is_reached))
        # hot path: "no extension" of benchmarks/overhead.py. Far from the point a float is enough.
        updater = trainer.updater
        return updater.epoch_detail >= self._first_check and count_epochs(updater) >= self._length

    def get_training_length(self) -> tuple[float, str]:
        """Return the length and its unit, for an extension that shows the progress of training."""
        return self.length, self.unit

    def __repr__(self) -> str:
        return f"ReachedTrigger({self.length}, {self.unit!r})"
