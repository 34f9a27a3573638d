"""Batch: examples, possibly stored as columns: whole arrays that are gathered at once instead of stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import call
from typing import Any, overload

import numpy as np
import torch

from chainring._random import Indices


class Batch(Sequence[Any]):
    """A sequence of examples. They may be stored as columns, which a converter uses directly without stacking.

    Attributes:
        columns: the batch as whole arrays (an array, or a tuple or mapping of arrays whose first dimension is the
            example), or ``None`` if the examples are stored one by one.
        weight: the number of examples that count; 0 for a batch that only keeps a rank synchronized with the others.

    Example::

        batch = Batch(columns=(np.zeros((3, 2)), np.arange(3)), length=3)
        x, t = batch[2]  # the last example
    """

    __slots__ = ("_examples", "_length", "columns", "weight")

    def __init__(self, examples: Sequence[Any] | None = None, *, columns: Any = None, length: int | None = None) -> None:
        self._examples, self.columns = examples, columns
        self._length: int = len(examples) if length is None else length  # type: ignore[arg-type]
        self.weight: Any = self._length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | Indices) -> Batch: ...
    def __getitem__(self, index: int | slice | Indices) -> Any:
        if isinstance(index, (slice, np.ndarray)):
            if self._examples is not None:
                batch = Batch(self._examples[index] if isinstance(index, slice) else _rows_at(self._examples, index))
            else:
                length = len(range(self._length)[index]) if isinstance(index, slice) else len(index)
                batch = Batch(columns=select_rows(self.columns, index), length=length)
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
        return (lambda rows: dataset.index_select(0, torch.from_numpy(rows).to(dataset.device))) if dataset.ndim else None
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
    if is_single or not hasattr(columns, "__getitem__"):
        return columns
    if isinstance(index, np.ndarray):
        return _rows_at(columns, index)
    rows = columns[index]
    if not isinstance(index, slice) or index.step in (None, 1):
        return rows
    # Every n-th row of an array in memory without gaps, as the whole array had it: ``view`` works on it.
    if isinstance(rows, torch.Tensor):
        return rows if rows.is_contiguous() else rows.clone()
    return np.ascontiguousarray(rows) if type(rows) is np.ndarray and rows.ndim else rows


def _rows_at(column: Any, indices: Indices) -> Any:
    """Return some rows of a column, which is an array, or a sequence of strings, say, that then becomes a list."""
    if hasattr(column, "ndim"):
        return column[indices]
    if isinstance(column, Sequence):
        return [column[index] for index in indices.tolist()]
    raise ValueError(
        f"of a {type(column).__name__} only every n-th row can be taken; return a tuple or mapping of arrays, or a Batch of "
        "examples"
    )


def count_rows(columns: Any) -> Any:
    """Return the first dimension that all arrays in ``columns`` have; ``None`` if there is no array.

    Tuples and mappings are entered. Lists are only where no other array is, since they may hold anything of each example,
    such as its boxes. If the arrays differ, the result is `Uncounted`.
    """
    counts = dict.fromkeys(_list_rows(columns, False)) or dict.fromkeys(_list_rows(columns, True))
    return Uncounted(list(counts)) if len(counts) > 1 else next(iter(counts), None)


def _list_rows(columns: Any, enters_lists: bool) -> Iterator[int]:
    if isinstance(columns, (torch.Tensor, np.ndarray)):
        if columns.ndim:
            yield int(columns.shape[0])
    elif hasattr(columns, "items"):
        for column in dict(columns.items()).values():  # of a class with this method alone
            yield from _list_rows(column, enters_lists)
    elif isinstance(columns, tuple) or (enters_lists and isinstance(columns, list)):
        for column in columns:
            yield from _list_rows(column, enters_lists)


class Uncounted:
    """Stands for the number of examples of a batch whose arrays have different numbers of rows."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def __repr__(self) -> str:
        return f"a batch of arrays with {' and '.join(map(str, self._rows))} rows"

    def error(self) -> ValueError:
        return ValueError(
            "the examples of a batch are the rows of its arrays, its first dimension, "
            f'and this is {self!r}. Give its number: let the model return a "weight" beside "loss", or the '
            "iterator or loader a chainring.iterators.Batch(columns=..., length=...)"
        )


def count_examples(batch: Any) -> Any:
    """Return the number of examples of a batch that count: a `Batch` has it, a tuple or mapping of arrays has rows.

    A list, or any other sequence, holds examples. The result is `Uncounted` where the arrays differ.
    """
    if type(batch) is Batch:  # hot path: "in stages" of benchmarks/overhead.py
        return batch.weight
    if isinstance(batch, (tuple, Mapping)):
        rows = count_rows(batch)
        return len(batch) if rows is None else rows
    weight = getattr(batch, "weight", None)
    return len(batch) if weight is None else weight


def require_count(examples: Any) -> Any:
    """Return the number of examples that `count_examples` has found, or raise where it is not known."""
    if isinstance(examples, Uncounted):
        raise examples.error()
    return examples


class UncountedBatch(Batch):
    """A batch of columns whose number of examples is not known, and needed for a part of it only."""

    __slots__ = ()

    def __init__(self, columns: Any, examples: Uncounted) -> None:
        super().__init__(columns=columns, length=1)
        self.weight: Any = examples

    def __len__(self) -> int:
        raise self.weight.error()

    def __getitem__(self, index: Any) -> Any:
        raise self.weight.error()

    def __repr__(self) -> str:
        return repr(self.weight)


def take_examples(batch: Any, index: slice) -> Any:
    """Return a part of the examples of a batch, in the structure that the batch has."""
    return select_rows(batch, index) if isinstance(batch, (tuple, Mapping)) else batch[index]
