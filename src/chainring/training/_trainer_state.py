"""The state of a trainer: what is saved, and how it is loaded whatever the order of ``load`` and ``extend``."""

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


class LoadedState:
    """The saved run that was loaded into a trainer, as far as it waits: for extensions not registered yet, for the start.

    Attributes:
        exists: True once anything was loaded, so that the run continues an earlier one.
        generators: the state of the random generators, put back immediately before the first update.
        directory: the directory of the snapshot that was loaded; ``None`` where it came from memory.
        changes: the settings in which the script differs from the saved run: by name, the old value and the new.
    """

    def __init__(self) -> None:
        self.exists = False
        self.generators: Any = None
        self.directory: Path | None = None
        self.changes: dict[str, list[Any]] = {}
        self._source: Deserializer | None = None
        self._saved: dict[str, list[str]] = {}  # extensions that only the saved run has, with their class names
        self._new: list[str] = []  # extensions that only this run has

    def begin(self, source: Deserializer, class_names: dict[str, list[str]], generators: Any, entries: list[Entry]) -> None:
        """Take over a saved run, whose extensions had these names and classes, and restore those that are registered."""
        self.exists = True
        self.generators = generators
        self.directory = source.directory
        self._source, self._saved, self._new = source, dict(class_names), []
        for entry in entries:
            self.restore(entry)

    def restore(self, entry: Entry) -> None:
        """Load the state of an extension and of its trigger, each unless its class is another one now."""
        if self._source is None:
            return
        if entry.name not in self._saved:
            self._new.append(entry.name)
            return
        saved, current = self._saved.pop(entry.name), entry.class_names
        with recording_changes(self.changes):
            if saved[0] == current[0]:
                visit_if_stateful(self._source["extensions"], entry.name, entry.extension)
            else:
                self._new.append(entry.name)
            if saved[1] == current[1]:
                visit_if_stateful(self._source["extension_triggers"], entry.name, entry.trigger)
            _visit_trigger_setting(self._source, entry)

    def warn_of_differences(self) -> None:
        """Name the extensions that only the saved run had, and those that only this one has; called when a run starts."""
        if self._saved or self._new:
            warnings.warn(
                f"this run has other extensions than the one it continues: only there {list(self._saved)}, only here "
                f"{self._new}. The state of those only there is dropped; those only here start from now",
                stacklevel=2,
            )
        self._source, self._saved, self._new = None, {}, []


def serialize(trainer: Trainer, run: Run, serializer: AbstractSerializer, entries: list[Entry]) -> None:
    """Save or load all of a trainer; ``entries`` are its extensions in the order of registration."""
    loaded_state = run.loaded_state
    if isinstance(serializer, Deserializer):
        loaded_state.changes = {}
    with recording_changes(loaded_state.changes):
        serializer.visit("updater", trainer.updater)
        elapsed = serializer("elapsed_time", trainer.elapsed_time)
        weight = serializer("weight", getattr(trainer.updater, "weight", 1))  # of the observation, for who averages it
        class_names = serializer("extension_types", {entry.name: entry.class_names for entry in entries})
        stop = type(trainer.stop_trigger).__name__
        if serializer("stop_trigger_type", stop) == stop:
            visit_if_stateful(serializer, "stop_trigger", trainer.stop_trigger)
        visit_setting(serializer, "stop_trigger_setting", describe_setting(trainer.stop_trigger), "stop trigger")
        generators = _visit_generators(trainer, serializer["generators"], loaded_state)
        if isinstance(serializer, Deserializer):
            observation = serializer["observation"]
            trainer.observation = {key: observation(key, None) for key in observation.paths()}
            run.earlier_time = elapsed
            with contextlib.suppress(AttributeError):  # of an updater that computes it
                trainer.updater.weight = weight
            loaded_state.begin(serializer, class_names, generators, entries)
        else:
            _save_observation(serializer["observation"], trainer.observation)
            for entry in entries:
                visit_if_stateful(serializer["extensions"], entry.name, entry.extension)
                visit_if_stateful(serializer["extension_triggers"], entry.name, entry.trigger)
                _visit_trigger_setting(serializer, entry)


def _save_observation(serializer: AbstractSerializer, observation: dict[str, Any]) -> None:
    for key, value in observation.items():
        if is_scalar(value):
            serializer(key, value if hasattr(value, "detach") or not hasattr(value, "item") else value.item())


def _visit_trigger_setting(serializer: AbstractSerializer, entry: Entry) -> None:
    setting, name = describe_setting(entry.trigger), f"trigger of extension {entry.name!r}"
    visit_setting(serializer["extension_trigger_settings"], entry.name, setting, name)


def _visit_generators(trainer: Trainer, serializer: AbstractSerializer, loaded_state: LoadedState) -> Any:
    """Save the random generators of all ranks, or return those of this rank; ``None`` if fewer ranks have saved.

    They are put back immediately before the first update, because a script may draw between load and run.
    """
    comm = trainer.comm
    if isinstance(serializer, Deserializer):
        ranks = {path.partition("/")[0] for path in serializer.paths()}
        if comm.rank == 0 and len(ranks) != comm.size:
            consequence = "examples and their order are the same, and the last bits are not"
            announce_change("number of ranks", len(ranks), comm.size, consequence)
        return serializer(str(comm.rank), None) if str(comm.rank) in ranks else None
    generators = loaded_state.generators or _random.get_rng_state()
    if serializer.comm.size == 1:
        serializer(str(comm.rank), generators)
    else:
        for rank, state in enumerate(serializer.comm.gather_object(generators)):
            serializer(str(rank), state)
    return generators


def visit_if_stateful(serializer: AbstractSerializer, key: str, obj: Any) -> None:
    """Save or load an extension or a trigger, if it has state."""
    if serialize_method(obj) is not None or has_state(obj):
        serializer.visit(key, obj)
