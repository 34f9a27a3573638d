"""observe_value and observe_lr: report values from outside the model, such as the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainring.reporting.reporter import report
from chainring.training.extension import PRIORITY_WRITER, make_extension

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


def observe_value(observation_key: str, target_func: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
    """Return an extension that reports the result of a function of the trainer, by default after every epoch.

    Example::

        trainer.extend(extensions.observe_value("momentum", lambda trainer: optimizer.param_groups[0]["momentum"]))

    Args:
        observation_key: the key under which it is reported.
        target_func: called with the trainer; returns the value.

    Raises:
        TypeError: the key is not a string, or the function cannot be called.
    """
    _check_key(observation_key)
    if not callable(target_func):
        raise TypeError(f"target_func is called with the trainer, got {target_func!r}; write lambda trainer: ...")

    @make_extension(trigger=(1, "epoch"), default_name="observe_value", priority=PRIORITY_WRITER)
    def observe(trainer: Trainer) -> None:
        report({observation_key: target_func(trainer)})

    return observe


def observe_lr(optimizer_name: str = "main", observation_key: str = "lr") -> Callable[[Trainer], Any]:
    """Return an extension that reports the learning rate of an optimizer, by default after every epoch.

    It is the learning rate of the last update, because schedulers and shifts run later in the iteration. With several
    parameter groups, those after the first are reported as ``lr/1``, ``lr/2`` and so on.

    Example::

        trainer.extend(extensions.observe_lr())

    Args:
        optimizer_name: the name of the optimizer in the updater; an unknown name is refused when the run starts.
        observation_key: the key under which it is reported.

    Raises:
        TypeError: a name is not a string.
    """
    _check_key(observation_key)
    if not isinstance(optimizer_name, str):
        raise TypeError(f'optimizer_name is that of an optimizer in the updater, such as "main"; got {optimizer_name!r}')

    def initialize(trainer: Trainer) -> None:
        trainer.updater.get_optimizer(optimizer_name)

    @make_extension((1, "epoch"), "observe_lr", PRIORITY_WRITER, initializer=initialize)
    def observe(trainer: Trainer) -> None:
        groups = trainer.updater.get_optimizer(optimizer_name).param_groups
        keys = [observation_key, *(f"{observation_key}/{index}" for index in range(1, len(groups)))]
        report({key: group["lr"] for key, group in zip(keys, groups, strict=True)})

    return observe


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f'observation_key is the key of a reported value, such as "lr"; got {key!r}')
