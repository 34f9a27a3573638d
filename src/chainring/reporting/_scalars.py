"""Scalars kept where they lie, many in one tensor, and what a mean is made of.

A thousand live scalars slow every iteration, and reading one waits for its device. So they are stacked there in blocks,
and read when a mean is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALARS = 256
"""So many are stacked at once: what stacking costs beside its values is then little, and few objects are alive."""
_BLOCKS = 64
"""So many blocks are made one."""
Block = tuple[Tensor, Tensor]
"""Values (numbers,) or (numbers, keys), and their weights (numbers,)."""
NONE = torch.empty(0, dtype=torch.float64)
"""No values, or no weights."""


def is_scalar(value: Any) -> bool:
    """Whether a value can be averaged: a real number, or an array or tensor without dimensions."""
    ndim = getattr(value, "ndim", None)
    if ndim is not None:
        if isinstance(value, Tensor):
            return ndim == 0 and not value.is_complex()
        return bool(ndim == 0) and np.asarray(value).dtype.kind in "biuf"
    return isinstance(value, Real)


def stacked(scalars: list[Any]) -> Tensor | None:
    """One dimension of like scalars: on their device where they are tensors, float64 on the host where they are numbers.

    ``None`` where they are of several kinds, or no scalars, or none.
    """
    if not scalars:
        return None
    kinds, first = set(map(type, scalars)), scalars[0]
    if kinds <= {float, int}:
        if scalars.count(first) == len(scalars):  # weights, nearly always
            return torch.full((len(scalars),), float(first), dtype=torch.float64)
        return torch.from_numpy(np.array(scalars, np.float64))
    if kinds != {Tensor} or not is_scalar(first) or len({value.dtype for value in scalars}) > 1:
        return None
    try:
        return torch.stack(scalars)
    except RuntimeError:  # some have dimensions, or lie on another device
        return None


def append(blocks: list[Block], block: Block) -> None:
    """Adds a block, and makes one of many, so that an interval of any length stays few objects."""
    blocks.append(block)
    if len(blocks) >= _BLOCKS:
        blocks[:] = _merged(blocks)


def _merged(blocks: list[Block]) -> list[Block]:
    """Neighbours of the same dtype and device as one block."""
    groups: list[list[Block]] = []
    for block in blocks:
        if groups and _kinds(groups[-1][0]) == _kinds(block):
            groups[-1].append(block)
        else:
            groups.append([block])
    return [_joined(group) for group in groups]


def _joined(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    values, weights = zip(*blocks, strict=True)
    return torch.cat(values), torch.cat(weights)


def _kinds(block: Block) -> list[Any]:
    return [(part.dtype, part.device) for part in block]


def on_host(blocks: list[Block]) -> Block:
    """All of them in one block of float64: the one place where a device is waited for."""
    return _joined([(_float64(values), _float64(weights)) for values, weights in _merged(blocks)])


def _float64(numbers: Tensor) -> Tensor:
    return numbers.cpu().to(torch.float64)


def in_order(values: Tensor, weights: Tensor) -> Block:
    """Numbers on the host by their bits, so that what is saved does not depend on which were stacked together."""
    order = torch.from_numpy(np.lexsort([part.numpy().view(np.int64) for part in (weights, values)]))
    return values[order], weights[order]


def mean_of(values: Tensor, weights: Tensor) -> float:
    """The weighted mean of numbers on the host, in float64; NaN where there are none."""
    total = sum_of(weights.tolist())
    if not total:
        return math.nan
    mean = sum_of((values * weights).tolist()) / total
    # 0.1 * 3 / 3 is not 0.1: equal values under other weights would otherwise have other means.
    return min(max(mean, values.min().item()), values.max().item()) if math.isfinite(mean) else mean


def sum_of(numbers: list[float]) -> float:
    """The sum, correctly rounded, so that it does not depend on the order."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # past the largest float on the way, in this order, or infinities of both signs
        special = [number for number in numbers if not math.isfinite(number)]
        return sum(special) if special else _exactly(numbers)


def _exactly(numbers: list[float]) -> float:
    from fractions import Fraction  # rarely needed, and an import of chainring shall be cheap

    total = sum(map(Fraction, numbers))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


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
