"""Columns: whole arrays of a dataset, from which the rows of a batch are gathered at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import call, getitem
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten, tree_map

from chainring._random import Indices

Gather = Callable[[Any], Any]  # from the indices of examples, or the places of a `JointGather`, to columns


def make_gather(dataset: Any) -> Gather | None:
    """Return a function from indices to the columns of those examples, or ``None`` if examples are asked one by one.

    Arrays of numbers, tensors and ``TensorDataset`` are gathered directly, but not their subclasses, which may give other
    examples. A dataset offers its own gather by a method ``column_gather()`` of its class.
    """
    cls = type(dataset)
    if is_array(dataset):
        return partial(dataset.take, axis=0)
    if cls is torch.Tensor:
        where: Any = {"device": dataset.device, "non_blocking": dataset.is_cuda}  # whose driver has the bytes at once
        return (lambda rows: dataset.index_select(0, torch.from_numpy(rows).to(**where))) if dataset.ndim else None
    if cls is torch.utils.data.TensorDataset:
        return make_tuple_gather(dataset.tensors)
    # Looked up in the class: a wrapper that passes unknown attributes on to what it wraps must not be bypassed.
    make = getattr(cls, "column_gather", None)
    return make(dataset) if callable(make) else None


def make_tuple_gather(datasets: Iterable[Any]) -> Gather | None:
    """Return a function from indices to a tuple of the columns of each dataset; ``None`` if one of them has none."""
    datasets = list(datasets)
    if all(map(is_array, datasets)):  # hot path: "arrays in memory" of benchmarks/data.py: no Python call for each array
        takes = [dataset.take for dataset in datasets]
        return lambda indices: tuple(map(call, takes, repeat(indices), repeat(0)))
    gathers = [gather for dataset in datasets if (gather := make_gather(dataset)) is not None]
    return (lambda indices: tuple([gather(indices) for gather in gathers])) if len(gathers) == len(datasets) else None


class JointGather:
    """Gathers rows of several datasets together. Their places are found first, for many batches at once."""

    def __init__(self, gathers: Sequence[Gather]) -> None:
        self._gathers = gathers

    def find(self, owners: Indices, indices: Indices) -> list[Indices]:
        """Return the places of examples in some arrays, given which dataset each is in, and its index there."""
        return [owners, indices]

    def __call__(self, places: Sequence[Indices]) -> Any:
        """Return the columns of the examples at these places."""
        owners, indices = places
        order = np.argsort(owners, kind="stable")
        parts = [self._gathers[owner](indices[owners == owner]) for owner in np.unique(owners).tolist() or [0]]
        return _join(parts, np.argsort(order))


class _ArrayGather(JointGather):
    """Gathers from several arrays as from one, which has a row at each address where a row of theirs may begin.

    It begins with the first of them in memory and ends with the last; what is between them is never read.
    """

    def __init__(self, columns: Sequence[Sequence[NDArray[Any]]], is_tuple: bool) -> None:
        self._columns, self._is_tuple = columns, is_tuple  # which are kept, as long as there are views of them
        self._views: list[NDArray[np.void]] = []
        self._kinds: list[np.dtype[Any]] = []
        self._steps: list[tuple[Indices, int]] = []
        for arrays in columns:
            # A row is one element, which is copied at once, and read as what it is when it has been.
            kind = np.dtype((arrays[0].dtype, arrays[0].shape[1:]))
            rows = [array.reshape(-1).view(f"V{kind.itemsize}") for array in arrays]
            addresses = [row.__array_interface__["data"][0] for row in rows]
            starts = np.array(addresses) - min(addresses)
            unit = math.gcd(kind.itemsize, *starts.tolist())
            steps = starts // unit, kind.itemsize // unit
            end = max(start + len(row) * steps[1] - steps[1] + 1 for start, row in zip(steps[0].tolist(), rows, strict=True))
            first = rows[addresses.index(min(addresses))]
            self._views.append(as_strided(first, (end,), (unit,), writeable=False))
            self._kinds.append(kind)
            self._steps.append(steps)

    def find(self, owners: Indices, indices: Indices) -> list[Indices]:
        return [starts[owners] + indices * step for starts, step in self._steps]

    def __call__(self, places: Sequence[Indices]) -> Any:
        # hot path: "the same, beside one array" of benchmarks/data.py
        columns = tuple(map(np.ndarray.view, map(getitem, self._views, places), self._kinds))
        return columns if self._is_tuple else columns[0]


def make_joint_gather(datasets: Sequence[Any], arrays: Sequence[Sequence[NDArray[Any]]]) -> JointGather | None:
    """Return the gather of datasets whose columns can be joined, which are arrays of the same shapes and dtypes.

    Other examples are collated one by one, which promotes dtypes and names the shapes that differ. ``arrays`` are those
    of which each dataset consists, if it consists of nothing else.
    """
    gathers = list(map(make_gather, datasets))
    kinds = [None if gather is None else _kind_of(gather(np.empty(0, np.int64))) for gather in gathers]
    if None in kinds or any(kind != kinds[0] for kind in kinds):
        return None
    if all(of_dataset and all(array.size and array.flags.c_contiguous for array in of_dataset) for of_dataset in arrays):
        with suppress(ValueError):  # where rows are large and arrays far apart, the view is larger than NumPy allows
            return _ArrayGather([*zip(*arrays, strict=True)], not is_array(datasets[0]))
    return JointGather(gathers)  # type: ignore[arg-type]


def _kind_of(columns: Any) -> Any:
    leaves, structure = tree_flatten(columns)
    if not leaves or not all(isinstance(leaf, (np.ndarray, torch.Tensor)) for leaf in leaves):
        return None
    return structure, [(type(leaf), leaf.dtype, leaf.shape[1:], getattr(leaf, "device", None)) for leaf in leaves]


def _join(parts: Sequence[Any], order: Indices) -> Any:
    """Return the rows of the columns of equal gathers, counted from the first of the first part, in an order."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts).take(order, axis=0)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)).index_select(0, torch.from_numpy(order).to(first.device))
    if type(first) is tuple:
        return tuple([_join(columns, order) for columns in zip(*parts, strict=True)])
    return tree_map(lambda *columns: _join(columns, order), *parts)


def is_array(dataset: Any) -> bool:
    """Return whether it is an array of numbers, of which rows are taken."""
    return type(dataset) in (np.ndarray, np.memmap) and dataset.ndim > 0 and dataset.dtype.kind in "biufc"
