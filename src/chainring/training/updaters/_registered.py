"""An updater whose iterators, models and optimizers have names."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from chainring.training.updaters import _arguments
from chainring.training.updaters.base import Updater


class Registered(Updater):
    """Finds iterators, models and optimizers by the names under which they were given."""

    _iterators: dict[str, Any]
    _models: dict[str, nn.Module]
    _optimizers: dict[str, Optimizer]

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
