"""What samplers are told: whole numbers, and one number for each example."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def as_count(what: str, value: Any) -> int:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{what} is an integer of at least 1, got {value!r}")
    return int(value)


def as_column(what: str, values: Any) -> npt.NDArray[Any]:
    """One finite number of at least 0 for each example, as an array of the sampler's own."""
    column = np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
    if column.ndim != 1 or (len(column) and column.dtype.kind not in "biuf"):
        raise ValueError(f"{what} are one number for each example, got an array of {column.dtype} and shape {column.shape}")
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0))) if len(column) else column
    if len(wrong):
        raise ValueError(f"{what} are finite and at least 0, got {column[wrong[0]]} for example {wrong[0]}")
    return column


def require_size(what: str, values: npt.NDArray[Any], size: int) -> None:
    """Refuses a dataset of another size than the sampler was made for."""
    if len(values) != size:
        raise ValueError(f"{what} are one number for each of the {size} examples of the dataset, got {len(values)}")
