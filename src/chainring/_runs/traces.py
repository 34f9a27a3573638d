"""Traces of runs, what each iteration had and computed, and where two of them differ first."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chainring.training._unsaved import as_tensor, bytes_of, describe

Trace = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""By iteration, and by the kind of thing, such as ``"loss"``, each value, or its digest, by its key or path."""
CAUSES = ("batch", "module", "loss", "gradient", "generators", "value", "state", "tensor")
"""Kinds of things, in the order in which an iteration has them."""

_WORDS = {"generators": "the random generators", "gradient": "the gradient of"}
_OF_BOTH = ("loss", "settings")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a floating-point number


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two runs differ.

    Attributes:
        iteration: the first in which it was seen.
        what: the kind of thing.
        name: its key or path.
        text: both values, or by how much they differ.
        after: the last iteration before of which the same thing was compared, and is the same; ``None`` if there is none.
    """

    iteration: int
    what: str
    name: str = ""
    text: str = ""
    after: int | None = None

    @property
    def named(self) -> str:
        """Its name, and how it differs."""
        return f"{self.name}{': ' * bool(self.text and self.name)}{self.text}"

    @property
    def words(self) -> str:
        """All of it but the iteration, such as ``"the loss main/loss: 0.5 -> 0.25"``."""
        return f"{_WORDS.get(self.what, f'the {self.what}')} {self.named}".rstrip()

    @property
    def is_exact(self) -> bool:
        """Whether it cannot have been there in an iteration before."""
        return self.iteration == 0 or self.after == self.iteration - 1


def differences(a: Trace, b: Trace, kinds: Iterable[str], left_out: Container[str] = ()) -> Iterator[list[Difference]]:
    """Yield for each iteration that both have, and in which they differ, all that does, in the order of the kinds.

    Names that are ``left_out`` are not compared, nor is a loss or a setting that only one of them has.
    """
    for iteration in sorted(a.keys() & b.keys()):
        differing = []
        for kind in kinds:
            values_a, values_b = a[iteration].get(kind, {}), b[iteration].get(kind, {})
            for name in dict.fromkeys([*values_a, *values_b]):
                value_a, value_b = values_a.get(name, "nothing"), values_b.get(name, "nothing")
                is_compared = name not in left_out and (kind not in _OF_BOTH or (name in values_a and name in values_b))
                if is_compared and value_a != value_b:
                    differing.append(Difference(iteration, kind, name, f"{value_a} -> {value_b}", iteration - 1))
        if differing:
            yield differing


def first_difference(a: Trace, b: Trace, kinds: Iterable[str], left_out: Container[str] = ()) -> Difference | None:
    """Return the first difference, of several in one iteration the cause; ``None`` if there is none. See `differences`.

    Its text has both values of a loss, and otherwise how many of the kind differ, of which the values are digests.
    """
    for found in differences(a, b, kinds, left_out):
        first = found[0]
        if first.what == "loss":
            return first
        names = a[first.iteration].get(first.what, {}).keys() | b[first.iteration].get(first.what, {}).keys()
        count = sum(difference.what == first.what for difference in found)
        return replace(first, text=f"{count} of {len(names)} differ")
    return None


def describe_difference(a: Any, b: Any) -> str | None:
    """Return how two values differ, ``None`` where they are the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    texts = f"{describe(a)} -> {describe(b)}"
    same_class = type(a) is type(b)
    a, b = as_tensor(a), as_tensor(b)
    if not (same_class and isinstance(a, Tensor)):
        return None if same_class and describe(a) == describe(b) else texts
    is_comparable = (a.dtype, a.shape) == (b.dtype, b.shape)
    if is_comparable and torch.equal(bytes_of(a), bytes_of(b)):
        return None
    if not is_comparable or a.numel() == 1:
        return texts
    dtype = torch.complex128 if a.is_complex() else torch.float64
    distances = (a.detach().cpu().to(dtype) - b.detach().cpu().to(dtype)).abs()
    largest = distances.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    if largest == 0:
        return "the same numbers in other bits, such as -0.0 for 0.0"
    return f"by at most {largest:.3g}, in {int((distances != 0).sum())} of {distances.numel()} elements"


def units_apart(a: Tensor, b: Tensor) -> int | None:
    """Return by how many units in the last place two tensors differ at most; ``None`` where that says nothing."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not a.is_floating_point() or not a.numel() or a.element_size() == 1:
        return None
    if not bool(torch.isfinite(a).all()) or not bool(torch.isfinite(b).all()):
        return None
    ordinals = []  # integers in the order of the numbers, one apart for neighbors
    for tensor in (a, b):
        bits = bytes_of(tensor).view(_BITS[tensor.element_size()]).to(torch.int64)
        largest = (1 << 8 * tensor.element_size() - 1) - 1
        ordinals.append(torch.where(bits < 0, -(bits & largest), bits))
    gaps = ordinals[0].double() - ordinals[1].double()
    furthest = [int(gaps.argmax()), int(gaps.argmin())]  # of which the exact distance is taken, beyond 2**53 too
    distances = [abs(int(ordinals[0][index]) - int(ordinals[1][index])) for index in furthest]
    return max(distances)
