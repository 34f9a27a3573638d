"""The training loop and its parts: trainer, updaters, extensions and triggers."""

from typing import TYPE_CHECKING

from chainring.training._entry import RollBack
from chainring.training._run import Interrupted
from chainring.training.extension import PRIORITY_EDITOR, PRIORITY_READER, PRIORITY_WRITER, Extension, make_extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_trigger
from chainring.training.updaters import (
    CorruptionError,
    ParallelUpdater,
    StandardUpdater,
    UpdateCallbacks,
    UpdateContext,
    Updater,
    clip_grad_norm,
    clip_grad_value,
)

__all__ = [
    "CorruptionError",
    "Extension",
    "Interrupted",
    "PRIORITY_EDITOR",
    "PRIORITY_READER",
    "PRIORITY_WRITER",
    "ParallelUpdater",
    "RollBack",
    "StandardUpdater",
    "Trainer",
    "UpdateCallbacks",
    "UpdateContext",
    "Updater",
    "clip_grad_norm",
    "clip_grad_value",
    "get_trigger",
    "make_extension",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from chainring._hints import find_missing

        return find_missing(__name__, name)
