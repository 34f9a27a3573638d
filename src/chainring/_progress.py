"""Training progress as exact fractions: intervals and limits never depend on dividing floats.

A period such as ``0.1`` means the fraction one tenth, so ``(0.1, "epoch")`` with ten iterations an epoch fires at
every one of them, for ever.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Rational
from types import FunctionType
from typing import Any, TypeAlias

Trainer: TypeAlias = Any
"""A `chainring.training.Trainer`, for the annotations of what a trainer is made of, which cannot import it."""
UNITS = ("iteration", "epoch")


def raise_unless_end(updater: Any, error: StopIteration) -> None:
    """Raise an error if a ``StopIteration`` that has left an update does not say that the data have ended.

    It does if an iterator of the updater has raised it, or, where an updater has none that is a class of Python's, if one
    of its own methods has raised it or called the ``next`` that did. A loss or a converter may have raised it too.
    """
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    iterators = list(updater.get_all_iterators().values()) if hasattr(updater, "get_all_iterators") else []
    # The first argument of each function that was running, of a method its object.
    codes = [(frame.f_locals, frame.f_code) for frame, _ in frames]
    owners = [names.get(code.co_varnames[0]) if code.co_argcount else None for names, code in codes]
    if any(owner is iterator for owner in owners for iterator in iterators):
        return
    if not iterators or not all(
        isinstance(getattr(type(iterator), "__next__", None), FunctionType) for iterator in iterators
    ):
        last = max((index for index, owner in enumerate(owners) if owner is updater), default=-1)
        if last >= 0 and all(frame.f_code.co_name in ("next", "__next__") for frame, _ in frames[last + 1 : last + 2]):
            return
    frame, line = frames[-1]
    where = f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {line})"
    raise RuntimeError(
        f"StopIteration was raised in {where}, and not by an iterator of {type(updater).__name__}, so it is an error, not "
        "the end of the data. Write next(iterator, None) there. To let the end of an iterator end the run, register it "
        "with the updater: StandardUpdater({'main': ..., 'other': ...}, ...), or return it from get_all_iterators()"
    ) from error


def to_fraction(value: float | Rational) -> Fraction:
    """Return the simplest fraction that rounds to a real number: ``0.1`` is 1/10, ``5 / 6`` is five sixths."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"a number is needed, such as 1 or 0.5, got {value!r} of type {type(value).__name__}")
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    real = float(value)
    if not math.isfinite(real):
        raise ValueError(f"a finite number is needed, got {real}")
    if real.is_integer():
        return Fraction(int(real))
    if real < 0:
        return -to_fraction(-real)
    # Every real between the two midpoints rounds to this float; the midpoints are taken in 1/2 ulp exactly.
    lower = (Fraction(math.nextafter(real, 0.0)) + Fraction(real)) / 2
    upper = (Fraction(real) + Fraction(math.nextafter(real, math.inf))) / 2
    return _simplest_between(lower, upper)


def _simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction with the smallest denominator in ``[low, high]`` (the Stern-Brocot tree, walked by floors)."""
    floor = math.floor(low)
    if floor == low:
        return Fraction(floor)
    if floor < math.floor(high):
        return Fraction(floor + 1)
    return floor + 1 / _simplest_between(1 / (high - floor), 1 / (low - floor))
