"""How the states in two snapshots of one iteration differ, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from chainring._runs.traces import describe_difference, units_apart
from chainring.serializers._restoring import StoredTensor, read_stored
from chainring.training._unsaved import leaves

_SETTINGS = ("updater/settings/",)
_CONSTRUCTED = "/constructed"
_ORDER = ("updater/iterator:", "generators/", "observation/", "updater/", "extensions/")  # causes first
_RATES = "/param_groups/"  # which come before the tensors that they change


@dataclass(frozen=True, slots=True)
class SavedDifference:
    """One value that differs.

    Attributes:
        path: its path in the snapshots.
        text: how it differs.
        is_tensor: whether it is a tensor of a model, an optimizer or an extension.
    """

    path: str
    text: str
    is_tensor: bool

    @property
    def name(self) -> str:
        """The path, of a reported value its key."""
        return self.path.removeprefix("observation/")

    @property
    def what(self) -> str:
        """What it is: "generators", "loss", "value", "tensor", or another value of the "state"."""
        if self.path.startswith("generators/"):
            return "generators"
        if self.path.startswith("observation/"):
            return "loss" if self.path.rpartition("/")[2] == "loss" else "value"
        return "tensor" if self.is_tensor else "state"


def compare_saved(
    one: Mapping[str, Any], other: Mapping[str, Any], is_left_out: Callable[[str], bool], on_value: Callable[[], object]
) -> Iterator[SavedDifference]:
    """Yield what differs in the flat states of two snapshots, causes first.

    Left out are settings, what extensions hold but for their tensors, and the generators of ranks that one of the runs does
    not have.

    Args:
        one: the state of the first, of which the tensors have not been read.
        other: that of the second.
        is_left_out: whether a reported value is not compared.
        on_value: called for each value that has been compared.
    """
    flat, flat_other = _flatten(one), _flatten(other)
    ranks = min(_count_ranks(state) for state in (one, other))
    paths = [path for path in flat | flat_other if _is_compared(path, ranks, is_left_out)]
    for path in sorted(paths, key=_place_in_order):
        on_value()
        values = [state.get(path, _Absent) for state in (flat, flat_other)]
        is_tensor = any(isinstance(value, Tensor | StoredTensor) for value in values)
        if path.startswith("extensions/") and (not is_tensor or _Absent in values):
            continue
        if path.startswith("observation/") and _Absent in values:
            continue
        if (text := _differ(*map(read_stored, values))) is not None:
            yield SavedDifference(path, text, is_tensor and not path.startswith(("generators/", "observation/")))


def _flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for key, item in state.items() for path, value in leaves(key, item)}


def _count_ranks(state: Mapping[str, Any]) -> int:
    return len({key.split("/")[1] for key in state if key.startswith("generators/")})


def _place_in_order(path: str) -> tuple[int, bool]:
    return next(index for index, start in enumerate(_ORDER) if path.startswith(start)), _RATES not in path


class _Absent:
    """In place of a value that one of the snapshots has not."""


def count_compared(state: Mapping[str, Any]) -> int:
    """Return about how many values of a state are compared."""
    return sum(1 for key, item in state.items() if key.startswith(_ORDER) for _ in leaves(key, item))


def _is_compared(path: str, ranks: int, is_left_out: Callable[[str], bool]) -> bool:
    if not path.startswith(_ORDER) or path.startswith(_SETTINGS) or f"{_CONSTRUCTED}/" in path:
        return False
    if path.startswith("generators/"):
        rank = path.split("/")[1]
        return rank.isdecimal() and int(rank) < ranks
    if path.startswith("observation/"):
        return not is_left_out(path.removeprefix("observation/"))
    return "/summary/" not in path


def _differ(one: Any, other: Any) -> str | None:
    if one is _Absent or other is _Absent:
        return f"only in {'the second' if one is _Absent else 'the first'}"
    text = describe_difference(one, other)
    if text is None or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return text
    steps = units_apart(one, other)
    return text if steps is None else f"{text}, at most {steps} ulp"
