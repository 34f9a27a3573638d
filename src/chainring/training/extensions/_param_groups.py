"""The settings in the parameter groups of an optimizer: finding, comparing and setting them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring.serializers._values import copy_value

OptimizerLike: TypeAlias = Optimizer | str | None
"""An optimizer, or something that wraps one; its name in the updater; or ``None`` for the updater's main one."""


def is_optimizer(value: Any) -> bool:
    """Return True for an optimizer, or something that wraps one and has its parameter groups."""
    return isinstance(value, Optimizer) or isinstance(getattr(value, "param_groups", None), list)


def name_of(optimizer: OptimizerLike, updater: Any) -> str:
    """Return the name of an optimizer in the updater; an empty one if the updater does not have it."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer or "main"
    optimizers: dict[str, Any] = getattr(updater, "get_all_optimizers", dict)()
    return next((name for name, candidate in optimizers.items() if candidate is optimizer), "")


def constructed_settings(updater: Any, optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each group as the script constructed them; empty if the updater does not know them."""
    constructed = getattr(updater, "constructed", {})
    optimizers: dict[str, Any] = getattr(updater, "get_all_optimizers", dict)()
    names = [name for name, candidate in optimizers.items() if candidate is optimizer and name in constructed]
    return list(constructed[names[0]]) if names else []


def copy_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return a copy of all settings of each group, tensors included."""
    groups = getattr(optimizer, "param_groups", [])
    settings = [{key: group[key] for key in group if key not in ("params", "param_names")} for group in groups]
    return copy_value(settings)  # type: ignore[no-any-return]


def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one setting. A tensor is changed in place, because a compiled or captured step reads it."""
    current = group.get(key)
    if not isinstance(current, Tensor) or isinstance(value, (tuple, list)):
        group[key] = value
    elif isinstance(value, Tensor):
        current.copy_(value)
    else:
        current.fill_(value)


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two settings are equal; a tensor equals the number that it becomes when `set_value` sets it."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    if isinstance(other, Tensor) and not isinstance(one, Tensor):
        one, other = other, one
    if isinstance(one, Tensor):
        if not isinstance(other, (Tensor, int, float)):
            return False
        return torch.equal(one, torch.as_tensor(other, dtype=one.dtype, device=one.device).expand_as(one))
    return bool(one == other)
