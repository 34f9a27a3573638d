"""The one place where a convenient spelling becomes a trigger."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from chainring.training.triggers.base import never
from chainring.training.triggers.interval import IntervalTrigger
from chainring.training.triggers.reached import ReachedTrigger
from chainring.training.triggers.time_trigger import TimeTrigger

_FORMS = 'None, a callable of the trainer, (period, "iteration"), (period, "epoch") or (seconds, "second")'


def get_trigger(trigger: Any) -> Callable[[Any], bool]:
    """The trigger that a setting stands for.

    Args:
        trigger: a callable of the trainer, which is returned as it is; ``None`` never fires; ``(period, "iteration")``
            and ``(period, "epoch")`` are an `IntervalTrigger`; ``(seconds, "second")`` is a `TimeTrigger`.

    Raises:
        TypeError: it is of another form.
        ValueError: the period is not above 0, or the unit is unknown.
    """
    if trigger is None:
        return never
    if callable(trigger):
        _refuse_uncallable(trigger)
        return trigger  # type: ignore[no-any-return]
    period, unit = _pair(trigger)
    if unit == "second":
        return TimeTrigger(period)
    if unit not in ("iteration", "epoch"):
        rule = f'the unit of a trigger is "iteration", "epoch" or "second", got {unit!r}'
        raise ValueError(f'{rule}; write for example ({period!r}, "epoch")')
    return IntervalTrigger(period, unit)


def get_stop_trigger(trigger: Any) -> Callable[[Any], bool]:
    """The stop trigger that a setting stands for: as `get_trigger`, but a pair or an interval means *reached*."""
    if isinstance(trigger, IntervalTrigger):
        return ReachedTrigger(trigger.period, trigger.unit)
    if trigger is None or callable(trigger):
        return get_trigger(trigger)
    return ReachedTrigger(*_pair(trigger))


def _pair(trigger: Any) -> tuple[Any, str]:
    if not isinstance(trigger, (tuple, list)) or len(trigger) != 2 or not isinstance(trigger[1], str):
        raise TypeError(f"a trigger is {_FORMS}; got {trigger!r}")
    if isinstance(trigger[0], str):
        raise TypeError(f"a trigger is {_FORMS}, the number first; got {trigger!r}")
    return trigger[0], trigger[1]


def _refuse_uncallable(trigger: Any) -> None:
    """Refuses now what would fail when it is asked for the first time, which may be after hours."""
    if isinstance(trigger, type):
        raise TypeError(f"a trigger is {_FORMS}; got the class {trigger.__name__}: pass an object of it")
    try:
        inspect.signature(trigger).bind(None)
    except ValueError:
        return  # some callables of C have no signature
    except TypeError as error:
        raise TypeError(
            f"a trigger is called with one argument, the trainer, and {trigger!r} cannot be: {error}; "
            "write lambda trainer: ..."
        ) from None
