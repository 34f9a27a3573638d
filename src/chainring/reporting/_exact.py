"""Sums of floats without rounding, in a fixed number of integers however many floats were added, in whatever order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_POINT = 1074  # every finite float is a multiple of 2**-1074, the least positive one
_RANGE = 2098  # bits of the largest float in those units
_COUNT = 64  # further bits, for 2**64 of them
_NAN, _PLUS, _MINUS = 1, 2, 4


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
