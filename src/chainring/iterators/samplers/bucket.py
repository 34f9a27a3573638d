"""BucketOrderSampler: examples of like length come in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainring.iterators.samplers._checks import as_column, as_count, require_size
from chainring.order import Indices, epoch_order, stable_hash


class BucketOrderSampler:
    """An order sampler whose batches are of examples of like length, so that little of a padded batch is padding.

    Each epoch is shuffled and cut into pools of ``pool`` batches; a pool is sorted by length and cut into batches, and the
    batches come in random order. Every batch is full, as `SerialIterator` makes them with ``repeat=True``, and an epoch
    is a whole number of batches, which keeps the next epoch's batches where they are.

    Args:
        lengths: of each example, in tokens or whatever is padded.
        batch_size: that of the iterator.
        pool: batches that are sorted together. More of them have less padding, fewer more chance in who meets whom.
        drop_last: what happens to the examples that fill no batch of their own. ``False`` fills it with examples of that
            epoch, which come a second time; ``True`` leaves them out, other ones every epoch.

    Raises:
        ValueError: the lengths are no such numbers, ``batch_size`` or ``pool`` is below 1, or with ``drop_last`` there is
            no full batch.
    """

    def __init__(self, lengths: Any, batch_size: int, *, pool: int = 100, drop_last: bool = False) -> None:
        self.lengths = as_column("lengths", lengths)
        self.batch_size = as_count("batch_size", batch_size)
        self.pool = as_count("pool", pool)
        self.drop_last = drop_last
        if drop_last and len(self.lengths) < self.batch_size:
            raise ValueError(
                f"drop_last=True leaves no batch of {self.batch_size} out of {len(self.lengths)} examples; "
                "take a smaller batch_size"
            )

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """The indices of an epoch, batch after batch."""
        require_size("lengths", self.lengths, size)
        number = size // self.batch_size if self.drop_last else -(-size // self.batch_size)
        total = number * self.batch_size
        order = np.resize(epoch_order(seed, epoch, size), total)  # begins again where it is too short
        pools = np.arange(total) // (self.batch_size * self.pool)
        batches = order[np.lexsort((self.lengths[order], pools))].reshape(number, self.batch_size)
        return batches[epoch_order(stable_hash("batches", seed), epoch, number)].reshape(total)
