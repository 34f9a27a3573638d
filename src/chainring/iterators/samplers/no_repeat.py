"""NoRepeatOrderSampler: no example twice in one batch, also where a batch crosses the end of an epoch."""

from __future__ import annotations

import heapq

import numpy as np

from chainring.iterators.samplers._checks import as_count
from chainring.order import Indices, epoch_order


class NoRepeatOrderSampler:
    """An order sampler that shuffles, and never gives an example twice within ``batch_size`` indices on end.

    With plain shuffling, the batch that crosses the end of an epoch may have an example both as one of the last of the old
    epoch and as one of the first of the new one. What compares the examples of a batch with each other (contrastive
    losses, say) takes it for its own negative. Here every epoch has every example once, and those that came last in the
    epoch before come a little later. It holds across epochs wherever batches begin, as long as the seed stays the same.

    Args:
        batch_size: that of the iterator, or more.

    Raises:
        ValueError: ``batch_size`` is below 1, or (with the first epoch) above the number of examples.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = as_count("batch_size", batch_size)

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """The indices of an epoch."""
        gap = self.batch_size
        if size < gap:
            raise ValueError(f"{size} examples cannot fill a batch of {gap} without a repeat; take a smaller batch_size")
        if size < 2 * gap - 1:
            return _shuffled_nearby(seed, epoch, size, size - gap + 1)
        order = epoch_order(seed, epoch, size)
        if epoch > 0 and gap > 1:
            # Only the first `gap` places change, so the last gap - 1 are what the next epoch takes them for.
            order[:gap] = _spaced(order[:gap].tolist(), epoch_order(seed, epoch - 1, size, size - gap + 1, size).tolist())
        return order


def _spaced(first: list[int], last: list[int]) -> list[int]:
    """The first indices of an epoch, moved back as far as they must stand from the same ones at the end of another."""
    earliest = {index: place + 1 for place, index in enumerate(last)}
    coming, waiting, spaced = iter(first), list[tuple[int, int]](), list[int]()
    for place in range(len(first)):
        while not waiting or waiting[0][0] > place:
            # There is one to come: all that wait have places of their own behind this one, and there are not so many.
            index = next(coming)
            heapq.heappush(waiting, (earliest.get(index, 0), index))
        spaced.append(heapq.heappop(waiting)[1])
    return spaced


def _shuffled_nearby(seed: int, epoch: int, size: int, width: int) -> Indices:
    """One order for all epochs, shuffled by stretches of ``width``: an index moves by less than that between epochs.

    Where nearly all examples are in one batch, no order that is shuffled more keeps equal ones a batch apart.
    """
    places = np.lexsort((epoch_order(seed, epoch + 1, size), np.arange(size) // width))
    return epoch_order(seed, 0, size)[places]
