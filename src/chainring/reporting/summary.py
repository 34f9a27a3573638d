"""Means of reported values, over intervals, micro-batches and ranks.

A mean is the correctly rounded sum of the products value x weight in float64 over the summed weight. So it does not depend
on where a snapshot fell or on how values were grouped. The values stay on their device, stacked in chunks, because a
thousand live scalars slow every iteration. They are read, which waits for the device, when a mean is computed or the state
is saved; a long interval is also read every few thousand values, so that neither memory nor a snapshot grows with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, groupby
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._messages import warn
from chainring.converters import to_device
from chainring.reporting import _metrics
from chainring.reporting._metrics import is_metric
from chainring.reporting.reporter import Stack, current, stack_tensors
from chainring.serializers.protocol import AbstractSerializer, Serializer, Stateful

if TYPE_CHECKING:
    from chainring._progress import Trainer

_MIN_ROWS, _MIN_VALUES = 32, 256
"""How many observations are stacked at once, if they have so many values: few objects are alive then, at a small cost."""
_MAX_CHUNKS = 64
"""The number of chunks that are merged into one."""
_MAX_VALUES = 2048
"""The number of values from which merged chunks are summed: many, since this has a fixed cost for each key."""
_Chunk = tuple[Tensor, Tensor]
"""Values and their weights."""
_ON_HOST = torch.float64, torch.device("cpu")

_POINT = 1074  # every finite float is a multiple of 2**-1074, the least positive one


class ExactSum:
    """The sum of floats as a multiple of 2**-1074: it depends on the floats alone, not on their order or grouping.

    NaN and infinities are kept apart, and decide the value as IEEE arithmetic does.
    """

    def __init__(self, units: int = 0, special: float = 0.0) -> None:
        self.units = units
        self.special = special  # the sum of those that are not finite

    def add(self, numbers: Sequence[float]) -> None:
        """Add numbers: their correctly rounded sum, then that of what rounding has left, until nothing is left."""
        rest, units = list(numbers), 0
        try:
            while total := math.fsum(rest):
                units += to_units(total)
                rest.append(-total)
        except (ValueError, OverflowError):  # not finite, or past the largest float on the way
            for number in numbers:
                if math.isfinite(number):
                    self.units += to_units(number)
                else:
                    self.special += number
        else:
            self.units += units

    def merge(self, other: ExactSum) -> None:
        self.units += other.units
        self.special += other.special

    def value(self) -> float:
        """Return the correctly rounded sum."""
        return self.special or divide(self.units, 1 << _POINT)


def to_units(number: float) -> int:
    """Return a finite float as a multiple of 2**-1074."""
    numerator, denominator = number.as_integer_ratio()
    return numerator << (_POINT + 1 - denominator.bit_length())


def divide(numerator: int, denominator: int) -> float:
    """Return the correctly rounded quotient; infinite if no float is as large."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if (numerator < 0) == (denominator < 0) else -math.inf


class Moments:
    """The sums from which a weighted mean, and a deviation, of any number of values are computed.

    The mean is of the products value x weight, rounded to float64 as they are; the deviation is of exact products. It is
    counted only ``with_deviation``, since it costs a microsecond a value.
    """

    def __init__(self, with_deviation: bool) -> None:
        self.products, self.weights = ExactSum(), ExactSum()
        self.least, self.largest = math.inf, -math.inf
        self.powers = [0, 0] if with_deviation else []  # sums of w*v, w*v*v; units 2**-2148, 2**-3222

    def add(self, values: Tensor, weights: Tensor) -> None:
        """Add values with their weights, float64 on the host."""
        self.weights.add(weights.tolist())
        if not math.isfinite(values.sum().item()):  # zero times infinity is NaN, and a value of no weight adds nothing
            counts = weights != 0
            values, weights = values[counts], weights[counts]
            if not len(values):
                return
        self.products.add((values * weights).tolist())
        numbers = values[~values.isnan()] if self.products.special else values  # NaN has no place among them
        if len(numbers):
            self.least, self.largest = min(self.least, numbers.min().item()), max(self.largest, numbers.max().item())
        if self.powers:
            for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
                if math.isfinite(value) and math.isfinite(weight):
                    units = to_units(value)
                    product = to_units(weight) * units
                    self.powers[0] += product
                    self.powers[1] += product * units

    def merge(self, other: Moments) -> None:
        self.products.merge(other.products)
        self.weights.merge(other.weights)
        self.least, self.largest = min(self.least, other.least), max(self.largest, other.largest)
        self.powers = [power + other_power for power, other_power in zip(self.powers, other.powers, strict=True)]

    def deviation(self) -> float:
        """Return the weighted population standard deviation; NaN if there is none."""
        total = self.weights.units
        if self.products.special or self.weights.special or not total:
            return math.nan
        first, second = self.powers
        return math.sqrt(max(0.0, divide(second * total - first * first, total * total << 2 * _POINT)))

    def state(self) -> list[float]:
        """Return the saved form, whose length does not depend on what was added."""
        sums = self.products, self.weights
        return [self.least, self.largest, *(n for total in sums for n in (total.units, total.special)), *self.powers]

    @classmethod
    def from_state(cls, saved: list[Any]) -> Moments:
        moments = cls(with_deviation=False)
        moments.least, moments.largest, *sums = saved
        moments.products, moments.weights, moments.powers = ExactSum(*sums[:2]), ExactSum(*sums[2:4]), sums[4:]
        return moments


class Column:
    """The numbers of one key, with their weights; `Moments` says what ``with_deviation`` costs."""

    __slots__ = ("chunks", "sums", "with_deviation")

    def __init__(self, with_deviation: bool) -> None:
        self.with_deviation = with_deviation
        self.chunks: list[_Chunk] = []
        self.sums: Moments | None = None  # of values that are in no chunk any more

    def append(self, values: Tensor, weights: Tensor) -> None:
        """Add a vector of numbers and one of their weights."""
        self.chunks.append((values, weights))
        if len(self.chunks) >= _MAX_CHUNKS:
            self.chunks = _merge(self.chunks)
            if len(self.chunks) > _MAX_CHUNKS // 2 or sum(len(weights) for _, weights in self.chunks) >= _MAX_VALUES:
                self.fold()

    def fold(self) -> Moments:
        """Sum all numbers, and return the sums in place of them."""
        read([self])
        self.sums = self.sums or Moments(self.with_deviation)
        for values, weights in self.chunks:
            self.sums.add(values, weights)
        self.chunks = []
        return self.sums

    def mean(self) -> float:
        """Return the weighted mean; NaN if there are no numbers."""
        if self.sums is None:  # hot path: "keys in the log": of a short interval no sums are made
            read([self])
            if not self.chunks:
                return math.nan
            values, weights = self.chunks[0]
            try:
                products, total = math.fsum((values * weights).tolist()), math.fsum(weights.tolist())
            except (ValueError, OverflowError):  # infinities of both signs; past the largest float on the way, in this order
                products = math.nan
            if math.isfinite(products):
                least, largest = values.min().item(), values.max().item()
            else:
                self.fold()
        if self.sums is not None:
            sums = self.fold()
            products, total, least, largest = sums.products.value(), sums.weights.value(), sums.least, sums.largest
        if not total:
            return math.nan
        mean = products / total
        # 0.1 * 3 / 3 is not 0.1: equal values under other weights would otherwise have other means.
        return min(max(mean, least), largest) if math.isfinite(mean) else mean


def read(columns: Iterable[Column]) -> None:
    """Bring the numbers of columns to the host, as one chunk in float64; the one place where a device is waited for."""
    unread = [
        column
        for column in columns
        if len(column.chunks) > 1 or any((t.dtype, t.device) != _ON_HOST for chunk in column.chunks for t in chunk)
    ]
    waiting: defaultdict[Any, dict[int, Tensor]] = defaultdict(dict)  # on MPS, which has no doubles, by dtype
    for column in unread:
        column.chunks = _merge(column.chunks)
        for chunk in column.chunks:
            for tensor in chunk:
                kind = tensor.device, tensor.dtype if tensor.device.type == "mps" else None
                waiting[kind][id(tensor)] = tensor  # weights are those of many columns
    on_host: dict[int, Tensor] = {}
    for tensors in waiting.values():  # by one copy
        vectors = list(tensors.values())
        if len({vector.dtype for vector in vectors}) > 1:
            vectors = [vector.to(torch.float64) for vector in vectors]
        joined = torch.cat(vectors).cpu().to(torch.float64)
        on_host.update(zip(tensors, torch.split(joined, [len(tensor) for tensor in tensors.values()]), strict=True))
    for column in unread:
        column.chunks = _merge([(on_host[id(values)], on_host[id(weights)]) for values, weights in column.chunks])


def _merge(chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Concatenate neighbours of the same dtypes and devices."""
    if len(chunks) == 1:  # hot path: "keys in the log"
        return list(chunks)
    groups = groupby(chunks, lambda chunk: [(tensor.dtype, tensor.device) for tensor in chunk])
    pairs = (zip(*group, strict=True) for _, group in groups)
    return [(torch.cat(values), torch.cat(weights)) for values, weights in pairs]


class DictMeans(Stateful):
    """Computes the mean of every key over observations; an observation without a key does not count for its mean."""

    _has_deviation = False

    def __init__(self, said: set[str] | None = None) -> None:
        self._said = said  # the keys of which a warning has said that their values are ignored; None to say nothing
        self._rows: list[dict[str, Any]] = []  # observations whose values are in no column yet
        self._weights: list[Any] = []
        # In the order in which keys were first added.
        self._columns: defaultdict[str, Column] = defaultdict(partial(Column, self._has_deviation))
        self._metrics: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], weight: float | Tensor = 1) -> None:
        """Add an observation with a weight; a value given as ``(value, weight)`` has its own weight.

        An object with ``compute()`` and ``reset()``, such as a torchmetrics metric, is computed when the mean is
        computed, and then reset; if it returns a mapping, as a ``MetricCollection`` does, each number is ``key/its
        name``. Other values that are not single numbers are ignored: strings silently, arrays with a warning. Tensors
        must not be changed in place afterwards; reported values, which are copies, are not.

        Raises:
            ValueError: a weight is not a single number.
        """
        if type(weight) is not int:
            _check_weight(weight)
        self._rows.append(dict(values))
        self._weights.append(weight)
        count = len(self._rows)
        if count >= _MIN_ROWS and count * (len(values) or 1) >= _MIN_VALUES:
            self._stack_rows()

    def _stack_rows(self) -> None:
        """Move the values of the rows to the columns."""
        # hot path: "keys in the log": observations of the same keys are stacked at once if their values are alike
        all_rows, all_weights = self._rows, self._weights
        self._rows, self._weights = [], []
        keys_of_rows = list(map(tuple, all_rows))
        for keys in dict.fromkeys(keys_of_rows):
            has_keys = [row_keys == keys for row_keys in keys_of_rows]
            rows = [list(row.values()) for row in compress(all_rows, has_keys)]
            weights = list(compress(all_weights, has_keys))
            weight_vector, start = _stack(weights), 0
            for _, group in groupby(rows[0], lambda value: value if type(value) is Stack else None):
                end = start + len(list(group))
                self._add_rows(list(keys[start:end]), [row[start:end] for row in rows], weights, weight_vector)
                start = end

    def _add_rows(self, keys: list[str], rows: list[list[Any]], weights: list[Any], weight_vector: Tensor | None) -> None:
        """Add rows of values, one of each key, or of a stack in the place of each of its elements."""
        stacks = [row[0] for row in rows]
        are_whole = all(
            type(stack) is Stack and stack.keys == keys and row.count(stack) == len(keys)
            for stack, row in zip(stacks, rows, strict=True)
        )
        kinds = {(stack.values.dtype, stack.values.device) for stack in stacks} if are_whole else ()
        if len(kinds) == 1 and not stacks[0].values.is_complex() and weight_vector is not None:
            table = torch.stack([stack.values for stack in stacks])
            for key, numbers in zip(keys, table.unbind(1), strict=True):
                self._columns[key].append(numbers, weight_vector)
            return
        for key, column in zip(keys, zip(*rows, strict=True), strict=True):
            values = [value[key] if type(value) is Stack else value for value in column]
            vector = _stack(values)
            if vector is not None and weight_vector is not None:
                self._columns[key].append(vector, weight_vector)
                continue
            for value, weight in zip(values, weights, strict=True):
                if type(value) is tuple and len(value) == 2 and is_scalar(value[0]):
                    _check_weight(value[1])
                    self._columns[key].append(*map(_as_vector, value))
                elif is_scalar(value):
                    self._columns[key].append(_as_vector(value), _as_vector(weight))
                elif is_metric(value):
                    self._metrics[key] = value
                else:
                    self._say(key, value)

    def _say(self, key: str, value: Any) -> None:
        """Warn, once for each key, of a value of which there is no mean; of a text nobody expects one."""
        if self._said is None or isinstance(value, (str, bytes, NoneType)):
            return
        said = self._said if current.reporter is None else current.reporter.said  # one cause, which an Evaluator meets too
        if key not in said:
            said.add(key)
            warn(
                f"what was given as {key!r} is not averaged: a mean is of single numbers, and it is {_describe(value)}; "
                "give a number, such as .mean() or float(), or leave it out: LogReport(keys=...)"
            )

    def _end_interval(self) -> dict[str, Column]:
        """Return the column of each key, those of metrics included, which are computed and reset."""
        self._stack_rows()
        metrics, self._metrics = self._metrics, {}
        for key, metric in metrics.items():
            value = metric.compute()
            metric.reset()
            values = {f"{key}/{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
            for name, item in values.items():
                if is_scalar(item):
                    self._columns[name].append(_as_vector(item), _as_vector(1))
                else:
                    self._say(name, item)
        read(self._columns.values())
        return self._columns

    def compute_mean(self) -> dict[str, float]:
        """Return the weighted mean of each key, in the order in which the keys were first added."""
        return {key: column.mean() for key, column in self._end_interval().items()}

    def compute_sum(self, key: str) -> float | None:
        """Return the weighted sum of a key; ``None`` if it has not been added."""
        self._stack_rows()
        return self._columns[key].fold().products.value() if key in self._columns else None

    def total_weight(self, key: str) -> float:
        """Return the sum of the weights of a key."""
        return self._columns[key].fold().weights.value()

    def over_ranks(self, comm: Communicator, each_has_all: bool = False) -> Self:
        """Return the summary of what has been added on all ranks. Metrics are computed and reset.

        Where ``each_has_all`` of it, it is that of rank 0.

        Raises:
            ValueError: a metric exchanges what it has counted over more ranks than those that share the data.
        """
        if comm.size == 1 and (type(comm) is Communicator or comm.world.size == 1):
            self._end_interval()
            return self
        self._stack_rows()
        _metrics.check_exchange(self._metrics, comm)
        self._end_interval()
        return self._of_ranks(comm, each_has_all)

    def _of_ranks(self, comm: Communicator, each_has_all: bool) -> Self:
        sums = self._fold()
        return self._merge([comm.broadcast_object(sums)] if each_has_all else comm.gather_object(sums))

    def __add__(self, other: Self) -> Self:
        """Return the summary of what has been added to either.

        Raises:
            ValueError: one of them contains a metric, which can be computed and reset only once.
        """
        if type(other) is not type(self):
            return NotImplemented
        all_sums = [self._fold(), other._fold()]
        if metrics := sorted({*self._metrics, *other._metrics}):
            raise ValueError(
                f"the metrics {metrics} are computed when a mean is asked for; add their values, not the metrics"
            )
        return self._merge(all_sums)

    def _fold(self) -> dict[str, Moments]:
        """Return the sums of each key, but for those of metrics."""
        self._stack_rows()
        read(self._columns.values())
        return {key: column.fold() for key, column in self._columns.items()}

    def _merge(self, all_sums: Iterable[dict[str, Moments]]) -> Self:
        merged = type(self)()
        for key, sums in chain.from_iterable(map(dict.items, all_sums)):
            merged._columns[key].fold().merge(sums)
        return merged

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the numbers of all ranks, or load them into rank 0."""
        folded, comm = None, serializer.comm
        if isinstance(serializer, Serializer):
            self._stack_rows()
            if self._metrics:
                _metrics.warn_of_unsaved(self._metrics)
            source = self if comm.size == 1 else self._of_ranks(comm, comm.survives)
            read(source._columns.values())
            folded = {key: column.fold().state() for key, column in source._columns.items()}
        folded = serializer("folded", folded)
        if not isinstance(serializer, Serializer):
            DictMeans.__init__(self, self._said)  # forgets what was added
            if comm.rank == 0 or comm.survives:  # a mean does not depend on which rank has the sums
                for key, state in folded.items():
                    self._columns[key].sums = Moments.from_state(state)


class DictSummary(DictMeans):
    """Computes mean and standard deviation of every key over observations; one without a key does not count for it.

    Example::

        summary = DictSummary()
        summary.add({"loss": loss, "accuracy": accuracy}, weight=len(batch))
        summary.compute_mean()  # {"loss": 0.4, "accuracy": 0.9}
    """

    _has_deviation = True

    def __init__(self) -> None:
        super().__init__(set())

    def make_statistics(self) -> dict[str, float]:
        """Return the mean of each key as ``key`` and its standard deviation as ``key.std``."""
        statistics: dict[str, float] = {}
        for key, column in self._end_interval().items():
            statistics[key], statistics[f"{key}.std"] = column.mean(), column.fold().deviation()
        return statistics


class Summary(Stateful):
    """The weighted mean and standard deviation of one series of numbers.

    Example::

        summary = Summary()
        summary.add(0.5, weight=3)
        mean, deviation = summary.make_statistics()
        total = summary + summary  # of what has been added to either; exact
    """

    def __init__(self) -> None:
        self._values = DictSummary()  # under one key, ""

    def add(self, value: float | Tensor, weight: float | Tensor = 1) -> None:
        """Add one number with a weight. Both may be 0-dimensional tensors, which are not read from their device.

        Raises:
            TypeError: ``value`` is not a single number.
            ValueError: ``weight`` is not a single number.
        """
        if not is_scalar(value):
            raise TypeError(f"a summary takes single numbers, got {_describe(value)}; reduce it first, for example .mean()")
        _check_weight(weight)
        self._values.add({"": _copy(value)}, _copy(weight))

    def compute_mean(self) -> float:
        """Return the weighted mean; NaN if nothing has been added."""
        return self._values.compute_mean().get("", math.nan)

    def make_statistics(self) -> tuple[float, float]:
        """Return the weighted mean and the weighted population standard deviation, from sums without rounding."""
        statistics = self._values.make_statistics()
        return statistics.get("", math.nan), statistics.get(".std", math.nan)

    def __add__(self, other: Self) -> Self:
        """Return the summary of what has been added to either."""
        if type(other) is not type(self):
            return NotImplemented
        total = type(self)()
        total._values = self._values + other._values
        return total

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the sums over all ranks, or load them into rank 0."""
        self._values.serialize(serializer)


class IntervalMeans:
    """The means of reported values over an interval, weighted as the updates are, and over all ranks.

    Its owner calls `observe` in every iteration and `end` when its trigger fires, and serializes it with itself. Without
    ``keys`` it takes all values that are single numbers; if it ``says`` so, there is a warning of each key with others.
    """

    def __init__(self, keys: Sequence[str] | None = None, *, says: bool = False) -> None:
        self._keys = keys
        self._said: set[str] | None = set() if says else None
        self._summary = DictMeans(self._said)

    def observe(self, trainer: Trainer, weight: Any = None) -> None:
        """Add what has been reported so far in this iteration, by default with the weight of the update."""
        reported = getattr(trainer, "reported", None)  # a trainer of the user's may have an observation alone
        values = trainer.observation if reported is None else reported.values
        if self._keys is not None:
            values = {key: values[key] for key in self._keys if key in values}
        own = getattr(trainer.updater, "reported_weights", None) if weight is None else None
        if own:
            values = {key: (value, own[key]) if key in own else value for key, value in values.items()}
        if values:
            self._summary.add(values, getattr(trainer.updater, "weight", 1) if weight is None else weight)

    def take(self, trainer: Trainer) -> dict[str, float]:
        """Return the means of this iteration alone, each report counting once, beside the open interval."""
        interval, self._summary = self._summary, DictMeans(self._said)
        try:
            self.observe(trainer, weight=1)
            return self.end(trainer)
        finally:
            self._summary = interval

    def end(self, trainer: Trainer) -> dict[str, float]:
        """Return the mean of each key that was reported in the interval, and begin a new one."""
        summary, comm = self._summary, trainer.comm
        summary._stack_rows()
        if comm.survives and summary._metrics:
            raise ValueError(
                f"with create_communicator(survive=True) a rank may be lost, and so far what it has counted for the metric "
                f"{min(summary._metrics)!r} with it: report a value of each batch, of which the mean is taken"
            )
        if comm.size > 1 and getattr(trainer.updater, "virtual_ranks", None) is not None:
            summary._metrics = _metrics.all_over_ranks(summary._metrics, comm)
        means = summary.over_ranks(comm, comm.survives).compute_mean()
        self._summary = DictMeans(self._said)
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
        elif all(is_scalar(value) or _is_weighted(value) for value, _ in pairs):
            merged[key] = weighted_mean([value if _is_weighted(value) else (value, weight) for value, weight in pairs])
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
    return sum(_product(value, weight) for value, weight in pairs) / total, total


def _product(value: Any, weight: Any) -> Any:
    """Return a value times its weight; 0 for a weight of 0, also of a value that is not finite."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0, value * weight)
    return value * weight if weight else 0


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


def is_scalar(value: Any) -> bool:
    """Return True for what can be averaged: a real number, or an array or tensor without dimensions."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    ndim = getattr(value, "ndim", None)
    return isinstance(value, Real) if ndim is None else bool(ndim == 0) and np.asarray(value).dtype.kind in "biuf"


def select_scalars(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those of a mapping's values that can be averaged, see `is_scalar`."""
    # hot path: "keys in the log": to ask each of a hundred tensors takes twice as long
    if set(map(type, values.values())) == {Tensor}:
        dtypes = {value.dtype for value in values.values()}  # `torch.compile` knows no attrgetter
        if set(map(Tensor.dim, values.values())) == {0} and not any(dtype.is_complex for dtype in dtypes):
            return values
    return {key: value for key, value in values.items() if is_scalar(value)}


def _check_weight(weight: Any) -> None:
    if not is_scalar(weight):
        raise ValueError(f"a weight is a single number, got {_describe(weight)}")


def _describe(value: Any) -> str:
    if not hasattr(value, "shape"):
        return repr(value)
    kind = f" and {value.dtype}" if not value.shape else ""  # which is none of a real number
    return f"{type(value).__name__} of shape {tuple(value.shape)}{kind}"


def _copy(number: Any) -> Any:
    return number.detach().clone() if isinstance(number, Tensor) else float(number)


def _as_vector(number: Any) -> Tensor:
    """Return a number as a tensor of one element, a copy out of its graph."""
    return _copy(number).view(1) if isinstance(number, Tensor) else torch.tensor([float(number)], dtype=torch.float64)


def _stack(scalars: list[Any]) -> Tensor | None:
    """Stack scalars: tensors on their device, Python numbers as float64; return ``None`` if they are not alike."""
    if not scalars:
        return None
    types, first = set(map(type, scalars)), scalars[0]
    if types <= {float, int}:
        if scalars.count(first) == len(scalars):  # weights, nearly always
            return torch.full((len(scalars),), float(first), dtype=torch.float64)
        return torch.from_numpy(np.array(scalars, np.float64))
    return stack_tensors(scalars) if types == {Tensor} and not first.is_complex() else None
