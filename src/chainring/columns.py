"""Data that lies in memory as whole arrays: a batch of it is one gather a column, not a stack of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Gather = Callable[[NDArray[np.int64]], Any]


def gather_of(dataset: Any) -> Gather | None:
    """A function from indices to the columns of those examples, or ``None`` where examples must be asked one by one.

    Arrays, tensors and ``TensorDataset`` are gathered directly. A dataset offers its own way by a method ``gather()``
    that returns such a function or ``None``.
    """
    if isinstance(dataset, np.ndarray):
        if dataset.ndim == 0 or dataset.dtype.hasobject or dataset.dtype.kind in "USV":
            return None
        return lambda indices: dataset.take(indices, 0)
    if isinstance(dataset, torch.Tensor):
        return (lambda indices: dataset.index_select(0, torch.from_numpy(indices))) if dataset.ndim else None
    if type(dataset) is torch.utils.data.TensorDataset:
        return gather_all(dataset.tensors)
    make = getattr(dataset, "gather", None)
    return make() if callable(make) else None


def gather_all(datasets: Any) -> Gather | None:
    """Gathers from each dataset, as a tuple of columns; ``None`` as soon as one of them cannot."""
    parts = [gather_of(dataset) for dataset in datasets]
    if any(part is None for part in parts):
        return None
    return lambda indices: tuple([part(indices) for part in parts if part is not None])


def rows(columns: Any, index: Any) -> Any:
    """What ``index`` (a number or a slice) selects from columns: tuples and mappings are entered, arrays are indexed."""
    if isinstance(columns, tuple):
        picked = [rows(column, index) for column in columns]
        return type(columns)(*picked) if hasattr(columns, "_fields") else tuple(picked)
    if hasattr(columns, "items"):
        return {key: rows(column, index) for key, column in columns.items()}
    return columns[index]


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
