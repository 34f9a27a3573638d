"""A file of ``torch.save``: the state dict of a model, or a dictionary of several, as scripts and tutorials write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring.serializers.foreign.content import (
    ForeignCheckpoint,
    count,
    is_entries,
    is_optimizer_state,
    to_entries,
    to_optimizer,
)

_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "net", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_SCALER = ("scaler", "grad_scaler", "scaler_state_dict")
_ITERATION = ("iteration", "global_step", "step", "iter", "iter_num", "num_updates")
_EPOCH = ("epoch", "epochs")


def read(path: Path, content: Any) -> ForeignCheckpoint | None:
    """Return what such a file holds; ``None`` if there is no model in it."""
    return from_dictionary("a file of torch.save", content, str(path))


def from_dictionary(kind: str, content: Any, where: str) -> ForeignCheckpoint | None:
    """Return what a state dict, or a dictionary of several, holds under the usual names; ``None`` if there is no model.

    Raises:
        ValueError: there are several models and none has a usual name, or a part has another form.
    """
    if is_entries(content):
        return ForeignCheckpoint(kind, {"main": to_entries(content, where)})
    if not isinstance(content, Mapping):
        return None
    models = {key: value for key, value in content.items() if is_entries(value)}
    found = next((key for key in _MODEL if key in models), None) or (next(iter(models)) if len(models) == 1 else None)
    if found is None:
        if models:
            raise ValueError(
                f"{where} has several models: {', '.join(map(str, models))}; load the one you mean with torch.load("
                "path, weights_only=True), and save it alone"
            )
        return None
    keys = {"model": found, "optimizer": _key(content, _OPTIMIZER, is_optimizer_state)}
    keys |= {"scheduler": _key(content, _SCHEDULER, _is_state), "scaler": _key(content, _SCALER, _is_scaler)}
    keys |= {"iteration": _key(content, _ITERATION, _is_number), "epoch": _key(content, _EPOCH, _is_number)}
    checkpoint = ForeignCheckpoint(kind, {"main": to_entries(content[found], where)})
    if (key := keys["optimizer"]) is not None:
        checkpoint.optimizers = {"main": to_optimizer(content[key], f"{where}: {key!r}")}
    if (key := keys["scheduler"]) is not None:
        checkpoint.schedulers = [content[key]]
    if (key := keys["scaler"]) is not None:
        checkpoint.scaler = content[key]
    checkpoint.iteration = count(content.get(keys["iteration"]), f"{where}: {keys['iteration']!r}")
    checkpoint.epoch = count(content.get(keys["epoch"]), f"{where}: {keys['epoch']!r}")
    checkpoint.left = [str(key) for key in content if key not in keys.values()]
    return checkpoint


def _key(content: Mapping[Any, Any], keys: tuple[str, ...], fits: Any) -> str | None:
    return next((key for key in keys if key in content and fits(content[key])), None)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and "last_epoch" in value


def _is_scaler(value: Any) -> bool:
    return isinstance(value, Mapping) and "scale" in value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
