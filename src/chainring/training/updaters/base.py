"""Updater: one update of the parameters, and the objects that it works with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from chainring._distributed.communicator import Communicator
from chainring._naming import unwrap
from chainring._progress import find_main_iterator
from chainring.serializers.base import AbstractSerializer, Stateful
from chainring.training.updaters._optimizer_state import OptimizerState, parameter_names

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from chainring.training.trainer import Trainer


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
    """One update of the parameters, and the iterators, models and optimizers that it works with.

    Subclass it and write ``update_core()``, and ``get_iterator``, ``get_model`` and ``get_optimizer`` for those that it has.
    There is no constructor to call. Epochs are those of ``get_iterator("main")``; without one they stay at 0.

    Attributes:
        iteration: updates completed.
        epoch: epochs completed.
        epoch_detail: the same, with the fraction of the current one.
        previous_epoch_detail: ``epoch_detail`` before the last update; ``None`` before the first.
        is_new_epoch: True if the last update reached the end of an epoch.
        comm: the communicator of the ranks that train together; by default a world of one.
        constructed: the hyperparameters of each optimizer by name, as the script had made them.
        weight: of the last update in a mean over updates, such as its number of examples.

    Example::

        class Search(Updater):
            def update_core(self):
                self.point = improve(self.point)
    """

    iteration: int = 0
    comm: Communicator = Communicator()
    weight: Any = 1
    constructed: Mapping[str, list[Any]] = MappingProxyType({})
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
        """Prepare for a trainer; called at the end of its construction."""

    def start(self) -> None:
        """Prepare for a run; called when it starts, after the state of a resumed run was put back."""

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
        """Return every iterator by its name; by default the main one, if there is one."""
        iterator = find_main_iterator(self)
        return {} if iterator is None else {"main": iterator}

    def get_model(self, name: str) -> nn.Module:
        """Return the model registered as ``name``.

        Raises:
            KeyError: there is no such model.
        """
        raise KeyError(f"{type(self).__name__} has no model {name!r}")

    def get_all_models(self) -> dict[str, nn.Module]:
        """Return every model by its name; by default the main one, if there is one."""
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
        """Return every optimizer by its name; by default the main one, if there is one."""
        try:
            return {"main": self.get_optimizer("main")}
        except KeyError:
            return {}

    def update(self) -> None:
        """Run ``update_core`` and count it.

        Raises:
            StopIteration: the data have ended.
        """
        self.update_core()
        self.iteration += 1

    def update_core(self) -> None:
        """Update the parameters once."""
        raise NotImplementedError(f"{type(self).__name__} must define update_core()")

    def serialize(self, serializer: AbstractSerializer) -> None:
        self.iteration = serializer("iteration", self.iteration)
        for name, iterator in self.get_all_iterators().items():
            serializer.visit(f"iterator:{name}", iterator)
        for name, model in self.get_all_models().items():
            serializer.visit(f"model:{name}", unwrap(model))
        names = parameter_names(self.get_all_models())
        for name, optimizer in self.get_all_optimizers().items():
            serializer.visit(f"optimizer:{name}", OptimizerState(optimizer, names, name, self.constructed.get(name)))
