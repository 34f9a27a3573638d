"""Datasets made of others: side by side, one after the other, with a function over their examples, or split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chainring._checks import is_integer, plain
from chainring._random import Indices, epoch_order, stable_hash
from chainring.datasets.base import (
    Dataset,
    DatasetMixin,
    Gather,
    indexes_like,
    is_array,
    make_gather,
    make_joint_gather,
    make_tuple_gather,
    require_datasets,
    size_of,
)


class TupleDataset(DatasetMixin):
    """Example i is the tuple of the i-th example of each dataset, such as an image and its label.

    Args:
        *datasets: arrays, tensors, lists or datasets, all of the same length.

    Raises:
        ValueError: there are no datasets, or their lengths differ.
        TypeError: one has no ``__len__`` or no ``__getitem__``.

    Example::

        TupleDataset([10, 20], ["a", "b"])[1]  # (20, "b")
    """

    def __init__(self, *datasets: Dataset) -> None:
        self.datasets = require_datasets("a TupleDataset", *datasets)
        _require_same_length("a TupleDataset", [size_of(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return len(self.datasets[0])

    def get_example(self, i: int) -> Any:
        return tuple([dataset[i] for dataset in self.datasets])

    def column_gather(self) -> Gather | None:
        """Return a function from indices to a tuple of columns, if every dataset holds whole arrays."""
        return make_tuple_gather(self.datasets) if indexes_like(self, TupleDataset) else None


def arrays_of(dataset: Any) -> list[NDArray[Any]]:
    """Return the arrays that a dataset consists of, if it consists of nothing else."""
    arrays = dataset.datasets if isinstance(dataset, TupleDataset) and indexes_like(dataset, TupleDataset) else [dataset]
    return list(arrays) if all(map(is_array, arrays)) else []


class DictDataset(DatasetMixin):
    """Example i is a dict of the i-th example of each dataset, such as ``{"x": image, "t": label}``.

    Args:
        **datasets: arrays, tensors, lists or datasets, all of the same length.

    Raises:
        ValueError: there are no datasets, or their lengths differ.
        TypeError: one has no ``__len__`` or no ``__getitem__``.

    Example::

        DictDataset(x=[10, 20], t=[0, 1])[1]  # {"x": 20, "t": 1}
    """

    def __init__(self, **datasets: Dataset) -> None:
        self.datasets = dict(zip(datasets, require_datasets("a DictDataset", *datasets.values()), strict=True))
        _require_same_length("a DictDataset", {key: size_of(dataset) for key, dataset in datasets.items()})

    def __len__(self) -> int:
        return len(next(iter(self.datasets.values())))

    def get_example(self, i: int) -> Any:
        return {key: dataset[i] for key, dataset in self.datasets.items()}

    def column_gather(self) -> Gather | None:
        """Return a function from indices to a dict of columns, if every dataset holds whole arrays."""
        gather = make_tuple_gather(self.datasets.values()) if indexes_like(self, DictDataset) else None
        return None if gather is None else lambda indices: dict(zip(self.datasets, gather(indices), strict=True))


def _require_same_length(name: str, lengths: Collection[int] | Mapping[str, int]) -> None:
    if len(set(lengths.values() if isinstance(lengths, Mapping) else lengths)) > 1:
        raise ValueError(f"the datasets of {name} must have the same length, got {lengths}")


class ConcatenatedDataset(DatasetMixin):
    """The examples of the first dataset, then those of the second, and so on.

    Args:
        *datasets: arrays, tensors, lists or datasets.

    Raises:
        ValueError: there are no datasets.
        TypeError: one has no ``__len__`` or no ``__getitem__``.

    Example::

        ConcatenatedDataset([0, 1], [2, 3])[2]  # 2
    """

    def __init__(self, *datasets: Dataset) -> None:
        self.datasets = require_datasets("a ConcatenatedDataset", *datasets)
        self._ends: Indices = np.cumsum([size_of(dataset) for dataset in datasets], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get_example(self, i: int) -> Any:
        k = int(self._ends.searchsorted(i, "right"))
        dataset = self.datasets[k]
        return dataset[i - int(self._ends[k]) + len(dataset)]

    def column_gather(self) -> Gather | None:
        """Return a function from indices to columns, if all datasets hold whole arrays of the same shapes and dtypes."""
        if not indexes_like(self, ConcatenatedDataset):
            return None
        if (gather := make_joint_gather(self.datasets, list(map(arrays_of, self.datasets)))) is None:
            return None
        ends, starts = self._ends, np.concatenate([[0], self._ends[:-1]])

        def gather_columns(indices: Indices) -> Any:
            owners = ends.searchsorted(indices, "right")
            return gather.take(gather.find(owners, indices - starts[owners]))

        return gather_columns


class TransformDataset(DatasetMixin):
    """Example i is ``transform(dataset[i])``, computed on demand.

    Args:
        dataset: the underlying dataset.
        transform: a function of one example. In an iterator, the numbers that it draws from ``random``, ``numpy.random``
            and ``torch`` are a function of seed, epoch and index.

    Raises:
        TypeError: ``transform`` cannot be called, or ``dataset`` is not a dataset.

    Example::

        TransformDataset(range(10), lambda x: x**2)[3]  # 9
    """

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Any]) -> None:
        if not callable(transform):
            raise TypeError(f"transform is a function of one example, got {type(transform).__name__}")
        (self.dataset,) = require_datasets("a TransformDataset", dataset)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def get_example(self, i: int) -> Any:
        return self.transform(self.dataset[i])


class SubDataset(DatasetMixin):
    """The examples from ``start`` to ``finish`` of a dataset, in its own order or in a given one.

    Args:
        dataset: the underlying dataset.
        start: the first position.
        finish: one past the last position.
        order: integer indices of ``dataset``, one for each example; ``start`` and ``finish`` are then positions in this
            order.

    Raises:
        TypeError: ``dataset`` is not a dataset, or a position is not an integer.
        ValueError: the positions do not lie in the dataset; or the order has another length than the dataset, or holds
            anything but integer indices of its examples.

    Example::

        list(SubDataset([10, 11, 12, 13], 1, 3))  # [11, 12]
    """

    def __init__(self, dataset: Dataset, start: int, finish: int, order: Sequence[int] | None = None) -> None:
        (self.dataset,) = require_datasets("a SubDataset", dataset)
        size = size_of(dataset)
        for position in (start, finish):
            if not is_integer(position):
                raise TypeError(f"positions are integers, got {position!r}; round a fraction of the examples with int(...)")
        if not 0 <= start <= finish <= size:
            raise ValueError(f"positions must satisfy 0 <= start <= finish <= {size}, got {start} and {finish}")
        self.start, self.finish = plain(start), plain(finish)
        self.order = None if order is None else _check_order(order, size)

    def __len__(self) -> int:
        return self.finish - self.start

    def get_example(self, i: int) -> Any:
        position = self.start + i
        return self.dataset[position if self.order is None else int(self.order[position])]

    def column_gather(self) -> Gather | None:
        """Return a function from indices to columns, if the underlying dataset holds whole arrays."""
        gather = make_gather(self.dataset) if indexes_like(self, SubDataset) else None
        if gather is None:
            return None
        if self.order is None:
            return lambda indices: gather(indices + self.start)
        order = self.order[self.start : self.finish]
        return lambda indices: gather(order[indices])


def _check_order(order: Sequence[int] | Indices, size: int) -> Indices:
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
    return indices.astype(np.int64, copy=False) % size


def split_dataset(dataset: Dataset, split_at: int, order: Sequence[int] | None = None) -> tuple[SubDataset, SubDataset]:
    """Split a dataset into the first ``split_at`` examples and the others.

    Raises:
        ValueError: ``split_at`` does not lie in the dataset.
    """
    size = size_of(dataset)
    if not 0 <= split_at <= size:
        raise ValueError(f"split_at is from 0 to {size}, the number of examples, got {split_at}")
    return SubDataset(dataset, 0, split_at, order), SubDataset(dataset, split_at, size, order)


def split_dataset_random(dataset: Dataset, first_size: int, seed: int | None = None) -> tuple[SubDataset, SubDataset]:
    """Split a dataset in two, in a random order.

    Args:
        dataset: the dataset to split.
        first_size: the number of examples in the first of the two.
        seed: the seed of the order; ``None`` takes one from ``torch.initial_seed()``. Global random generators are not
            used.

    Raises:
        ValueError: ``first_size`` does not lie in the dataset.
    """
    return split_dataset(dataset, first_size, _random_order(dataset, seed))


def split_dataset_n(dataset: Dataset, n: int, order: Sequence[int] | None = None) -> list[SubDataset]:
    """Split a dataset into ``n`` consecutive parts that together contain every example; sizes differ by at most one.

    Raises:
        ValueError: ``n`` is below 1 or above the number of examples.
    """
    size = size_of(dataset)
    if not 1 <= n <= max(size, 1):
        raise ValueError(f"n is from 1 to {size}, the number of examples, got {n}")
    bounds = [(size // n) * k + min(k, size % n) for k in range(n + 1)]
    return [SubDataset(dataset, start, finish, order) for start, finish in pairwise(bounds)]


def split_dataset_n_random(dataset: Dataset, n: int, seed: int | None = None) -> list[SubDataset]:
    """Split a dataset like `split_dataset_n`, in a random order; ``seed`` is as in `split_dataset_random`."""
    return split_dataset_n(dataset, n, _random_order(dataset, seed))


def get_cross_validation_datasets(
    dataset: Dataset, n_folds: int, order: Sequence[int] | None = None
) -> list[tuple[SubDataset, SubDataset]]:
    """Return the training set and the test set of each fold; every example is in one test set.

    The sizes of the test sets differ by at most one. As in Chainer, the test set of the first fold is the end of the
    order and that of the last fold its start; a training set starts after the test set and wraps around from the end to
    the start.

    Args:
        dataset: the dataset to split.
        n_folds: the number of folds.
        order: integer indices of ``dataset``, one for each example; by default its own order.

    Raises:
        ValueError: ``n_folds`` is below 2 or above the number of examples, or the order is not one of the dataset.

    Example::

        for train, test in get_cross_validation_datasets(dataset, 5):
            ...
    """
    size = size_of(dataset)
    if not 2 <= n_folds <= size:
        raise ValueError(f"n_folds is from 2 to {size}, the number of examples, got {n_folds}")
    indices = np.arange(size) if order is None else _check_order(order, size)
    bounds = [size * fold // n_folds for fold in range(n_folds + 1)]
    # Rotated by its end, the order ends with the test set.
    folds: list[tuple[int, Any]] = [(size - (end - start), np.roll(indices, -end)) for start, end in pairwise(bounds)]
    return [split_dataset(dataset, n_train, rotated) for n_train, rotated in reversed(folds)]


def get_cross_validation_datasets_random(
    dataset: Dataset, n_folds: int, seed: int | None = None
) -> list[tuple[SubDataset, SubDataset]]:
    """Return `get_cross_validation_datasets` in a random order; ``seed`` as in `split_dataset_random`."""
    return get_cross_validation_datasets(dataset, n_folds, _random_order(dataset, seed))


def _random_order(dataset: Dataset, seed: int | None) -> Any:
    return epoch_order(stable_hash("split", torch.initial_seed()) if seed is None else seed, 0, size_of(dataset))
