"""Batch: examples that may be held as columns, whole arrays that are gathered at once instead of stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import call
from typing import Any, overload

import numpy as np
import torch

from chainring._random import Indices


class Batch(Sequence[Any]):
    """Examples, as a sequence. It may hold them as columns, which a converter then takes over without stacking.

    Attributes:
        columns: the batch as whole arrays (an array, or a tuple or mapping of arrays whose first dimension is the
            example), or ``None`` if the examples are held one by one.
        weight: the number of examples that count; 0 for a batch that only keeps a rank in step with the others.

    Example::

        batch = Batch(columns=(np.zeros((3, 2)), np.arange(3)), length=3)
        x, t = batch[2]  # the last example
    """

    __slots__ = ("_examples", "_length", "columns", "weight")

    def __init__(self, examples: Sequence[Any] | None = None, *, columns: Any = None, length: int | None = None) -> None:
        self._examples, self.columns = examples, columns
        self._length: int = len(examples) if length is None else length  # type: ignore[arg-type]
        self.weight: int = self._length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            if self._examples is not None:
                batch = Batch(self._examples[index])
            else:
                batch = Batch(columns=select_rows(self.columns, index), length=len(range(*index.indices(self._length))))
            batch.weight = min(self.weight, batch.weight)  # no example of a batch of weight 0 counts
            return batch
        if not -self._length <= index < self._length:
            raise IndexError(f"a batch of {self._length} examples has no example {index}")
        return self._examples[index] if self._examples is not None else select_rows(self.columns, index)

    def __repr__(self) -> str:
        return f"Batch of {self._length} examples"


Gather = Callable[[Indices], Any]  # from the indices of examples to their columns


def make_gather(dataset: Any) -> Gather | None:
    """Return a function from indices to the columns of those examples, or ``None`` if examples are asked one by one.

    Arrays of numbers, tensors and ``TensorDataset`` are gathered directly, but not their subclasses, which may give other
    examples. A dataset offers its own gather by a method ``column_gather()`` of its class.
    """
    cls = type(dataset)
    if _is_array(dataset):
        return partial(dataset.take, axis=0)
    if cls is torch.Tensor:
        return partial(_gather_tensor, dataset) if dataset.ndim else None
    if cls is torch.utils.data.TensorDataset:
        return make_tuple_gather(dataset.tensors)
    # Looked up in the class: a wrapper that passes unknown attributes on to what it wraps must not be bypassed.
    make = getattr(cls, "column_gather", None)
    return make(dataset) if callable(make) else None


def make_tuple_gather(datasets: Iterable[Any]) -> Gather | None:
    """Return a function from indices to a tuple of the columns of each dataset; ``None`` if one of them has none."""
    datasets = list(datasets)
    if all(map(_is_array, datasets)):  # hot path: "arrays in memory" of benchmarks/data.py: no Python call for each array
        takes = [dataset.take for dataset in datasets]
        return lambda indices: tuple(map(call, takes, repeat(indices), repeat(0)))
    gathers = [gather for dataset in datasets if (gather := make_gather(dataset)) is not None]
    return (lambda indices: tuple([gather(indices) for gather in gathers])) if len(gathers) == len(datasets) else None


def _is_array(dataset: Any) -> bool:
    return type(dataset) in (np.ndarray, np.memmap) and dataset.ndim > 0 and dataset.dtype.kind in "biufc"


def _gather_tensor(tensor: torch.Tensor, indices: Indices) -> torch.Tensor:
    return tensor.index_select(0, torch.from_numpy(indices).to(tensor.device))


def select_rows(columns: Any, index: int | slice | Indices) -> Any:
    """Return the rows that ``index`` selects: containers of arrays are entered, arrays are indexed.

    A list without arrays is a column itself (of strings, say). A value without rows, such as a number that a whole batch
    shares, comes with every selection.
    """
    if isinstance(columns, tuple):
        selected = [select_rows(column, index) for column in columns]
        return type(columns)(*selected) if hasattr(columns, "_fields") else tuple(selected)
    if isinstance(columns, list) and count_rows(columns) is not None:
        return [select_rows(column, index) for column in columns]
    if hasattr(columns, "items"):
        return {key: select_rows(column, index) for key, column in columns.items()}
    is_single = getattr(columns, "ndim", 1) == 0 or isinstance(columns, (str, bytes))
    return columns if is_single or not hasattr(columns, "__getitem__") else columns[index]


def count_rows(columns: Any) -> int | None:
    """Return the first dimension of the first array in ``columns``, depth first, or ``None`` if there is no array."""
    if isinstance(columns, (torch.Tensor, np.ndarray)):
        return int(columns.shape[0]) if columns.ndim else None
    if hasattr(columns, "items"):
        columns = [column for _, column in columns.items()]
    if isinstance(columns, (tuple, list)):
        return next((count for column in columns if (count := count_rows(column)) is not None), None)
    return None
