"""Triggers that ask several others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from chainring._progress import Trainer
from chainring.training.triggers.base import Trigger, TriggerLike, describe, get_stop_trigger, get_trigger


class CombinedTrigger(Trigger):
    """Asks several triggers in every iteration, and fires when any, or all, of them do; see `any_of` and `all_of`."""

    def __init__(self, combine: Callable[[Iterable[bool]], bool], triggers: Sequence[Callable[[Trainer], bool]]) -> None:
        self._combine, self._triggers = combine, triggers
        units = {getattr(trigger, "unit", "iteration") for trigger in triggers}
        self.unit = next((unit for unit in ("second", "epoch") if unit in units), "iteration")  # for a plan of the run

    @property
    def _inner(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {f"trigger_{index}": trigger for index, trigger in enumerate(self._triggers)}

    @property
    def predictable(self) -> bool:  # type: ignore[override]
        """True if all of them are."""
        return all(getattr(trigger, "predictable", False) for trigger in self._triggers)

    def ask(self, trainer: Trainer) -> bool:
        return self._combine([bool(trigger(trainer)) for trigger in self._triggers])

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return [describe(trigger, as_setting=True) for trigger in self._triggers]

    def for_stopping(self) -> CombinedTrigger:
        return CombinedTrigger(self._combine, list(map(get_stop_trigger, self._triggers)))

    def get_training_length(self) -> tuple[float, str] | None:
        """Return the length of the only trigger that has one, where it alone ends training; ``None`` where none is known."""
        lengths = [getattr(trigger, "get_training_length", lambda: None)() for trigger in self._triggers]
        known = [length for length in lengths if length is not None]
        return known[0] if self._combine is any and len(known) == 1 else None

    def __repr__(self) -> str:
        return f"{self._combine.__name__}_of({', '.join(map(describe, self._triggers))})"


def any_of(*triggers: TriggerLike) -> Trigger:
    """Return a trigger that fires when one or more of several do.

    All are asked in every iteration, and saved with the run, so that each keeps its own count. As a stop trigger, a pair
    among them is a length to be *reached*.

    Example::

        trainer.extend(extensions.snapshot(), trigger=any_of((1000, "iteration"), (600, "second")))

    Args:
        triggers: one or more, each as for `get_trigger`.

    Raises:
        TypeError: one of them is not a trigger, or there is none.
        ValueError: the period or unit of one is invalid.
    """
    return _combine(any, triggers)


def all_of(*triggers: TriggerLike) -> Trigger:
    """Return a trigger that fires when all of several fire in the same iteration; all else is as for `any_of`.

    Example::

        stop = all_of((10, "epoch"), EarlyStoppingTrigger(max_trigger=None))  # not before ten epochs
    """
    return _combine(all, triggers)


def _combine(combine: Callable[[Iterable[bool]], bool], triggers: Sequence[TriggerLike]) -> CombinedTrigger:
    if not triggers:
        name = f"{combine.__name__}_of"
        raise TypeError(f'{name} takes one trigger or more; write {name}((1, "epoch"), other)')
    return CombinedTrigger(combine, list(map(get_trigger, triggers)))
