"""NoRepeatOrderSampler: no example twice in one batch, also where a batch crosses the end of an epoch."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chainring._random import Indices, epoch_order, stable_hash


def as_count(what: str, value: Any) -> int:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{what} is an integer of at least 1, got {value!r}")
    return int(value)


def as_column(what: str, values: Any) -> npt.NDArray[Any]:
    """One finite number of at least 0 for each example, as an array of the sampler's own."""
    column = np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "biuf"):
        raise ValueError(f"{what} are one number for each example, got an array of {column.dtype} and shape {column.shape}")
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0))) if len(column) else column
    if len(wrong):
        raise ValueError(f"{what} are finite and at least 0, got {column[wrong[0]]} for example {wrong[0]}")
    return column


def require_size(what: str, values: npt.NDArray[Any], size: int) -> None:
    """Refuses a dataset of another size than the sampler was made for."""
    if len(values) != size:
        raise ValueError(f"{what} are one number for each of the {size} examples of the dataset, got {len(values)}")


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


class WeightedOrderSampler:
    """An order sampler that draws examples with probabilities in proportion to their weights.

    An epoch is ``num_samples`` draws. To balance classes, an example's weight is 1 / (the number of examples of its class).

    Args:
        weights: one for each example, finite and not negative; an example of weight 0 never comes.
        num_samples: indices in an epoch, by default as many as there are examples.
        replacement: whether each draw is from all examples. Otherwise no example comes twice in an epoch, and each draw is
            from those that are left (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).

    Raises:
        ValueError: the weights are no such numbers or all 0; or ``num_samples`` is below 1, or without replacement above
            the number of examples that have a weight.
    """

    def __init__(self, weights: Any, num_samples: int | None = None, replacement: bool = True) -> None:
        self.weights = as_column("weights", weights).astype(np.float64)
        possible = int(np.count_nonzero(self.weights))
        if not possible:
            raise ValueError(f"weights need one above 0, got {len(self.weights)} without")
        self.num_samples = len(self.weights) if num_samples is None else as_count("num_samples", num_samples)
        self.replacement = replacement
        if not replacement and self.num_samples > possible:
            raise ValueError(
                f"without replacement an epoch has at most the {possible} examples that have a weight above 0, "
                f"got num_samples = {self.num_samples}"
            )

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """The indices of an epoch."""
        require_size("weights", self.weights, size)
        key = stable_hash("weighted", seed, epoch)
        if self.replacement:
            ends = np.cumsum(self.weights / self.weights.max())  # the sum of weights themselves may overflow
            drawn: Indices = ends.searchsorted(_uniforms(key, self.num_samples) * ends[-1], "right")
            return drawn
        # The largest u ** (1 / weight) come first, compared by logarithms, which neither overflow nor become equal.
        ranks = np.full(size, -np.inf)
        has_weight = np.flatnonzero(self.weights)
        ranks[has_weight] = np.log(self.weights[has_weight]) - np.log(-np.log(_uniforms(key, size)[has_weight]))
        return np.argsort(-ranks, kind="stable")[: self.num_samples]


def _uniforms(key: int, number: int) -> npt.NDArray[Any]:
    """Numbers above 0 and below 1. NumPy keeps the raw stream of a bit generator; the methods of Generator may change."""
    raw = np.random.Philox(key=key).random_raw(number)
    return ((raw >> np.uint64(12)) + 0.5) * 2.0**-52


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


__all__ = ["BucketOrderSampler", "NoRepeatOrderSampler", "WeightedOrderSampler"]
