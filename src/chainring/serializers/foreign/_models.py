"""Parameters and buffers of another library's checkpoint, matched with those of a model by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._distributed.sharding import is_sharded, shard_like
from chainring._naming import name_cleaner
from chainring.serializers._values import find_aliases
from chainring.serializers.foreign.content import Entries
from chainring.serializers.protocol import load_entries, own_states, state_entries

_SHOWN = 5


@dataclass
class ModelPlan:
    """What will be loaded into a model, which fits.

    Attributes:
        name: of the model in the updater.
        names: from the name of an entry in the checkpoint to that in the model, without prefixes of wrappers.
        order: the names in the order of the checkpoint, ``None`` where that does not tell the order of the parameters.
        report: in words, what is loaded.
    """

    name: str
    model: nn.Module
    entries: Mapping[str, Any]
    strict: bool
    names: dict[str, str]
    order: list[str] | None
    report: list[str]

    def apply(self) -> None:
        """Load it."""
        load_entries(self.model, self.entries, self.strict)


def plan_model(
    path: Path, label: str, model: nn.Module, saved: Entries, prefix: str, is_ordered: bool, strict: bool
) -> ModelPlan:
    """Return what of a state dict belongs to a model, below ``prefix`` or wherever all names of the model are found.

    Raises:
        ValueError: nothing has that prefix.
        RuntimeError: entries are missing or unexpected, or of another shape or kind of numbers.
    """
    own, clean = state_entries(model), name_cleaner(model)
    live = {clean(name): name for name in own}
    values = {clean(name): value for name, value in own.items()}
    tied = _tied(model, own, clean)
    below = {name: name for name in saved}
    if prefix:
        below = {name: name.removeprefix(f"{prefix}.") for name in saved if name.startswith(f"{prefix}.")}
        if not below:
            raise ValueError(f"{path} has nothing under {prefix!r}; it has {_shown(saved)}")
    names, words = _match(below, list(live), tied)
    found = {own_name: saved[name] for name, own_name in names.items()}
    for name in live.keys() - found.keys():  # a tied one is written under one of its names
        written = next((alias for alias in tied.get(name, ()) if alias in found), None)
        if written is not None:
            found[name] = found[written]
    missing, unexpected = [n for n in live if n not in found], [n for n in found if n not in live]
    wrong = [f"missing: {_shown(missing)}"] if missing and strict else []
    wrong += [f"unexpected: {_shown(unexpected)}"] if unexpected and strict else []
    for name, value in values.items():
        if name in found and (reason := _misfit(found[name], value)):
            wrong.append(f"{name}: {reason}")
    if wrong:
        raise RuntimeError(
            f"{path} does not fit the {type(model).__name__}: {'; '.join(wrong[:10])}. Make the model that was saved, "
            "or name a part of the checkpoint by path_in_snapshot"
            + (", or pass strict=False" if missing or unexpected else "")
        )
    report = [f"model {label!r}: {len(found.keys() & live.keys())} of {len(live)} parameters and buffers{words}"]
    if aside := [name for name in saved if name not in names]:
        report.append(f"not loaded: {_shown(aside)}")
    if missing:
        report.append(f"missing: {_shown(missing)}")
    if unexpected:
        report.append(f"not loaded: {_shown(unexpected)}")
    pairs = [(found[name], value) for name, value in values.items() if isinstance(found.get(name), Tensor)]
    if less := {f"{a.dtype} to {b.dtype}" for a, b in pairs if isinstance(b, Tensor) and b.itemsize < a.itemsize}:
        report.append(f"rounded: {', '.join(sorted(less)).replace('torch.', '')}")
    if classes := {type(module).__name__ for _, module in own_states(model)}:
        report.append(f"missing: the state that serialize of {', '.join(sorted(classes))} declares")
    entries = {live[name]: shard_like(found[name], value) for name, value in values.items() if name in found}
    order = list(names.values()) if is_ordered else None
    return ModelPlan(label, model, entries, strict and not missing, names, order, report)


def _tied(model: nn.Module, own: Mapping[str, Any], clean: Any) -> dict[str, list[str]]:
    """Return for each entry that is one tensor under several names the other names.

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
    return {
        name: [other for other in group if other != name] for group in groups.values() for name in group if len(group) > 1
    }


def _match(saved: Mapping[str, str], own: list[str], tied: Mapping[str, list[str]]) -> tuple[dict[str, str], str]:
    """Return from name in the file to name in the model, and in words which prefix one of them has more.

    A prefix is assumed only where with it every entry of the model is found, and without it not.
    """
    own_set = set(own)

    def is_complete(found: Iterable[str]) -> bool:
        there = set(found)
        return all(name in there or any(other in there for other in tied.get(name, ())) for name in own)

    if is_complete(saved.values()) or not own or not saved:
        return dict(saved), ""
    first = next(iter(saved.values()))
    more = {name.removesuffix(own[0]) for name in saved.values() if name.endswith(f".{own[0]}")}
    for prefix in sorted(more):
        below = {name: given.removeprefix(prefix) for name, given in saved.items() if given.startswith(prefix)}
        if is_complete(below.values()):
            return below, f", which stand below {prefix[:-1]!r} there"
    for prefix in sorted(name.removesuffix(first) for name in own_set if name.endswith(f".{first}")):
        below = {name: prefix + given for name, given in saved.items()}
        if is_complete(below.values()):
            return below, f", which stand below {prefix[:-1]!r} here"
    return dict(saved), ""


def _misfit(saved: Any, own: Any) -> str | None:
    """Return in words why a saved entry cannot become that of the model."""
    if not isinstance(own, Tensor):
        return None
    if not isinstance(saved, Tensor):
        return f"a {type(saved).__name__} there, and a tensor here"
    if is_lazy(own):
        return None
    if saved.shape != own.shape:
        return f"shape {list(saved.shape)} there, {list(own.shape)} here"
    if kind_of(saved) != kind_of(own):
        return f"{saved.dtype} there, {own.dtype} here"
    return None


def kind_of(tensor: Tensor) -> str:
    """Return the kind of numbers of a tensor, within which they are converted and lose digits at most."""
    if tensor.is_floating_point() or tensor.is_complex():
        return "complex" if tensor.is_complex() else "float"
    return str(tensor.dtype) if str(tensor.dtype) == "torch.bool" else "integer"


def _shown(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
