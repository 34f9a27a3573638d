"""IntervalMeans: the means of reported values since a trigger last fired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chainring.reporting.summary import DictSummary
from chainring.serializers.base import AbstractSerializer

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class IntervalMeans:
    """The means of reported values over an interval, weighted as the updates are, and over all ranks.

    Its owner calls `observe` in every iteration and `end` when its trigger fires, and serializes it with itself.

    Args:
        keys: of the values in the observation; ``None`` takes all. What is not a single number is ignored.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self._keys = keys
        self.reset()

    def reset(self) -> None:
        """Begin a new interval."""
        self._summary = DictSummary()

    def observe(self, trainer: Trainer) -> None:
        """Add what has been reported so far in this iteration."""
        values = trainer.observation
        if self._keys is not None:
            values = {key: values[key] for key in self._keys if key in values}
        if values:
            self._summary.add(values, getattr(trainer.updater, "weight", 1))

    def end(self, trainer: Trainer) -> dict[str, float]:
        """Return the mean of each key that was reported in the interval, and begin a new one."""
        means = self._summary.over_ranks(trainer.comm).compute_mean()
        self.reset()
        return means

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the values of the open interval, as ``summary`` in the state of the owner."""
        self._summary.serialize(serializer["summary"])
