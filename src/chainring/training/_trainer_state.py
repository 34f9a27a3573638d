"""The state of a trainer: what is saved, and how it finds its way back whatever the order of load and extend."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainring import _random
from chainring._messages import announce_change, recording_changes
from chainring.reporting._scalars import is_scalar
from chainring.serializers.base import AbstractSerializer, Deserializer, has_state, serialize_method, visit_setting
from chainring.training.triggers.base import describe_setting

if TYPE_CHECKING:
    from chainring.training._run import Run
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer


_OTHER_RANKS = "examples and their order are the same, and the last bits are not"


class Restored:
    """What was loaded into a trainer and waits: for an extension that is not registered yet, for the run to start.

    Attributes:
        happened: whether anything was loaded, so that the run continues an earlier one.
        generators: the state of the random generators, put back immediately before the first update.
        origin: the directory in which the snapshot lies that was loaded; ``None`` where it came from memory.
        changes: the settings that the script has otherwise than that of the saved run: by name, the old value and the new.
    """

    def __init__(self) -> None:
        self.happened = False
        self.generators: Any = None
        self.origin: Path | None = None
        self.changes: dict[str, list[Any]] = {}
        self._source: Deserializer | None = None
        self._saved: dict[str, list[str]] = {}
        self._new: list[str] = []

    def begin(self, source: Deserializer, kinds: dict[str, list[str]], drawn: Any, entries: list[Entry]) -> None:
        """Takes over a saved run, whose extensions had these names and types."""
        self.happened = True
        self.generators = drawn
        self.origin = source.directory
        self._source, self._saved, self._new = source, dict(kinds), []
        for entry in entries:
            self.claim(entry)

    def claim(self, entry: Entry) -> None:
        """Puts back the state of an extension and of its trigger. What is of another class now starts anew."""
        if self._source is None:
            return
        if entry.name not in self._saved:
            self._new.append(entry.name)
            return
        saved, own = self._saved.pop(entry.name), entry.kinds
        with recording_changes(self.changes):
            if saved[0] == own[0]:
                visit_part(self._source["extensions"], entry.name, entry.extension)
            else:
                self._new.append(entry.name)
            if saved[1] == own[1]:
                visit_part(self._source["extension_triggers"], entry.name, entry.trigger)
            _visit_trigger_setting(self._source, entry)

    def warn_of_differences(self) -> None:
        """Names the extensions that only the saved run had, and those that only this one has; called when a run starts."""
        if self._saved or self._new:
            warnings.warn(
                "this run has other extensions than the one it continues: "
                f"only there {list(self._saved)}, only here {self._new}. "
                "What is only there is forgotten, what is only here starts from now",
                stacklevel=2,
            )
        self._source, self._saved, self._new = None, {}, []


def serialize(trainer: Trainer, run: Run, serializer: AbstractSerializer, entries: list[Entry]) -> None:
    """Saves or loads all of a trainer.

    Raises:
        RuntimeError: state is loaded into a trainer that has run.
    """
    if isinstance(serializer, Deserializer):
        run.restored.changes = {}
    with recording_changes(run.restored.changes):
        _visit(trainer, run, serializer, entries)


def _visit(trainer: Trainer, run: Run, serializer: AbstractSerializer, entries: list[Entry]) -> None:
    serializer.visit("updater", trainer.updater)
    elapsed = serializer("elapsed_time", trainer.elapsed_time)
    weight = serializer("weight", getattr(trainer.updater, "weight", 1))  # of the observation, for who averages it
    kinds = serializer("extension_types", {entry.name: entry.kinds for entry in entries})
    stop = type(trainer.stop_trigger).__name__
    if serializer("stop_trigger_type", stop) == stop:
        visit_part(serializer, "stop_trigger", trainer.stop_trigger)
    visit_setting(serializer, "stop_trigger_setting", describe_setting(trainer.stop_trigger), "stop trigger")
    drawn = _generators(trainer, serializer["generators"], run.restored)
    observation = serializer["observation"]
    if isinstance(serializer, Deserializer):
        trainer.observation = {key: observation(key, None) for key in serializer["observation"].paths()}
        run.earlier_time = elapsed
        with contextlib.suppress(AttributeError):  # of an updater that computes it
            trainer.updater.weight = weight
        run.restored.begin(serializer, kinds, drawn, entries)
        return
    for key, value in trainer.observation.items():
        if is_scalar(value):
            observation(key, value if hasattr(value, "detach") or not hasattr(value, "item") else value.item())
    for entry in entries:
        visit_part(serializer["extensions"], entry.name, entry.extension)
        visit_part(serializer["extension_triggers"], entry.name, entry.trigger)
        _visit_trigger_setting(serializer, entry)


def _visit_trigger_setting(serializer: AbstractSerializer, entry: Entry) -> None:
    setting, name = describe_setting(entry.trigger), f"trigger of extension {entry.name!r}"
    visit_setting(serializer["extension_trigger_settings"], entry.name, setting, name)


def _generators(trainer: Trainer, serializer: AbstractSerializer, restored: Restored) -> Any:
    """The state of this rank's generators, ``None`` where there is none of it because fewer ranks have saved.

    It is put back immediately before the first update, because a script may draw between load and run.
    """
    own = str(trainer.comm.rank)
    if isinstance(serializer, Deserializer):
        saved = {path.partition("/")[0] for path in serializer.paths()}
        if trainer.comm.rank == 0 and len(saved) != trainer.comm.size:
            announce_change("number of ranks", len(saved), trainer.comm.size, _OTHER_RANKS)
        return serializer(own, None) if own in saved else None
    drawn = restored.generators or _random.get_rng_state()
    if serializer.comm.size == 1:
        serializer(own, drawn)
    else:
        for rank, state in enumerate(serializer.comm.gather_object(drawn)):
            serializer(str(rank), state)
    return drawn


def visit_part(serializer: AbstractSerializer, name: str, part: Any) -> None:
    """Saves or loads an extension or a trigger, if it has state."""
    if serialize_method(part) is not None or has_state(part):
        serializer.visit(name, part)
