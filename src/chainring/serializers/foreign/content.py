"""The content of a checkpoint of another library, in the same words for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Entries = dict[str, Any]
"""Parameters and buffers by their dotted names."""


@dataclass
class SavedOptimizer:
    """The state of an optimizer."""

    state: Mapping[Any, Mapping[str, Any]]  # by number or name of a parameter its entries
    groups: list[dict[str, Any]]  # the settings of each
    members: list[list[Any]]  # the numbers or names of the parameters in each group
    required: str | None = None  # a setting by which one that can take the state is known, where there are no groups

    @property
    def step(self) -> int | None:
        """The number of its updates, if it counts them."""
        steps = [entries["step"] for entries in self.state.values() if isinstance(entries.get("step"), (int, float, Tensor))]
        return max((int(step) for step in steps if not isinstance(step, Tensor) or step.numel() == 1), default=None)


@dataclass
class ForeignCheckpoint:
    """All that a checkpoint has of what a run continues from."""

    kind: str  # the format in words, such as "a Lightning checkpoint"
    models: dict[str, Entries]  # by name
    main: str = "main"  # the name of the one that is meant where none is named
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)  # in the order in which they were made
    schedulers: list[Any] = field(default_factory=list)  # the state_dict of each
    scaler: Any = None  # the state_dict of the loss scaler
    iteration: int | None = None  # updates done
    epoch: int | None = None  # epochs done
    batches: int | None = None  # of the next epoch that were taken
    fraction: float | None = None  # the same as a part of an epoch, where the batches were not counted
    examples: int | None = None  # the same in examples
    left: list[str] = field(default_factory=list)  # the names of all else that it holds, which is not taken
    is_ordered: bool = True  # the entries of a model are in the order in which it has them


def is_entries(value: Any) -> bool:
    """Return whether a value is the ``state_dict`` of a model: names with a tensor each, or a few values of its own."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    tensors = [name for name, entry in value.items() if isinstance(entry, Tensor)]
    return bool(tensors) and all(name in tensors or name.endswith("_extra_state") for name in value)


def to_entries(value: Mapping[str, Any], where: str) -> Entries:
    """Return parameters and buffers, all plain tensors, without the prefixes that ``torch.compile`` puts into names."""
    entries: Entries = {}
    for name, entry in value.items():
        if (clean := name.replace("_orig_mod.", "")) in entries:
            raise ValueError(f"{where} has {clean!r} with and without '_orig_mod.': save the state dict of one model alone")
        entries[clean] = entry
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            check_plain(entry, f"{where}: {name!r}")
    return entries


def check_plain(value: Tensor, what: str) -> None:
    """Refuse a tensor that is not dense and in memory."""
    is_plain = type(value) in (Tensor, nn.Parameter) and not value.is_meta and not value.is_quantized
    if not is_plain or value.is_nested or value.layout is not torch.strided:
        raise ValueError(
            f"{what} is a {type(value).__name__} of {value.layout} on {value.device}, and only plain dense tensors are "
            "taken: save what it holds by to_dense() or dequantize()"
        )


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value looks like the ``state_dict`` of an optimizer."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def to_optimizer(value: Any, where: str) -> SavedOptimizer:
    """Return the state of an optimizer from its ``state_dict``."""
    if not is_optimizer_state(value):
        raise ValueError(f"{where} is not the state_dict of an optimizer: it has no 'state' and 'param_groups'")
    state, groups = value["state"], value["param_groups"]
    is_state = isinstance(state, Mapping) and all(isinstance(entries, Mapping) for entries in state.values())
    is_groups = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    if not is_state or not is_groups or not all(_is_members(group.get("params")) for group in groups):
        raise ValueError(f"{where} is damaged: the state or the groups of an optimizer have another form")
    members = [list(group["params"]) for group in groups]
    names = [group.get("param_names") for group in groups]
    if all(_is_members(of_group) and len(of_group) == len(ids) for of_group, ids in zip(names, members, strict=True)):
        by_number = dict(zip(itertools.chain(*members), itertools.chain(*names), strict=True))
        state = {by_number.get(number, number): entries for number, entries in state.items()}
        members = names
    settings = [{key: setting for key, setting in group.items() if key not in ("params", "param_names")} for group in groups]
    return SavedOptimizer(state, settings, members)


def _is_members(value: Any) -> bool:
    return isinstance(value, list) and all(type(member) in (int, str) for member in value) and len(set(value)) == len(value)


def count(value: Any, where: str) -> int | None:
    """Return a count of iterations or epochs, ``None`` where there is not one; anything else is refused."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        shown = value if isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"
        raise ValueError(f"{where} is {shown}, and a count is a whole number that is not negative")
    return int(value)
