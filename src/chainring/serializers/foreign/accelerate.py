"""Directories of Accelerate's ``save_state``."""

from __future__ import annotations

from pathlib import Path

from chainring.serializers.foreign.archive import read_torch_file
from chainring.serializers.foreign.content import Entries, ForeignCheckpoint, to_optimizer
from chainring.serializers.foreign.weights import find_inside, read_weights


def read(directory: Path) -> ForeignCheckpoint | None:
    """Return what such a directory holds; ``None`` if it is another.

    Raises:
        ValueError: a file is damaged, missing, or elsewhere.
    """
    names = {path.name for path in directory.iterdir()}
    if not names & {"optimizer.bin", "random_states_0.pkl"}:
        return None
    models: list[Entries] = []
    is_ordered = True
    while (found := read_weights(directory, _numbered("model", len(models)))) is not None:
        models.append(found[0])
        is_ordered &= found[1]
    if not models:
        raise ValueError(
            f"{directory} is a state of Accelerate without the weights of a model, such as FSDP and DeepSpeed write "
            "in directories of their own: save it with a full state dict, or load the directory of the model alone"
        )
    labels = ["main"] if len(models) == 1 else [_numbered("model", index) for index in range(len(models))]
    checkpoint = ForeignCheckpoint("a state of Accelerate", dict(zip(labels, models, strict=True)), is_ordered=is_ordered)
    optimizers = _read_numbered(directory, "optimizer")
    labels = ["main"] if len(optimizers) == 1 else list(optimizers)
    states = [to_optimizer(state, f"{directory / name}.bin") for name, state in optimizers.items()]
    checkpoint.optimizers = dict(zip(labels, states, strict=True))
    checkpoint.schedulers = list(_read_numbered(directory, "scheduler").values())
    if (path := find_inside(directory, "scaler.pt")) is not None:
        checkpoint.scaler = read_torch_file(path)
    taken = ("model", "pytorch_model", "optimizer", "scheduler", "scaler")
    checkpoint.left = sorted(name for name in names if not name.startswith(taken))
    return checkpoint


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def _read_numbered(directory: Path, name: str) -> dict[str, object]:
    """Return by name the contents of the files of one role, such as ``optimizer.bin`` and ``optimizer_1.bin``."""
    found: dict[str, object] = {}
    while (path := find_inside(directory, f"{_numbered(name, len(found))}.bin")) is not None:
        found[_numbered(name, len(found))] = read_torch_file(path)
    return found
