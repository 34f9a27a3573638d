"""Means of reported values, over intervals, micro-batches and ranks.

A mean is the correctly rounded sum (`math.fsum`) of the products value x weight in float64 over the summed weight. So it
does not depend on where a snapshot fell or on how values were grouped. The values stay on their device, stacked in
chunks, because a thousand live scalars slow every iteration. They are read, which synchronizes with the device, when a
mean is computed or the state is saved; a long interval is also read every few thousand values, into sums without
rounding, so that neither memory nor a snapshot grows with it.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress, groupby
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import shared_by_copies
from chainring._messages import warn
from chainring.converters import to_device
from chainring.reporting import _counts
from chainring.reporting._exact import ExactSum, Moments
from chainring.reporting.reporter import Stack
from chainring.serializers._objects import has_state, serialize_method
from chainring.serializers.protocol import AbstractSerializer, Serializer, Stateful, visit_optional

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_dtype = attrgetter("dtype")
_CHUNK_SIZE = 256
"""The number of scalars stacked at once: the fixed cost of stacking is then small, and few objects are alive."""
_MAX_CHUNKS = 64
"""The number of chunks that are merged into one."""
_MAX_ROWS = 2048
"""The number of rows from which merged chunks are folded into sums: many, since a fold has a fixed cost for each key."""
_Chunk = tuple[Tensor, Tensor]
"""Values (n,) or (n, keys), and their weights (n,)."""
_EMPTY: _Chunk = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)


class MeanSummary(Stateful):
    """The weighted mean of one series of numbers.

    Example::

        summary = MeanSummary()
        summary.add(0.5, weight=3)
        mean = summary.compute_mean()
    """

    _has_deviation = False

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._moments: Moments | None = None  # of what has been folded

    def add(self, value: float | Tensor, weight: float | Tensor = 1) -> None:
        """Add one number with a weight. Both may be 0-dimensional tensors, which are not read from their device.

        Raises:
            TypeError: ``value`` is not a single number.
            ValueError: ``weight`` is not a single number.
        """
        if not is_scalar(value):
            raise TypeError(f"a summary takes single numbers, got {_describe(value)}; reduce it first, for example .mean()")
        _check_weight(weight)
        self._append((_as_vector(value), _as_vector(weight)))

    def _append(self, chunk: _Chunk) -> None:
        if _append(self._chunks, chunk):
            self._fold()

    def _on_host(self) -> _Chunk:
        self._chunks = [_to_host(self._chunks)] if self._chunks else []
        return self._chunks[0] if self._chunks else _EMPTY

    def _fold(self) -> Moments:
        """Add all values to the moments and return these."""
        values, weights = self._on_host()
        self._chunks = []
        return self._fold_column(values, weights, _total(weights))

    def _fold_column(self, values: Tensor, weights: Tensor, total: ExactSum) -> Moments:
        if self._moments is None:
            self._moments = Moments(self._has_deviation)
        if len(values):
            self._moments.add(values, weights, total)
        return self._moments

    def compute_mean(self) -> float:
        """Return the weighted mean; NaN if nothing has been added."""
        if self._moments is None:  # hot path: "keys in the log"
            return _mean_of(*self._on_host())
        moments = self._fold()
        return _quotient(moments.products.value(), moments.weights.value(), moments.least, moments.largest)

    def compute_sum(self) -> float | None:
        """Return the weighted sum; ``None`` if nothing has been added."""
        moments = self._fold()
        return None if moments.is_empty else moments.products.value()

    def over_ranks(self, comm: Communicator) -> Self:
        """Return the summary of what has been added on all ranks."""
        return self._merge(comm.gather_object(self._parts()))

    def __add__(self, other: Self) -> Self:
        """Return the summary of what has been added to either."""
        return self._merge([self._parts(), other._parts()]) if type(other) is type(self) else NotImplemented

    def _merge(self, parts: Iterable[tuple[Moments | None, _Chunk]]) -> Self:
        merged = type(self)()
        for part in parts:
            merged._merge_parts(part)
        return merged

    def _parts(self) -> tuple[Moments | None, _Chunk]:
        return self._moments, self._on_host()

    def _merge_parts(self, parts: tuple[Moments | None, _Chunk]) -> None:
        moments, chunk = parts
        self._chunks.append(chunk)
        if moments is not None:
            if self._moments is None:
                self._moments = Moments(self._has_deviation)
            self._moments.merge(moments)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the sums over all ranks, or load them into rank 0: a mean does not depend on which rank has them."""
        is_shared = isinstance(serializer, Serializer) and serializer.comm.size > 1
        (self.over_ranks(serializer.comm) if is_shared else self)._visit(serializer)

    def _visit(self, serializer: AbstractSerializer) -> None:
        if isinstance(serializer, Serializer):
            serializer("folded", self._fold().to_tensor())
            return
        folded = visit_optional(serializer, "folded", None)
        values, weights = _EMPTY
        if folded is None:  # earlier versions saved each value
            values, weights = serializer("values", values), serializer("weights", weights)
        is_here = serializer.comm.rank == 0
        self._moments = Moments.from_tensor(folded, self._has_deviation) if folded is not None and is_here else None
        self._chunks = [(values, weights)] if len(values) and is_here else []


class Summary(MeanSummary):
    """The weighted mean and standard deviation of one series of numbers.

    Example::

        summary = Summary()
        summary.add(0.5, weight=3)
        mean, deviation = summary.make_statistics()
        total = summary + summary  # of what has been added to either; exact
    """

    _has_deviation = True

    def make_statistics(self) -> tuple[float, float]:
        """Return the weighted mean and the weighted population standard deviation, from sums without rounding."""
        deviation = self._fold().deviation()
        return self.compute_mean(), deviation


class DictMeans(Stateful):
    """Computes the mean of every key over observations; an observation without a key does not count for its mean.

    Example::

        summary = DictMeans()
        summary.add({"loss": loss, "accuracy": accuracy}, weight=len(batch))
        summary.compute_mean()  # {"loss": 0.4, "accuracy": 0.9}
    """

    _summary: type[MeanSummary] = MeanSummary

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._weights: list[Any] = []
        self._tables: dict[tuple[str, ...], list[_Chunk]] = {}
        self._summaries: defaultdict[str, MeanSummary] = defaultdict(self._summary)
        self._metrics: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], weight: float | Tensor = 1) -> None:
        """Add an observation with a weight; a value given as ``(value, weight)`` has its own weight.

        An object with ``compute()`` and ``reset()``, such as a torchmetrics metric, is computed when the mean is
        computed, and then reset; if it returns a mapping, as a ``MetricCollection`` does, each number is ``key/its
        name``. Other values that are not single numbers, such as strings and arrays, are ignored. Tensors must not be
        changed in place afterwards; reported values, which are copies, are not.

        Raises:
            ValueError: a weight is not a single number.
        """
        _check_weight(weight)
        self._rows.append(dict(values))
        self._weights.append(weight)
        if len(self._rows) * (len(values) or 1) >= _CHUNK_SIZE:
            self._stack_rows()

    def _stack_rows(self) -> None:
        # hot path: "keys in the log": observations of the same keys are stacked at once if their values are alike
        all_rows, all_weights = self._rows, self._weights
        self._rows, self._weights = [], []
        keys_of_rows = list(map(tuple, all_rows))
        for keys in dict.fromkeys(keys_of_rows):
            has_keys = [row_keys == keys for row_keys in keys_of_rows]
            rows = [list(row.values()) for row in compress(all_rows, has_keys)]
            weights = list(compress(all_weights, has_keys))
            weight_vector, start = _stack(weights), 0
            for _, part in groupby(rows[0], _as_stack):
                end = start + len(list(part))
                self._add_rows(keys[start:end], [row[start:end] for row in rows], weights, weight_vector)
                start = end

    def _add_rows(
        self, keys: tuple[str, ...], rows: list[list[Any]], weights: list[Any], weight_vector: Tensor | None
    ) -> None:
        """Add rows of values, one of each key, or of a stack in the place of each of its elements."""
        if self._add_table(keys, _join_stacks(keys, rows), weight_vector):
            return
        rows = [
            [value if _as_stack(value) is None else value[key] for key, value in zip(keys, row, strict=True)] for row in rows
        ]
        if self._add_table(keys, _stack(list(chain.from_iterable(rows))), weight_vector):
            return
        for key, column in zip(keys, map(list, zip(*rows, strict=True)), strict=True):
            if not self._add_table((key,), _stack(column), weight_vector):
                self._add_column(key, column, weights)

    def _add_table(self, keys: tuple[str, ...], values: Tensor | None, weights: Tensor | None) -> bool:
        """Add rows of values, one of each key; return False if they could not be stacked."""
        if values is None or weights is None:
            return False
        for key in keys:
            self._summaries[key]  # created, because means come in the order in which keys were first added
        if _append(self._tables.setdefault(keys, []), (values.view(-1, len(keys)), weights)):
            self._fold_table(keys)
        return True

    def _fold_table(self, keys: tuple[str, ...]) -> None:
        values, weights = _to_host(self._tables.pop(keys))
        total = _total(weights)
        for key, column in zip(keys, values.unbind(1), strict=True):
            self._summaries[key]._fold_column(column, weights, total)

    def _add_column(self, key: str, column: list[Any], weights: list[Any]) -> None:
        for value, weight in zip(column, weights, strict=True):
            if type(value) is tuple and len(value) == 2 and is_scalar(value[0]):
                self._summaries[key].add(*value)
            elif is_scalar(value):
                self._summaries[key].add(value, weight)
            elif is_metric(value):
                self._metrics[key] = value

    def _collect(self) -> dict[str, MeanSummary]:
        """Return the summary of each key, with all of its values but those of metrics."""
        self._stack_rows()
        tables, self._tables = self._tables, {}
        for keys, chunks in tables.items():
            values, weights = _to_host(chunks)
            for key, column in zip(keys, values.unbind(1), strict=True):
                self._summaries[key]._append((column.contiguous(), weights))
        return self._summaries

    def _end_interval(self) -> dict[str, MeanSummary]:
        """Return the summary of each key, those of metrics included, which are computed and reset."""
        summaries, metrics, self._metrics = self._collect(), self._metrics, {}
        for key, metric in metrics.items():
            value = metric.compute()
            metric.reset()
            values = {f"{key}/{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
            for name, item in values.items():
                if is_scalar(item):
                    summaries[name].add(item)
        return summaries

    def compute_mean(self) -> dict[str, float]:
        """Return the weighted mean of each key, in the order in which the keys were first added."""
        return {key: summary.compute_mean() for key, summary in self._end_interval().items()}

    def add_up_metrics(self, comm: Communicator) -> None:
        """Put metrics that have counted what those of all ranks have in the place of those of this rank.

        Raises:
            ValueError: one was not added on all ranks, or what it has counted cannot be added up.
        """
        self._stack_rows()
        self._metrics = _counts.all_over_ranks(self._metrics, comm)

    def over_ranks(self, comm: Communicator) -> Self:
        """Return the summary of what has been added on all ranks. Metrics are computed and reset.

        Raises:
            ValueError: a metric exchanges what it has counted over more ranks than those that share the data.
        """
        is_alone = comm.size == 1 and (type(comm) is Communicator or comm.world.size == 1)
        if not is_alone:
            self._stack_rows()
            _counts.check_exchange(self._metrics, comm)
        self._end_interval()
        return self if is_alone else self._gather(comm)  # on a mesh, what one of the ranks that see the same rows has

    def __add__(self, other: Self) -> Self:
        """Return the summary of what has been added to either.

        Raises:
            ValueError: one of them contains a metric, which can be computed and reset only once.
        """
        if type(other) is not type(self):
            return NotImplemented
        parts = [self._parts(), other._parts()]
        if metrics := sorted({*self._metrics, *other._metrics}):
            raise ValueError(
                f"the metrics {metrics} are computed when a mean is asked for; add their values, not the metrics"
            )
        return self._merge(parts)

    def _gather(self, comm: Communicator) -> Self:
        return self._merge(comm.gather_object(self._parts()))

    def _parts(self) -> dict[str, tuple[Moments | None, _Chunk]]:
        return {key: summary._parts() for key, summary in self._collect().items()}

    def _merge(self, parts: Iterable[dict[str, tuple[Moments | None, _Chunk]]]) -> Self:
        merged = type(self)()
        for part in parts:
            for key, held in part.items():
                merged._summaries[key]._merge_parts(held)
        return merged

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the numbers of all ranks, or load them into rank 0."""
        self._stack_rows()
        source, is_saving = self, isinstance(serializer, Serializer)
        if is_saving:
            _warn_of_unsaved(self._metrics)
            source = self if serializer.comm.size == 1 else self._gather(serializer.comm)
        keys: list[str] = serializer("names", list(source._collect()))
        if not is_saving:
            self._rows = []
            self._weights = []
            self._tables = {}
            self._metrics = {}
            self._summaries = defaultdict(self._summary)
        for index, key in enumerate(keys):  # by index: a key may hold slashes
            source._summaries[key]._visit(serializer[str(index)])


class DictSummary(DictMeans):
    """Computes mean and standard deviation of every key over observations; one without a key does not count for it.

    Example::

        summary = DictSummary()
        summary.add({"loss": loss, "accuracy": accuracy}, weight=len(batch))
        summary.compute_mean()  # {"loss": 0.4, "accuracy": 0.9}
    """

    _summary = Summary

    def make_statistics(self) -> dict[str, float]:
        """Return the mean of each key as ``key`` and its standard deviation as ``key.std``."""
        statistics: dict[str, float] = {}
        for key, summary in self._end_interval().items():
            assert isinstance(summary, Summary)
            statistics[key], statistics[f"{key}.std"] = summary.make_statistics()
        return statistics


class IntervalMeans:
    """The means of reported values over an interval, weighted as the updates are, and over all ranks.

    Its owner calls `observe` in every iteration and `end` when its trigger fires, and serializes it with itself. Without
    ``keys`` it takes all values that are single numbers.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self._keys = keys
        self.reset()

    def reset(self) -> None:
        """Begin a new interval."""
        self._summary = DictMeans()

    def observe(self, trainer: Trainer, weight: Any = None) -> None:
        """Add what has been reported so far in this iteration, by default with the weight of the update."""
        reported = getattr(trainer, "reported", None)  # a trainer of the user's may have an observation alone
        values = trainer.observation if reported is None else reported.values
        if self._keys is not None:
            values = {key: values[key] for key in self._keys if key in values}
        if values:
            self._summary.add(values, getattr(trainer.updater, "weight", 1) if weight is None else weight)

    def take(self, trainer: Trainer) -> dict[str, float]:
        """Return the means of this iteration alone, each report counting once, beside the open interval."""
        interval, self._summary = self._summary, DictMeans()
        try:
            self.observe(trainer, weight=1)
            return self._compute(trainer)
        finally:
            self._summary = interval

    def end(self, trainer: Trainer) -> dict[str, float]:
        """Return the mean of each key that was reported in the interval, and begin a new one."""
        means = self._compute(trainer)
        self.reset()
        return means

    def _compute(self, trainer: Trainer) -> dict[str, float]:
        if trainer.comm.size > 1 and getattr(trainer.updater, "virtual_ranks", None) is not None:
            self._summary.add_up_metrics(trainer.comm)
        return self._summary.over_ranks(trainer.comm).compute_mean()

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the values of the open interval, as ``summary`` in the state of the owner."""
        self._summary.serialize(serializer["summary"])


def weighted_means(observations: Sequence[tuple[Mapping[str, Any], Any]]) -> dict[str, Any]:
    """Merge observations of one update, each with its weight: numbers by weighted mean, on their device, else the last."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for values, _ in observations for key in values):
        pairs = [(values[key], weight) for values, weight in observations if key in values]
        if all(is_scalar(value) for value, _ in pairs):
            merged[key], _ = weighted_mean(pairs)
        elif all(_is_weighted(value) for value, _ in pairs):
            merged[key] = weighted_mean([value for value, _ in pairs])
        else:
            merged[key] = pairs[-1][0]
    return merged


def _is_weighted(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and is_scalar(value[0]) and is_scalar(value[1])


def weighted_mean(pairs: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the weighted mean of pairs of value and weight, and the summed weight."""
    # In float32 at least, in which a sum of products of half-precision values neither overflows nor loses the value.
    pairs = [(v.float() if isinstance(v, Tensor) and v.dtype.itemsize < 4 else v, weight) for v, weight in pairs]
    total = sum(weight for _, weight in pairs)
    if not isinstance(total, Tensor) and total == 0:  # nothing counts: a plain mean, which weighs nothing later
        return sum(value for value, _ in pairs) / len(pairs), total
    return sum(value * weight for value, weight in pairs) / total, total


_PLAIN = {bool, int, float, str, type(None), dict, OrderedDict}
"""Types of most attributes of a module, which are not metrics."""


def merge_observations(observations: Sequence[dict[str, Any]], weights: Sequence[Any], device: Any) -> dict[str, Any]:
    """Merge what replicas of a model reported on several devices: numbers by weighted mean, on ``device``, else the last."""
    if len(observations) == 1:
        return observations[0]
    moved = [
        {key: to_device(device, value) if isinstance(value, (Tensor, tuple)) else value for key, value in values.items()}
        for values in observations
    ]
    for key in dict.fromkeys(key for values in moved for key in values):
        if len({id(values[key]) for values in moved if is_metric(values.get(key))}) > 1:
            raise TypeError(
                f"{key!r} is a metric of which each replica has its own, and each has counted a part of the batch; report "
                "the metric's value of the batch, which is averaged, or keep one metric outside the model, for all replicas"
            )
    return weighted_means(list(zip(moved, weights, strict=True)))


def is_metric(value: Any) -> bool:
    """Return True for an object with ``compute()`` and ``reset()``, such as a torchmetrics metric."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


@contextmanager
def fresh_metrics(models: Iterable[nn.Module]) -> Generator[None]:
    """Replace every metric that is an attribute of a submodule by a reset copy, until the end of the context.

    A metric accumulates over an interval of training. Without this, an evaluation of the same model would add its examples
    to that interval and then end it.
    """
    found = [attribute for model in models for attribute in _metric_attributes(model)]
    # One for all, so that a metric under two names is one copy.
    memo = shared_by_copies(part for _, _, metric in found for part in _counts.parts_of(metric) if hasattr(part, "__dict__"))
    copies = [copy.deepcopy(metric, memo) for _, _, metric in found]
    try:
        for (attributes, name, _), fresh in zip(found, copies, strict=True):
            fresh.reset()
            attributes[name] = fresh
        yield
    finally:
        for attributes, name, metric in found:
            attributes[name] = metric


@contextmanager
def uncounted(models: Iterable[nn.Module]) -> Generator[None]:
    """Undo at the end of the context what metrics that are attributes of submodules have counted in it; not in buffers."""
    found = {
        id(metric): metric for model in models for *_, metric in _metric_attributes(model) if hasattr(metric, "__dict__")
    }
    of_modules = {"_buffers", "_modules", "_parameters"}
    states = [
        {name: copy.deepcopy(value, {id(metric): metric}) for name, value in vars(metric).items() if name not in of_modules}
        for metric in found.values()
    ]
    try:
        yield
    finally:
        for metric, state in zip(found.values(), states, strict=True):
            for name in vars(metric).keys() - state.keys() - of_modules:
                del vars(metric)[name]
            vars(metric).update(state)


def _metric_attributes(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for module in model.modules():
        for attributes in (vars(module), module._modules):
            for name, value in attributes.items():
                if type(value) in _PLAIN or not is_metric(value):
                    continue
                # A module with trained parameters is a layer that only happens to have methods of those names.
                if not isinstance(value, nn.Module) or not any(p.requires_grad for p in value.parameters()):
                    yield attributes, name, value


def _warn_of_unsaved(metrics: Mapping[str, Any]) -> None:
    """Name the metrics whose state is not saved by their owner, a model for example."""
    saved = (name for name, m in metrics.items() if serialize_method(m) is not None or (has_state(m) and m.state_dict()))
    if unsaved := sorted(metrics.keys() - set(saved)):
        warn(
            f"this state lies inside the interval of the metrics {unsaved}, and what they have counted is not in it: a run "
            "resumed from here computes them over the rest of the interval. Save where intervals end; or make the metric a "
            "part of the model that saves its state: metric.persistent(True), or an nn.Module with buffers",
        )


def is_scalar(value: Any) -> bool:
    """Return True for what can be averaged: a real number, or an array or tensor without dimensions."""
    if type(value) is Tensor:  # hot path: "keys in the log"
        return value.ndim == 0 and not value.is_complex()
    ndim = getattr(value, "ndim", None)
    if ndim is not None:
        if isinstance(value, Tensor):
            return ndim == 0 and not value.is_complex()
        return bool(ndim == 0) and np.asarray(value).dtype.kind in "biuf"
    return isinstance(value, Real)


def select_scalars(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those of a mapping's values that can be averaged, see `is_scalar`."""
    # hot path: "keys in the log": to ask each of a hundred tensors takes twice as long
    if set(map(type, values.values())) == {Tensor}:
        dtypes = {value.dtype for value in values.values()}  # `torch.compile` knows no attrgetter
        if set(map(Tensor.dim, values.values())) == {0} and not any(dtype.is_complex for dtype in dtypes):
            return values
    return {key: value for key, value in values.items() if is_scalar(value)}


def _check_weight(weight: Any) -> None:
    if type(weight) is not int and not is_scalar(weight):
        raise ValueError(f"a weight is a single number, got {_describe(weight)}")


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"


def _as_vector(number: Any) -> Tensor:
    """Return a number as a tensor of one element, a copy out of its graph."""
    if isinstance(number, Tensor):
        return number.detach().clone().view(1)
    return torch.tensor([float(number)], dtype=torch.float64)


def _stack(scalars: list[Any]) -> Tensor | None:
    """Stack scalars: tensors on their device, Python numbers as float64; return ``None`` if they are not alike."""
    if not scalars:
        return None
    types, first = set(map(type, scalars)), scalars[0]
    if types <= {float, int}:
        if scalars.count(first) == len(scalars):  # weights, nearly always
            return torch.full((len(scalars),), float(first), dtype=torch.float64)
        return torch.from_numpy(np.array(scalars, np.float64))
    if types != {Tensor} or not is_scalar(first) or len(set(map(_dtype, scalars))) > 1:
        return None
    try:
        return torch.stack(scalars)
    except RuntimeError:  # some have dimensions, or lie on another device
        return None


def _as_stack(value: Any) -> Stack | None:
    return value if type(value) is Stack else None


def _join_stacks(keys: tuple[str, ...], rows: list[list[Any]]) -> Tensor | None:
    """Return the values of rows each of which is one stack, and all of it; else ``None``."""
    stacks = [row[0] for row in rows]
    if set(map(type, stacks)) != {Stack} or len({(stack.values.dtype, stack.values.device) for stack in stacks}) > 1:
        return None
    names = list(keys)
    is_whole = all(stack.keys == names and row.count(stack) == len(names) for stack, row in zip(stacks, rows, strict=True))
    return torch.stack([stack.values for stack in stacks]) if is_whole and not stacks[0].values.is_complex() else None


def _append(chunks: list[_Chunk], chunk: _Chunk) -> bool:
    """Add a chunk, and merge many into one; return whether there are so many rows or chunks that they should be folded."""
    chunks.append(chunk)
    if len(chunks) < _MAX_CHUNKS:
        return False
    chunks[:] = _merge(chunks)
    return len(chunks) > _MAX_CHUNKS // 2 or sum(len(weights) for _, weights in chunks) >= _MAX_ROWS


def _merge(chunks: list[_Chunk]) -> list[_Chunk]:
    """Concatenate neighbours of the same dtypes and devices."""
    groups = groupby(chunks, lambda chunk: [(tensor.dtype, tensor.device) for tensor in chunk])
    return [_concatenate(list(group)) for _, group in groups]


def _concatenate(chunks: Sequence[_Chunk]) -> _Chunk:
    if len(chunks) == 1:  # hot path: "keys in the log"
        return chunks[0]
    values, weights = zip(*chunks, strict=True)
    return torch.cat(values), torch.cat(weights)


def _to_host(chunks: list[_Chunk]) -> _Chunk:
    """Concatenate all chunks in float64 on the host: the one place where a device is waited for."""
    return _concatenate([(v.cpu().to(torch.float64), w.cpu().to(torch.float64)) for v, w in _merge(chunks)])


def _total(weights: Tensor) -> ExactSum:
    total = ExactSum()
    total.add(weights.tolist())
    return total


def _mean_of(values: Tensor, weights: Tensor) -> float:
    """Return the weighted mean of numbers on the host, in float64; NaN if there are none."""
    if not len(values):
        return math.nan
    products = exact_sum((values * weights).tolist())
    counts = None if math.isfinite(products) else weights != 0
    if counts is not None and not counts.all():  # zero times infinity is NaN, and a value of no weight adds nothing
        return _mean_of(values[counts], weights[counts])
    return _quotient(products, exact_sum(weights.tolist()), values.min().item(), values.max().item())


def _quotient(products: float, weights: float, least: float, largest: float) -> float:
    """Return a mean from its two sums, and within the values of which it is the mean; NaN without weight."""
    if not weights:
        return math.nan
    mean = products / weights
    # 0.1 * 3 / 3 is not 0.1: equal values under other weights would otherwise have other means.
    return min(max(mean, least), largest) if math.isfinite(mean) else mean


def exact_sum(numbers: list[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs; past the largest float on the way, in this order
        total = ExactSum()
        total.add(numbers)
        return total.value()
