"""LRScheduler: steps a learning rate scheduler of PyTorch; and the settings in the parameter groups of an optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from chainring._hints import OF_EXTEND, hinting
from chainring._messages import OneTimeWarning, warn
from chainring.reporting.summary import IntervalMeans
from chainring.serializers._models import filled
from chainring.serializers._values import copy_value
from chainring.serializers.protocol import AbstractSerializer, Serializer, announce_change, has_state
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike
from chainring.training.triggers.best_value import mode_of_key

OptimizerLike: TypeAlias = Optimizer | str | None
"""An optimizer, or something that wraps one; its name in the updater; or ``None`` for the updater's main one."""
Groups = list[dict[str, Any]]
"""The settings of each parameter group."""

_COUNTERS = ("_last_lr", "last_epoch", "_step_count")
"""Attributes of a scheduler that say how far it is; they differ if it is made after the state was loaded."""


class Scheduler(Protocol):
    """The interface of schedulers, those of ``torch.optim.lr_scheduler`` and others."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any: ...


class _Settings(NamedTuple):
    """The settings of the groups at three times."""

    groups: Groups  # now
    made: Groups  # when the scheduler was passed to the extension
    constructed: Groups  # when the updater was made


class LRScheduler(Extension):
    """Steps a learning rate scheduler of ``torch.optim.lr_scheduler``, by default after every epoch.

    The scheduler may be created before or after the updater, and before or after a snapshot is loaded: a resumed run
    continues with the saved rates, momenta and counts. A setting of the scheduler that the script has changed since is
    kept, and printed; if it has changed the learning rate of the optimizer, the saved rate is scaled by the ratio.

    It steps when its trigger fires, and triggers count updates: also one whose step the loss scaler of ``"fp16"`` has
    skipped, or that had weight 0. ``ReduceLROnPlateau`` steps by the weighted mean of a reported value since the last step.
    If it was not reported, there is no step, and one warning; there is one too if its mode is ``"min"`` and the key an
    accuracy. A scheduler that is told how far training is, as those of timm are, gets the number of completed epochs; after
    every update the number of updates, if its ``t_in_epochs`` is False.

    Example::

        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        trainer.extend(extensions.LRScheduler(scheduler))

    Args:
        scheduler: a scheduler of ``torch.optim.lr_scheduler``, or any object with its ``step``, ``state_dict`` and
            ``load_state_dict``.
        monitor: the key of the value by which ``ReduceLROnPlateau`` steps, such as ``"validation/main/loss"``.

    Raises:
        ValueError: the scheduler steps by a value and there is no ``monitor``, or vice versa; or its state is incomplete.
    """

    trigger: TriggerLike = (1, "epoch")
    skip_on_resume = True
    watched_keys: Sequence[str] = ()

    @hinting(OF_EXTEND)
    def __init__(self, scheduler: Scheduler, *, monitor: str | None = None) -> None:
        name, is_class = type(scheduler).__name__, isinstance(scheduler, type)
        if is_class or is_optimizer(scheduler) or not has_state(scheduler) or not callable(getattr(scheduler, "step", None)):
            given = f"the class {scheduler.__name__}" if is_class else name  # type: ignore[attr-defined]
            raise TypeError(f"LRScheduler takes a scheduler of torch.optim.lr_scheduler, over the optimizer; got {given}")
        if monitor is not None and not isinstance(monitor, str):
            raise TypeError(f'monitor is the key of a reported value, such as "validation/main/loss"; got {monitor!r}')
        if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
            rule = f"{name} saves its best value and not the number of bad epochs, so a resumed run would differ"
            raise ValueError(f"{rule}; use torch.optim.lr_scheduler.ReduceLROnPlateau, which it wraps")
        parameters: list[Any] = list(inspect.signature(scheduler.step).parameters.values())
        first, *more = parameters or [None]
        is_required = first is not None and first.default is first.empty and first.kind is not first.VAR_POSITIONAL
        takes_epoch = first is not None and first.name == "epoch"
        self._count = "epoch" if takes_epoch and is_required else None  # of the updater, which the scheduler is told
        if self._count and getattr(scheduler, "t_in_epochs", True) is False and hasattr(scheduler, "step_update"):
            self._count, self.trigger = "iteration", (1, "iteration")
        if monitor is None and is_required and not takes_epoch:
            raise ValueError(f'{name} steps by a value; name it: LRScheduler(..., monitor="validation/main/loss")')
        if monitor is not None and (first is None or (takes_epoch and not (is_required and more))):
            raise ValueError(f"{name} does not step by a value, so monitor={monitor!r} would do nothing; leave it out")
        better, mode = mode_of_key(monitor or ""), getattr(scheduler, "mode", None)
        if {better, mode} == {"min", "max"}:
            warn(f"{name} has the mode {mode!r}, and of {monitor!r} {better!r} is better: {name}(..., mode={better!r})")
        self.scheduler: Any = scheduler
        self.monitor = monitor
        self.watched_keys = () if monitor is None else (monitor,)
        self._optimizer = getattr(scheduler, "optimizer", None)
        self._made_state = copy_value(_state_of(scheduler))
        self._made = copy_settings(self._optimizer)
        self._constructed: Groups = []
        self._restored: _Settings | None = None  # until the run starts
        self._groups_at_load: Groups = []  # settings that differ from these at the start were set by the script, and stay
        self._means = IntervalMeans([monitor] if monitor else [])
        self._warning = OneTimeWarning()
        self._has_stepped = False

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (name_of(self._optimizer, trainer.updater), _class_name(self.scheduler), self.monitor or "")

    def initialize(self, trainer: Trainer) -> None:
        self._constructed = constructed_settings(trainer.updater, self._optimizer)
        saved, self._restored = self._restored, None
        if saved is None:
            return
        # The groups get their saved settings, also where a scheduler made since has changed them.
        groups, defaults = getattr(self._optimizer, "param_groups", []), getattr(self._optimizer, "defaults", {})
        for index, (group, settings) in enumerate(zip(groups, saved.groups, strict=True)):
            made, saved_made = _at(self._made, index), _at(saved.made, index)
            constructed, saved_constructed = _at(self._constructed, index), _at(saved.constructed, index)
            for key, value in settings.items():
                if _differs(key, group, self._groups_at_load[index]):
                    continue
                if key == "lr":
                    old = saved_made.get("initial_lr", saved_constructed.get("lr"))
                    new = made.get("initial_lr", constructed.get("lr"))
                    if old is not None and new is not None and not are_equal(old, new):  # the rate changes as they do
                        value = value * (float(new) / float(old)) if float(old) else new
                    set_value(group, key, value)
                elif _differs(key, constructed, saved_constructed):
                    continue  # the updater has announced the new value, which holds
                elif key not in defaults and _differs(key, made, saved_made):
                    if key != "initial_lr":  # which is announced as base_lrs
                        announce_change(f"{key} of the scheduler, group {index}", saved_made[key], made[key])
                    set_value(group, key, made[key])
                else:
                    set_value(group, key, value)

    def sets_lr(self, optimizer: Any) -> bool:
        return optimizer is self._optimizer

    def observe(self, trainer: Trainer) -> None:
        if self.monitor is not None:
            self._means.observe(trainer)

    def __call__(self, trainer: Trainer) -> None:
        means = {} if self.monitor is None else self._means.end(trainer)
        if self.monitor is None or means:
            with nullcontext() if self._has_stepped else warnings.catch_warnings():
                if not self._has_stepped:  # the first update came before this step; a loss scaler may have skipped it
                    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
                self._has_stepped = True
                step = self.scheduler.step_update if self._count == "iteration" else self.scheduler.step
                step(*([getattr(trainer.updater, self._count)] if self._count else ()), *means.values())
        elif not trainer.is_rehearsing:  # which raises where the key is not reported
            self._warning.give(
                f"{type(self.scheduler).__name__} is not stepped at iteration {trainer.updater.iteration}: since its last "
                f"step {self.monitor!r} was not reported as a single number; reported now are "
                f"{sorted(trainer.observation)}. This warning is given once; check the key, or step it where the value is "
                "reported: extend(..., trigger=...)",
            )

    def serialize(self, serializer: AbstractSerializer) -> None:
        current = _Settings(copy_settings(self._optimizer), self._made, self._constructed)
        saved = _Settings(*serializer("groups", list(self._restored or current)))
        name = _class_name(self.scheduler)
        saved_name, saved_monitor = serializer("kind", name), serializer("monitor", self.monitor)
        saved_made = serializer("made", self._made_state)
        state = serializer["scheduler"]("state_dict", _state_of(self.scheduler))
        self._warning.serialize(serializer)
        self._means.serialize(serializer)
        if isinstance(serializer, Serializer):
            return
        if saved_monitor != self.monitor:
            self._means = IntervalMeans([self.monitor] if self.monitor else [])
        if saved_name != name:
            announce_change("the scheduler", saved_name, name, "the new one starts from here")
            return
        self._restored, self._groups_at_load = saved, current.groups
        self.scheduler.load_state_dict(_merge_changes(state, self._made_state, saved_made, name))


def _state_of(scheduler: Any) -> Any:
    """Return the state of a scheduler; where an earlier torch puts a function into it, the name that later ones have."""
    state = scheduler.state_dict()
    if not isinstance(scheduler, SWALR) or "anneal_func" not in state:
        return state
    strategy = "linear" if scheduler.anneal_func is SWALR._linear_anneal else "cos"
    return {key: value for key, value in state.items() if key != "anneal_func"} | {"_anneal_strategy": strategy}


def _merge_changes(state: Any, made: Any, saved_made: Any, name: str) -> Any:
    """Return the saved state, with the settings that the script has changed since the saved run."""
    if type(state) is type(made) is type(saved_made) is dict:
        settings = (made.keys() & saved_made.keys()).difference(_COUNTERS)
        return {
            key: _merge_changes(value, made[key], saved_made[key], key) if key in settings else value
            for key, value in state.items()
        }
    versions = (state, made, saved_made)
    # The states of the schedulers or functions that a scheduler is made of, not a list of numbers.
    are_lists = all(
        type(states) is list and all(item is None or isinstance(item, dict) for item in states) for states in versions
    )
    if are_lists and len(set(map(len, versions))) == 1:
        return [_merge_changes(*states, name) for states in zip(*versions, strict=True)]
    if are_equal(made, saved_made):
        return state
    announce_change(f"{name} of the scheduler", saved_made, made)
    return copy_value(made)


def _class_name(scheduler: Any) -> str:
    """Return the class name of a scheduler, with those of the schedulers that it is made of."""
    children = vars(scheduler).get("_schedulers", ())
    name = type(scheduler).__name__
    return f"{name}({', '.join(map(_class_name, children))})" if children else name


def _at(groups: Groups, index: int) -> dict[str, Any]:
    return groups[index] if index < len(groups) else {}


def _differs(key: str, settings: dict[str, Any], saved: dict[str, Any]) -> bool:
    return key in settings and key in saved and not are_equal(settings[key], saved[key])


def is_optimizer(value: Any) -> bool:
    """Return True for an optimizer, or something that wraps one and has its parameter groups."""
    return isinstance(value, Optimizer) or isinstance(getattr(value, "param_groups", None), list)


def name_of(optimizer: OptimizerLike, updater: Any) -> str:
    """Return the name of an optimizer in the updater; an empty one if the updater does not have it."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer or "main"
    optimizers: dict[str, Any] = getattr(updater, "get_all_optimizers", dict)()
    return next((name for name, candidate in optimizers.items() if candidate is optimizer), "")


def constructed_settings(updater: Any, optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of each group as the script constructed them; empty if the updater does not know them."""
    return [] if optimizer is None else list(getattr(updater, "constructed", {}).get(name_of(optimizer, updater), ()))


def copy_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return a copy of all settings of each group, tensors included."""
    groups = getattr(optimizer, "param_groups", [])
    settings = [{key: group[key] for key in group if key not in ("params", "param_names")} for group in groups]
    return copy_value(settings)  # type: ignore[no-any-return]


def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one setting. A tensor is changed in place, because a compiled or captured step reads it."""
    group[key] = filled(group.get(key), value)


def are_equal(first: Any, second: Any) -> bool:
    """Return True if two settings are equal; a tensor equals the number that it becomes when `set_value` sets it."""
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(are_equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(are_equal(value, second[key]) for key, value in first.items())
    if isinstance(second, Tensor) and not isinstance(first, Tensor):
        first, second = second, first
    if isinstance(first, Tensor):
        if not isinstance(second, (Tensor, int, float)):
            return False
        return torch.equal(first, torch.as_tensor(second, dtype=first.dtype, device=first.device).expand_as(first))
    return bool(first == second)
