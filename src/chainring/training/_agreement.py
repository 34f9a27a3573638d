"""The start of a run on several ranks: all of them train the same way, and write to the same place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from chainring._distributed.communicator import Communicator
from chainring._files import temporary_path
from chainring._naming import name_cleaner
from chainring._version import __version__
from chainring.training.triggers.base import describe_setting
from chainring.training.updaters.base import hyperparameters, parameter_names

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


def check_agreement(trainer: Trainer) -> None:
    """Refuse ranks whose settings differ, which would compute something else than one process does, or wait for ever.

    Raises:
        ValueError: a setting differs; the same error on every rank names the first.
    """
    comm = trainer.comm.world
    settings = {name: {key: repr(value) for key, value in part.items()} for name, part in _settings(trainer).items()}
    digests = comm.gather_object({name: _digest(part) for name, part in settings.items()})
    for name in settings:
        if any(digest.get(name) != digests[0].get(name) for digest in digests):
            _raise_first_difference(name, comm.gather_object(settings[name]))


def check_out(out: str, comm: Communicator) -> None:
    """Refuse an ``out`` that is not the same directory for all ranks, which a resumed run could not read.

    Raises:
        ValueError: a rank does not see what rank 0 has written there.
    """
    probe, comm = temporary_path(Path(out)), comm.world
    if comm.is_main:
        probe.touch(exist_ok=False)
    try:
        name = comm.broadcast_object(probe.name)
        is_seen = comm.gather_object(os.path.exists(Path(out) / name))
    finally:
        probe.unlink(missing_ok=True)
    blind = [rank for rank, seen in enumerate(is_seen) if not seen]
    if blind and is_seen[0]:
        raise ValueError(
            f"out is one directory for all ranks, from which each of them resumes, and {out!r} of rank {blind[0]} is not "
            "that of rank 0: give a path on storage that all machines share"
        )


def _settings(trainer: Trainer) -> dict[str, Mapping[str, Any]]:
    """Return what must be the same on all ranks, by what it belongs to."""
    updater = trainer.updater
    models = updater.get_all_models()
    names = parameter_names(models)
    return {
        "the version of": {"chainring": __version__, "PyTorch": torch.__version__, "NumPy": np.__version__},
        "the updater's": {
            "class": type(updater).__qualname__,
            **{name: getattr(updater, name, None) for name in ("accumulate", "precision", "accumulate_across_epochs")},
        },
        **{f"iterator {name!r}'s": _of_iterator(source) for name, source in updater.get_all_iterators().items()},
        **{f"model {name!r}'s": _of_model(model) for name, model in models.items()},
        **{f"optimizer {name!r}'s": _of_optimizer(each, names) for name, each in updater.get_all_optimizers().items()},
        "the trainer's": {
            "stop trigger": describe_setting(trainer.stop_trigger),
            "extensions": [entry.name for entry in trainer.entries],
        },
        **{
            f"extension {entry.name!r}'s": {
                "classes": entry.class_names,
                "trigger": describe_setting(entry.trigger),
                "priority": entry.priority,
            }
            for entry in trainer.entries
        },
    }


def _of_iterator(iterator: Any) -> dict[str, Any]:
    if getattr(iterator, "per_rank", False):  # each rank has data of its own
        return {"class": type(iterator).__qualname__}
    progress = getattr(iterator, "progress", None)
    values = {name: getattr(iterator, name, None) for name in ("batch_size", "repeat", "epoch_length")}
    length = progress[2] if isinstance(progress, tuple) and len(progress) == 3 else None
    return {"class": type(iterator).__qualname__, **values, "length of an epoch": length}


def _of_model(model: Any) -> dict[str, Any]:
    clean = name_cleaner(model)
    return {clean(name): (tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()}


def _of_optimizer(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"class": type(optimizer).__qualname__}
    for index, group in enumerate(hyperparameters(optimizer)):
        settings |= {f"{key} of group {index}": value for key, value in group.items()}
    for index, group in enumerate(optimizer.param_groups):
        settings[f"parameters of group {index}"] = [names.get(id(parameter)) for parameter in group["params"]]
    return settings


def _digest(settings: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


def _raise_first_difference(name: str, settings: list[Mapping[str, str]]) -> None:
    first = settings[0]
    for rank, other in enumerate(settings):
        for key in [*first, *other]:
            one, two = first.get(key, "absent"), other.get(key, "absent")
            if one != two:
                raise ValueError(
                    f"all ranks train the same way, and {name} {key} is {_shorten(one)} on rank 0 and {_shorten(two)} on "
                    f"rank {rank}; let every rank run the same script with the same settings (what is printed or written "
                    "by rank 0 alone needs no condition on the rank)"
                )


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
