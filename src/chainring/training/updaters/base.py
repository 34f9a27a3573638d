"""Updater: one update of the parameters, the objects that it works with, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring._progress import Trainer, raise_unless_end
from chainring.iterators.base import find_main_iterator
from chainring.serializers._models import (
    Flags,
    Layouts,
    OptimizerState,
    buffer_layouts,
    group_names,
    serialize_layouts,
    trains_other_weights,
)
from chainring.serializers.protocol import AbstractSerializer, Stateful, parameter_names, unwrap


class _FromIterator:
    """An attribute of the main iterator. A subclass or an object may set its own, as for any attribute."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, updater: Updater | None, owner: type) -> Any:
        if updater is None:
            return self
        try:
            return getattr(updater.get_iterator("main"), self._name)
        except (KeyError, AttributeError, NotImplementedError):
            return self._default


class Updater(Stateful):
    """Base class of updaters: runs one update of the parameters, and owns the iterators, models and optimizers.

    A subclass defines ``update_core()``, and ``get_iterator``, ``get_model`` and ``get_optimizer`` if it has such
    objects. It need not call ``super().__init__()``. Epochs are counted by ``get_iterator("main")``; without a main
    iterator they stay at 0.

    Attributes:
        iteration: the number of completed updates.
        epoch: the number of completed epochs.
        epoch_detail: the number of epochs, including the fraction of the current one.
        previous_epoch_detail: ``epoch_detail`` before the last update; ``None`` before the first.
        is_new_epoch: True if the last update reached the end of an epoch.
        comm: the communicator of the ranks that train together; by default a world of one.
        constructed: the hyperparameters of each optimizer by name, as the script set them at construction.
        weight: the weight of the last update in a mean over updates, such as its number of examples.
        reported_weights: the weights of values by key that the last update has reported of another batch than its last one.

    Example::

        class Search(Updater):
            def update_core(self):
                self.point = improve(self.point)
    """

    iteration: int = 0
    comm: Communicator = Communicator()
    weight: Any = 1
    reported_weights: Mapping[str, Any] = MappingProxyType({})
    constructed: Mapping[str, list[Any]] = MappingProxyType({})
    _layouts: Mapping[str, Layouts] = MappingProxyType({})  # of each model's buffers, as the script had made them
    _flags: Mapping[str, Flags] = MappingProxyType({})  # of each model, as the script had set them
    _groups: Mapping[str, list[list[str]]] = MappingProxyType({})  # of each optimizer, the names of its parameters
    epoch: int = _FromIterator(0)  # type: ignore[assignment]
    epoch_detail: float = _FromIterator(0.0)  # type: ignore[assignment]
    previous_epoch_detail: float | None = _FromIterator(None)  # type: ignore[assignment]
    is_new_epoch: bool = _FromIterator(False)  # type: ignore[assignment]

    @property
    def counts_epochs(self) -> bool:
        """True if the updater has a main iterator, or counts epochs itself."""
        overridden = any(
            name in vars(self) or getattr(type(self), name) is not getattr(Updater, name)
            for name in ("epoch", "epoch_detail")
        )
        return overridden or find_main_iterator(self) is not None

    def connect_trainer(self, trainer: Trainer) -> None:
        """Prepare for a trainer; called at the end of the trainer's constructor.

        This records how the script has set up the parameter groups, buffers, frozen parameters and training modes, so
        that later changes to them, for example by ``add_param_group``, are saved and restored on resume.
        """
        models = {name: model for name, model in self.get_all_models().items() if isinstance(model, nn.Module)}
        optimizers = self.get_all_optimizers()
        names = parameter_names(models)
        self._layouts = {name: buffer_layouts(unwrap(model)) for name, model in models.items()}
        self._flags = {name: Flags(unwrap(model), self.iteration) for name, model in models.items()}
        self._groups = {
            name: group_names(optimizers[name], names) for name in optimizers if hasattr(optimizers[name], "param_groups")
        }

    def start(self) -> None:
        """Prepare for a run; called when it starts, after the state of a resumed run was restored."""
        for name, model in self.get_all_models().items():
            if name in self._flags:
                self._flags[name].note(unwrap(model), self.iteration)
        for optimizer in self.get_all_optimizers().values():
            if trains_other_weights(optimizer):
                optimizer.train()

    def finalize(self) -> None:
        """Release the iterators; called once when a run ends, with or without an error."""
        for iterator in self.get_all_iterators().values():
            if hasattr(iterator, "finalize"):
                iterator.finalize()

    def get_iterator(self, name: str) -> Any:
        """Return the iterator registered as ``name``.

        Raises:
            KeyError: there is no such iterator.
        """
        raise KeyError(f"{type(self).__name__} has no iterator {name!r}")

    def get_all_iterators(self) -> dict[str, Any]:
        """Return all iterators by name; by default only the main one, if there is one."""
        iterator = find_main_iterator(self)
        return {} if iterator is None else {"main": iterator}

    def get_model(self, name: str) -> nn.Module:
        """Return the model registered as ``name``.

        Raises:
            KeyError: there is no such model.
        """
        raise KeyError(f"{type(self).__name__} has no model {name!r}")

    def get_all_models(self) -> dict[str, nn.Module]:
        """Return all models by name; by default only the main one, if there is one."""
        try:
            return {"main": self.get_model("main")}
        except KeyError:
            return {}

    def get_optimizer(self, name: str) -> Optimizer:
        """Return the optimizer registered as ``name``.

        Raises:
            KeyError: there is no such optimizer.
        """
        raise KeyError(f"{type(self).__name__} has no optimizer {name!r}")

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Return all optimizers by name; by default only the main one, if there is one."""
        try:
            return {"main": self.get_optimizer("main")}
        except KeyError:
            return {}

    def update(self) -> None:
        """Run ``update_core``, then add 1 to ``iteration``.

        Raises:
            StopIteration: the data have run out: raised by an iterator of the updater or, if it has none, by its own
                methods or a ``next`` that they call.
            RuntimeError: anything else has raised ``StopIteration``, such as the loss function.
        """
        try:
            self.update_core()
        except StopIteration as error:
            raise_unless_end(self, error)
            raise
        self.iteration += 1

    def update_core(self) -> None:
        """Update the parameters once."""
        raise NotImplementedError(f"{type(self).__name__} must define update_core()")

    def serialize(self, serializer: AbstractSerializer) -> None:
        before, self.iteration = self.iteration, serializer("iteration", self.iteration)
        for name, iterator in self.get_all_iterators().items():
            serializer.visit(f"iterator:{name}", iterator)
        models = self.get_all_models()
        for name, model in models.items():
            if name in self._layouts:
                serialize_layouts(serializer, name, unwrap(model), self._layouts[name])
            if name in self._flags:
                self._flags[name].serialize(serializer, name, unwrap(model), before, self.iteration)
            serializer.visit(f"model:{name}", unwrap(model))
        for name, optimizer in self.get_all_optimizers().items():
            state = OptimizerState(optimizer, models, name, self.constructed.get(name), self._groups.get(name))
            serializer.visit(f"optimizer:{name}", state)
