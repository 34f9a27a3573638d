"""``run.json``: with what settings a run was made, and when it was started and resumed."""

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

NAME = "run.json"
FORMAT = 1


def read(directory: Path) -> dict[str, Any]:
    """What a run in this directory has recorded; empty where there is no record that can be read."""
    path = directory / NAME
    try:
        return parsed(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is passed over and written anew: {error}", stacklevel=2)
        return {}


def parsed(path: Path) -> dict[str, Any]:
    """The record in this file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not what `write` writes.
    """
    try:
        return _checked(json.loads(path.read_bytes()))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _checked(record: Any) -> dict[str, Any]:
    """The record, if its parts are of the types in which they are written: a person may have edited it."""
    kinds = {"config": dict, "versions": dict, "files": list, "starts": list}
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is no record of format {FORMAT}")
    if wrong := [part for part, kind in kinds.items() if not isinstance(record.get(part), kind)]:
        raise ValueError(f"these parts of it are not what was written: {wrong}")
    return record


def write(trainer: Trainer, earlier: Mapping[str, Any], files: Iterable[str], changes: Mapping[str, list[Any]]) -> None:
    """Records this start after those of ``earlier``, the record of the run that is continued, and prints what has changed.

    Args:
        trainer: the trainer.
        earlier: what `read` returned, empty for a run that starts anew.
        files: templates of the names of all that this run and the starts before it write.
        changes: settings that differ from those in the loaded state: by name, the old value and the new.
    """
    settings = settings_of(trainer)
    changed = _changes(earlier, settings) if earlier else {}
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "iteration": trainer.updater.iteration,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": settings["argv"],
        "changed": {**changed, **_plain(changes)},  # by name, the old value and the new
    }
    starts = [*earlier.get("starts", ()), start]
    shown = {"models": _models(trainer), "plan": plan_of(trainer)}
    record = {"format": FORMAT, **settings, **shown, "files": sorted(files), "starts": starts}
    with atomic_write(Path(trainer.out) / NAME) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The settings that the results depend on, as plain JSON values."""
    iterators = trainer.updater.get_all_iterators()
    seeds = {name: iterator.seed for name, iterator in iterators.items() if hasattr(iterator, "seed")}
    return {
        "config": _plain(trainer.config),
        "argv": list(sys.argv),
        "git_commit": _environment.git_commit(),
        "versions": _environment.versions(),
        "device": _environment.device_name(),
        "threads": torch.get_num_threads(),
        "seeds": _plain({"torch": torch.initial_seed(), "iterators": seeds}),
        "optimizers": _plain(getattr(trainer.updater, "constructed", {})),
    }


def _models(trainer: Trainer) -> dict[str, Any]:
    """Of each model its class, the shape of each parameter, such as ``"50x64"``, and which of them need no gradient."""
    found = {}
    for name, model in trainer.updater.get_all_models().items():
        clean = name_cleaner(model)
        parameters = {clean(path).replace(".", "/"): each for path, each in model.named_parameters()}
        shapes = {path: _shape(parameter) for path, parameter in parameters.items()}
        frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
        found[name] = {"class": type(model).__name__, "parameters": shapes, "frozen": frozen}
    return found


def _shape(parameter: torch.nn.Parameter) -> str:
    if torch.nn.parameter.is_lazy(parameter):
        return "not known before the first update"
    return "x".join(map(str, parameter.shape)) or "scalar"


def _changes(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What this start has otherwise than the one before, as pairs of old and new by name; each is printed."""
    changed = {}
    inexact = "the run goes on, and may differ in the last bits"
    for part, label, consequence in (("config", "config", "the new value holds"), ("versions", "version of", inexact)):
        before, now = earlier.get(part, {}), settings[part]
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                changed[f"{part}.{key}"] = [before.get(key), now.get(key)]
                announce_change(f"{label} {key}", before.get(key), now.get(key), consequence)
    for part, consequence in (("git_commit", "the code of now runs"), ("device", inexact), ("threads", inexact)):
        if earlier.get(part) != settings[part]:
            changed[part] = [earlier.get(part), settings[part]]
            announce_change(part, earlier.get(part), settings[part], consequence)
    return changed


def _plain(value: Any) -> Any:
    """As JSON has it; what it has no word for is recorded as a text that is the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, type) or hasattr(
        value, "__qualname__"
    ):  # a class or a function: its address would be new each time
        return ".".join(filter(None, (value.__module__, value.__qualname__)))
    return json.loads(json.dumps(to_json(value), default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other))))
