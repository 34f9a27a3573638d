"""The state of another library's optimizer, given to the same parameters here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chainring._distributed.sharding import shard_like
from chainring._naming import name_cleaner
from chainring.serializers._models import load_optimizer
from chainring.serializers._values import copy_value, is_same_value
from chainring.serializers.foreign._models import ModelPlan, kind_of
from chainring.serializers.foreign.content import SavedOptimizer, check_plain

_OF_THE_SCRIPT = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that say how an optimizer computes the same, not what."""
_ADDED = {"initial_lr", "maximize", "decoupled_weight_decay", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Settings that schedulers add, or later versions of torch."""


def plan_optimizer(
    path: Path, label: str, optimizer: Any, saved: SavedOptimizer, models: list[ModelPlan], strict: bool
) -> tuple[Callable[[], None], list[str]]:
    """Return what gives the saved state to the parameters here, and in words what will be loaded.

    State saved by names is found by name. State saved by numbers is found by their order in the groups, if the groups are
    as large here, every entry has the shape of its parameter, and no other order is as likely.

    Raises:
        ValueError: it does not fit, or the order is not certain.
    """
    try:
        keys = _keys_in_order(optimizer, saved, models)
        state = _state_by_position(optimizer, saved, keys)
        groups = _groups(optimizer, saved)
    except ValueError as error:
        reason = f"{path}: the saved optimizer {label!r} {error}"
        if strict:
            raise ValueError(f"{reason}. Or leave it out by strict=False") from error
        return lambda: None, [f"not loaded: the state of an optimizer. {reason}"]
    step = "" if saved.step is None else f", {saved.step} updates"
    report = [f"optimizer {label!r}: the state of {len(state)} of {len(keys)} parameters{step}"]
    if not saved.groups:
        report.append(f"missing: the settings of optimizer {label!r}; those of the script hold")
    if saved.required == "momentum":
        report.append("converted: the momentum, by the learning rate of the script")
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key in sorted(settings.keys() & group.keys() - {"params", "initial_lr"}):
            made, value = group[key], settings[key]
            if key == "lr":
                made, value = group.get("initial_lr", made), settings.get("initial_lr", value)
            if not is_same_value(_plain(made), _plain(value)):
                place = f"optimizer {label!r}, group {index}"
                report.append(f"{place}: {key} {_plain(value)!r} is taken, the script has {_plain(made)!r}")
    return partial(load_optimizer, optimizer, state, groups), report


def _keys_in_order(optimizer: Any, saved: SavedOptimizer, models: list[ModelPlan]) -> list[Any]:
    """Return for each parameter here, in the order of the groups, the key of its state in the checkpoint."""
    here: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
    if all(isinstance(key, str) for members in saved.members for key in members):
        return _keys_by_name(here, saved, models)
    sizes, own_sizes = [len(members) for members in saved.members], [len(members) for members in here]
    if sizes != own_sizes:
        raise ValueError(
            f"has {sizes} parameters in its groups by number, and this one {own_sizes}, so that it is not certain which is "
            "which: make the same groups in the same order"
        )
    parameters = {id(parameter) for group in here for parameter in group}
    for plan in models:
        clean = name_cleaner(plan.model)
        own = [clean(name) for name, parameter in plan.model.named_parameters() if id(parameter) in parameters]
        there = own if plan.order is None else [name for name in plan.order if name in set(own)]
        if there != [name for name in own if name in set(there)]:
            name, own_name = next(pair for pair in zip(there, own, strict=False) if pair[0] != pair[1])
            raise ValueError(
                f"holds numbers in place of names, and the saved model has {name!r} where this one has {own_name!r}, so "
                "that it is not certain which is which: define the modules in the saved order"
            )
    _refuse_exchanged_groups(optimizer, saved)
    return [key for members in saved.members for key in members]


def _keys_by_name(here: list[list[Any]], saved: SavedOptimizer, models: list[ModelPlan]) -> list[str]:
    names: dict[int, str] = {}
    for plan in models:
        clean = name_cleaner(plan.model)
        back = {own: name for name, own in plan.names.items()}
        for name, parameter in plan.model.named_parameters():
            names.setdefault(id(parameter), back.get(clean(name), clean(name)))
    keys = [names.get(id(parameter), "") for members in here for parameter in members]
    group_of = {key: index for index, members in enumerate(saved.members) for key in members}
    if missing := [key for key in keys if key not in group_of]:
        raise ValueError(f"has no parameter {missing[0]!r}: make an optimizer of the parameters that were trained")
    if more := group_of.keys() - set(keys):
        raise ValueError(
            f"has {min(more)!r} too, which this one lacks: make an optimizer of the parameters that were trained"
        )
    if saved.groups and [group_of[key] for key in keys] != [index for index, group in enumerate(here) for _ in group]:
        raise ValueError(
            f"has {len(saved.groups)} groups of other parameters than the {len(here)} here: make the same groups"
        )
    return keys


def _refuse_exchanged_groups(optimizer: Any, saved: SavedOptimizer) -> None:
    """Refuse groups that fit one another's parameters, and whose settings say that they have changed places."""

    def settings(group: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        taken = group.keys() & like.keys() - _OF_THE_SCRIPT - {"params", "initial_lr"}
        return {key: group[key] for key in taken} | {"lr": group.get("initial_lr", group.get("lr"))}

    shapes = [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    own = [settings(group, saved.groups[0]) for group in optimizer.param_groups]
    theirs = [settings(group, optimizer.param_groups[0]) for group in saved.groups]
    for j, i in itertools.combinations(range(len(own)), 2):
        are_exchanged = is_same_value(own[i], theirs[j]) and is_same_value(own[j], theirs[i])
        if shapes[i] == shapes[j] and are_exchanged and not is_same_value(own[i], theirs[i]):
            raise ValueError(
                f"has the settings of group {j} in group {i}, and the reverse: make the groups in the saved order"
            )


def _state_by_position(optimizer: Any, saved: SavedOptimizer, keys: list[Any]) -> dict[int, dict[str, Any]]:
    """Return copies of the entries of each parameter that has some.

    Raises:
        ValueError: an entry has another shape than its parameter, or is no number.
    """
    if unknown := [key for key in saved.state if key not in set(keys)]:
        raise ValueError(f"has state of {unknown[0]!r:.80}, which is in none of its groups")
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for position, (key, (parameter, group)) in enumerate(zip(keys, parameters, strict=True)):
        if key not in saved.state:
            continue
        entries = saved.state[key].items()
        state[position] = {name: _to_entry(f"of {key!r:.80}, {name!r:.40}", value, parameter) for name, value in entries}
        if saved.required == "momentum":  # which Chainer keeps multiplied by the learning rate
            if not float(group["lr"]):
                raise ValueError(
                    "has a momentum that is multiplied by the learning rate, which is zero here: set it to the saved run's"
                )
            state[position]["momentum_buffer"] /= float(group["lr"])
    return state


def _to_entry(what: str, value: Any, parameter: Tensor) -> Any:
    """Return a copy of an entry of a parameter's state, sharded as the parameter if it has its shape."""
    if not isinstance(value, Tensor):
        if not isinstance(value, (bool, int, float, str, list, tuple, type(None))):
            raise ValueError(f"has {what}, which is a {type(value).__name__} and no number or tensor")
        return copy_value(value)
    check_plain(value, f"what it has {what},")
    fits = value.ndim == parameter.ndim and all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
    if value.numel() != 1 and (not fits or kind_of(value) != kind_of(parameter)):
        raise ValueError(
            f"has {what}, as {value.dtype} of shape {list(value.shape)}, and the parameter here is {parameter.dtype} of "
            f"shape {list(parameter.shape)}: make the same groups of the same parameters in the same order"
        )
    value = value.detach().clone(memory_format=torch.preserve_format)
    return shard_like(value, parameter) if value.shape == parameter.shape else value


def _groups(optimizer: Any, saved: SavedOptimizer) -> list[dict[str, Any]]:
    """Return the groups with the saved settings, and numbers in order; how it computes stays as the script says.

    Raises:
        ValueError: the settings are those of another optimizer.
    """
    theirs: list[dict[str, Any]] = saved.groups or [{} for _ in optimizer.param_groups]
    own_setting = optimizer.param_groups[0].get(saved.required)
    if saved.required is not None and (own_setting is None or (saved.required == "momentum" and not own_setting)):
        raise ValueError(f"is of another kind than {type(optimizer).__name__}, which has no {saved.required!r}")
    if len(theirs) != len(optimizer.param_groups):
        raise ValueError(f"has {len(theirs)} groups, and this one {len(optimizer.param_groups)}: make as many")
    groups, positions = [], itertools.count()
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, theirs, strict=True)):
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if settings and (differ := (own.keys() ^ settings.keys()) - _ADDED - _OF_THE_SCRIPT):
            raise ValueError(
                f"is another one than {type(optimizer).__name__}: only one of them has the setting {min(differ)!r}"
            )
        for key, value in settings.items():
            if not _is_setting(value, own.get(key)):
                raise ValueError(
                    f"has a {type(value).__name__} as {key!r:.40} of group {index}, where {own.get(key)!r:.40} is here"
                )
        decouples = own.get("decoupled_weight_decay", False)
        if settings.get("decoupled_weight_decay", decouples) != decouples:
            raise ValueError("decays weights in another way than this one: Adam and AdamW are not the same")
        taken = {key: value for key, value in settings.items() if key not in _OF_THE_SCRIPT}
        members = list(itertools.islice(positions, len(group["params"])))
        groups.append({**own, **copy_value(taken), "params": members})
    return groups


def _is_setting(value: Any, own: Any) -> bool:
    """Return whether a saved setting is of the kind that stands here."""
    if isinstance(own, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(own) and all(map(_is_setting, value, own))
    if isinstance(own, (bool, str)):
        return isinstance(value, type(own)) or value is None
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_number or value is None or (own is None and isinstance(value, str))


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
