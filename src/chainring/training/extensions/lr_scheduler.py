"""LRScheduler: any scheduler of torch, stepped when a trigger fires and saved with the run."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from chainring._messages import OneTimeWarning, announce_change
from chainring.serializers.base import AbstractSerializer, Serializer, copy_value, has_state
from chainring.training.extension import Extension
from chainring.training.extensions._param_groups import (
    are_equal,
    constructed_settings,
    copy_settings,
    is_optimizer,
    set_value,
)
from chainring.training.triggers._interval_means import IntervalMeans

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

Groups = list[dict[str, Any]]
"""The settings of each group of parameters."""

_MOVING = ("_last_lr", "last_epoch", "_step_count")
"""Attributes of a scheduler that say how far it is; where it is made after the state was loaded, they begin otherwise."""


class _Saved(NamedTuple):
    groups: Groups
    made: Groups
    constructed: Groups


class LRScheduler(Extension):
    """Steps a scheduler of ``torch.optim.lr_scheduler``, by default after every epoch.

    The scheduler may be made before or after the updater, and before or after a snapshot is loaded: a resumed run goes on
    with the learning rates, momenta and counts of the saved one. What the script makes otherwise than the script of the
    saved run is a changed setting, holds and is printed: a setting of the scheduler; or the learning rate of the optimizer,
    by which what the scheduler had made of the old one is scaled.

    ``ReduceLROnPlateau`` steps by a reported value: its weighted mean since the last step. Where it was not reported there
    is no step, which is warned about once.

    Args:
        scheduler: of ``torch.optim.lr_scheduler``, or anything with its ``step``, ``state_dict`` and ``load_state_dict``.
        monitor: the key of the value that ``ReduceLROnPlateau`` is fed with, such as ``"validation/main/loss"``.

    Attributes:
        scheduler: the scheduler.
        monitor: the key.

    Raises:
        TypeError: it is no scheduler, or the key no string.
        ValueError: the scheduler steps by a value and there is no ``monitor``, or there is one and it does not.
    """

    trigger = (1, "epoch")
    skip_on_resume = True

    def __init__(self, scheduler: Any, *, monitor: str | None = None) -> None:
        _check(scheduler, monitor)
        self.scheduler = scheduler
        self.monitor = monitor
        self._optimizer = getattr(scheduler, "optimizer", None)
        self._made_state = copy_value(scheduler.state_dict())
        self._made = copy_settings(self._optimizer)
        self._constructed: Groups = []
        self._pending: _Saved | None = None  # what was loaded, until the run starts
        self._seen: Groups = []  # what the groups had then: what the script writes to them in between, holds
        self._means = IntervalMeans([] if monitor is None else [monitor])
        self._warning = OneTimeWarning()
        self._has_stepped = False

    def initialize(self, trainer: Trainer) -> None:
        self._constructed = constructed_settings(trainer.updater, self._optimizer)
        if self._pending is not None:
            saved, self._pending = self._pending, None
            self._put_back(saved)

    def _put_back(self, saved: _Saved) -> None:
        """Gives the groups their saved settings, also where a scheduler made since has written to them."""
        groups, defaults = getattr(self._optimizer, "param_groups", []), getattr(self._optimizer, "defaults", {})
        for index, (group, values) in enumerate(zip(groups, saved.groups, strict=True)):
            made, before = _at(self._made, index), _at(saved.made, index)
            given, had = _at(self._constructed, index), _at(saved.constructed, index)
            for key, value in values.items():
                if _differs(key, group, self._seen[index]):
                    continue
                if key == "lr":
                    old, new = (one.get("initial_lr", other.get("lr")) for one, other in ((before, had), (made, given)))
                    set_value(group, key, _scaled(value, old, new))
                elif _differs(key, given, had):
                    continue  # the updater has let it hold
                elif key not in defaults and _differs(key, made, before):
                    if key != "initial_lr":  # which is told as the base_lrs of the scheduler
                        announce_change(f"{key} of the scheduler, group {index},", before[key], made[key])
                    set_value(group, key, made[key])
                else:
                    set_value(group, key, value)

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def __call__(self, trainer: Trainer) -> None:
        if self.monitor is None:
            self._step()
            return
        means = self._means.end(trainer)
        if self.monitor in means:
            self._step(means[self.monitor])
        else:
            self._warning.give(
                f"{type(self.scheduler).__name__} is not stepped at iteration {trainer.updater.iteration}: since its last "
                f"step {self.monitor!r} was not reported as a single number; reported now are "
                f"{sorted(trainer.observation)}. This warning is given once; check the key, or step it where the "
                "value is reported: extend(..., trigger=...)",
                stacklevel=2,
            )

    def _step(self, *value: float) -> None:
        if self._has_stepped:
            self.scheduler.step(*value)
            return
        self._has_stepped = True
        with warnings.catch_warnings():
            # The step of the first update comes before this; a loss scaler may have left it out.
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            self.scheduler.step(*value)

    def serialize(self, serializer: AbstractSerializer) -> None:
        live = _Saved(copy_settings(self._optimizer), self._made, self._constructed)
        saved = _Saved(*serializer("groups", list(live if self._pending is None else self._pending)))
        kind, own = serializer("kind", _kind(self.scheduler)), _kind(self.scheduler)
        monitor = serializer("monitor", self.monitor)
        made = serializer("made", self._made_state)
        state = serializer["scheduler"]("state_dict", self.scheduler.state_dict())
        self._warning.serialize(serializer)
        self._means.serialize(serializer)
        if isinstance(serializer, Serializer):
            return
        if monitor != self.monitor:
            self._means.reset()
        if kind != own:
            announce_change("the scheduler", kind, own, "the new one starts from here")
            return
        self._pending, self._seen = saved, live.groups
        self.scheduler.load_state_dict(_with_changes(state, self._made_state, made, own))


def _with_changes(state: Any, made: Any, before: Any, name: str) -> Any:
    """Saved state, in which holds what the script now makes otherwise than the script of the saved run."""
    if type(state) is type(made) is type(before) is dict:
        known = (made.keys() & before.keys()).difference(_MOVING)
        return {
            key: _with_changes(value, made[key], before[key], key) if key in known else value for key, value in state.items()
        }
    if _are_parts(state, made, before):
        return [_with_changes(*each, name) for each in zip(state, made, before, strict=True)]
    if are_equal(made, before):
        return state
    announce_change(f"{name} of the scheduler", before, made)
    return copy_value(made)


def _are_parts(*lists: Any) -> bool:
    """Whether they are the states of as many schedulers or functions each."""
    if not all(type(each) is list for each in lists) or len({len(each) for each in lists}) > 1:
        return False
    return all(isinstance(item, dict) for each in lists for item in each if item is not None)


def _kind(scheduler: Any) -> str:
    """The class name of a scheduler, with those of the ones that it is made of."""
    parts = vars(scheduler).get("_schedulers", ())
    name = type(scheduler).__name__
    return f"{name}({', '.join(map(_kind, parts))})" if parts else name


def _at(groups: Groups, index: int) -> dict[str, Any]:
    return groups[index] if index < len(groups) else {}


def _differs(key: str, given: dict[str, Any], had: dict[str, Any]) -> bool:
    return key in given and key in had and not are_equal(given[key], had[key])


def _scaled(rate: Any, old: Any, new: Any) -> Any:
    """A learning rate that was reached from ``old``, as it would have been reached from ``new``."""
    if old is None or new is None or are_equal(old, new):
        return rate
    return rate * (float(new) / float(old)) if float(old) else new


def _check(scheduler: Any, monitor: Any) -> None:
    name = type(scheduler).__name__
    is_one = callable(getattr(scheduler, "step", None)) and has_state(scheduler) and not is_optimizer(scheduler)
    if isinstance(scheduler, type) or not is_one:
        what = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else name
        raise TypeError(f"LRScheduler takes a scheduler of torch.optim.lr_scheduler, over the optimizer; got {what}")
    if monitor is not None and not isinstance(monitor, str):
        raise TypeError(f'monitor is the key of a reported value, such as "validation/main/loss"; got {monitor!r}')
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    if monitor is None and first is not None and first.default is first.empty and first.kind is not first.VAR_POSITIONAL:
        raise ValueError(f'{name} steps by a value; name it: LRScheduler(..., monitor="validation/main/loss")')
    if monitor is not None and (first is None or first.name == "epoch"):
        raise ValueError(f"{name} does not step by a value, so monitor={monitor!r} would do nothing; leave it out")
