"""The settings of an optimizer's groups of parameters: found, compared, and written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring.serializers.base import copy_value

_NO_SETTINGS = ("params", "param_names")


def is_optimizer(value: Any) -> bool:
    """Whether it is an optimizer, or something that wraps one and shows its groups."""
    return isinstance(value, Optimizer) or isinstance(getattr(value, "param_groups", None), list)


def find_optimizer(updater: Any, wanted: Any) -> Any:
    """The optimizer that is meant: ``None`` is the updater's ``"main"``, a string its name, all else is one.

    Raises:
        KeyError: the updater has none of that name.
    """
    if wanted is None:
        wanted = "main"
    return updater.get_optimizer(wanted) if isinstance(wanted, str) else wanted


def constructed_settings(updater: Any, optimizer: Any) -> list[dict[str, Any]]:
    """The plain settings of each group as the script had made them; empty where the updater does not know them."""
    recorded = getattr(updater, "constructed", {})
    found: dict[str, Any] = getattr(updater, "get_all_optimizers", dict)()
    for name, each in found.items():
        if each is optimizer and name in recorded:
            return list(recorded[name])
    return []


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """A copy of all settings of each group, tensors included."""
    groups = getattr(optimizer, "param_groups", [])
    own = [{key: value for key, value in group.items() if key not in _NO_SETTINGS} for group in groups]
    return copy_value(own)  # type: ignore[no-any-return]


def write(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets one setting. A tensor stays the one that it is, because a compiled or captured step reads it."""
    current = group.get(key)
    if not isinstance(current, Tensor) or isinstance(value, (tuple, list)):
        group[key] = value
    elif isinstance(value, Tensor):
        current.copy_(value)
    else:
        current.fill_(value)


def same(one: Any, other: Any) -> bool:
    """Whether two settings are equal; a tensor equals the number that it becomes when it is written there."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(other, Tensor) and not isinstance(one, Tensor):
        one, other = other, one
    if isinstance(one, Tensor):
        if not isinstance(other, (Tensor, int, float)):
            return False
        return torch.equal(one, torch.as_tensor(other, dtype=one.dtype, device=one.device).expand_as(one))
    return bool(one == other)
