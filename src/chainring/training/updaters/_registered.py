"""An updater whose iterators, models and optimizers have names."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from chainring.training.updaters import _arguments
from chainring.training.updaters.base import Updater

NO_EPOCHS = SimpleNamespace(epoch_detail=0.0)
"""Stands for the main iterator of an updater that has none."""


class Registered(Updater):
    """Finds iterators, models and optimizers by the names under which they were given."""

    _iterators: dict[str, Any]
    _models: dict[str, nn.Module]
    _optimizers: dict[str, Optimizer]

    _clock: Any
    """What counts the epochs: the main iterator, or `NO_EPOCHS`."""

    # Asked by every epoch trigger in every iteration, so without a Python frame.
    epoch_detail = property(attrgetter("_clock.epoch_detail"))

    @property
    def counts_epochs(self) -> bool:
        has_own = type(self).epoch_detail is not Registered.epoch_detail or type(self).epoch is not Updater.epoch
        return has_own or self._clock is not NO_EPOCHS

    def get_iterator(self, name: str) -> Any:
        if name in self._iterators:  # asked by every epoch trigger every iteration
            return self._iterators[name]
        return _arguments.look_up(self._iterators, name, "iterator")

    def get_all_iterators(self) -> dict[str, Any]:
        return dict(self._iterators)

    def get_model(self, name: str) -> nn.Module:
        return _arguments.look_up(self._models, name, "model")  # type: ignore[no-any-return]

    def get_all_models(self) -> dict[str, nn.Module]:
        return dict(self._models)

    def get_optimizer(self, name: str) -> Optimizer:
        return _arguments.look_up(self._optimizers, name, "optimizer")  # type: ignore[no-any-return]

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        return dict(self._optimizers)
