"""Weighted statistics of reported values, which are read from their device only when they are asked for.

The values themselves are kept, not running sums: a mean is the correctly rounded sum (`math.fsum`) of the products
value x weight in float64 over the summed weight. So it does not depend on where a snapshot fell or on how values were
grouped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring.reporting._metrics import is_metric, take, warn_of_unsaved
from chainring.reporting._scalars import NONE, SCALARS, Block, append, in_order, is_scalar, mean_of, on_host, stacked
from chainring.serializers.base import AbstractSerializer, Serializer, Stateful

Keys = tuple[str, ...]


class Summary(Stateful):
    """The weighted mean and deviation of one series of numbers."""

    def __init__(self) -> None:
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
        self.add_block(_kept(value), _kept(weight))

    def add_block(self, values: Tensor, weights: Tensor) -> None:
        """Takes many numbers into account, one dimension of values and of their weights, where they lie."""
        append(self._blocks, (values, weights))

    def _numbers(self) -> Block:
        """Values and weights in float64 on the host."""
        self._blocks = [on_host(self._blocks)] if self._blocks else []
        return self._blocks[0] if self._blocks else (NONE, NONE)

    def compute_mean(self) -> float:
        """The weighted mean; NaN when nothing has been added."""
        return mean_of(*self._numbers())

    def make_statistics(self) -> tuple[float, float]:
        """The weighted mean and the weighted population standard deviation, by two passes over the values."""
        values, weights = self._numbers()
        mean = mean_of(values, weights)
        variance = mean_of((values - mean) * (values - mean), weights)
        return mean, math.sqrt(variance) if variance == variance else variance

    def over(self, comm: Communicator) -> Summary:
        """The summary of what has been added on all ranks."""
        merged = Summary()
        for values, weights in comm.gather_object(self._numbers()):
            merged.add_block(values, weights)
        return merged

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved = self.over(serializer.comm) if isinstance(serializer, Serializer) and serializer.comm.size > 1 else self
        saved.visit(serializer)

    def visit(self, serializer: AbstractSerializer) -> None:
        """Saves what this rank has, or loads what all had on rank 0: a mean does not depend on who holds the values."""
        saving = isinstance(serializer, Serializer)
        values, weights = in_order(*self._numbers()) if saving else (NONE, NONE)
        loaded = serializer("values", values)
        loaded_weights = serializer("weights", weights)
        if not saving:
            holds = len(loaded) and serializer.comm.rank == 0
            self._blocks = [(loaded, loaded_weights)] if holds else []


class DictSummary(Stateful):
    """The statistics of every key of a sequence of observations; a key that an observation lacks does not count as zero."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._weights: list[Any] = []
        self._tables: dict[Keys, list[Block]] = {}
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
        self._rows.append(dict(values))
        self._weights.append(weight)
        if len(self._rows) * (len(values) or 1) >= SCALARS:
            self._fold()

    def _fold(self) -> None:
        """Stacks the observations that have the same keys, all their values at once if those are alike."""
        groups = _alike(self._rows, self._weights)
        self._rows, self._weights = [], []
        for keys, rows, weights in groups:
            values = list(chain.from_iterable(map(dict.values, rows)))
            weighing = stacked(weights)
            if self._add_table(keys, stacked(values), weighing):
                continue
            for number, key in enumerate(keys):
                column = values[number :: len(keys)]
                if not self._add_table((key,), stacked(column), weighing):
                    self._add_each(key, column, weights)

    def _add_table(self, keys: Keys, values: Tensor | None, weights: Tensor | None) -> bool:
        """Adds rows of values, one of each key; false where there are none, because they are not alike."""
        if values is None or weights is None:
            return False
        for key in keys:
            self._of(key)
        append(self._tables.setdefault(keys, []), (values.view(-1, len(keys)), weights))
        return True

    def _add_each(self, key: str, column: list[Any], weights: list[Any]) -> None:
        for value, weight in zip(column, weights, strict=True):
            if type(value) is tuple and len(value) == 2 and is_scalar(value[0]):
                self._of(key).add(*value)
            elif is_scalar(value):
                self._of(key).add(value, weight)
            elif is_metric(value):
                self._metrics[key] = value

    def _collect(self) -> dict[str, Summary]:
        """The summary of each key, with all of its values."""
        self._fold()
        tables, self._tables = self._tables, {}
        for keys, blocks in tables.items():
            values, weights = on_host(blocks)
            for key, column in zip(keys, values.unbind(1), strict=True):
                self._of(key).add_block(column.contiguous(), weights)
        return self._summaries

    def _compute(self) -> dict[str, Summary]:
        """The same at the end of the interval of the metrics: each gives one number and starts anew."""
        summaries = self._collect()
        metrics, self._metrics = self._metrics, {}
        for key, metric in metrics.items():
            for name, value in take(key, metric).items():
                if is_scalar(value):
                    self._of(name).add(value)
        return summaries

    def _of(self, key: str) -> Summary:
        if key not in self._summaries:
            self._summaries[key] = Summary()
        return self._summaries[key]

    def compute_mean(self) -> dict[str, float]:
        """The weighted mean of each key, in the order in which the keys were first seen."""
        return {key: summary.compute_mean() for key, summary in self._compute().items()}

    def make_statistics(self) -> dict[str, float]:
        """The mean of each key as ``key`` and its standard deviation as ``key.std``."""
        statistics: dict[str, float] = {}
        for key, summary in self._compute().items():
            statistics[key], statistics[f"{key}.std"] = summary.make_statistics()
        return statistics

    def over(self, comm: Communicator) -> DictSummary:
        """The summary of what has been added on all ranks. Metrics are computed, and start anew."""
        self._compute()
        return self if comm.size == 1 else self._gathered(comm)

    def _gathered(self, comm: Communicator) -> DictSummary:
        merged = DictSummary()
        for rank in comm.gather_object({name: summary._numbers() for name, summary in self._collect().items()}):
            for name, (values, weights) in rank.items():
                merged._of(name).add_block(values, weights)
        return merged

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._fold()
        saved, saving = self, isinstance(serializer, Serializer)
        if saving:
            warn_of_unsaved(self._metrics)
            saved = self if serializer.comm.size == 1 else self._gathered(serializer.comm)
        names: list[str] = serializer("names", list(saved._collect()))
        if not saving:
            self._rows, self._weights, self._tables, self._metrics = [], [], {}, {}
            self._summaries = {name: Summary() for name in names}
        for number, name in enumerate(names):  # by number: a name may hold slashes
            saved._summaries[name].visit(serializer[str(number)])


def _alike(rows: list[dict[str, Any]], weights: list[Any]) -> list[tuple[Keys, list[dict[str, Any]], list[Any]]]:
    """Observations by their keys, with their weights."""
    keys = list(map(tuple, rows))
    if keys and keys.count(keys[0]) == len(keys):  # nearly always
        return [(keys[0], rows, weights)]
    groups: dict[Keys, tuple[list[dict[str, Any]], list[Any]]] = {}
    for own, row, weight in zip(keys, rows, weights, strict=True):
        group = groups.setdefault(own, ([], []))
        group[0].append(row)
        group[1].append(weight)
    return [(own, *group) for own, group in groups.items()]


def _kept(number: Any) -> Tensor:
    """One dimension: of a tensor as it was now, out of its graph and safe from a later change in place."""
    if isinstance(number, Tensor):
        return number.detach().clone().view(1)
    return torch.tensor([float(number)], dtype=torch.float64)


def _check_weight(weight: Any) -> None:
    if not is_scalar(weight):
        raise ValueError(f"a weight is a single number, got {_shown(weight)}")


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
