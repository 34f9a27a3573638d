"""What a run will do, without doing it: triggers that follow from iterations and epochs alone are asked in advance."""

from __future__ import annotations

import copy
from fractions import Fraction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from chainring._progress import find_main_iterator
from chainring.training.triggers.base import describe, never

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

_SHOWN = 12


class ImaginedUpdater:
    """Counts iterations and epochs as an updater would, and updates nothing.

    Args:
        iteration: updates completed.
        epochs: epochs completed.
        epochs_per_iteration: by how much an update advances, or ``None`` where that is unknown.
        repeat: whether the data go on after the first epoch.
    """

    def __init__(self, iteration: int, epochs: Fraction, epochs_per_iteration: Fraction | None, repeat: bool = True) -> None:
        self.iteration = iteration
        self._epochs = epochs
        self._per_iteration = epochs_per_iteration
        self._repeat = repeat
        self.previous_epoch_detail: float | None = None
        self.is_new_epoch = False
        self.counts_epochs = epochs_per_iteration is not None

    @property
    def epoch(self) -> int:
        return int(self._epochs)

    @property
    def epoch_detail(self) -> float:
        epoch, position, size = self.progress
        return epoch + position / size  # rounded as an iterator's is

    def get_iterator(self, name: str) -> Any:
        """Itself, as far as exact progress goes."""
        return self

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.epoch, (self._epochs - self.epoch).numerator, self._epochs.denominator

    @property
    def has_ended(self) -> bool:
        """Whether there are no more data for another update."""
        return not self._repeat and self._epochs >= 1

    def update(self) -> None:
        """The next iteration."""
        self.iteration += 1
        self.previous_epoch_detail, before = self.epoch_detail, self.epoch
        self._epochs += self._per_iteration or 0
        if not self._repeat:
            self._epochs = min(self._epochs, Fraction(1))
        self.is_new_epoch = self.epoch != before


def imagined(trainer: Trainer) -> ImaginedUpdater:
    """An imagined updater that stands where the trainer's stands."""
    updater = trainer.updater
    iterator = find_main_iterator(updater)
    progress = getattr(iterator, "progress", None)
    if progress is None or not progress[2]:
        return ImaginedUpdater(updater.iteration, Fraction(0), None)
    epoch, position, size = progress
    per_iteration = Fraction(iterator.step * getattr(updater, "accumulate", 1), size)
    repeat = getattr(iterator, "repeat", True)
    return ImaginedUpdater(updater.iteration, epoch + Fraction(position, size), per_iteration, repeat)


def explain(trainer: Trainer, iterations: int, is_started: bool) -> str:
    """The plan as text, see `Trainer.explain`."""
    if iterations < 1:
        raise ValueError(f"explain foretells 1 iteration or more, got {iterations}")
    ordered = _in_order(trainer.entries)
    fires, first, last, end = _foretold(trainer, ordered, iterations, is_started)
    rows = [_row(trainer, entry, fires.get(id(entry.trigger))) for entry in ordered]
    return "\n".join([_headline(trainer, first, last, end), *_table(rows)])


def plan_of(trainer: Trainer) -> dict[str, Any]:
    """The plan as plain values: what stops the run, and the extensions in the order in which they run."""
    extensions = [
        {
            "name": entry.name,
            "class": type(entry.extension).__name__,
            "priority": entry.priority,
            "trigger": describe(entry.trigger),
            "before_training": entry.invoke_before_training,
            "observes": entry.observe is not None,
        }
        for entry in _in_order(trainer.entries)
    ]
    return {"stop_trigger": describe(trainer.stop_trigger), "extensions": extensions}


def _in_order(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.is_snapshot)


def _foretold(
    trainer: Trainer, entries: list[Entry], iterations: int, is_started: bool
) -> tuple[dict[int, list[int]], int, int, str | None]:
    """At which iterations each trigger fires (by id), the first iteration, the last, and what ends the run there."""
    triggers = {id(trigger): copy.deepcopy(trigger) for trigger in _predictable(trainer, entries)}
    fires: dict[int, list[int]] = {key: [] for key in triggers}
    updater = imagined(trainer)
    first = updater.iteration + 1
    stand_in: Any = SimpleNamespace(updater=updater, elapsed_time=trainer.elapsed_time, observation={})
    stand_in.initialize_trigger = lambda trigger: hasattr(trigger, "initialize") and trigger.initialize(stand_in)
    if not is_started:
        for trigger in triggers.values():
            stand_in.initialize_trigger(trigger)
    stop = triggers.get(id(trainer.stop_trigger))
    while updater.iteration < first - 1 + iterations:
        if stop is not None and stop(stand_in):
            return fires, first, updater.iteration, describe(trainer.stop_trigger)
        if updater.has_ended:
            return fires, first, updater.iteration, "the end of the data"
        updater.update()
        for key, trigger in triggers.items():
            if trigger(stand_in):
                fires[key].append(updater.iteration)
    return fires, first, updater.iteration, None


def _predictable(trainer: Trainer, entries: list[Entry]) -> list[Any]:
    """The triggers that can be asked in advance; those that ask for epochs only where epochs can be foretold."""
    known = imagined(trainer).counts_epochs
    triggers = [trainer.stop_trigger, *(entry.trigger for entry in entries)]
    return [
        trigger
        for trigger in triggers
        if getattr(trigger, "predictable", False)
        and (known or getattr(trigger, "unit", None) != "epoch")
        and getattr(trigger, "unit", None) != "second"
    ]


def _headline(trainer: Trainer, first: int, last: int, end: str | None) -> str:
    if last < first:
        return f"No more iterations: {end} has stopped training after iteration {last}."
    until = "the data end" if trainer.stop_trigger is never else describe(trainer.stop_trigger)
    what = f"then {end} stops training" if end is not None else f"until {until}"
    return f"Iterations {first} to {last}, {what}. Each is an update, then in this order:"


def _row(trainer: Trainer, entry: Entry, fires: list[int] | None) -> tuple[str, ...]:
    if fires is None:
        when = "asked each iteration"
    elif not fires:
        when = "at none of them"
    else:
        when = "at " + ", ".join(map(str, fires[:_SHOWN])) + (f", ... ({len(fires)} times)" if len(fires) > _SHOWN else "")
    is_skipped = trainer.is_resumed and getattr(entry.extension, "skip_on_resume", False)
    before = "; once before training" if entry.invoke_before_training and not is_skipped else ""
    observes = "; observes each" if entry.observe is not None else ""
    return entry.name, str(entry.priority), describe(entry.trigger), when + before + observes


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    rows = [("extension", "priority", "trigger", "fires"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]
