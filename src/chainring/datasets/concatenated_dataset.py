"""ConcatenatedDataset: several datasets, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from chainring._random import Indices
from chainring.datasets._columns import Gather, make_gather, select_rows
from chainring.datasets.base import Dataset, DatasetMixin, indexes_like, require_datasets, size_of


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
