"""Directories with the weights of a model under the names of Hugging Face's libraries, alone or with the state of a run.

They are those of ``save_pretrained``, of a checkpoint of Hugging Face's ``Trainer`` and of Accelerate's ``save_state``.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chainring._files import parse_strict
from chainring.serializers import _safetensors
from chainring.serializers.foreign.content import Entries, ForeignCheckpoint, count, is_entries, to_entries, to_optimizer
from chainring.serializers.foreign.files import is_regular_file, read_torch

_STATE = "trainer_state.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def read_hugging_face(directory: Path) -> ForeignCheckpoint | None:
    """Return what a directory of ``Trainer`` or ``save_pretrained`` holds; ``None`` if it is another."""
    names = {path.name for path in directory.iterdir()}
    if not names & {name + end for name in _WEIGHTS for end in ("", ".index.json")}:
        return None
    weights = _read_weights(directory)
    if weights is None:
        return None
    kind = "a checkpoint of Hugging Face's Trainer" if _STATE in names else "a model of save_pretrained"
    checkpoint = ForeignCheckpoint(kind, {"main": weights[0]}, is_ordered=weights[1])
    taken = {_STATE, "optimizer.pt", "scheduler.pt", "scaler.pt"}
    checkpoint.left = sorted(name for name in names - taken if not name.startswith(("model", "pytorch_model")))
    if _STATE not in names:
        return checkpoint
    if (path := find_inside(directory, "optimizer.pt")) is not None:
        checkpoint.optimizers = {"main": to_optimizer(read_torch(path), str(path))}
    if (path := find_inside(directory, "scheduler.pt")) is not None:
        checkpoint.schedulers = [read_torch(path)]
    if (path := find_inside(directory, "scaler.pt")) is not None:
        checkpoint.scaler = read_torch(path)
    state = _read_json(directory, _STATE) or {}
    checkpoint.iteration = count(state.get("global_step"), f"{directory / _STATE}: 'global_step'")
    epoch = state.get("epoch")
    if isinstance(epoch, (int, float)) and 0 <= epoch < 2**53:
        checkpoint.epoch = math.floor(epoch)
        checkpoint.fraction = epoch - checkpoint.epoch
    return checkpoint


def read_accelerate(directory: Path) -> ForeignCheckpoint | None:
    """Return what a directory of ``save_state`` holds; ``None`` if it is another."""
    names = {path.name for path in directory.iterdir()}
    if not names & {"optimizer.bin", "random_states_0.pkl"}:
        return None
    models: list[tuple[Entries, bool]] = []
    for name in _numbered("model"):
        if (weights := _read_weights(directory, name)) is None:
            break
        models.append(weights)
    if not models:
        raise ValueError(
            f"{directory} is a state of Accelerate without the weights of a model, such as FSDP and DeepSpeed write "
            "in directories of their own: save it with a full state dict, or load the directory of the model alone"
        )
    labels = ["main"] if len(models) == 1 else list(itertools.islice(_numbered("model"), len(models)))
    entries = {label: weights for label, (weights, _) in zip(labels, models, strict=True)}
    checkpoint = ForeignCheckpoint("a state of Accelerate", entries, is_ordered=all(ordered for _, ordered in models))
    states = _read_numbered(directory, "optimizer")
    labels = ["main"] if len(states) == 1 else list(states)
    checkpoint.optimizers = {
        label: to_optimizer(states[name], f"{directory / name}.bin") for label, name in zip(labels, states, strict=True)
    }
    checkpoint.schedulers = list(_read_numbered(directory, "scheduler").values())
    if (path := find_inside(directory, "scaler.pt")) is not None:
        checkpoint.scaler = read_torch(path)
    taken = ("model", "pytorch_model", "optimizer", "scheduler", "scaler")
    checkpoint.left = sorted(name for name in names if not name.startswith(taken))
    return checkpoint


def _numbered(name: str) -> Iterator[str]:
    """Yield the names of the files of one role, such as ``optimizer`` and ``optimizer_1``."""
    return (f"{name}_{index}" if index else name for index in itertools.count())


def _read_numbered(directory: Path, role: str) -> dict[str, Any]:
    """Return the contents of the files of one role by their names."""
    found: dict[str, Any] = {}
    for name in _numbered(role):
        if (path := find_inside(directory, f"{name}.bin")) is None:
            break
        found[name] = read_torch(path)
    return found


def find_inside(directory: Path, name: str) -> Path | None:
    """Return the path of a regular file of a directory, ``None`` if it has none of that name.

    A link may lead to another file of the directory, or to the ``blobs`` of Hugging Face's cache, which lie two above.
    """
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name or "\\" in name:
        raise ValueError(f"{directory} names the file {name!r:.80}, which is not in it: use another copy")
    path = directory / name
    if not os.path.lexists(path):
        return None
    root, real = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if real.parent not in (root, root.parent.parent / "blobs"):
        raise ValueError(f"{path} is a link to {real}, which is not in {directory}: copy the file there")
    if not is_regular_file(real):
        raise ValueError(f"{path} is not a regular file: use another copy")
    return real


def _read_json(directory: Path, name: str) -> dict[str, Any] | None:
    """Return the object of a file of JSON in a directory, ``None`` if it is not there."""
    path = find_inside(directory, name)
    if path is None:
        return None
    try:
        found = parse_strict(re.sub(rb"NaN|-?Infinity", b"null", path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found


def _read_weights(directory: Path, stem: str = "model") -> tuple[Entries, bool] | None:
    """Return parameters and buffers, and whether their order is that of the model; ``None`` if there are none."""
    for name, is_of_torch in ((f"{stem}.safetensors", False), (f"pytorch_{stem}.bin", True)):  # whose order is kept
        if (path := find_inside(directory, name)) is not None:
            return _read_entries(path, is_of_torch), is_of_torch
        index = _read_json(directory, f"{name}.index.json")
        if index is None:
            continue
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{directory} has an index without 'weight_map': it is damaged")
        files: dict[str, Entries] = {}
        for file in dict.fromkeys(weight_map.values()):
            path = find_inside(directory, file)
            if path is None:
                raise ValueError(f"{directory} lacks {file}, which its index names: copy it there")
            files[file] = _read_entries(path, is_of_torch)
        if missing := [key for key, file in weight_map.items() if key not in files[file]]:
            raise ValueError(
                f"{directory} is damaged: {missing[0]!r} is not in {weight_map[missing[0]]}, where its index says"
            )
        return {key: files[file][key] for key, file in weight_map.items()}, is_of_torch
    return None


def _read_entries(path: Path, is_of_torch: bool) -> Entries:
    content = read_torch(path) if is_of_torch else _safetensors.read(path)
    if is_of_torch and not is_entries(content):
        raise ValueError(f"{path} holds no state dict: it is damaged, or of another program")
    return to_entries(content, str(path))
