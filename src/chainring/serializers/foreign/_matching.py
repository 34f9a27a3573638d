"""What another library has saved of models and optimizers, matched with those here: the former by name, then the latter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._distributed.sharding import is_sharded, shard_like
from chainring._messages import list_names
from chainring.serializers._models import as_number, load_optimizer
from chainring.serializers._values import copy_value, find_aliases, is_same_value
from chainring.serializers.foreign.content import Entries, ForeignCheckpoint, SavedOptimizer, check_plain
from chainring.serializers.protocol import load_entries, name_cleaner, own_states, state_entries

_SHOWN = 5  # names in a message
_OF_THE_SCRIPT = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that say how an optimizer computes the same, not what."""
_ADDED = {"initial_lr", "maximize", "decoupled_weight_decay", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Settings that schedulers add, or later versions of torch."""


@dataclass
class ModelPlan:
    """What will be loaded into a model, which fits."""

    model: nn.Module
    load: Callable[[], Any]
    names: dict[str, str]  # from that of an entry in the checkpoint to that in the model, without prefixes of wrappers
    order: list[str] | None  # the names in that of the checkpoint, if it tells the order of the parameters
    report: list[str]  # in words, what is loaded


def plan_models(
    path: Path, saved: ForeignCheckpoint, models: Mapping[str, nn.Module], prefix: str, strict: bool
) -> list[ModelPlan]:
    """Return the entries of each model in a checkpoint; those of a single model are below ``prefix``."""
    main = next(iter(saved.models)) if len(saved.models) == 1 else saved.main
    if len(models) == 1:
        parts = dict.fromkeys(models, (prefix, "") if prefix in saved.models else (main, prefix))
    elif saved.models.keys() == models.keys():
        parts = {name: (name, "") for name in models}
    else:
        parts = {name: (main, name) for name in models}  # one state dict for all of them, each below its name
    taken = {part for part, _ in parts.values()}
    if not taken <= saved.models.keys():
        raise ValueError(
            f"{path} has the models {sorted(saved.models)}; name one by path_in_snapshot, or give the updater the same "
            "models"
        )
    saved.left = [*(name for name in saved.models if name not in taken), *saved.left]
    return [
        _plan_model(path, name, models[name], saved.models[part], below, saved.is_ordered, strict)
        for name, (part, below) in parts.items()
    ]


def _plan_model(
    path: Path, label: str, model: nn.Module, saved: Entries, prefix: str, is_ordered: bool, strict: bool
) -> ModelPlan:
    """Return the entries of a model in a state dict, below ``prefix`` or below the one that all of its names have there."""
    own, clean = state_entries(model), name_cleaner(model)
    live, values = {clean(name): name for name in own}, {clean(name): value for name, value in own.items()}
    tied = _tied(model, own, clean)
    below = {name: name for name in saved}
    if prefix:
        below = {name: name.removeprefix(f"{prefix}.") for name in saved if name.startswith(f"{prefix}.")}
        if not below:
            raise ValueError(f"{path} has nothing under {prefix!r}; it has {list_names(saved, _SHOWN)}")
    try:
        names, words = _match(below, list(live), tied)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    found = {own_name: saved[name] for name, own_name in names.items()}
    for name in live.keys() - found.keys():  # a tied one is written under one of its names
        written = next((alias for alias in tied.get(name, ()) if alias in found), None)
        if written is not None:
            found[name] = found[written]
    missing, unexpected = [n for n in live if n not in found], [n for n in found if n not in live]
    wrong = [f"missing: {list_names(missing, _SHOWN)}"] if missing and strict else []
    wrong += [f"unexpected: {list_names(unexpected, _SHOWN)}"] if unexpected and strict else []
    misfits = {name: _misfit(found[name], value) for name, value in values.items() if name in found}
    wrong += [f"{name}: {reason}" for name, (reason, _) in misfits.items() if reason]
    if wrong:
        raise RuntimeError(
            f"{path} does not fit the {type(model).__name__}: {'; '.join(wrong[:10])}. Make the model that was saved, "
            "or name a part of the checkpoint by path_in_snapshot"
            + (", or pass strict=False" if missing or unexpected else "")
        )
    report = [f"model {label!r}: {len(found.keys() & live.keys())} of {len(live)} parameters and buffers{words}"]
    if aside := [name for name in saved if name not in names]:
        report.append(f"not loaded: {list_names(aside, _SHOWN)}")
    if missing:
        report.append(f"missing: {list_names(missing, _SHOWN)}")
    if unexpected:
        report.append(f"not loaded: {list_names(unexpected, _SHOWN)}")
    if less := {f"{found[name].dtype} to {values[name].dtype}" for name, (_, is_rounded) in misfits.items() if is_rounded}:
        report.append(f"rounded: {', '.join(sorted(less)).replace('torch.', '')}")
    if classes := {type(module).__name__ for _, module in own_states(model)}:
        report.append(f"missing: the state that serialize of {', '.join(sorted(classes))} declares")
    entries = {live[name]: shard_like(found[name], value) for name, value in values.items() if name in found}
    load = partial(load_entries, model, entries, strict and not missing)
    return ModelPlan(model, load, names, list(names.values()) if is_ordered else None, report)


def _tied(model: nn.Module, own: Mapping[str, Any], clean: Any) -> dict[str, list[str]]:
    """Return for each entry that is one tensor under several names all of them.

    Of a sharded one this rank may have no element, by whose place it would be known: there the parameter is the same.
    """
    plain = {
        clean(n): v for n, v in own.items() if isinstance(v, Tensor) and not is_lazy(v) and not is_sharded(v) and v.numel()
    }
    groups: dict[Any, list[str]] = {}
    for name, first in find_aliases(plain).items():
        groups.setdefault(first, []).append(name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_sharded(parameter) and name in own:
            groups.setdefault(id(parameter), []).append(clean(name))
    return {name: group for group in groups.values() for name in group}


def _match(saved: Mapping[str, str], own: list[str], tied: Mapping[str, list[str]]) -> tuple[dict[str, str], str]:
    """Return from name in the file to name in the model, and in words which prefix one of them has more.

    A prefix is assumed only where with it every entry of the model is found, and without it not.
    """

    def is_complete(names: Iterable[str]) -> bool:
        given = set(names)
        return all(not given.isdisjoint(tied.get(name, [name])) for name in own)

    if is_complete(saved.values()) or not own or not saved:
        return dict(saved), ""
    first = next(iter(saved.values()))
    there = sorted({name.removesuffix(own[0]) for name in saved.values() if name.endswith(f".{own[0]}")})
    here = sorted(name.removesuffix(first) for name in own if name.endswith(f".{first}"))
    renamed: dict[str, dict[str, str]] = {}
    for prefix in there:
        below = {name: given.removeprefix(prefix) for name, given in saved.items() if given.startswith(prefix)}
        renamed[f"{prefix[:-1]!r} there"] = below
    for prefix in here:
        renamed[f"{prefix[:-1]!r} here"] = {name: prefix + given for name, given in saved.items()}
    fitting = {where: names for where, names in renamed.items() if is_complete(names.values())}
    if len(fitting) > 1:
        raise ValueError(f"has the names of this model below each of {', '.join(fitting)}: name one by path_in_snapshot")
    for where, names in fitting.items():
        return names, f", which stand below {where}"
    return dict(saved), ""


def _misfit(saved: Any, own: Any) -> tuple[str, bool]:
    """Return in words why a saved entry cannot become that of the model, and whether it can by rounding alone."""
    if isinstance(own, Tensor) and not isinstance(saved, Tensor):
        return f"a {type(saved).__name__} there, and a tensor here", False
    if not isinstance(own, Tensor) or is_lazy(own):
        return "", False
    if saved.shape != own.shape:
        return f"shape {list(saved.shape)} there, {list(own.shape)} here", False
    if saved.dtype == own.dtype:
        return "", False
    kind, dtypes = _kind(saved), f"{saved.dtype} there, {own.dtype} here"
    if kind != _kind(own):
        return dtypes, False
    if kind == "integer":
        is_lost, is_rounded = not np.array_equal(saved.numpy(), saved.to(own.dtype).numpy()), False
    else:
        wide = torch.complex128 if saved.is_complex() else torch.float64
        before, after = saved.to(wide), saved.to(own.dtype).to(wide)
        is_lost = bool((before.isfinite() & ~after.isfinite()).any())
        is_rounded = not torch.equal(before.nan_to_num(), after.nan_to_num())
    return (f"{dtypes}, which lacks its values", False) if is_lost else ("", is_rounded)


def _kind(tensor: Tensor) -> str:
    """Return the kind of numbers of a tensor, within which they are converted and lose digits at most."""
    if tensor.dtype is torch.bool:
        return "bool"
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "integer"


def plan_optimizer(
    path: Path, label: str, optimizer: Any, saved: SavedOptimizer, models: list[ModelPlan], strict: bool
) -> tuple[Callable[[], None], list[str]]:
    """Return a function that loads the saved state into the optimizer, and in words what it will load.

    State saved by names is found by name. State saved by numbers is found by their order in the groups, if the groups are
    as large here, every entry has the shape of its parameter, and no other order is as likely.
    """
    try:
        if not (form := optimizer.state_dict().keys()) >= {"state", "param_groups"}:
            raise ValueError(
                f"is that of an optimizer of torch, and state_dict() of {type(optimizer).__name__} has another form, "
                f"{sorted(map(str, form))}: load it into an updater with the optimizer that it wraps"
            )
        keys = _keys_in_order(optimizer, saved, models)
        state = _state_by_position(optimizer, saved, keys)
        is_by_number = not all(isinstance(key, str) for key in keys)
        if is_by_number:
            _refuse_other_order(optimizer, models)
        groups = _groups(optimizer, saved)
    except ValueError as error:
        reason = f"{path}: the saved optimizer {label!r} {error}"
        if strict:
            raise ValueError(f"{reason}. Or leave it out by strict=False") from error
        return lambda: None, [f"not loaded: the state of an optimizer. {reason}"]
    step = "" if saved.step is None else f", {saved.step} updates"
    report = [f"optimizer {label!r}: the state of {len(state)} of {len(keys)} parameters{step}"]
    if is_by_number and any(plan.order is None for plan in models):
        report.append("assumed: that the saved model had its parameters in the order of this one, which nothing tells")
    if not saved.groups:
        report.append(f"missing: the settings of optimizer {label!r}; those of the script hold")
    if saved.required == "momentum":
        report.append("converted: the momentum, by the learning rate of the script")
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key in sorted(settings.keys() & group.keys() - {"params", "initial_lr"}):
            source = "initial_lr" if key == "lr" else key
            made, value = (as_number(of.get(source, of[key])) for of in (group, settings))
            if not is_same_value(made, value):
                report.append(f"optimizer {label!r}, group {index}: {key} {value!r} is taken, the script has {made!r}")
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
        saved_order = own if plan.order is None else [name for name in plan.order if name in set(own)]
        if saved_order != [name for name in own if name in set(saved_order)]:
            name, own_name = next(pair for pair in zip(saved_order, own, strict=False) if pair[0] != pair[1])
            raise ValueError(
                f"holds numbers in place of names, and the saved model has {name!r} where this one has {own_name!r}, so "
                "that it is not certain which is which: define the modules in the saved order"
            )
    _refuse_exchanged_groups(optimizer, saved)
    return [key for members in saved.members for key in members]


def _refuse_other_order(optimizer: Any, models: list[ModelPlan]) -> None:
    """Refuse a group with parameters of one shape in another order than the model has them, as they may have been saved."""
    places = {id(p): place for place, p in enumerate(p for plan in models for p in plan.model.parameters())}
    for group in optimizer.param_groups:
        latest: dict[Any, int] = {}  # by shape
        for parameter in group["params"]:
            place = places.get(id(parameter), -1)
            if place < latest.get(parameter.shape, -1):
                raise ValueError(
                    "holds numbers in place of names, and a group here has parameters of one shape in another order than "
                    "the model, so that it is not certain which is which: make the groups in the order of model.parameters()"
                )
            latest[parameter.shape] = place


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
    """Return copies of the entries of each parameter that has some."""
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
    if value.numel() != 1 and (not fits or _kind(value) != _kind(parameter)):
        raise ValueError(
            f"has {what}, as {value.dtype} of shape {list(value.shape)}, and the parameter here is {parameter.dtype} of "
            f"shape {list(parameter.shape)}: make the same groups of the same parameters in the same order"
        )
    value = value.detach().clone(memory_format=torch.preserve_format)
    return shard_like(value, parameter) if value.shape == parameter.shape else value


def _groups(optimizer: Any, saved: SavedOptimizer) -> list[dict[str, Any]]:
    """Return the groups with the saved settings, and numbers in order; how it computes stays as the script says."""
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
