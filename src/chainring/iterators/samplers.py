"""Order samplers: functions of (seed, epoch, size) that return the indices of a whole epoch."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from chainring._random import Indices, epoch_order, stable_hash
from chainring.iterators.serial import require_flag, require_integer


class BucketOrderSampler:
    """Order sampler that puts examples of similar length into a batch, to reduce padding.

    Each epoch is shuffled and cut into pools of ``pool`` batches; a pool is sorted by length and cut into batches, and the
    batches come in random order. Every batch is full, as `SerialIterator` makes them with ``repeat=True``, and an epoch
    is a whole number of batches, so that the batches of the next epoch are not shifted.

    Args:
        lengths: the length of each example, in tokens or in any unit that is padded; an array, a tensor or a list.
        batch_size: the batch size of the iterator.
        pool: the number of batches that are sorted together. A larger pool needs less padding, a smaller one shuffles
            better.
        drop_last: what to do with examples that do not fill a batch. ``False`` fills it with examples of the same epoch,
            which then occur twice; ``True`` leaves them out, different ones in every epoch.

    Raises:
        ValueError: the lengths are not such numbers, ``batch_size`` or ``pool`` is below 1, or with ``drop_last`` there is
            no full batch.

    Example::

        SerialIterator(dataset, 32, order_sampler=BucketOrderSampler([len(text) for text in dataset], 32))
    """

    def __init__(
        self, lengths: ArrayLike | torch.Tensor, batch_size: int, *, pool: int = 100, drop_last: bool = False
    ) -> None:
        self.lengths = _to_column("lengths", lengths)
        self.batch_size = require_integer("batch_size", batch_size, 1)
        self.pool = require_integer("pool", pool, 1)
        self.drop_last = require_flag("drop_last", drop_last)
        if drop_last and len(self.lengths) < self.batch_size:
            raise ValueError(
                f"drop_last=True leaves no batch of {self.batch_size} out of {len(self.lengths)} examples; "
                "take a smaller batch_size"
            )

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """Return the indices of an epoch, batch after batch."""
        _check_size("lengths", self.lengths, size)
        batches = size // self.batch_size if self.drop_last else -(-size // self.batch_size)
        total = batches * self.batch_size
        order = np.resize(epoch_order(seed, epoch, size), total)  # begins again if it is too short
        pools = np.arange(total) // (self.batch_size * self.pool)
        rows = order[np.lexsort((self.lengths[order], pools))].reshape(batches, self.batch_size)
        return rows[epoch_order(stable_hash("batches", seed), epoch, batches)].reshape(total)


class TokenOrderSampler:
    """Order sampler whose batches have a number of tokens at most, so that long examples come in small batches.

    Each epoch is shuffled and cut into pools; a pool is sorted by length and cut into batches, each as large as it may be,
    and the batches come in random order. Each example comes once an epoch. The batch size of the iterator is the most
    examples in a batch, and no batch crosses the end of an epoch. Means are weighted by the examples of each batch, or by
    the ``"weight"`` that a model returns, such as its number of tokens.

    Args:
        lengths: the length of each example, in tokens; an array, a tensor or a list.
        max_tokens: the most tokens in a batch.
        padded: True to count a batch as it is padded: its longest example times their number. ``False`` counts the tokens
            themselves, of examples that are joined.
        pool: about how many batches are sorted together. A larger pool needs less padding, a smaller one shuffles better.

    Raises:
        ValueError: the lengths are not such numbers, ``max_tokens`` or ``pool`` is below 1, or an example is longer than
            ``max_tokens``.

    Example::

        SerialIterator(dataset, 256, order_sampler=TokenOrderSampler([len(text) for text in dataset], 4096))
    """

    def __init__(self, lengths: ArrayLike | torch.Tensor, max_tokens: int, *, padded: bool = True, pool: int = 100) -> None:
        self.lengths = _to_column("lengths", lengths).astype(np.float64)
        self.max_tokens = require_integer("max_tokens", max_tokens, 1)
        self.padded, self.pool = require_flag("padded", padded), require_integer("pool", pool, 1)
        if len(longer := np.flatnonzero(self.lengths > max_tokens)):
            raise ValueError(
                f"every example fits into a batch, and example {longer[0]} has {self.lengths[longer[0]]:g} tokens for "
                f"max_tokens={max_tokens}; raise it, or cut the example or leave it out"
            )
        self._last: tuple[tuple[int, int], tuple[Indices, Indices]] | None = None

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """Return the indices of an epoch, batch after batch."""
        return self._cut(seed, epoch, size)[0]

    def batch_ends(self, seed: int, epoch: int, size: int) -> Indices:
        """Return the position after each batch of an epoch."""
        return self._cut(seed, epoch, size)[1]

    def _cut(self, seed: int, epoch: int, size: int) -> tuple[Indices, Indices]:
        _check_size("lengths", self.lengths, size)
        if self._last is None or self._last[0] != (seed, epoch):
            order = epoch_order(seed, epoch, size)
            a_batch = self.max_tokens / max(float(self.lengths.mean()), 1) if size else 1
            pools = np.arange(size) // max(int(self.pool * a_batch), 1)
            order = order[np.lexsort((self.lengths[order], pools))]
            firsts, used, count, longest = [0] * (size > 0), 0.0, 0, 0.0
            for position, length in enumerate(self.lengths[order].tolist()):
                longest = max(longest, length)
                used, count = used + length, count + 1
                if (longest * count if self.padded else used) > self.max_tokens:
                    firsts.append(position)
                    used, count, longest = length, 1, length
            batches = np.split(order, firsts[1:])
            batches = [batches[index] for index in epoch_order(stable_hash("batches", seed), epoch, len(batches))]
            ends = np.cumsum(list(map(len, batches)), dtype=np.int64)
            self._last = (seed, epoch), (np.concatenate([order[:0], *batches]), ends)
        return self._last[1]


class WeightedOrderSampler:
    """Order sampler that draws examples with probabilities proportional to their weights, for example to balance classes.

    An epoch is ``num_samples`` draws. To balance classes, an example's weight is 1 / (the number of examples of its class).

    Args:
        weights: one for each example, finite and not negative; an example of weight 0 is never drawn.
        num_samples: the number of indices in an epoch, by default the number of examples.
        replacement: True to draw from all examples each time. Otherwise no example is drawn twice in an epoch, and each
            draw is from those that are left (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).

    Raises:
        ValueError: the weights are not such numbers or all 0; or ``num_samples`` is below 1, or without replacement above
            the number of examples that have a weight.

    Example::

        counts = np.bincount(labels)
        SerialIterator(dataset, 32, order_sampler=WeightedOrderSampler(1 / counts[labels]))
    """

    def __init__(self, weights: ArrayLike | torch.Tensor, num_samples: int | None = None, replacement: bool = True) -> None:
        self.weights = _to_column("weights", weights).astype(np.float64)
        possible = int(np.count_nonzero(self.weights))
        if not possible:
            raise ValueError(f"at least one weight must be above 0, got {len(self.weights)} without")
        self.num_samples = len(self.weights) if num_samples is None else require_integer("num_samples", num_samples, 1)
        self.replacement = require_flag("replacement", replacement)
        if not replacement and self.num_samples > possible:
            raise ValueError(
                f"without replacement an epoch has at most the {possible} examples that have a weight above 0, "
                f"got num_samples = {self.num_samples}"
            )

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """Return the indices of an epoch."""
        _check_size("weights", self.weights, size)
        key = stable_hash("weighted", seed, epoch)
        if self.replacement:
            cumulative = np.cumsum(self.weights / self.weights.max())  # the sum of weights themselves may overflow
            drawn: Indices = cumulative.searchsorted(_uniform(key, self.num_samples) * cumulative[-1], "right")
            return drawn
        # The largest u ** (1 / weight) come first, compared by logarithms, which neither overflow nor become equal.
        scores = np.full(size, -np.inf)
        positive = np.flatnonzero(self.weights)
        scores[positive] = np.log(self.weights[positive]) - np.log(-np.log(_uniform(key, size)[positive]))
        return np.argsort(-scores, kind="stable")[: self.num_samples]


def _uniform(key: int, count: int) -> NDArray[np.floating]:
    """Return numbers above 0 and below 1, from a raw stream that NumPy keeps; the methods of Generator may change."""
    raw = np.random.Philox(key=key).random_raw(count)
    return ((raw >> np.uint64(12)) + 0.5) * 2.0**-52


def _to_column(name: str, values: ArrayLike | torch.Tensor) -> NDArray[np.generic]:
    """Return a new array of one finite number of at least 0 for each example."""
    column = np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "biuf"):
        raise ValueError(f"{name} are one number for each example, got an array of {column.dtype} and shape {column.shape}")
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0))) if len(column) else column
    if len(wrong):
        raise ValueError(f"{name} are finite and at least 0, got {column[wrong[0]]} for example {wrong[0]}")
    return column


def _check_size(name: str, values: NDArray[np.generic], size: int) -> None:
    if len(values) != size:
        raise ValueError(f"{name} are one number for each of the {size} examples of the dataset, got {len(values)}")


class NoRepeatOrderSampler:
    """Order sampler that shuffles, and never repeats an example within ``batch_size`` successive indices.

    With plain shuffling, the batch that crosses the end of an epoch may have an example twice, and a loss that compares the
    examples of a batch with each other (such as a contrastive loss) uses it as its own negative. Here every epoch has
    every example once, and the last ones of the epoch before are moved back a little. This holds wherever batches start,
    if the seed stays the same.

    Args:
        batch_size: the batch size of the iterator, or more.

    Raises:
        ValueError: ``batch_size`` is below 1, or (with the first epoch) above the number of examples.

    Example::

        SerialIterator(dataset, 32, order_sampler=NoRepeatOrderSampler(32))
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = require_integer("batch_size", batch_size, 1)

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """Return the indices of an epoch."""
        gap = self.batch_size
        if size < gap:
            raise ValueError(f"{size} examples cannot fill a batch of {gap} without a repeat; take a smaller batch_size")
        if size < 2 * gap - 1:
            # Nearly all examples are in one batch, so only a local shuffle keeps equal ones a batch apart: one order for
            # all epochs, in which an index moves by less than `width` between epochs.
            width = size - gap + 1
            positions = np.lexsort((epoch_order(seed, epoch + 1, size), np.arange(size) // width))
            return epoch_order(seed, 0, size)[positions]
        order = epoch_order(seed, epoch, size)
        if epoch > 0 and gap > 1:
            # Only the first `gap` positions change, so the last gap - 1 are as the next epoch expects them.
            order[:gap] = _spaced(order[:gap].tolist(), epoch_order(seed, epoch - 1, size, size - gap + 1, size).tolist())
        return order


def _spaced(first: list[int], last: list[int]) -> list[int]:
    """Return the first indices of an epoch, delayed until they are far enough from the same ones at the end of the last."""
    earliest = {index: position + 1 for position, index in enumerate(last)}
    coming, waiting, spaced = iter(first), list[tuple[int, int]](), list[int]()
    for position in range(len(first)):
        while not waiting or waiting[0][0] > position:
            # `coming` is not exhausted: all that wait have later positions, and there are not so many of these.
            index = next(coming)
            heapq.heappush(waiting, (earliest.get(index, 0), index))
        spaced.append(heapq.heappop(waiting)[1])
    return spaced
