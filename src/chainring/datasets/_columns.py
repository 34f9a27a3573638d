"""Columns: whole arrays of a dataset, from which the rows of a batch are gathered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import call
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from chainring._random import Indices

Gather = Callable[[Any], Any]  # from the indices of examples, or the parts of a mixture, to columns


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


def make_equal_gathers(datasets: Iterable[Any]) -> list[Gather] | None:
    """Return the gathers of datasets whose columns can be joined, which are arrays of the same shapes and dtypes.

    Other examples are collated one by one, which promotes dtypes and names the shapes that differ.
    """
    gathers = list(map(make_gather, datasets))
    kinds = [None if gather is None else _kind_of(gather(np.empty(0, np.int64))) for gather in gathers]
    return None if None in kinds or any(kind != kinds[0] for kind in kinds) else gathers  # type: ignore[return-value]


def _kind_of(columns: Any) -> Any:
    leaves, structure = tree_flatten(columns)
    if not leaves or not all(isinstance(leaf, (np.ndarray, torch.Tensor)) for leaf in leaves):
        return None
    return structure, [(type(leaf), leaf.dtype, leaf.shape[1:], getattr(leaf, "device", None)) for leaf in leaves]


def join_columns(parts: Sequence[Any], order: Indices) -> Any:
    """Return the rows of the columns of equal gathers, counted from the first of the first part, in an order."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts).take(order, axis=0)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)).index_select(0, torch.from_numpy(order).to(first.device))
    if type(first) is tuple:
        return tuple([join_columns(columns, order) for columns in zip(*parts, strict=True)])
    return tree_map(lambda *columns: join_columns(columns, order), *parts)


def is_array(dataset: Any) -> bool:
    """Return whether it is an array of numbers, of which rows are taken."""
    return type(dataset) in (np.ndarray, np.memmap) and dataset.ndim > 0 and dataset.dtype.kind in "biufc"
