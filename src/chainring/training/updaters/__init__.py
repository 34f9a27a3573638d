"""Updaters: one update of the parameters, from a batch to the step of the optimizers."""

from chainring.training.updaters._audit import CorruptionError
from chainring.training.updaters.base import Updater
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, clip_grad_norm, clip_grad_value
from chainring.training.updaters.parallel import ParallelUpdater
from chainring.training.updaters.standard import StandardUpdater

__all__ = [
    "CorruptionError",
    "ParallelUpdater",
    "StandardUpdater",
    "UpdateCallbacks",
    "UpdateContext",
    "Updater",
    "clip_grad_norm",
    "clip_grad_value",
]
