"""A run of a trainer: what it continues, how it starts, and how it ends come what may."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chainring import _random
from chainring._messages import info, recording_changes
from chainring._naming import named_submodules
from chainring.iterators.base import share_among_ranks
from chainring.serializers.base import Deserializer, visit_if_stateful
from chainring.training._run_directory import RECORD, RunDirectory, create_out, read_record, write_record
from chainring.training._signals import Interruption
from chainring.training.extension import RollBack
from chainring.training.triggers.base import serialize_extension_trigger

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

logger = logging.getLogger("chainring")


class LoadedState:
    """The saved run that was loaded into a trainer, as far as it waits: for extensions not registered yet, for the start."""

    def __init__(self) -> None:
        self.exists = False  # True once anything was loaded, so that the run continues an earlier one
        self.generators: Any = None  # the state of the random generators, put back immediately before the first update
        self.directory: Path | None = None  # of the snapshot that was loaded, unless it came from memory
        self.changes: dict[str, list[Any]] = {}  # by name, the old and the new value of settings that the script changes
        self._source: Deserializer | None = None
        self._saved: dict[str, list[str]] = {}  # extensions that only the saved run has, with their class names
        self._new: list[str] = []  # extensions that only this run has

    def begin(self, source: Deserializer, class_names: dict[str, list[str]], generators: Any, entries: list[Entry]) -> None:
        """Take over a saved run, whose extensions had these names and classes, and restore those that are registered."""
        self.exists = True
        self.generators = generators
        self.directory = source.directory
        self._source = source
        self._saved = dict(class_names)
        self._new = []
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
            serialize_extension_trigger(self._source, entry.name, entry.trigger, is_same_class=saved[1] == current[1])

    def warn_of_differences(self) -> None:
        """Name the extensions that only the saved run had, and those that only this one has; called when a run starts."""
        if self._saved or self._new:
            warnings.warn(
                f"this run has other extensions than the one it continues: only there {list(self._saved)}, only here "
                f"{self._new}. The state of those only there is dropped; those only here start from now",
                stacklevel=2,
            )
        self._source = None
        self._saved = {}
        self._new = []


class Run:
    """The start and the end of a run, and the saved run that it continues."""

    def __init__(self) -> None:
        self.has_begun = False  # True once Trainer.run was called
        self.loaded_state = LoadedState()
        self.earlier_time = 0.0  # seconds of training in the runs before a resume
        self.started_at: float | None = None  # on a monotonic clock; None as long as state may be loaded
        self.ended_at: float | None = None
        self._directory: RunDirectory | None = None
        self._started_triggers: list[Any] = []

    @contextmanager
    def session(self, trainer: Trainer) -> Iterator[None]:
        """Start the run, and end it come what may; raise the first error, or `Interrupted` if a signal has ended it."""
        self.has_begun = True
        initialized: list[Entry] = []
        failure: BaseException | None = None
        with Interruption(trainer.comm) as trainer.interruption:
            try:
                if trainer.comm.rank == 0:  # the only rank that writes there
                    create_out(trainer.out)
                    self._directory = RunDirectory(trainer.out)
                self._start(trainer, initialized, lambda: _load_newest(trainer))
                yield
            except BaseException as error:
                error.add_note(f"raised {_position(trainer)}")
                failure = trainer.comm.failed(error)
            failure = _end(trainer, initialized, failure)
            self.ended_at = time.monotonic()
            if self._directory is not None:
                self._directory.release()
            if failure is None and trainer.interruption.signum is not None and not trainer.interruption.is_nested:
                failure = trainer.interruption.error()
        if failure is not None:
            raise failure

    def roll_back(self, trainer: Trainer, reason: RollBack) -> None:
        """Start the run again from its newest snapshot; raise ``reason`` if there is none."""
        if (state := _newest_state(trainer, trainer.entries)) is None:
            raise reason
        iteration, load = state
        info(f"{reason}; the run goes back to iteration {iteration}")
        for entry in trainer.entries:
            optional_method(entry, "finalize")()
        self._start(trainer, [], load)

    def initialize_trigger(self, trigger: Any, trainer: Trainer) -> None:
        """Initialize a trigger once a run, however many extensions and other triggers share it."""
        if hasattr(trigger, "initialize") and all(other is not trigger for other in self._started_triggers):
            self._started_triggers.append(trigger)
            trigger.initialize(trainer)

    def _start(self, trainer: Trainer, initialized: list[Entry], load: Callable[[], None]) -> None:
        """Load a state if there is one, and start from it; extensions are added to ``initialized`` when they are."""
        self.started_at = None  # state may be loaded until it is set
        load()
        trainer.comm.barrier()  # rank 0 may move later snapshots, and cuts the log back, when all have loaded
        self.started_at = time.monotonic()
        if self._directory is not None:
            self._claim_directory(trainer, self._directory)
        prepare(trainer)
        self._started_triggers = []
        for trigger in (trainer.stop_trigger, *(entry.trigger for entry in trainer.entries)):
            self.initialize_trigger(trigger, trainer)
        self.loaded_state.warn_of_differences()
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            optional_method(entry, "initialize")(trainer)
            initialized.append(entry)
        trainer.extension_name = None
        _call_before_training(trainer)
        self._restore_generators(trainer)

    def _claim_directory(self, trainer: Trainer, directory: RunDirectory) -> None:
        """Move away in ``out`` what belongs to other runs, and record this start there."""
        _check_names(trainer.entries)
        loaded = self.loaded_state
        earlier = read_record(directory.path)
        names = {name for entry in trainer.entries for name in getattr(entry.extension, "writes", ())} | {RECORD}
        known = names.union(earlier.get("files", ()))
        if loaded.exists:
            directory.archive_later_snapshots(known, trainer.updater.iteration)
            earlier = (read_record(loaded.directory) if loaded.directory is not None else {}) or earlier
            write_record(trainer, earlier, known, loaded.changes)
        else:
            directory.archive_earlier_run(known)
            write_record(trainer, {}, names, loaded.changes)

    def _restore_generators(self, trainer: Trainer) -> None:
        loaded, rank = self.loaded_state, trainer.comm.rank
        if loaded.generators is not None:
            _random.set_rng_state(loaded.generators)
            loaded.generators = None
        elif loaded.exists:  # saved by fewer ranks
            _random.seed_all("rank", rank, trainer.updater.iteration)
        elif rank > 0:  # each rank draws from its own stream, and rank 0 from the one that the script has seeded
            _random.seed_all("rank", rank, torch.initial_seed())


def prepare(trainer: Trainer) -> None:
    """Prepare what extensions find when they are initialized: the names of models, the ranks, the shares of data."""
    updater, comm = trainer.updater, trainer.comm
    for name, model in updater.get_all_models().items():
        for path, module in named_submodules(name, model):
            trainer.reporter.add_observer(path, module)
    comm.begin()
    for iterator in updater.get_all_iterators().values():
        share_among_ranks(iterator, comm)
    if hasattr(updater, "start"):
        updater.start()


def optional_method(entry: Entry, name: str) -> Callable[..., Any]:
    """Return a method of an extension, which need not define it."""
    method = getattr(entry.extension, name, None)
    return method if callable(method) else lambda *_: None


def _load_newest(trainer: Trainer) -> None:
    """Load the newest state that an extension with ``autoload`` has saved, unless the script has loaded one."""
    entries = [entry for entry in trainer.entries if getattr(entry.extension, "autoload", False)]
    if not trainer.is_resumed and (state := _newest_state(trainer, entries)) is not None:
        state[1]()


def _newest_state(trainer: Trainer, entries: list[Entry]) -> tuple[int, Callable[[], None]] | None:
    states, name = [], trainer.extension_name
    for entry in entries:
        trainer.extension_name = entry.name
        states.append(optional_method(entry, "newest")(trainer))
    trainer.extension_name = name
    return max(filter(None, states), key=lambda state: state[0], default=None)


def _check_names(entries: list[Entry]) -> None:
    """Refuse two snapshots of different targets under one name."""
    targets: dict[str, Any] = {}
    for entry in entries:
        for name in getattr(entry.extension, "writes", ()) if entry.is_snapshot else ():
            target = getattr(entry.extension, "target", None)
            if targets.setdefault(name, target) is not target:
                raise ValueError(f"two snapshots of other targets have the name {name!r}; give filename= to one of them")


def _call_before_training(trainer: Trainer) -> None:
    """Call the extensions with ``invoke_before_training``; in a resumed run, discard what they report."""
    observation = trainer.observation
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        for entry in trainer.entries:
            skipped = trainer.is_resumed and getattr(entry.extension, "skip_on_resume", False)
            if entry.invoke_before_training and entry.observe_start is None and not skipped:
                if entry.observe is not None:
                    entry.observe(trainer)
                trainer.extension_name = entry.name
                entry.extension(trainer)
        if trainer.observation and not trainer.is_resumed:
            for entry in filter(lambda entry: entry.observe_start is not None, trainer.entries):
                trainer.extension_name = entry.name
                entry.extension.observe_start(trainer)
    trainer.extension_name = None
    if trainer.is_resumed:
        trainer.observation = observation


def _position(trainer: Trainer) -> str:
    extension = "" if trainer.extension_name is None else f"in extension {trainer.extension_name!r} "
    return f"{extension}after iteration {trainer.updater.iteration}"


def _end(trainer: Trainer, initialized: list[Entry], failure: BaseException | None) -> BaseException | None:
    """Call every ``on_error`` and every ``finalize``; return the first error, with the later ones as its notes."""
    position = _position(trainer)
    for entry in initialized if failure is not None else ():
        failure = _try_call(f"on_error of {entry.name!r}", failure, entry.on_error, trainer, failure)
    if isinstance(failure, Exception):  # logged now, because finalizing may take long or hang
        logger.error("training stops %s: %s: %s", position, type(failure).__name__, failure)
    for entry in trainer.entries:
        failure = _try_call(f"finalize of {entry.name!r}", failure, optional_method(entry, "finalize"))
    failure = _try_call("finalize of the updater", failure, getattr(trainer.updater, "finalize", lambda: None))
    trainer.extension_name = None
    return failure


def _try_call(name: str, failure: BaseException | None, call: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Call a function; return the first error so far, with one that the call raises as its note."""
    try:
        call(*arguments)
    except BaseException as error:
        if failure is None:
            failure = error
            failure.add_note(f"raised in {name}")
        elif error is not failure:
            failure.add_note(f"afterwards {name} raised {type(error).__name__}: {error}")
    return failure
