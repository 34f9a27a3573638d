"""Sums of floats without rounding, in a fixed number of integers however many floats were added, in whatever order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_POINT = 1074  # every finite float is a multiple of 2**-1074, the least positive one
# Integers of 64 bits that hold 2**64 of the largest float, of its square and of its cube, and a sign.
_SIZE, *_POWER_SIZES = [-(-(power * 2098 + 64 + 1) // 64) for power in (1, 2, 3)]
_NAN, _PLUS, _MINUS = 1, 2, 4


class ExactSum:
    """The sum of floats as a multiple of 2**-1074: it depends on the floats alone, not on their order or grouping.

    NaN and infinities are kept apart, and decide the value as IEEE arithmetic does.
    """

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
                if math.isfinite(number):
                    self.units += to_units(number)
                else:
                    self.special |= _NAN if number != number else _PLUS if number > 0 else _MINUS
        else:
            self.units += units

    def merge(self, other: ExactSum) -> None:
        self.units += other.units
        self.special |= other.special

    def value(self) -> float:
        """Return the correctly rounded sum."""
        if self.special:
            return {_PLUS: math.inf, _MINUS: -math.inf}.get(self.special, math.nan)
        return divide(self.units, 1 << _POINT)


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


def _to_words(number: int, size: int) -> list[int]:
    """Return a number in two's complement, as integers of 64 bits."""
    words: list[int] = np.frombuffer(number.to_bytes(8 * size, "little", signed=True), "<i8").tolist()
    return words


def _from_words(words: Sequence[int]) -> int:
    return int.from_bytes(np.array(words, "<i8").tobytes(), "little", signed=True)


class Moments:
    """What a weighted mean, and a deviation, need to know of any number of values.

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
        self.powers = [mine + its for mine, its in zip(self.powers, other.powers, strict=True)]

    def deviation(self) -> float:
        """Return the weighted population standard deviation; NaN if there is none."""
        total = self.weights.units
        if self.products.special or self.weights.special or not total:
            return math.nan
        first, second = self.powers
        return math.sqrt(max(0.0, divide(second * total - first * first, total * total << 2 * _POINT)))

    def to_tensor(self) -> Tensor:
        """Return the saved form, whose length does not depend on what was added."""
        words = np.array([self.least, self.largest]).view(np.int64).tolist()
        for total in (self.products, self.weights):
            words += [total.special, *_to_words(total.units, _SIZE)]
        for power, size in zip(self.powers, _POWER_SIZES, strict=False):
            words += _to_words(power, size)
        return torch.tensor(words, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, saved: Tensor, with_deviation: bool) -> Moments:
        """Return the moments of which this is the saved form; a `ValueError` refuses one of another length."""
        sizes = [2, 1 + _SIZE, 1 + _SIZE, *(_POWER_SIZES if with_deviation else ())]
        if saved.dtype != torch.int64 or saved.shape != (sum(sizes),):
            raise ValueError(f"the sums of an interval are {sum(sizes)} integers, got {saved.dtype} {tuple(saved.shape)}")
        limits, products, weights, *powers = (words.tolist() for words in torch.split(saved, sizes))
        moments = cls(with_deviation)
        moments.least, moments.largest = np.array(limits).view(np.float64).tolist()
        moments.products, moments.weights = (ExactSum(_from_words(of[1:]), of[0]) for of in (products, weights))
        moments.powers = [_from_words(words) for words in powers]
        return moments
