"""A checkpoint of a Lightning ``Trainer``, which is a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring.serializers.foreign.content import ForeignCheckpoint, count, is_entries, to_entries, to_optimizer

_VERSION = "pytorch-lightning_version"
_SCALER = "MixedPrecision"
_TAKEN = {"state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops", _VERSION}


def read(path: Path, content: Any) -> ForeignCheckpoint | None:
    """Return what it holds; ``None`` if it is of another library.

    Raises:
        ValueError: a part has another form.
    """
    if not isinstance(content, Mapping) or _VERSION not in content or not is_entries(content.get("state_dict")):
        return None
    checkpoint = ForeignCheckpoint("a Lightning checkpoint", {"main": to_entries(content["state_dict"], str(path))})
    optimizers = _listed(path, content, "optimizer_states")
    names = ["main"] if len(optimizers) == 1 else [str(index) for index in range(len(optimizers))]
    checkpoint.optimizers = {
        name: to_optimizer(state, f"{path}: 'optimizer_states'") for name, state in zip(names, optimizers, strict=True)
    }
    checkpoint.schedulers = _listed(path, content, "lr_schedulers")
    scaler = content.get(_SCALER)
    checkpoint.scaler = scaler if isinstance(scaler, Mapping) and "scale" in scaler else None
    checkpoint.iteration = count(content.get("global_step"), f"{path}: 'global_step'")
    checkpoint.epoch, checkpoint.batches = _place(path, content)
    checkpoint.left = [str(key) for key in content if key not in _TAKEN and (key != _SCALER or checkpoint.scaler is None)]
    return checkpoint


def _listed(path: Path, content: Mapping[Any, Any], key: str) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{path} is damaged: {key!r} is a {type(value).__name__} and no list")
    return value


def _place(path: Path, content: Mapping[Any, Any]) -> tuple[int | None, int | None]:
    """Return the epochs done and the batches of the next.

    Lightning counts a batch as processed when its update is done, and an epoch as ready when it begins.
    """
    try:
        loop = content["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        begun = count(loop["epoch_progress"]["current"]["ready"], f"{path}: epochs")
        processed = count(batches["current"]["processed"], f"{path}: batches")
        is_last = batches["is_last_batch"]
    except (KeyError, TypeError):  # of versions that saved no loops
        return count(content.get("epoch"), f"{path}: 'epoch'"), None
    if not begun or is_last:
        return begun, 0
    return begun - 1, processed
