"""``run.json``: the settings of a run, and when it was started and resumed."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chainring import _environment
from chainring._files import atomic_write
from chainring._json import to_json
from chainring._messages import announce_change
from chainring._naming import name_cleaner
from chainring.training._plan import plan_of

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

FILENAME = "run.json"
_FORMAT = 1
_TYPES = {"config": dict, "versions": dict, "files": list, "starts": list}


def read(directory: Path) -> dict[str, Any]:
    """Return the record of the run in this directory; empty if there is none that can be read."""
    path = directory / FILENAME
    try:
        return parse(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is passed over and written anew: {error}", stacklevel=2)
        return {}


def parse(path: Path) -> dict[str, Any]:
    """Return the record in this file, which a person may have edited.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a record that `write` has written.
    """
    try:
        record = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"it is not a record of format {_FORMAT}")
    if wrong := [key for key, cls in _TYPES.items() if not isinstance(record.get(key), cls)]:
        raise ValueError(f"these entries are not of the type that was written: {wrong}")
    return record


def write(trainer: Trainer, earlier: Mapping[str, Any], files: Iterable[str], changes: Mapping[str, list[Any]]) -> None:
    """Record this start after those of ``earlier``, the record of the run that is continued, and print what has changed.

    Args:
        trainer: the trainer.
        earlier: the record of the run that is continued; empty for a run that starts anew.
        files: templates of the names of all that this run and the starts before it write.
        changes: settings that differ from those in the loaded state: by name, the old value and the new.
    """
    settings = _settings_of(trainer)
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "iteration": trainer.updater.iteration,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": settings["argv"],
        "changed": {**(_announce_changes(earlier, settings) if earlier else {}), **_to_record(changes)},
    }
    record = {
        "format": _FORMAT,
        **settings,
        "models": {name: _describe(model) for name, model in trainer.updater.get_all_models().items()},
        "plan": plan_of(trainer),
        "files": sorted(files),
        "starts": [*earlier.get("starts", ()), start],
    }
    with atomic_write(Path(trainer.out) / FILENAME) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def _settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that the results depend on, as JSON values."""
    iterators = trainer.updater.get_all_iterators()
    seeds = {name: iterator.seed for name, iterator in iterators.items() if hasattr(iterator, "seed")}
    return {
        "config": _to_record(trainer.config),
        "argv": list(sys.argv),
        "git_commit": _environment.git_commit(),
        "versions": _environment.versions(),
        "device": _environment.device_name(),
        "threads": torch.get_num_threads(),
        "seeds": _to_record({"torch": torch.initial_seed(), "iterators": seeds}),
        "optimizers": _to_record(getattr(trainer.updater, "constructed", {})),
    }


def _announce_changes(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that differ from those of the start before: by name, the old value and the new; print each."""
    inexact = "the run goes on, and may differ in the last bits"
    changes = {}

    def compare(key: str, name: str, old: Any, new: Any, consequence: str) -> None:
        if old != new:
            changes[key] = [old, new]
            announce_change(name, old, new, consequence)

    for group, label, consequence in (("config", "config", "the new value holds"), ("versions", "version of", inexact)):
        old, new = earlier.get(group, {}), settings[group]
        for key in sorted(old.keys() | new.keys()):
            compare(f"{group}.{key}", f"{label} {key}", old.get(key), new.get(key), consequence)
    for key, consequence in (("git_commit", "the code of now runs"), ("device", inexact), ("threads", inexact)):
        compare(key, key, earlier.get(key), settings[key], consequence)
    return changes


def _describe(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's class, the shape of each parameter, such as ``"50x64"``, and which of them need no gradient."""
    clean = name_cleaner(model)
    parameters = {clean(name).replace(".", "/"): parameter for name, parameter in model.named_parameters()}
    shapes = {path: _shape(parameter) for path, parameter in parameters.items()}
    frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
    return {"class": type(model).__name__, "parameters": shapes, "frozen": frozen}


def _shape(parameter: torch.nn.Parameter) -> str:
    if torch.nn.parameter.is_lazy(parameter):
        return "not known before the first update"
    return "x".join(map(str, parameter.shape)) or "scalar"


def _to_record(value: Any) -> Any:
    """Return a value as JSON has it; any other as a text that is the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): _to_record(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_record(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_to_record(item) for item in value), key=repr)
    if hasattr(value, "__qualname__"):  # the text of a class or a function has its address, which is new each time
        return ".".join(filter(None, (value.__module__, value.__qualname__)))
    return json.loads(json.dumps(to_json(value), default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other))))
