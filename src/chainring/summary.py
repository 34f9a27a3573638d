"""Weighted statistics of reported values, which are read from their device only when they are asked for.

The values themselves are kept, not running sums: a mean is the correctly rounded sum (`math.fsum`) of the products
value x weight in float64 over the summed weight. So it does not depend on where a snapshot fell or on how values were
grouped. Values that live on a device are stacked there in blocks, because a thousand live scalars slow every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring.communicator import Communicator
from chainring.metrics import is_metric, take, warn_of_unsaved
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.serializers.stateful import Stateful

_BLOCK = 32

Block = tuple[Tensor, Tensor]
"""Values and their weights, one dimension each."""


def is_scalar(value: Any) -> bool:
    """Whether a value can be averaged: a real number, or an array or tensor without dimensions."""
    ndim = getattr(value, "ndim", None)
    if ndim is not None:
        if isinstance(value, Tensor):
            return ndim == 0 and not value.is_complex()
        return bool(ndim == 0) and np.asarray(value).dtype.kind in "biuf"
    return isinstance(value, Real)


class Summary(Stateful):
    """The weighted mean and deviation of one series of numbers."""

    def __init__(self) -> None:
        self._new: list[tuple[Any, Any]] = []
        self._blocks: list[Block] = []

    def add(self, value: Any, weight: float = 1) -> None:
        """Takes one number into account ``weight`` times. Tensors without dimensions will do for both, and are not read.

        Raises:
            TypeError: ``value`` is not a single number.
            ValueError: ``weight`` is not.
        """
        if not is_scalar(value):
            raise TypeError(f"a summary takes single numbers, got {_shown(value)}; reduce it first, for example .mean()")
        _check_weight(weight)
        self._new.append((_kept(value), _kept(weight)))
        if len(self._new) == _BLOCK:
            self._fold()

    def add_block(self, values: Tensor, weights: Tensor) -> None:
        """Takes many numbers into account, one dimension of values and of their weights, where they lie."""
        self._blocks.append((values, weights))
        if len(self._blocks) >= 2 * _BLOCK:  # blocks of blocks, so that an interval of any length stays few objects
            self._blocks = _merged(self._blocks)

    def _fold(self) -> None:
        new, self._new = self._new, []
        for value, weight in new:
            self.add_block(_stacked([value]), _stacked([weight]))

    def _numbers(self) -> tuple[list[float], list[float]]:
        """Values and weights on the host: the one place where a device is waited for."""
        self._fold()
        self._blocks = _merged(self._blocks)
        values = [number for block, _ in self._blocks for number in block.cpu().to(torch.float64).tolist()]
        weights = [number for _, block in self._blocks for number in block.cpu().to(torch.float64).tolist()]
        return values, weights

    def compute_mean(self) -> float:
        """The weighted mean; NaN when nothing has been added."""
        return _mean(*self._numbers())

    def make_statistics(self) -> tuple[float, float]:
        """The weighted mean and the weighted population standard deviation, by two passes over the values."""
        values, weights = self._numbers()
        mean = _mean(values, weights)
        variance = _mean([(value - mean) * (value - mean) for value in values], weights)
        return mean, math.sqrt(variance) if variance == variance else variance

    def over(self, comm: Communicator) -> Summary:
        """The summary of what has been added on all ranks."""
        merged = Summary()
        for values, weights in comm.gather_object(self._numbers()):
            merged._extend(values, weights)
        return merged

    def _extend(self, values: list[float], weights: list[float]) -> None:
        if values:
            self.add_block(torch.tensor(values, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64))

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved = self.over(serializer.comm) if isinstance(serializer, Serializer) and serializer.comm.size > 1 else self
        saved.visit(serializer)

    def visit(self, serializer: AbstractSerializer) -> None:
        """Saves what this rank has, or loads what all had on rank 0: a mean does not depend on who holds the values."""
        saving = isinstance(serializer, Serializer)
        values, weights = self._numbers() if saving else ([], [])
        loaded = serializer("values", torch.tensor(values, dtype=torch.float64))
        loaded_weights = serializer("weights", torch.tensor(weights, dtype=torch.float64))
        if not saving:
            holds = len(loaded) and serializer.comm.rank == 0
            self._new, self._blocks = [], [(loaded, loaded_weights)] if holds else []


def _stacked(values: list[Any]) -> Tensor:
    """One dimension of like scalars: on their device where they are tensors, else float64 on the host."""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _merged(blocks: list[Block]) -> list[Block]:
    """Neighbours of the same dtype and device as one block."""
    groups: list[list[Block]] = []
    for block in blocks:
        if groups and _kinds(groups[-1][0]) == _kinds(block):
            groups[-1].append(block)
        else:
            groups.append([block])
    return [(torch.cat([v for v, _ in group]), torch.cat([w for _, w in group])) for group in groups]


def _kinds(block: Block) -> list[Any]:
    return [(part.dtype, part.device) for part in block]


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
    total = sum_of(weights)
    if not total:
        return math.nan
    mean = sum_of([value * weight for value, weight in zip(values, weights, strict=True)]) / total
    # 0.1 * 3 / 3 is not 0.1: equal values under other weights would otherwise have other means.
    return min(max(mean, min(values)), max(values)) if math.isfinite(mean) else mean


def sum_of(numbers: list[float]) -> float:
    """The sum, correctly rounded, so that it does not depend on the order."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or past the largest float: as IEEE addition has it
        return sum(numbers)


class DictSummary(Stateful):
    """The statistics of every key of a sequence of observations; a key that an observation lacks does not count as zero."""

    def __init__(self) -> None:
        self._rows: list[tuple[Mapping[str, Any], Any]] = []
        self._summaries: dict[str, Summary] = {}
        self._metrics: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], weight: float = 1) -> None:
        """Takes an observation into account with ``weight``; a value given as ``(value, weight)`` brings its own.

        Of an object with ``compute()`` and ``reset()``, such as a metric of torchmetrics, the value is computed when the
        mean is asked for, and the object then starts anew; of a mapping, such as a ``MetricCollection`` computes, each
        number is ``key/its name``. Other values that are no single numbers, such as strings and arrays, are passed over.
        Tensors must not change afterwards in place, which holds for what was reported.

        Raises:
            ValueError: a weight is not a single number.
        """
        if type(weight) is not int:
            _check_weight(weight)
        self._rows.append((dict(values), weight))
        if len(self._rows) == _BLOCK:
            self._fold()

    def _fold(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        weights = _column([weight for _, weight in rows])
        keys = rows[0][0].keys()
        if weights is not None and all(values.keys() == keys for values, _ in rows):  # nearly always: whole columns
            for key in keys:
                column = [values[key] for values, _ in rows]
                block = _column(column)
                if block is None:
                    self._add_each(key, rows)
                else:
                    self._of(key).add_block(block, weights)
            return
        for key in dict.fromkeys(key for values, _ in rows for key in values):
            self._add_each(key, [row for row in rows if key in row[0]])

    def _add_each(self, key: str, rows: list[tuple[Mapping[str, Any], Any]]) -> None:
        for values, weight in rows:
            value = values[key]
            if type(value) is tuple and len(value) == 2 and is_scalar(value[0]):
                self._of(key).add(*value)
            elif is_scalar(value):
                self._of(key).add(value, weight)
            elif is_metric(value):
                self._metrics[key] = value

    def _compute(self) -> None:
        """Ends the interval of the metrics: each gives one number and starts anew."""
        self._fold()
        metrics, self._metrics = self._metrics, {}
        for key, metric in metrics.items():
            for name, value in take(key, metric).items():
                if is_scalar(value):
                    self._of(name).add(value)

    def _of(self, key: str) -> Summary:
        if key not in self._summaries:
            self._summaries[key] = Summary()
        return self._summaries[key]

    def compute_mean(self) -> dict[str, float]:
        """The weighted mean of each key, in the order in which the keys were first seen."""
        self._compute()
        return {key: summary.compute_mean() for key, summary in self._summaries.items()}

    def make_statistics(self) -> dict[str, float]:
        """The mean of each key as ``key`` and its standard deviation as ``key.std``."""
        self._compute()
        statistics: dict[str, float] = {}
        for key, summary in self._summaries.items():
            statistics[key], statistics[f"{key}.std"] = summary.make_statistics()
        return statistics

    def over(self, comm: Communicator) -> DictSummary:
        """The summary of what has been added on all ranks. Metrics are computed, and start anew."""
        self._compute()
        return self if comm.size == 1 else self._gathered(comm)

    def _gathered(self, comm: Communicator) -> DictSummary:
        merged = DictSummary()
        for rank in comm.gather_object({name: summary._numbers() for name, summary in self._summaries.items()}):
            for name, numbers in rank.items():
                merged._of(name)._extend(*numbers)
        return merged

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._fold()
        saved, saving = self, isinstance(serializer, Serializer)
        if saving:
            warn_of_unsaved(self._metrics)
            saved = self if serializer.comm.size == 1 else self._gathered(serializer.comm)
        names: list[str] = serializer("names", list(saved._summaries))
        if not saving:
            self._rows, self._summaries, self._metrics = [], {name: Summary() for name in names}, {}
        for number, name in enumerate(names):  # by number: a name may hold slashes
            saved._summaries[name].visit(serializer[str(number)])


def _column(values: list[Any]) -> Tensor | None:
    """One dimension of scalars, made at once where all of them are tensors or all are numbers; else ``None``."""
    first, kinds = values[0], set(map(type, values))
    if kinds <= {float, int}:
        if values.count(first) == len(values):  # weights, nearly always
            return torch.full((len(values),), float(first), dtype=torch.float64)
        return torch.tensor(values, dtype=torch.float64)
    if kinds != {Tensor} or not is_scalar(first) or len({value.dtype for value in values}) > 1:
        return None
    try:
        return torch.stack(values)
    except RuntimeError:  # some have dimensions, or lie on another device
        return None
