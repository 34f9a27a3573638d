"""Columns: whole arrays of a dataset, from which the rows of a batch are gathered at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import call
from typing import Any, NamedTuple

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


class JointGather(NamedTuple):
    """Gathers rows of several datasets together. Their places are found first, for many batches at once."""

    find: Callable[[Indices, Indices], list[Indices]]
    """From which dataset each example is in, and its index there, to its places in some arrays."""
    take: Callable[[Sequence[Indices]], Any]
    """From the places of examples to their columns."""
    arrays: Any = None  # which are kept, as long as there are views of their memory


def _gather_in_turn(gathers: Sequence[Gather]) -> JointGather:
    """Return what gathers from one dataset after the other."""

    def take(places: Sequence[Indices]) -> Any:
        owners, indices = places
        order = np.argsort(owners, kind="stable")
        parts = [gathers[owner](indices[owners == owner]) for owner in np.unique(owners).tolist() or [0]]
        return _join(parts, np.argsort(order))

    return JointGather(lambda owners, indices: [owners, indices], take)


def _gather_at_once(columns: Sequence[Sequence[NDArray[Any]]], is_tuple: bool) -> JointGather:
    """Return what gathers from several arrays as from one, of a row at each address where a row of theirs may begin.

    It begins with the first of them in memory and ends with the last; what is between them is never read.
    """
    takes, steps = [], []
    for arrays in columns:
        kind = np.dtype((arrays[0].dtype, arrays[0].shape[1:]))
        addresses = np.array([array.__array_interface__["data"][0] for array in arrays])
        starts = addresses - addresses.min()
        unit = math.gcd(kind.itemsize, *starts.tolist())
        starts, step = starts // unit, kind.itemsize // unit
        length = int(max(starts + (np.array(list(map(len, arrays))) - 1) * step)) + 1
        takes.append(_make_take(arrays[int(starts.argmin())], length, unit, kind))
        steps.append((starts, step))

    def take(places: Sequence[Indices]) -> Any:
        # hot path: "the same, beside one array" of benchmarks/data.py
        return tuple(map(call, takes, places))

    def find(owners: Indices, indices: Indices) -> list[Indices]:
        return [starts[owners] + indices * step for starts, step in steps]

    return JointGather(find, take if is_tuple else lambda places: takes[0](places[0]), columns)


def _make_take(first: NDArray[Any], length: int, unit: int, kind: np.dtype[Any]) -> Callable[[Indices], NDArray[Any]]:
    """Return what takes rows of a kind, of which one may begin at each multiple of a number of bytes after an array."""
    if unit == kind.itemsize and first.flags.aligned:  # otherwise NumPy would copy all that is between them
        view = as_strided(first, (length, *first.shape[1:]), (unit, *first.strides[1:]), writeable=False)
        return view.__getitem__ if first.ndim == 1 else lambda places: view.take(places, 0)
    # They overlap, and NumPy copies a row at once only where it is one element, which is read as what it is afterwards.
    rows = as_strided(first.reshape(-1).view(f"V{kind.itemsize}"), (length,), (unit,), writeable=False)
    return lambda places: rows[places].view(kind)


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
            return _gather_at_once([*zip(*arrays, strict=True)], not is_array(datasets[0]))
    return _gather_in_turn(gathers)  # type: ignore[arg-type]


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
