"""Checkpoints of other libraries, each format recognised by what is in it; `plan_loading` is the door to all of them.

Nothing is unpickled but by torch's reader of weights alone, and the metadata in `distributed` by a reader of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chainring.serializers.foreign import chainer, directories, distributed, torch_files
from chainring.serializers.foreign.loading import ForeignPlan

__all__ = ["ForeignPlan", "plan_loading"]

_OF_DIRECTORIES = (distributed.read, directories.read_accelerate, directories.read_hugging_face)


def plan_loading(path: Path, obj: Any, path_in_snapshot: str, strict: bool) -> ForeignPlan | None:
    """Return how what another library has saved is loaded into an object; ``None`` for what is not recognised.

    Raises:
        TypeError: the object is neither a model nor a trainer.
        ValueError, RuntimeError: it is damaged, holds what is not read, or does not fit.
    """
    if path.is_dir():
        found = next((found for read in _OF_DIRECTORIES if (found := read(path)) is not None), None)
    elif torch_files.is_torch_file(path):
        found = torch_files.read(path)
    else:
        found = chainer.read(path) if torch_files.is_regular_file(path) else None
    return None if found is None else ForeignPlan(path, found, obj, path_in_snapshot, strict)
