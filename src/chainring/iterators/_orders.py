"""The order of every epoch, asked in stretches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chainring.order import Indices, epoch_order

OrderSampler = Callable[[int, int, int], Any]

_BLOCK = 65_536


class Orders:
    """Which indices an epoch has at which positions; a block of the last order asked for is kept.

    Args:
        dataset_size: the number of examples.
        shuffle: whether epochs are shuffled, where there is no sampler.
        sampler: ``sampler(seed, epoch, dataset_size)`` returns the indices of a whole epoch, a pure function of its
            arguments. Its length is the epoch's size.
    """

    def __init__(self, dataset_size: int, shuffle: bool, sampler: OrderSampler | None) -> None:
        self._dataset_size = dataset_size
        self._shuffle = shuffle
        self._sampler = sampler
        self._kept: tuple[int, int, int, int] = (0, -1, 0, 0)  # seed, epoch, and the positions that _block holds
        self._block: Indices = np.empty(0, np.int64)
        self.size = dataset_size if sampler is None else len(self._sampled(0, 0))
        self._stretch = _BLOCK if sampler is None else max(self.size, 1)  # a sampler makes whole epochs, so one is kept

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> Indices:
        """The indices at positions ``start`` to ``stop`` of an epoch's order."""
        kept_seed, kept_epoch, first, last = self._kept
        if epoch == kept_epoch and seed == kept_seed and first <= start and stop <= last:
            return self._block[start - first : stop - first]
        if self._sampler is None and not self._shuffle:
            return np.arange(start, stop)
        middle = start - start % self._stretch + self._stretch
        if stop > middle:
            return np.concatenate([self.indices(seed, epoch, start, middle), self.indices(seed, epoch, middle, stop)])
        first, last = middle - self._stretch, min(self.size, middle)
        self._block = self._make_block(seed, epoch, first, last)
        self._kept = seed, epoch, first, last
        return self._block[start - first : stop - first]

    def _make_block(self, seed: int, epoch: int, first: int, last: int) -> Indices:
        if self._sampler is None:
            return epoch_order(seed, epoch, self._dataset_size, first, last)
        order = self._sampled(seed, epoch)
        if len(order) != self.size:
            raise ValueError(
                f"an order sampler must return as many indices for every epoch; "
                f"it gave {self.size} for the first and {len(order)} for epoch {epoch}"
            )
        return order[first:last]

    def _sampled(self, seed: int, epoch: int) -> Indices:
        assert self._sampler is not None
        order = np.asarray(self._sampler(seed, epoch, self._dataset_size))
        if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu"):
            raise ValueError(
                "an order sampler returns one dimension of integer indices, "
                f"got an array of shape {order.shape} and dtype {order.dtype}"
            )
        order = order.astype(np.int64)
        if len(order) and not 0 <= order.min() <= order.max() < self._dataset_size:
            raise ValueError(
                f"an order sampler returns indices from 0 to {self._dataset_size - 1}, "
                f"got some from {order.min()} to {order.max()}"
            )
        return order
