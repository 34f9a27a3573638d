"""ConcatenatedDataset: several datasets, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chainring._random import Indices
from chainring.datasets._columns import Gather, make_gather
from chainring.datasets.base import DatasetMixin, indexes_plainly, require_datasets


class ConcatenatedDataset(DatasetMixin):
    """The examples of the first dataset, then those of the second, and so on.

    Args:
        *datasets: arrays, tensors, lists or datasets.

    Raises:
        ValueError: there is none.
        TypeError: one has no ``__len__`` or no ``__getitem__``.
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
        number = int(self._ends.searchsorted(i, "right"))
        dataset = self.datasets[number]
        return dataset[i - int(self._ends[number]) + len(dataset)]

    def column_gather(self) -> Gather | None:
        """A function from indices to columns, where all datasets hold whole arrays of the same shapes and dtypes."""
        gathers = (
            [make_gather(dataset) for dataset in self.datasets] if indexes_plainly(self, ConcatenatedDataset) else [None]
        )
        known = [gather for gather in gathers if gather is not None]
        if len(known) < len(gathers):
            return None
        forms = [_form(gather(np.empty(0, np.int64))) for gather in known]
        # Of other forms the examples are joined one by one, which promotes dtypes and names the shapes that differ.
        if forms[0] is None or any(form != forms[0] for form in forms):
            return None
        ends, starts = self._ends, np.concatenate([[0], self._ends[:-1]])

        def gather_columns(indices: Indices) -> Any:
            if not len(indices):
                return known[0](indices)
            numbers = ends.searchsorted(indices, "right")
            places = [(int(number), np.flatnonzero(numbers == number)) for number in np.unique(numbers)]
            pieces = [known[number](indices[place] - starts[number]) for number, place in places]
            return _joined(pieces, [place for _, place in places], len(indices))

        return gather_columns


def _form(columns: Any) -> Any:
    """What must be equal for columns to be joined; ``None`` where they hold something else than arrays."""
    if isinstance(columns, np.ndarray):
        return columns.dtype, columns.shape[1:]
    if isinstance(columns, torch.Tensor):
        return columns.dtype, columns.shape[1:], columns.device
    items = columns.items() if isinstance(columns, Mapping) else enumerate(columns) if type(columns) is tuple else ()
    forms = {key: _form(column) for key, column in items}
    return None if not forms or None in forms.values() else (isinstance(columns, Mapping), forms)


def _joined(pieces: Sequence[Any], places: Sequence[Indices], length: int) -> Any:
    """Columns of ``length`` rows, in which each piece has its rows at its places."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: _joined([piece[key] for piece in pieces], places, length) for key in first}
    if isinstance(first, tuple):
        return tuple([_joined([piece[part] for piece in pieces], places, length) for part in range(len(first))])
    if isinstance(first, torch.Tensor):
        column = first.new_empty((length, *first.shape[1:]))
        for piece, place in zip(pieces, places, strict=True):
            column[torch.from_numpy(place).to(column.device)] = piece
        return column
    assert isinstance(first, np.ndarray)
    rows = np.empty((length, *first.shape[1:]), first.dtype)
    for piece, place in zip(pieces, places, strict=True):
        rows[place] = piece
    return rows
