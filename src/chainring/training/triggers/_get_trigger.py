"""Convenient spellings of a trigger, such as ``(1, "epoch")``, and the triggers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from chainring._checks import find_call_error, is_number
from chainring.training.triggers.base import never
from chainring.training.triggers.interval import IntervalTrigger, ReachedTrigger, TimeTrigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

TriggerLike: TypeAlias = Callable[["Trainer"], bool] | tuple[float, Literal["iteration", "epoch", "second"]] | None
"""A callable of the trainer; ``(period, "iteration")``, ``(period, "epoch")`` or ``(seconds, "second")``; or ``None``."""

_UNITS = ("iteration", "epoch", "second")
_RULE = 'a trigger is None, a callable of the trainer, (period, "iteration"), (period, "epoch") or (seconds, "second")'


def get_trigger(trigger: TriggerLike) -> Callable[[Trainer], bool]:
    """Return the trigger for a setting such as ``(1, "epoch")``.

    Example::

        get_trigger((1, "epoch"))  # IntervalTrigger(1, 'epoch')
        get_trigger((30, "second"))  # TimeTrigger(30)

    Args:
        trigger: a callable of the trainer, which is returned as it is; ``None`` never fires; ``(period, "iteration")``
            and ``(period, "epoch")`` are an `IntervalTrigger`; ``(seconds, "second")`` is a `TimeTrigger`.

    Returns:
        A callable of the trainer that returns True when the trigger fires.

    Raises:
        TypeError: ``trigger`` is anything else.
        ValueError: the period is not above 0, or the unit is unknown.
    """
    if trigger is None:
        return never
    if callable(trigger):
        if isinstance(trigger, type):
            raise TypeError(f"{_RULE}; got the class {trigger.__name__}: pass an object of it")
        if error := find_call_error(trigger, None):
            rule = f"a trigger is called with one argument, the trainer, and {trigger!r} cannot be"
            raise TypeError(f"{rule}: {error}; write lambda trainer: ...")
        return trigger
    period, unit = _split_pair(trigger)
    if unit == "second":
        return TimeTrigger(period)
    if unit not in ("iteration", "epoch"):
        raise ValueError(f'the unit of a trigger is "iteration", "epoch" or "second", got {unit!r}; write (1, "epoch")')
    return IntervalTrigger(period, unit)


def get_stop_trigger(trigger: TriggerLike) -> Callable[[Trainer], bool]:
    """Return the stop trigger for a setting: like `get_trigger`, but a pair or an interval is a length to be *reached*.

    Raises:
        TypeError: it is neither a trigger nor a pair.
        ValueError: the length is below 0, or the unit is unknown.
    """
    if isinstance(trigger, IntervalTrigger):
        return ReachedTrigger(trigger.period, trigger.unit)
    if trigger is None or callable(trigger):
        return get_trigger(trigger)
    return ReachedTrigger(*_split_pair(trigger))


def _split_pair(trigger: Any) -> tuple[Any, Any]:
    is_pair = isinstance(trigger, (tuple, list)) and len(trigger) == 2
    if not is_pair or isinstance(trigger[0], str) or not isinstance(trigger[1], str):
        raise TypeError(f"{_RULE}; got {trigger!r}{_suggest(trigger)}")
    return trigger[0], trigger[1]


def _suggest(trigger: Any) -> str:
    """Return the pair that was probably meant, as text; nothing where that is not known."""
    parts = trigger if isinstance(trigger, (tuple, list)) else [trigger]
    numbers = [part for part in parts if is_number(part)] or [1]
    units = [part for part in parts if isinstance(part, str)] or ["epoch"]
    return f'; write ({numbers[0]}, "{units[0]}")' if len(parts) <= 2 and units[0] in _UNITS else ""
