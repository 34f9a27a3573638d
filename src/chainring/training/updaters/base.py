"""What one update is."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

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
    """One update of the parameters, and what it is made with.

    Write ``update_core()``, and ``get_iterator``, ``get_model`` and ``get_optimizer`` for those there are. There is no
    constructor to call. Epochs are those of ``get_iterator("main")``; without one they stay at 0.

    Attributes:
        iteration: updates completed.
        epoch: epochs completed.
        epoch_detail: the same, with the fraction of the current one.
        previous_epoch_detail: ``epoch_detail`` before the last update; ``None`` before the first.
        is_new_epoch: whether the last update reached the end of an epoch.
        comm: the communicator of the ranks that train together; by default a world of one.
        constructed: the hyperparameters of each optimizer by name, as the script had made them.
        weight: what the last update counts in a mean over updates: its number of examples, say.
    """

    iteration: int = 0
    comm: Any = Communicator()
    weight: Any = 1
    constructed: Mapping[str, list[Any]] = MappingProxyType({})
    epoch: int = _FromIterator(0)  # type: ignore[assignment]
    epoch_detail: float = _FromIterator(0.0)  # type: ignore[assignment]
    previous_epoch_detail: float | None = _FromIterator(None)  # type: ignore[assignment]
    is_new_epoch: bool = _FromIterator(False)  # type: ignore[assignment]

    @property
    def counts_epochs(self) -> bool:
        """Whether there is anything to count epochs by."""
        own = any(
            name in vars(self) or getattr(type(self), name) is not getattr(Updater, name)
            for name in ("epoch", "epoch_detail")
        )
        return own or find_main_iterator(self) is not None

    def connect_trainer(self, trainer: Trainer) -> None:
        """Called at the end of the trainer's construction."""

    def start(self) -> None:
        """Called when a run starts, after the state of a resumed run was put back."""

    def finalize(self) -> None:
        """Lets go of what the updater holds; called once when a run ends, however it ends."""
        for iterator in self.get_all_iterators().values():
            if hasattr(iterator, "finalize"):
                iterator.finalize()

    def get_iterator(self, name: str) -> Any:
        """The iterator registered as ``name``."""
        raise KeyError(f"{type(self).__name__} has no iterator {name!r}")

    def get_all_iterators(self) -> dict[str, Any]:
        """Every iterator by its name; by default the main one, if there is one."""
        iterator = find_main_iterator(self)
        return {} if iterator is None else {"main": iterator}

    def get_model(self, name: str) -> nn.Module:
        """The model registered as ``name``."""
        raise KeyError(f"{type(self).__name__} has no model {name!r}")

    def get_all_models(self) -> dict[str, nn.Module]:
        """Every model by its name; by default the main one, if there is one."""
        try:
            return {"main": self.get_model("main")}
        except KeyError:
            return {}

    def get_optimizer(self, name: str) -> Optimizer:
        """The optimizer registered as ``name``."""
        raise KeyError(f"{type(self).__name__} has no optimizer {name!r}")

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Every optimizer by its name; by default the main one, if there is one."""
        try:
            return {"main": self.get_optimizer("main")}
        except KeyError:
            return {}

    def update(self) -> None:
        """Runs ``update_core`` and counts it. ``StopIteration`` means that the data have ended."""
        self.update_core()
        self.iteration += 1

    def update_core(self) -> None:
        """One update of the parameters."""
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


def look_up(registered: Mapping[str, Any], name: str, what: str) -> Any:
    """What is registered as ``name``."""
    try:
        return registered[name]
    except KeyError:
        raise KeyError(f"no {what} {name!r}; registered: {sorted(registered)}") from None


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
        return look_up(self._iterators, name, "iterator")

    def get_all_iterators(self) -> dict[str, Any]:
        return dict(self._iterators)

    def get_model(self, name: str) -> nn.Module:
        return look_up(self._models, name, "model")  # type: ignore[no-any-return]

    def get_all_models(self) -> dict[str, nn.Module]:
        return dict(self._models)

    def get_optimizer(self, name: str) -> Optimizer:
        return look_up(self._optimizers, name, "optimizer")  # type: ignore[no-any-return]

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        return dict(self._optimizers)
