"""The numbers of one key over an interval, with their weights: stacked where they lie, then summed without rounding.

A mean is the correctly rounded sum of the products value x weight in float64 over the summed weight. So it does not depend
on where a snapshot fell or on how values were grouped. The values stay on their device, stacked in chunks, because a
thousand live scalars slow every iteration. They are read, which waits for the device, when a mean is computed or the state
is saved; a long interval is also read every few thousand values, so that neither memory nor a snapshot grows with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from chainring.serializers.protocol import AbstractSerializer, Serializer

_MAX_CHUNKS = 64
"""The number of chunks that are merged into one."""
_MAX_VALUES = 2048
"""The number of values from which merged chunks are summed: many, since this has a fixed cost for each key."""
_Chunk = tuple[Tensor, Tensor]
"""Values and their weights."""

_POINT = 1074  # every finite float is a multiple of 2**-1074, the least positive one
_RANGE = 2098  # bits of the largest float in those units
_COUNT = 64  # further bits, for 2**64 of them
_NAN, _PLUS, _MINUS = 1, 2, 4


class Column:
    """The numbers of one key, with their weights.

    Args:
        with_deviation: True if their deviation will be asked for, which takes a microsecond a value.
    """

    __slots__ = ("chunks", "sums", "with_deviation")

    def __init__(self, with_deviation: bool) -> None:
        self.with_deviation = with_deviation
        self.chunks: list[_Chunk] = []
        self.sums: Moments | None = None  # of values that are in no chunk any more

    def append(self, values: Tensor, weights: Tensor) -> None:
        """Add vectors of numbers and of their weights."""
        self.chunks.append((values, weights))
        if len(self.chunks) >= _MAX_CHUNKS:
            self.chunks = _merge(self.chunks)
            if len(self.chunks) > _MAX_CHUNKS // 2 or sum(len(weights) for _, weights in self.chunks) >= _MAX_VALUES:
                self.fold()

    def fold(self) -> Moments:
        """Sum all numbers, and return the sums in place of them."""
        read([self])
        chunks, self.chunks = self.chunks, []
        if self.sums is None:
            self.sums = Moments(self.with_deviation)
        for values, weights in chunks:
            self.sums.add(values, weights)
        return self.sums

    def mean(self) -> float:
        """Return the weighted mean; NaN if there are no numbers."""
        if self.sums is not None:
            sums = self.fold()
            return _quotient(sums.products.value(), sums.weights.value(), sums.least, sums.largest)
        read([self])  # hot path: "keys in the log": of a short interval no sums are made
        return _mean_of(*self.chunks[0]) if self.chunks else math.nan

    def statistics(self) -> tuple[float, float]:
        """Return the weighted mean and the weighted population standard deviation; NaN if there are no numbers."""
        deviation = self.fold().deviation()
        return self.mean(), deviation

    def merge(self, sums: Moments) -> None:
        """Add numbers of which these are the sums."""
        self.fold().merge(sums)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the sums, or load them into rank 0: a mean does not depend on which rank has them."""
        sums = serializer("folded", self.fold().to_tensor() if isinstance(serializer, Serializer) else None)
        if not isinstance(serializer, Serializer):
            self.chunks = []
            self.sums = Moments.from_tensor(sums, self.with_deviation) if serializer.comm.rank == 0 else None


def read(columns: Iterable[Column]) -> None:
    """Bring the numbers of columns to the host, as one chunk in float64; the one place where a device is waited for."""
    unread = [column for column in columns if not _is_read(column.chunks)]
    for column in unread:
        column.chunks = _merge(column.chunks)
    waiting: defaultdict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = defaultdict(dict)
    for column in unread:
        for chunk in column.chunks:
            for tensor in chunk:
                waiting[tensor.dtype, tensor.device][id(tensor)] = tensor  # weights are those of many columns
    on_host: dict[int, Tensor] = {}
    for tensors in waiting.values():  # by one copy
        joined = torch.cat(list(tensors.values())).cpu().to(torch.float64)
        on_host.update(zip(tensors, torch.split(joined, [len(tensor) for tensor in tensors.values()]), strict=True))
    for column in unread:
        column.chunks = [_concatenate([(on_host[id(values)], on_host[id(weights)]) for values, weights in column.chunks])]


def _is_read(chunks: Sequence[_Chunk]) -> bool:
    return not chunks or (
        len(chunks) == 1 and all(tensor.dtype == torch.float64 and tensor.device.type == "cpu" for tensor in chunks[0])
    )


def _merge(chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Concatenate neighbours of the same dtypes and devices."""
    groups = groupby(chunks, lambda chunk: [(tensor.dtype, tensor.device) for tensor in chunk])
    return [_concatenate(list(group)) for _, group in groups]


def _concatenate(chunks: Sequence[_Chunk]) -> _Chunk:
    if len(chunks) == 1:  # hot path: "keys in the log"
        return chunks[0]
    values, weights = zip(*chunks, strict=True)
    return torch.cat(values), torch.cat(weights)


def _mean_of(values: Tensor, weights: Tensor) -> float:
    """Return the weighted mean of numbers on the host, in float64; NaN if there are none."""
    if not len(values):
        return math.nan
    products = _exact_sum((values * weights).tolist())
    counts = None if math.isfinite(products) else weights != 0
    if counts is not None and not counts.all():  # zero times infinity is NaN, and a value of no weight adds nothing
        return _mean_of(values[counts], weights[counts])
    return _quotient(products, _exact_sum(weights.tolist()), values.min().item(), values.max().item())


def _quotient(products: float, weights: float, least: float, largest: float) -> float:
    """Return a mean from its two sums, and within the values of which it is the mean; NaN without weight."""
    if not weights:
        return math.nan
    mean = products / weights
    # 0.1 * 3 / 3 is not 0.1: equal values under other weights would otherwise have other means.
    return min(max(mean, least), largest) if math.isfinite(mean) else mean


def _exact_sum(numbers: list[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs; past the largest float on the way, in this order
        total = ExactSum()
        total.add(numbers)
        return total.value()


class ExactSum:
    """The sum of floats as a multiple of 2**-1074: it depends on the floats alone, not on their order or grouping.

    NaN and infinities are kept apart, and decide the value as IEEE arithmetic does.
    """

    size = 1 + -(-(_RANGE + _COUNT + 1) // 64)
    """Integers of 64 bits in the saved form: one of flags, then the sum in two's complement."""

    def __init__(self, units: int = 0, special: int = 0) -> None:
        self.units = units
        self.special = special

    def add(self, numbers: Sequence[float]) -> None:
        """Add numbers: their correctly rounded sum, then that of what rounding has left, until nothing is left."""
        rest, units = list(numbers), 0
        try:
            while total := math.fsum(rest):
                units += to_units(total)
                rest.append(-total)
        except (ValueError, OverflowError):  # not finite, or past the largest float on the way
            for number in numbers:
                self._add_one(number)
        else:
            self.units += units

    def _add_one(self, number: float) -> None:
        if math.isfinite(number):
            self.units += to_units(number)
        else:
            self.special |= _NAN if number != number else _PLUS if number > 0 else _MINUS

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self.units += other.units
        self.special |= other.special

    def value(self) -> float:
        """Return the correctly rounded sum."""
        if self.special:
            return {_PLUS: math.inf, _MINUS: -math.inf}.get(self.special, math.nan)
        return divide(self.units, 1 << _POINT)

    def to_words(self) -> list[int]:
        """Return the saved form: `size` integers of 64 bits."""
        content = self.units.to_bytes(8 * (self.size - 1), "little", signed=True)
        return [self.special, *np.frombuffer(content, "<i8").tolist()]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> ExactSum:
        """Return the sum of which this is the saved form."""
        content = np.array(words[1:], "<i8").tobytes()
        return cls(int.from_bytes(content, "little", signed=True), words[0])


def to_units(number: float) -> int:
    """Return a finite float in units of 2**-1074."""
    numerator, denominator = number.as_integer_ratio()
    return numerator << (_POINT + 1 - denominator.bit_length())


def divide(numerator: int, denominator: int) -> float:
    """Return the correctly rounded quotient; infinite if no float is as large."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if (numerator < 0) == (denominator < 0) else -math.inf


class Moments:
    """What a weighted mean, and a deviation, need to know of any number of values.

    The mean is of the products value x weight, rounded to float64 as they are; the deviation is of exact products. It is
    counted only ``with_deviation``, since it costs a microsecond a value.
    """

    def __init__(self, with_deviation: bool) -> None:
        self.products, self.weights = ExactSum(), ExactSum()
        self.least, self.largest = math.inf, -math.inf
        self.powers: list[int] | None = [0, 0] if with_deviation else None  # sums of w*v, w*v*v; units 2**-2148, 2**-3222

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
        if self.powers is not None:
            for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
                if math.isfinite(value) and math.isfinite(weight):
                    units = to_units(value)
                    product = to_units(weight) * units
                    self.powers[0] += product
                    self.powers[1] += product * units

    def merge(self, other: Moments) -> None:
        """Add what another has counted."""
        self.products.merge(other.products)
        self.weights.merge(other.weights)
        self.least, self.largest = min(self.least, other.least), max(self.largest, other.largest)
        if self.powers is not None and other.powers is not None:
            self.powers = [mine + its for mine, its in zip(self.powers, other.powers, strict=True)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added."""
        return self.least > self.largest and not self.products.special

    def deviation(self) -> float:
        """Return the weighted population standard deviation; NaN if there is none."""
        assert self.powers is not None
        total = self.weights.units
        if self.products.special or self.weights.special or not total:
            return math.nan
        first, second = self.powers
        return math.sqrt(max(0.0, divide(second * total - first * first, total * total << 2 * _POINT)))

    def to_tensor(self) -> Tensor:
        """Return the saved form, whose length does not depend on what was added."""
        limits = np.array([self.least, self.largest]).view(np.int64).tolist()
        words = [*limits, *self.products.to_words(), *self.weights.to_words()]
        for power, size in zip(self.powers or (), _POWER_SIZES, strict=False):
            words += np.frombuffer(power.to_bytes(8 * size, "little", signed=True), "<i8").tolist()
        return torch.tensor(words, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, saved: Tensor, with_deviation: bool) -> Moments:
        """Return the moments of which this is the saved form.

        Raises:
            ValueError: it has another length.
        """
        expected = 2 + 2 * ExactSum.size + (sum(_POWER_SIZES) if with_deviation else 0)
        if saved.dtype != torch.int64 or saved.shape != (expected,):
            raise ValueError(f"the sums of an interval are {expected} integers, got {saved.dtype} {tuple(saved.shape)}")
        words, moments = saved.tolist(), cls(with_deviation)
        moments.least, moments.largest = np.array(words[:2]).view(np.float64).tolist()
        middle = 2 + ExactSum.size
        end = middle + ExactSum.size
        moments.products, moments.weights = ExactSum.from_words(words[2:middle]), ExactSum.from_words(words[middle:end])
        if moments.powers is not None:
            cut = end + _POWER_SIZES[0]
            parts = (words[end:cut], words[cut:])
            moments.powers = [int.from_bytes(np.array(part, "<i8").tobytes(), "little", signed=True) for part in parts]
        return moments


_POWER_SIZES = tuple(-(-(power * _RANGE + _COUNT + 1) // 64) for power in (2, 3))
