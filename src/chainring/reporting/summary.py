"""Means of reported values, over intervals, micro-batches and ranks.

The values themselves are kept, not running sums: a mean is the correctly rounded sum (`math.fsum`) of the products
value x weight in float64 over the summed weight. So it does not depend on where a snapshot fell or on how values were
grouped. They stay on their device, stacked in chunks, because a thousand live scalars slow every iteration; reading them
waits for the device, and happens only when a mean is asked for.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress, groupby
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator
from chainring.converters import to_device
from chainring.serializers.base import AbstractSerializer, Serializer, Stateful, has_state, serialize_method

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_CHUNK_SIZE = 256
"""The number of scalars stacked at once: the fixed cost of stacking is then small, and few objects are alive."""
_MAX_CHUNKS = 64
"""The number of chunks that are merged into one."""
_Chunk = tuple[Tensor, Tensor]
"""Values (n,) or (n, keys), and their weights (n,)."""
_EMPTY: _Chunk = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)


class Summary(Stateful):
    """The weighted mean and standard deviation of one series of numbers.

    Example::

        summary = Summary()
        summary.add(0.5, weight=3)
        mean, deviation = summary.make_statistics()
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def add(self, value: float | Tensor, weight: float | Tensor = 1) -> None:
        """Add one number that counts ``weight`` times. Both may be tensors without dimensions, which are not read.

        Raises:
            TypeError: ``value`` is not a single number.
            ValueError: ``weight`` is not a single number.
        """
        if not is_scalar(value):
            raise TypeError(f"a summary takes single numbers, got {_describe(value)}; reduce it first, for example .mean()")
        _check_weight(weight)
        _append(self._chunks, (_as_vector(value), _as_vector(weight)))

    def _on_host(self) -> _Chunk:
        self._chunks = [_to_host(self._chunks)] if self._chunks else []
        return self._chunks[0] if self._chunks else _EMPTY

    def compute_mean(self) -> float:
        """Return the weighted mean; NaN if nothing has been added."""
        return _mean_of(*self._on_host())

    def make_statistics(self) -> tuple[float, float]:
        """Return the weighted mean and the weighted population standard deviation, by two passes over the values."""
        values, weights = self._on_host()
        mean = _mean_of(values, weights)
        variance = _mean_of((values - mean) * (values - mean), weights)
        return mean, math.sqrt(variance) if variance == variance else variance

    def over_ranks(self, comm: Communicator) -> Summary:
        """Return the summary of what has been added on all ranks."""
        merged = Summary()
        merged._chunks = comm.gather_object(self._on_host())
        return merged

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the numbers of all ranks, or load them into rank 0: a mean does not depend on which rank has them."""
        is_shared = isinstance(serializer, Serializer) and serializer.comm.size > 1
        (self.over_ranks(serializer.comm) if is_shared else self)._visit(serializer)

    def _visit(self, serializer: AbstractSerializer) -> None:
        is_saving = isinstance(serializer, Serializer)
        values, weights = _sort_by_bits(*self._on_host()) if is_saving else _EMPTY
        values, weights = serializer("values", values), serializer("weights", weights)
        if not is_saving:
            self._chunks = [(values, weights)] if len(values) and serializer.comm.rank == 0 else []


class DictSummary(Stateful):
    """The statistics of every key of a sequence of observations; a key that an observation lacks does not count as zero.

    Example::

        summary = DictSummary()
        summary.add({"loss": loss, "accuracy": accuracy}, weight=len(batch))
        summary.compute_mean()  # {"loss": 0.4, "accuracy": 0.9}
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._weights: list[Any] = []
        self._tables: dict[tuple[str, ...], list[_Chunk]] = {}
        self._summaries: defaultdict[str, Summary] = defaultdict(Summary)
        self._metrics: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], weight: float | Tensor = 1) -> None:
        """Add an observation that counts ``weight`` times; a value given as ``(value, weight)`` has its own weight.

        An object with ``compute()`` and ``reset()``, such as a metric of torchmetrics, is computed when the mean is asked
        for, and then reset; of a mapping, such as a ``MetricCollection`` computes, each number is ``key/its name``. Other
        values that are not single numbers, such as strings and arrays, are ignored. Tensors must not change afterwards in
        place, which holds for what was reported.

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
            values = list(chain.from_iterable(map(dict.values, compress(all_rows, has_keys))))
            weights = list(compress(all_weights, has_keys))
            weight_vector = _stack(weights)
            if self._add_table(keys, _stack(values), weight_vector):
                continue
            for index, key in enumerate(keys):
                column = values[index :: len(keys)]
                if not self._add_table((key,), _stack(column), weight_vector):
                    self._add_column(key, column, weights)

    def _add_table(self, keys: tuple[str, ...], values: Tensor | None, weights: Tensor | None) -> bool:
        """Add rows of values, one of each key; return False if they could not be stacked."""
        if values is None or weights is None:
            return False
        for key in keys:
            self._summaries[key]  # created, because means come in the order in which keys were first added
        _append(self._tables.setdefault(keys, []), (values.view(-1, len(keys)), weights))
        return True

    def _add_column(self, key: str, column: list[Any], weights: list[Any]) -> None:
        for value, weight in zip(column, weights, strict=True):
            if type(value) is tuple and len(value) == 2 and is_scalar(value[0]):
                self._summaries[key].add(*value)
            elif is_scalar(value):
                self._summaries[key].add(value, weight)
            elif is_metric(value):
                self._metrics[key] = value

    def _collect(self) -> dict[str, Summary]:
        """Return the summary of each key, with all of its values but those of metrics."""
        self._stack_rows()
        tables, self._tables = self._tables, {}
        for keys, chunks in tables.items():
            values, weights = _to_host(chunks)
            for key, column in zip(keys, values.unbind(1), strict=True):
                _append(self._summaries[key]._chunks, (column.contiguous(), weights))
        return self._summaries

    def _end_interval(self) -> dict[str, Summary]:
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

    def make_statistics(self) -> dict[str, float]:
        """Return the mean of each key as ``key`` and its standard deviation as ``key.std``."""
        statistics: dict[str, float] = {}
        for key, summary in self._end_interval().items():
            statistics[key], statistics[f"{key}.std"] = summary.make_statistics()
        return statistics

    def over_ranks(self, comm: Communicator) -> DictSummary:
        """Return the summary of what has been added on all ranks. Metrics are computed and reset."""
        self._end_interval()
        return self if comm.size == 1 else self._gather(comm)

    def _gather(self, comm: Communicator) -> DictSummary:
        merged = DictSummary()
        for chunks in comm.gather_object({key: summary._on_host() for key, summary in self._collect().items()}):
            for key, chunk in chunks.items():
                merged._summaries[key]._chunks.append(chunk)
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
            self._summaries = defaultdict(Summary)
        for index, key in enumerate(keys):  # by index: a key may hold slashes
            source._summaries[key]._visit(serializer[str(index)])


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
        self._summary = DictSummary()

    def observe(self, trainer: Trainer) -> None:
        """Add what has been reported so far in this iteration."""
        values = trainer.observation
        if self._keys is not None:
            values = {key: values[key] for key in self._keys if key in values}
        if values:
            self._summary.add(values, getattr(trainer.updater, "weight", 1))

    def end(self, trainer: Trainer) -> dict[str, float]:
        """Return the mean of each key that was reported in the interval, and begin a new one."""
        means = self._summary.over_ranks(trainer.comm).compute_mean()
        self.reset()
        return means

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
    """Return True for an object with ``compute()`` and ``reset()``, such as a metric of torchmetrics."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


@contextmanager
def fresh_metrics(models: Iterable[nn.Module]) -> Generator[None]:
    """Replace every metric that is an attribute of a submodule by a copy that starts anew, until the end of the context.

    A metric accumulates over an interval of training. Without this, an evaluation of the same model would add its examples
    to that interval and then end it.
    """
    found = [attribute for model in models for attribute in _metric_attributes(model)]
    memo: dict[int, Any] = {}  # one for all, so that a metric under two names is one copy
    copies = [copy.deepcopy(metric, memo) for _, _, metric in found]
    try:
        for (attributes, name, _), fresh in zip(found, copies, strict=True):
            fresh.reset()
            attributes[name] = fresh
        yield
    finally:
        for attributes, name, metric in found:
            attributes[name] = metric


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
        warnings.warn(
            f"this state lies inside the interval of the metrics {unsaved}, and what they have counted is not in it: a run "
            "resumed from here computes them over the rest of the interval. Save where intervals end; or make the metric a "
            "part of the model that saves its state: metric.persistent(True), or an nn.Module with buffers",
            stacklevel=3,
        )


def is_scalar(value: Any) -> bool:
    """Return True for what can be averaged: a real number, or an array or tensor without dimensions."""
    ndim = getattr(value, "ndim", None)
    if ndim is not None:
        if isinstance(value, Tensor):
            return ndim == 0 and not value.is_complex()
        return bool(ndim == 0) and np.asarray(value).dtype.kind in "biuf"
    return isinstance(value, Real)


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
    if types != {Tensor} or not is_scalar(first) or len({value.dtype for value in scalars}) > 1:
        return None
    try:
        return torch.stack(scalars)
    except RuntimeError:  # some have dimensions, or lie on another device
        return None


def _append(chunks: list[_Chunk], chunk: _Chunk) -> None:
    """Add a chunk, and merge many into one, so that an interval of any length stays few objects."""
    chunks.append(chunk)
    if len(chunks) >= _MAX_CHUNKS:
        chunks[:] = _merge(chunks)


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


def _sort_by_bits(values: Tensor, weights: Tensor) -> _Chunk:
    """Sort numbers on the host, so that what is saved does not depend on which were stacked together."""
    order = torch.from_numpy(np.lexsort([tensor.numpy().view(np.int64) for tensor in (weights, values)]))
    return values[order], weights[order]


def _mean_of(values: Tensor, weights: Tensor) -> float:
    """Return the weighted mean of numbers on the host, in float64; NaN if there are none."""
    total = exact_sum(weights.tolist())
    if not total:
        return math.nan
    mean = exact_sum((values * weights).tolist()) / total
    # 0.1 * 3 / 3 is not 0.1: equal values under other weights would otherwise have other means.
    return min(max(mean, values.min().item()), values.max().item()) if math.isfinite(mean) else mean


def exact_sum(numbers: list[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order."""
    try:
        return math.fsum(numbers)
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:  # past the largest float on the way, in this order
        return math.fsum(math.ldexp(number, -64) for number in numbers) * 2.0**64
