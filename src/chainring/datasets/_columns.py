"""Columns: whole arrays of a dataset, from which the rows of a batch are gathered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import call
from typing import Any

import numpy as np
import torch

from chainring._random import Indices

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
    if all(map(_is_array, datasets)):  # hot path: "arrays in memory" of benchmarks/data.py: no Python call for each array
        takes = [dataset.take for dataset in datasets]
        return lambda indices: tuple(map(call, takes, repeat(indices), repeat(0)))
    gathers = [gather for dataset in datasets if (gather := make_gather(dataset)) is not None]
    return (lambda indices: tuple([gather(indices) for gather in gathers])) if len(gathers) == len(datasets) else None


def _is_array(dataset: Any) -> bool:
    return type(dataset) in (np.ndarray, np.memmap) and dataset.ndim > 0 and dataset.dtype.kind in "biufc"
