"""Datasets made of others: side by side, one after the other, or with a function over their examples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from chainring._random import Indices
from chainring.datasets._columns import Gather, make_gather, make_tuple_gather, select_rows
from chainring.datasets.base import Dataset, DatasetMixin, indexes_like, require_datasets, size_of


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
        require_datasets("a TupleDataset", *datasets)
        _require_same_length("a TupleDataset", [size_of(dataset) for dataset in datasets])
        self.datasets: tuple[Any, ...] = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def get_example(self, i: int) -> Any:
        return tuple([dataset[i] for dataset in self.datasets])

    def column_gather(self) -> Gather | None:
        """Return a function from indices to a tuple of columns, if every dataset holds whole arrays."""
        return make_tuple_gather(self.datasets) if indexes_like(self, TupleDataset) else None


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
        require_datasets("a DictDataset", *datasets.values())
        _require_same_length("a DictDataset", {key: size_of(dataset) for key, dataset in datasets.items()})
        self.datasets: dict[str, Any] = datasets

    def __len__(self) -> int:
        return len(next(iter(self.datasets.values())))

    def get_example(self, i: int) -> Any:
        return {key: dataset[i] for key, dataset in self.datasets.items()}

    def column_gather(self) -> Gather | None:
        """Return a function from indices to a dict of columns, if every dataset holds whole arrays."""
        gather = make_tuple_gather(self.datasets.values()) if indexes_like(self, DictDataset) else None
        return None if gather is None else lambda indices: dict(zip(self.datasets, gather(indices), strict=True))


def _require_same_length(name: str, lengths: Collection[int] | Mapping[str, int]) -> None:
    if not lengths:
        raise ValueError(f"{name} needs at least one dataset, got none")
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
        if not datasets:
            raise ValueError("a ConcatenatedDataset needs at least one dataset, got none")
        require_datasets("a ConcatenatedDataset", *datasets)
        self.datasets: tuple[Any, ...] = datasets
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
        gathers = [gather for dataset in self.datasets if (gather := make_gather(dataset)) is not None]
        signatures = [_signature(gather(np.empty(0, np.int64))) for gather in gathers]
        # Other examples are collated one by one, which promotes dtypes and names the shapes that differ.
        if len(gathers) < len(self.datasets) or any(item is None or item != signatures[0] for item in signatures):
            return None
        ends, starts = self._ends, np.concatenate([[0], self._ends[:-1]])

        def gather_columns(indices: Indices) -> Any:
            owners = ends.searchsorted(indices, "right")
            order = np.argsort(owners, kind="stable")
            chunks = [gathers[k](indices[owners == k] - starts[k]) for k in np.unique(owners).tolist() or [0]]
            return select_rows(tree_map(_concatenate, *chunks), np.argsort(order))

        return gather_columns


def _signature(columns: Any) -> Any:
    """Return what must be equal for columns to be joined; ``None`` if they hold anything but arrays."""
    leaves, structure = tree_flatten(columns)
    if not leaves or not all(isinstance(leaf, (np.ndarray, torch.Tensor)) for leaf in leaves):
        return None
    return structure, [(type(leaf), leaf.dtype, leaf.shape[1:], getattr(leaf, "device", None)) for leaf in leaves]


def _concatenate(*arrays: Any) -> Any:
    return torch.cat(arrays) if isinstance(arrays[0], torch.Tensor) else np.concatenate(arrays)


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
        require_datasets("a TransformDataset", dataset)
        self.dataset: Any = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def get_example(self, i: int) -> Any:
        return self.transform(self.dataset[i])
