"""Checkpoints of other libraries, each format read by a file of its own, and recognised by what is in it.

Nothing is unpickled but by torch's reader of weights alone, and the metadata in `distributed` by a reader of its own.
"""

from __future__ import annotations

from pathlib import Path

from chainring.serializers.foreign import accelerate, chainer, distributed, hugging_face, lightning, pfn_extras, torch_save
from chainring.serializers.foreign.archive import is_regular_file, is_torch_file, read_torch_file
from chainring.serializers.foreign.content import ForeignCheckpoint
from chainring.serializers.foreign.loading import ForeignPlan

__all__ = ["ForeignPlan", "read_foreign"]

_OF_DIRECTORIES = (distributed.read, accelerate.read, hugging_face.read)
_OF_TORCH_FILES = (lightning.read, pfn_extras.read, torch_save.read)


def read_foreign(path: Path) -> ForeignCheckpoint | None:
    """Return what another library has saved; ``None`` for what is not recognised.

    Raises:
        ValueError: it is damaged, or holds what is not read.
    """
    if path.is_dir():
        return next((found for read in _OF_DIRECTORIES if (found := read(path)) is not None), None)
    if not is_torch_file(path):
        return chainer.read(path) if is_regular_file(path) else None
    content = read_torch_file(path)
    return next((found for read in _OF_TORCH_FILES if (found := read(path, content)) is not None), None)
