"""Weighted statistics of reported values, which are read from their device only when they are asked for.

The values themselves are kept, not running sums: a mean is the correctly rounded sum (`math.fsum`) of the products
value x weight in float64 over the summed weight. So it does not depend on where a snapshot fell or on how values were
grouped. Values that live on a device are stacked there in blocks, because a thousand live scalars slow every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring.serializers.base import AbstractSerializer, Serializer, Stateful

_BLOCK = 32


def is_scalar(value: Any) -> bool:
    """Whether a value can be averaged: a real number, or an array or tensor without dimensions."""
    ndim = getattr(value, "ndim", None)
    if ndim is not None:
        return bool(ndim == 0) and (isinstance(value, Tensor) or np.asarray(value).dtype.kind in "biuf")
    return isinstance(value, Real)


class _Series:
    """Numbers in the order in which they came: a list of what is new, folded into blocks where it lies."""

    def __init__(self) -> None:
        self._new: list[Any] = []
        self._blocks: list[Tensor] = []

    def add(self, value: Any) -> None:
        self._new.append(value)
        if len(self._new) == _BLOCK:
            self._fold()

    def _fold(self) -> None:
        """Stacks runs of like tensors on their device; plain numbers become a float64 block on the host."""
        run: list[Any] = []
        for value in self._new:
            if run and _kind(run[0]) != _kind(value):
                self._blocks.append(_block(run))
                run = []
            run.append(value)
        if run:
            self._blocks.append(_block(run))
        self._new = []
        if len(self._blocks) >= 2 * _BLOCK:  # blocks of blocks, so that an interval of any length stays few objects
            self._blocks = [_joined(part) for part in _alike(self._blocks)]

    def numbers(self) -> list[float]:
        """All of them, on the host: the one place where a device is waited for."""
        self._fold()
        return [number for block in self._blocks for number in block.to("cpu", torch.float64).tolist()]

    def replace(self, numbers: Tensor) -> None:
        self._new, self._blocks = [], [numbers] if len(numbers) else []


def _kind(value: Any) -> tuple[Any, Any]:
    return (value.dtype, value.device) if isinstance(value, Tensor) else (None, None)


def _block(values: list[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _alike(blocks: list[Tensor]) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    for block in blocks:
        if groups and _kind(groups[-1][0]) == _kind(block):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


class Summary(Stateful):
    """The weighted mean and deviation of one series of numbers."""

    def __init__(self) -> None:
        self._values = _Series()
        self._weights = _Series()

    def add(self, value: Any, weight: float = 1) -> None:
        """Takes one number into account ``weight`` times. Both may be tensors without dimensions, which stay where they are.

        Raises:
            TypeError: ``value`` is not a single number.
            ValueError: ``weight`` is not.
        """
        if not is_scalar(value):
            raise TypeError(f"a summary takes single numbers, got {_shown(value)}; reduce it first, for example .mean()")
        _check_weight(weight)
        self._values.add(_kept(value))
        self._weights.add(_kept(weight))

    def compute_mean(self) -> float:
        """The weighted mean; NaN when nothing has been added."""
        return _mean(self._values.numbers(), self._weights.numbers())

    def make_statistics(self) -> tuple[float, float]:
        """The weighted mean and the weighted population standard deviation, by two passes over the values."""
        values, weights = self._values.numbers(), self._weights.numbers()
        mean = _mean(values, weights)
        variance = _mean([(value - mean) ** 2 for value in values], weights)
        return mean, math.sqrt(variance) if variance == variance else variance

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        for key, series in (("values", self._values), ("weights", self._weights)):
            numbers = torch.tensor(series.numbers() if saving else [], dtype=torch.float64)
            loaded = serializer(key, numbers)
            if not saving:
                series.replace(loaded)


def _kept(value: Any) -> Any:
    """A tensor as it was now: out of its graph, and safe from a later change in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _check_weight(weight: Any) -> None:
    if not is_scalar(weight):
        raise ValueError(f"a weight is a single number, got {_shown(weight)}")


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def _mean(values: list[float], weights: list[float]) -> float:
    total = _sum(weights)
    return _sum([value * weight for value, weight in zip(values, weights, strict=True)]) / total if total else math.nan


def _sum(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or past the largest float: as IEEE addition has it
        return sum(numbers)


class DictSummary(Stateful):
    """The statistics of every key of a sequence of observations; a key that an observation lacks does not count as zero."""

    def __init__(self) -> None:
        self._rows: list[tuple[Mapping[str, Any], Any]] = []
        self._summaries: dict[str, Summary] = {}

    def add(self, values: Mapping[str, Any], weight: float = 1) -> None:
        """Takes an observation into account with ``weight``; a value given as ``(value, weight)`` brings its own.

        Values that are no single numbers, such as strings and arrays, are passed over. Tensors must not change
        afterwards in place, which holds for what was reported.

        Raises:
            ValueError: a weight is not a single number.
        """
        _check_weight(weight)
        self._rows.append((dict(values), weight))
        if len(self._rows) == _BLOCK:
            self._fold()

    def _fold(self) -> None:
        rows, self._rows = self._rows, []
        for values, row_weight in rows:
            for key, value in values.items():
                weight = row_weight
                if type(value) is tuple and len(value) == 2 and is_scalar(value[0]):
                    value, weight = value
                    _check_weight(weight)
                if is_scalar(value):
                    if key not in self._summaries:
                        self._summaries[key] = Summary()
                    summary = self._summaries[key]
                    summary._values.add(value)
                    summary._weights.add(weight)

    def compute_mean(self) -> dict[str, float]:
        """The weighted mean of each key, in the order in which the keys were first seen."""
        self._fold()
        return {key: summary.compute_mean() for key, summary in self._summaries.items()}

    def make_statistics(self) -> dict[str, float]:
        """The mean of each key as ``key`` and its standard deviation as ``key.std``."""
        self._fold()
        statistics: dict[str, float] = {}
        for key, summary in self._summaries.items():
            statistics[key], statistics[f"{key}.std"] = summary.make_statistics()
        return statistics

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._fold()
        names: list[str] = serializer("names", list(self._summaries))
        if not isinstance(serializer, Serializer):
            self._summaries = {name: Summary() for name in names}
        for number, name in enumerate(names):  # by number: a name may hold slashes
            self._summaries[name].serialize(serializer[str(number)])


def weighted_means(parts: Sequence[tuple[Mapping[str, Any], Any]]) -> dict[str, Any]:
    """Merges the observations of the parts of one update: numbers by weighted mean, on their device; of all else the last.

    Args:
        parts: an observation and its weight (a number or a tensor without dimensions), one for each part.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for values, _ in parts for key in values):
        held = [(values[key], weight) for values, weight in parts if key in values]
        if all(is_scalar(value) for value, _ in held):
            merged[key] = sum(value * weight for value, weight in held) / sum(weight for _, weight in held)
        else:
            merged[key] = held[-1][0]
    return merged
