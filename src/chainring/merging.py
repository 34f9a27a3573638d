"""Observations of the parts of one update, merged into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from chainring.blocks import is_scalar


def weighted_means(parts: Sequence[tuple[Mapping[str, Any], Any]]) -> dict[str, Any]:
    """Merges the observations of the parts of one update: numbers by weighted mean, on their device; of all else the last.

    Args:
        parts: an observation and its weight (a number or a tensor without dimensions), one for each part.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for values, _ in parts for key in values):
        held = [(values[key], weight) for values, weight in parts if key in values]
        if all(is_scalar(value) for value, _ in held):
            merged[key], _ = _merged_scalars(held)
        elif all(_is_weighted(value) for value, _ in held):
            merged[key] = _merged_scalars([value for value, _ in held])
        else:
            merged[key] = held[-1][0]
    return merged


def _is_weighted(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and is_scalar(value[0]) and is_scalar(value[1])


def _merged_scalars(held: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    total = sum(weight for _, weight in held)
    if not isinstance(total, Tensor) and total == 0:  # nothing counts: a plain mean, which weighs nothing later
        return sum(_wide(value) for value, _ in held) / len(held), total
    return sum(_wide(value) * weight for value, weight in held) / total, total


def _wide(value: Any) -> Any:
    """A tensor of few bits as float32, in which a sum of products neither overflows nor loses the value."""
    return value.float() if isinstance(value, Tensor) and value.dtype.itemsize < 4 else value
