"""Directories of Hugging Face's ``Trainer``, and of ``save_pretrained``."""

from __future__ import annotations

import math
from pathlib import Path

from chainring.serializers.foreign.archive import read_torch_file
from chainring.serializers.foreign.content import ForeignCheckpoint, count, to_optimizer
from chainring.serializers.foreign.weights import find_inside, read_json, read_weights

_STATE = "trainer_state.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TAKEN = {_STATE, "optimizer.pt", "scheduler.pt", "scaler.pt"}


def read(directory: Path) -> ForeignCheckpoint | None:
    """Return what such a directory holds; ``None`` if it is another.

    Raises:
        ValueError: a file is damaged, missing, or elsewhere.
    """
    names = {path.name for path in directory.iterdir()}
    is_trainer = _STATE in names
    if not names & {name + end for name in _WEIGHTS for end in ("", ".index.json")}:
        return None
    weights = read_weights(directory)
    if weights is None:
        return None
    kind = "a checkpoint of Hugging Face's Trainer" if is_trainer else "a model of save_pretrained"
    checkpoint = ForeignCheckpoint(kind, {"main": weights[0]}, is_ordered=weights[1])
    checkpoint.left = sorted(
        name for name in names if name not in _TAKEN and not name.startswith(("model", "pytorch_model"))
    )
    if is_trainer:
        _add_run(directory, checkpoint)
    return checkpoint


def _add_run(directory: Path, checkpoint: ForeignCheckpoint) -> None:
    """Add what the directory of a run has beside the model."""
    if (path := find_inside(directory, "optimizer.pt")) is not None:
        checkpoint.optimizers = {"main": to_optimizer(read_torch_file(path), str(path))}
    if (path := find_inside(directory, "scheduler.pt")) is not None:
        checkpoint.schedulers = [read_torch_file(path)]
    if (path := find_inside(directory, "scaler.pt")) is not None:
        checkpoint.scaler = read_torch_file(path)
    state = read_json(directory, _STATE) or {}
    checkpoint.iteration = count(state.get("global_step"), f"{directory / _STATE}: 'global_step'")
    epoch = state.get("epoch")
    if isinstance(epoch, (int, float)) and 0 <= epoch < 2**53:
        checkpoint.epoch = math.floor(epoch)
        checkpoint.fraction = epoch - checkpoint.epoch
