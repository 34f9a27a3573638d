"""A snapshot of pytorch-pfn-extras, which is a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring.serializers.foreign.content import ForeignCheckpoint, count, is_entries, to_entries, to_optimizer

_ITERATION = "_start_iteration"
_TAKEN = {_ITERATION, "_start_execution", "models", "optimizers", "extensions", "ppe_version"}


def read(path: Path, content: Any) -> ForeignCheckpoint | None:
    """Return what it holds; ``None`` if it is of another library.

    Raises:
        ValueError: a part has another form.
    """
    if not isinstance(content, Mapping) or _ITERATION not in content or not isinstance(content.get("models"), Mapping):
        return None
    models, optimizers, extensions = (_mapping(path, content, key) for key in ("models", "optimizers", "extensions"))
    if not models or not all(map(is_entries, models.values())):
        raise ValueError(f"{path} has no models in 'models': it is damaged, or none was given to the manager")
    checkpoint = ForeignCheckpoint(
        "a snapshot of pytorch-pfn-extras", {str(name): to_entries(model, str(path)) for name, model in models.items()}
    )
    checkpoint.optimizers = {
        str(name): to_optimizer(state, f"{path}: optimizer {name!r}") for name, state in optimizers.items()
    }
    states = {name: _scheduler(saved) for name, saved in extensions.items()}
    checkpoint.schedulers = [state for state in states.values() if state is not None]
    checkpoint.iteration = count(content[_ITERATION], f"{path}: {_ITERATION!r}")
    checkpoint.left = [str(key) for key, value in content.items() if key not in _TAKEN and value]
    checkpoint.left += [f"extension {name}" for name, state in states.items() if state is None]
    return checkpoint


def _mapping(path: Path, content: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is damaged: {key!r} is a {type(value).__name__} and no dictionary")
    return value


def _scheduler(saved: Any) -> Any:
    extension = saved.get("extension") if isinstance(saved, Mapping) else None
    return extension.get("scheduler") if isinstance(extension, Mapping) else None
