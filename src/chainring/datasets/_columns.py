"""Data that lies in memory as whole arrays: a batch of it is one gather a column, not a stack of examples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import call
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Gather = Callable[[NDArray[np.int64]], Any]


def make_gather(dataset: Any) -> Gather | None:
    """A function from indices to the columns of those examples, or ``None`` where examples must be asked one by one.

    Arrays of numbers, tensors and ``TensorDataset`` are gathered directly; subclasses of theirs are asked one by one,
    since they may give other examples. A dataset offers its own way by a method ``column_gather()`` of its class, which
    returns such a function or ``None``.
    """
    kind = type(dataset)
    if _is_array(dataset):
        return partial(dataset.take, axis=0)
    if kind is torch.Tensor:
        return _gather_tensor(dataset) if dataset.ndim else None
    if kind is torch.utils.data.TensorDataset:
        return make_tuple_gather(dataset.tensors)
    # Looked up in the class: a wrapper that passes unknown attributes on to what it wraps must not be passed by.
    make = getattr(kind, "column_gather", None)
    return make(dataset) if callable(make) else None


def _is_array(dataset: Any) -> bool:
    return type(dataset) in (np.ndarray, np.memmap) and dataset.ndim > 0 and dataset.dtype.kind in "biufc"


def _gather_tensor(tensor: torch.Tensor) -> Gather:
    if tensor.device.type == "cpu":
        return lambda indices: tensor.index_select(0, torch.from_numpy(indices))
    return lambda indices: tensor.index_select(0, torch.from_numpy(indices).to(tensor.device))


def make_tuple_gather(datasets: Any) -> Gather | None:
    """Gathers from each dataset, as a tuple of columns; ``None`` as soon as one of them cannot."""
    if all(map(_is_array, datasets)):  # nearly always, and so without a Python call for each
        takes = [dataset.take for dataset in datasets]
        return lambda indices: tuple(map(call, takes, repeat(indices), repeat(0)))
    parts = [make_gather(dataset) for dataset in datasets]
    if any(part is None for part in parts):
        return None
    return lambda indices: tuple([part(indices) for part in parts if part is not None])


def select_rows(columns: Any, index: Any) -> Any:
    """What ``index`` (a number or a slice) selects from columns: containers of arrays are entered, arrays are indexed.

    A list without arrays is a column itself (of strings, say). What has no rows, such as a number that a whole batch
    shares, comes with every selection.
    """
    if isinstance(columns, tuple):
        picked = [select_rows(column, index) for column in columns]
        return type(columns)(*picked) if hasattr(columns, "_fields") else tuple(picked)
    if isinstance(columns, list) and count_rows(columns) is not None:
        return [select_rows(column, index) for column in columns]
    if hasattr(columns, "items"):
        return {key: select_rows(column, index) for key, column in columns.items()}
    is_single = getattr(columns, "ndim", 1) == 0 or isinstance(columns, (str, bytes))
    return columns if is_single or not hasattr(columns, "__getitem__") else columns[index]


def count_rows(columns: Any) -> int | None:
    """The first dimension of the first array in ``columns``, depth first; ``None`` where there is no array."""
    if isinstance(columns, (torch.Tensor, np.ndarray)):
        return int(columns.shape[0]) if columns.ndim else None
    if hasattr(columns, "items"):
        columns = [column for _, column in columns.items()]
    if isinstance(columns, (tuple, list)):
        for column in columns:
            number = count_rows(column)
            if number is not None:
                return number
    return None
