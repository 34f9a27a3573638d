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

from chainring import environment
from chainring.files import replace
from chainring.notices import changed_setting
from chainring.plain import plain

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

NAME = "run.json"
FORMAT = 1


def read(directory: Path) -> dict[str, Any]:
    """What a run in this directory has recorded; empty where there is no record that can be read."""
    path = directory / NAME
    try:
        return _checked(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} is passed over and written anew: {error}", stacklevel=2)
        return {}


def _checked(record: Any) -> dict[str, Any]:
    """The record, if its parts are of the types in which they are written: a person may have edited it."""
    kinds = {"config": dict, "versions": dict, "files": list, "starts": list}
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is no record of format {FORMAT}")
    if wrong := [part for part, kind in kinds.items() if not isinstance(record.get(part), kind)]:
        raise ValueError(f"these parts of it are not what was written: {wrong}")
    return record


def write(trainer: Trainer, earlier: Mapping[str, Any], files: Iterable[str]) -> None:
    """Records this start after those of ``earlier``, the record of the run that is continued, and prints what has changed.

    Args:
        trainer: the trainer.
        earlier: what `read` returned, empty for a run that starts anew.
        files: templates of the names of all that this run and the starts before it write.
    """
    settings = settings_of(trainer)
    changed = _changes(earlier, settings) if earlier else {}
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "iteration": trainer.updater.iteration,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": settings["argv"],
        "changed": changed,  # by name, the old value and the new
    }
    starts = [*earlier.get("starts", ()), start]
    record = {"format": FORMAT, **settings, "files": sorted(files), "starts": starts}
    replace(Path(trainer.out) / NAME, (json.dumps(record, indent=1) + "\n").encode())


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The settings that the results depend on, as plain JSON values."""
    iterators = trainer.updater.get_all_iterators()
    seeds = {name: iterator.seed for name, iterator in iterators.items() if hasattr(iterator, "seed")}
    return {
        "config": _plain(trainer.config),
        "argv": list(sys.argv),
        "git_commit": environment.git_commit(),
        "versions": environment.versions(),
        "device": environment.device(),
        "threads": torch.get_num_threads(),
        "seeds": _plain({"torch": torch.initial_seed(), "iterators": seeds}),
    }


def _changes(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What this start has otherwise than the one before, as pairs of old and new by name; each is printed."""
    changed = {}
    inexact = "the run goes on, and may differ in the last bits"
    for part, label, consequence in (("config", "config", "the new value holds"), ("versions", "version of", inexact)):
        before, now = earlier.get(part, {}), settings[part]
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                changed[f"{part}.{key}"] = [before.get(key), now.get(key)]
                changed_setting(f"{label} {key}", before.get(key), now.get(key), consequence)
    for part, consequence in (("git_commit", "the code of now runs"), ("device", inexact), ("threads", inexact)):
        if earlier.get(part) != settings[part]:
            changed[part] = [earlier.get(part), settings[part]]
            changed_setting(part, earlier.get(part), settings[part], consequence)
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
    return json.loads(json.dumps(plain(value), default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other))))
