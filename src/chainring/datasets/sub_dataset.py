"""SubDataset, and the ways of splitting a dataset into some."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from chainring._random import Indices, epoch_order, stable_hash
from chainring.datasets._columns import Gather, make_gather
from chainring.datasets.base import DatasetMixin, indexes_plainly, require_datasets


class SubDataset(DatasetMixin):
    """The examples from ``start`` to ``finish`` of a dataset, in its own order or in a given one.

    Args:
        dataset: the dataset underneath.
        start: the first position.
        finish: one past the last position.
        order: integer indices of ``dataset``, one for each example; positions are then those of this order.

    Raises:
        TypeError: ``dataset`` is none, or a position no integer.
        ValueError: the positions do not lie in the dataset; or the order has another length than the dataset, or holds
            something else than integers that are numbers of its examples.
    """

    def __init__(self, dataset: Any, start: int, finish: int, order: Sequence[int] | None = None) -> None:
        require_datasets("a SubDataset", dataset)
        size = len(dataset)
        for position in (start, finish):
            if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
                raise TypeError(f"positions are integers, got {position!r}; write int(...) of a share of the examples")
        if not 0 <= start <= finish <= size:
            raise ValueError(f"positions must satisfy 0 <= start <= finish <= {size}, got {start} and {finish}")
        self.dataset = dataset
        self.start = start
        self.finish = finish
        self.order = None if order is None else _checked_order(order, size)

    def __len__(self) -> int:
        return self.finish - self.start

    def get_example(self, i: int) -> Any:
        position = self.start + i
        return self.dataset[position if self.order is None else int(self.order[position])]

    def column_gather(self) -> Gather | None:
        """A function from indices to columns, where the dataset underneath holds whole arrays."""
        below = make_gather(self.dataset) if indexes_plainly(self, SubDataset) else None
        if below is None:
            return None
        start = self.start
        if self.order is None:
            return lambda indices: below(indices + start)
        own = self.order[start : self.finish]
        return lambda indices: below(own[indices])


def _checked_order(order: Sequence[int], size: int) -> Indices:
    indices = np.asarray(order)
    if indices.shape != (size,):
        raise ValueError(f"an order has one index for each of the {size} examples, got the shape {indices.shape}")
    if size == 0:
        return indices.astype(np.int64)
    if indices.dtype.kind not in "iu":
        raise ValueError(f"an order is made of integers, got {indices.dtype}")
    low, high = indices.min(), indices.max()
    if low < -size or high >= size:
        raise ValueError(f"an order has indices from 0 to {size - 1}, got some from {low} to {high}")
    indices = indices.astype(np.int64, copy=False)
    return indices if low >= 0 else indices % size


def split_dataset(dataset: Any, split_at: int, order: Sequence[int] | None = None) -> tuple[SubDataset, SubDataset]:
    """The first ``split_at`` examples, and the others.

    Raises:
        ValueError: ``split_at`` does not lie in the dataset.
    """
    size = len(dataset)
    if not 0 <= split_at <= size:
        raise ValueError(f"split_at is from 0 to {size}, the number of examples, got {split_at}")
    return SubDataset(dataset, 0, split_at, order), SubDataset(dataset, split_at, size, order)


def split_dataset_random(dataset: Any, first_size: int, seed: int | None = None) -> tuple[SubDataset, SubDataset]:
    """`split_dataset` in a random order.

    Args:
        dataset: the dataset to split.
        first_size: examples in the first part.
        seed: of the order; ``None`` takes one from ``torch.initial_seed()``. No generator is drawn from.
    """
    return split_dataset(dataset, first_size, _random_order(dataset, seed))


def split_dataset_n(dataset: Any, n: int, order: Sequence[int] | None = None) -> list[SubDataset]:
    """``n`` parts, one after the other, which together hold every example; their sizes differ by at most one.

    Raises:
        ValueError: ``n`` is below 1 or above the number of examples.
    """
    size = len(dataset)
    if not 1 <= n <= max(size, 1):
        raise ValueError(f"n is from 1 to {size}, the number of examples, got {n}")
    bounds = [(size // n) * part + min(part, size % n) for part in range(n + 1)]
    return [SubDataset(dataset, start, finish, order) for start, finish in pairwise(bounds)]


def split_dataset_n_random(dataset: Any, n: int, seed: int | None = None) -> list[SubDataset]:
    """`split_dataset_n` in a random order; ``seed`` as in `split_dataset_random`."""
    return split_dataset_n(dataset, n, _random_order(dataset, seed))


def get_cross_validation_datasets(
    dataset: Any, n_folds: int, order: Sequence[int] | None = None
) -> list[tuple[SubDataset, SubDataset]]:
    """For each fold the examples to train on, and those to test with: every example is tested with in one fold.

    The sizes of the test sets differ by at most one. As in Chainer, the first fold is tested with the end of the order
    and the last with its start; training goes on after the test set and round from the end to the start.

    Args:
        dataset: the dataset to split.
        n_folds: how many folds.
        order: integer indices of ``dataset``, one for each example; by default its own order.

    Raises:
        ValueError: ``n_folds`` is below 2 or above the number of examples, or the order is none of the dataset.
    """
    size = len(dataset)
    if not 2 <= n_folds <= size:
        raise ValueError(f"n_folds is from 2 to {size}, the number of examples, got {n_folds}")
    indices = np.arange(size) if order is None else _checked_order(order, size)
    bounds = [size * fold // n_folds for fold in range(n_folds + 1)]
    splits = []
    for start, end in reversed(list(pairwise(bounds))):
        turned: Any = np.concatenate([indices[end:], indices[:end]])  # ends with the test set
        splits.append(split_dataset(dataset, size - (end - start), turned))
    return splits


def get_cross_validation_datasets_random(
    dataset: Any, n_folds: int, seed: int | None = None
) -> list[tuple[SubDataset, SubDataset]]:
    """`get_cross_validation_datasets` in a random order; ``seed`` as in `split_dataset_random`."""
    return get_cross_validation_datasets(dataset, n_folds, _random_order(dataset, seed))


def _random_order(dataset: Any, seed: int | None) -> Any:
    seed = stable_hash("split", torch.initial_seed()) if seed is None else seed
    return epoch_order(seed, 0, len(dataset))
