"""ConcatenatedDataset: several datasets, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chainring._random import Indices
from chainring.datasets._columns import Gather, make_gather
from chainring.datasets.base import DatasetMixin, indexes_like, require_datasets


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

    def __init__(self, *datasets: Any) -> None:
        if not datasets:
            raise ValueError("a ConcatenatedDataset needs at least one dataset, got none")
        require_datasets("a ConcatenatedDataset", *datasets)
        self.datasets = datasets
        self._ends: Indices = np.cumsum([len(dataset) for dataset in datasets], dtype=np.int64)

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
        structures = [_structure(gather(np.empty(0, np.int64))) for gather in gathers]
        # Other examples are collated one by one, which promotes dtypes and names the shapes that differ.
        if len(gathers) < len(self.datasets) or any(item is None or item != structures[0] for item in structures):
            return None
        ends, starts = self._ends, np.concatenate([[0], self._ends[:-1]])

        def gather_columns(indices: Indices) -> Any:
            owners = ends.searchsorted(indices, "right")
            positions = {int(k): np.flatnonzero(owners == k) for k in np.unique(owners)}
            if len(positions) <= 1:
                k = next(iter(positions), 0)
                return gathers[k](indices - starts[k])
            chunks = [gathers[k](indices[where] - starts[k]) for k, where in positions.items()]
            return _scatter_rows(chunks, list(positions.values()), len(indices))

        return gather_columns


def _structure(columns: Any) -> Any:
    """Return what must be equal for columns to be joined; ``None`` if they hold anything but arrays."""
    if isinstance(columns, np.ndarray):
        return columns.dtype, columns.shape[1:]
    if isinstance(columns, torch.Tensor):
        return columns.dtype, columns.shape[1:], columns.device
    items = columns.items() if isinstance(columns, Mapping) else enumerate(columns) if type(columns) is tuple else ()
    structures = {key: _structure(column) for key, column in items}
    return None if not structures or None in structures.values() else (isinstance(columns, Mapping), structures)


def _scatter_rows(chunks: Sequence[Any], positions: Sequence[Indices], length: int) -> Any:
    """Return columns of ``length`` rows, in which each chunk has its rows at its positions."""
    first = chunks[0]
    if isinstance(first, Mapping):
        return {key: _scatter_rows([chunk[key] for chunk in chunks], positions, length) for key in first}
    if isinstance(first, tuple):
        return tuple([_scatter_rows(columns, positions, length) for columns in zip(*chunks, strict=True)])
    shape = (length, *first.shape[1:])
    column: Any = np.empty(shape, first.dtype) if isinstance(first, np.ndarray) else first.new_empty(shape)
    for chunk, where in zip(chunks, positions, strict=True):
        column[where if isinstance(first, np.ndarray) else torch.from_numpy(where).to(first.device)] = chunk
    return column
