"""The settings of a run by path: those that its record tells, and how two runs differ."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from chainring import _environment
from chainring._files import to_json
from chainring._naming import name_cleaner
from chainring._progress import Trainer
from chainring.training.triggers.base import describe

_RECORDED = ("argv", "git_commit", "device", "threads", "ranks", "config", "versions", "seeds", "optimizers", "models")
_DEEPEST = 20


_runs = itertools.count(1)  # of this process


class Change(NamedTuple):
    """A setting in which two runs, or two ranks, differ; ``None`` where one of them has none."""

    path: str
    value: Any
    other: Any


class Settings(dict[str, Any]):
    """Settings by path, such as ``config.lr``."""

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Settings:
        """Return those that the record of a run has, with those that a resume has changed."""
        settings = cls(leaf for name in _RECORDED for leaf in leaves(name, record.get(name)))
        plan, needed = record.get("plan"), record.get("reproduction")
        if isinstance(needed, dict):
            settings |= [leaf for name in ("distributions", "environment") for leaf in leaves(name, needed.get(name))]
        if isinstance(plan, dict):
            settings["plan.stop_trigger"] = plan.get("stop_trigger")
            entries = plan.get("extensions")
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict):
                    text = f"{entry.get('class')} with {entry.get('trigger')}, priority {entry.get('priority')}"
                    settings[f"plan.{entry.get('name')}"] = text
        for command in record.get("commands", ()):
            if "refused" not in command:
                settings.setdefault(f"commanded after iteration {command['iteration']}", []).append(command["command"])
        for start in record.get("starts", ()):
            changed = start.get("changed")
            for name, values in changed.items() if isinstance(changed, dict) else ():
                settings[f"{name}, changed at iteration {start.get('iteration')}"] = values
        return settings

    def differences(self, other: Mapping[str, Any]) -> list[Change]:
        """Return the settings in which another run differs."""
        pairs = (Change(path, self.get(path), other.get(path)) for path in dict.fromkeys([*self, *other]))
        return [pair for pair in pairs if pair.value != pair.other]


def leaves(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested containers by their paths; a list of plain values is one value."""
    if isinstance(value, dict) and value and depth < _DEEPEST:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}", item, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from leaves(f"{path}[{index}]", item, depth + 1)
    elif value != {}:
        yield path, value


def to_record(trainer: Trainer) -> dict[str, Any]:
    """Return the settings for the record of a run, as JSON values; `Settings.recorded` reads them."""
    from chainring.training._provenance import provenance, withhold  # which nothing needs before a run

    updater, code = trainer.updater, provenance()
    iterators, device = updater.get_all_iterators(), getattr(updater, "device", None)
    seeds = {name: iterator.seed for name, iterator in iterators.items() if hasattr(iterator, "seed")}
    models = {}
    for name, model in updater.get_all_models().items():
        clean = name_cleaner(model)
        parameters = {clean(path).replace(".", "/"): parameter for path, parameter in model.named_parameters()}
        lazy = "not known before the first update"
        shapes = {path: lazy if is_lazy(p) else "x".join(map(str, p.shape)) or "scalar" for path, p in parameters.items()}
        frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
        models[name] = {"class": type(model).__name__, "parameters": shapes, "frozen": frozen}
    extensions = [
        {
            "name": entry.name,
            "class": type(entry.extension).__name__,
            "priority": entry.priority,
            "trigger": describe(entry.trigger),
            "before_training": entry.invoke_before_training,
            "observes": entry.observe is not None,
        }
        for entry in sorted(trainer.entries, key=lambda entry: entry.is_snapshot)  # in the order in which they run
    ]
    machine = {
        "device": _environment.device_name(device if isinstance(device, torch.device) else None),
        "threads": torch.get_num_threads(),
        "ranks": trainer.comm.world.size,
    }
    mixtures = {name: each.sources.names for name, each in iterators.items() if hasattr(each, "change_weights")}
    return {
        **({"mixtures": mixtures} if mixtures else {}),
        **withhold(json.dumps({"config": as_json(trainer.config), "argv": sys.argv})),
        "git_commit": code["source"]["commit"],
        "versions": _environment.versions(),
        **machine,
        "seeds": as_json({"torch": torch.initial_seed(), "iterators": seeds}),
        "optimizers": as_json(getattr(updater, "constructed", {})),
        "models": models,
        "plan": {"stop_trigger": describe(trainer.stop_trigger), "extensions": extensions},
        "reproduction": {
            **code,
            "python": _environment.versions()["python"],
            **machine,
            "virtual_ranks": as_json(getattr(updater, "virtual_ranks", None)),
            "run": next(_runs),
        },
    }


def as_json(value: Any) -> Any:
    """Return a value as JSON has it, or as a text that is the same in every process if JSON has no such type."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=repr)
    if hasattr(value, "__qualname__"):  # the text of a class or a function has its address, which is new each time
        return ".".join(filter(None, (value.__module__, value.__qualname__)))
    return json.loads(json.dumps(to_json(value), default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other))))
