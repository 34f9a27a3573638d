"""A run of a trainer: what it continues, how it starts, and how it ends come what may."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from chainring import _random
from chainring._distributed.progress import reporting_position
from chainring._distributed.sharding import is_tensor_parallel
from chainring._hints import find_hint
from chainring._messages import info
from chainring._naming import named_submodules
from chainring.iterators.base import share_among_ranks
from chainring.serializers import CorruptError
from chainring.serializers._store import Snapshots
from chainring.serializers.protocol import telling_changes
from chainring.training._agreement import check_agreement, check_generators, check_out
from chainring.training._loaded_state import LoadedState
from chainring.training._run_directory import RECORD, RunDirectory, create_out, read_record, write_record
from chainring.training.extension import RollBack

if TYPE_CHECKING:
    from chainring._places.remote import RemotePlace
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

logger = logging.getLogger("chainring")


class Run:
    """The start and the end of a run, and the saved run that it continues."""

    def __init__(self) -> None:
        self.has_begun = False  # True once Trainer.run was called
        self.loaded_state = LoadedState()
        self.earlier_time = 0.0  # seconds of training in the runs before a resume
        self.started_at: float | None = None  # on a monotonic clock; None as long as state may be loaded
        self.ended_at: float | None = None
        self.store: Snapshots | None = None  # in which this process alone writes, while the run continues
        self._directory: RunDirectory | None = None
        self._remote: RemotePlace | None = None
        self._initialized: list[Entry] = []  # extensions
        self._started_triggers: list[Any] = []
        self._rollback: str | None = None  # the reason, if the run has gone back to a snapshot

    def reporting_position(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return a context in which this rank can say where it is, for one that waits for it."""
        if trainer.comm.world.size == 1:
            return nullcontext()
        return reporting_position(lambda: (trainer.updater.iteration, trainer.extension_name))

    def open(self, trainer: Trainer) -> None:
        """Take ``out`` for this process, compare the ranks, load the newest state, and start from it."""
        self.has_begun = True
        several = trainer.comm.world.size > 1
        if several or not any(map(is_tensor_parallel, trainer.updater.get_all_models().values())):
            trainer.comm.begin()  # ranks that compute a model together need no comm
        if trainer.comm.is_main:  # the only rank that writes there
            if trainer.url is not None:
                from chainring._places.remote import RemotePlace  # which few programs need

                self._remote = RemotePlace(trainer.url)
                self._remote.claim(trainer.out)
                self.store = Snapshots(self._remote)
            create_out(trainer.out)
            self.store = trainer.store
            self._directory = RunDirectory(trainer.out, self.store)
        if several:
            check_agreement(trainer)
            check_out(trainer.store, trainer.comm)
        if trainer.comm.world.size > trainer.comm.size and not trainer.is_resumed:
            check_generators(trainer.comm)
        self._start(trainer, lambda: _load_newest(trainer, self.loaded_state))

    def roll_back(self, trainer: Trainer, reason: RollBack) -> None:
        """Start the run again from its newest snapshot; raise ``reason`` if there is none."""
        if (state := _newest_state(trainer, trainer.entries)) is None:
            raise reason
        info(f"{reason}; the run goes back to iteration {state[0]}")
        for entry in trainer.entries:
            entry.optional("finalize")()
        self._rollback = str(reason)
        self._start(trainer, lambda: _load_sound(trainer, trainer.entries, state))

    def explain(self, trainer: Trainer, error: BaseException) -> BaseException:
        """Return the error that ends the run, with notes that say where it was raised and what helps."""
        reason = getattr(error, "otherwise", None) if isinstance(error, RollBack) else None
        reason = error if reason is None else reason
        reason.__suppress_context__ |= reason is not error  # which would be printed with the same words
        reason.add_note(f"raised {_position(trainer)}")
        if (hint := find_hint(reason)) is not None:
            reason.add_note(hint)
        return trainer.comm.failed(reason)

    def close(self, trainer: Trainer, failure: BaseException | None) -> BaseException | None:
        """Call every ``on_error`` and every ``finalize``, and give ``out`` back, come what may.

        Return the first error, with the later ones as its notes; without one `Interrupted`, if a signal has ended the run.
        """
        position = _position(trainer)
        for entry in self._initialized if failure is not None else ():
            trainer.extension_name = entry.name
            failure = _try_call(f"on_error of {entry.name!r}", failure, entry.on_error, trainer, failure)
        # Now, because finalizing may take long or hang; without a log, the error is printed once, with its traceback.
        if isinstance(failure, Exception) and logger.hasHandlers():
            logger.error("training stops %s: %s: %s", position, type(failure).__name__, failure)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            failure = _try_call(f"finalize of {entry.name!r}", failure, entry.optional("finalize"))
        trainer.extension_name = None
        failure = _try_call("finalize of the updater", failure, getattr(trainer.updater, "finalize", lambda: None))
        if self._remote is not None:
            failure = _try_call(f"the last files of {trainer.url}", failure, self._remote.release)
        trainer.comm.end()
        self.ended_at = time.monotonic()
        if self._directory is not None:
            self._directory.release()
        if failure is None and trainer.interruption.signum is not None and not trainer.interruption.is_nested:
            return trainer.interruption.error()
        return failure

    def initialize_trigger(self, trigger: Any, trainer: Trainer) -> None:
        """Initialize a trigger once a run, however many extensions and other triggers share it."""
        if hasattr(trigger, "initialize") and all(other is not trigger for other in self._started_triggers):
            self._started_triggers.append(trigger)
            trigger.initialize(trainer)

    def _start(self, trainer: Trainer, load: Callable[[], None]) -> None:
        """Load a state if there is one, and start from it."""
        self.started_at = None  # state may be loaded until it is set
        with telling_changes(self.loaded_state.untold):
            load()
            self.loaded_state.conclude(trainer)
            trainer.comm.barrier()  # rank 0 may move later snapshots, and cuts the log back, when all have loaded
            self.started_at = time.monotonic()
            if self._directory is not None:
                self._claim_directory(trainer, self._directory)
        prepare(trainer)
        self._started_triggers = []
        self.initialize_trigger(trainer.stop_trigger, trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name  # which an error names
            self.initialize_trigger(entry.trigger, trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            entry.optional("initialize")(trainer)
            if entry not in self._initialized:
                self._initialized.append(entry)
        trainer.extension_name = None
        _call_before_training(trainer)
        loaded, rank = self.loaded_state, trainer.comm.rank
        if loaded.generators is not None:
            _random.set_rng_state(loaded.generators)
            loaded.generators = None
        elif loaded.exists:  # saved by fewer ranks
            _random.seed_all("rank", rank, trainer.updater.iteration)
        elif rank > 0:  # each rank draws from its own stream, and rank 0 from the one that the script has seeded
            _random.seed_all("rank", rank, torch.initial_seed())

    def _claim_directory(self, trainer: Trainer, directory: RunDirectory) -> None:
        """Move away in ``out`` what belongs to other runs, and record this start there."""
        targets: dict[str, Any] = {}  # by the name of a snapshot
        for entry in trainer.entries:
            for name in entry.optional("writes") if entry.is_snapshot else ():
                if targets.setdefault(name, entry.optional("target")) is not entry.optional("target"):
                    raise ValueError(f"two snapshots of other targets have the name {name!r}; give filename= to one of them")
        loaded = self.loaded_state
        earlier = read_record(directory.path, moves_damaged=loaded.exists)
        names = {name for entry in trainer.entries for name in entry.optional("writes")} | {RECORD}
        known = names.union(earlier.get("files", ()))
        if not loaded.exists:
            directory.archive_earlier_run(known)
            write_record(trainer, {}, names, loaded.changes)
            return
        if loaded.directory is not None and loaded.place not in (None, trainer.store.place):
            directory.archive_other_snapshots(known, loaded.place)
            earlier = read_record(loaded.directory) or earlier
        else:
            directory.archive_later_snapshots(known, trainer.updater.iteration)
        write_record(trainer, earlier, known, loaded.changes, self._rollback)


def prepare(trainer: Trainer) -> None:
    """Prepare what extensions find when they are initialized: the names of models, the ranks, the shares of data."""
    updater, comm = trainer.updater, trainer.comm
    for name, model in updater.get_all_models().items():
        for path, module in named_submodules(name, model):
            trainer.reporter.add_observer(path, module)
    for iterator in updater.get_all_iterators().values():
        share_among_ranks(iterator, comm, getattr(updater, "virtual_ranks", None))
    if hasattr(updater, "start"):
        updater.start()


def _load_newest(trainer: Trainer, loaded: LoadedState) -> None:
    """Load the newest state that an extension with ``autoload`` has saved, unless the script or a replay has loaded one."""
    if trainer.is_replaying:
        return
    entries = [entry for entry in trainer.entries if entry.optional("autoload")]
    if (not trainer.is_resumed or loaded.gives_way) and (state := _newest_state(trainer, entries)) is not None:
        _load_sound(trainer, entries, state)


def _load_sound(trainer: Trainer, entries: list[Entry], state: tuple[int, Callable[[], None]]) -> None:
    """Load a state; where it proves to be damaged, which its extension remembers, the newest of the others."""
    tried: list[int] = []
    while True:
        iteration, load = state
        try:
            return load()
        except CorruptError:
            tried.append(iteration)
            following = _newest_state(trainer, entries)
            if following is None or tried.count(following[0]) > len(entries):
                raise
            state = following


def _newest_state(trainer: Trainer, entries: list[Entry]) -> tuple[int, Callable[[], None]] | None:
    states, name = [], trainer.extension_name
    for entry in entries:
        trainer.extension_name = entry.name
        states.append(entry.optional("newest")(trainer))
    trainer.extension_name = name
    return max(filter(None, states), key=lambda state: state[0], default=None)


def _call_before_training(trainer: Trainer) -> None:
    """Call the extensions with ``invoke_before_training``; in a resumed run, discard what they report."""
    observation, watchers = trainer.observation, trainer.reporter.media_watchers
    trainer.observation = {}
    if trainer.is_resumed:
        trainer.reporter.media_watchers = ()
    with trainer.reporter.scope(trainer.observation):
        for entry in trainer.entries:
            skipped = trainer.is_resumed and entry.optional("skip_on_resume")
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
        trainer.observation, trainer.reporter.media_watchers = observation, watchers


def _position(trainer: Trainer) -> str:
    extension = "" if trainer.extension_name is None else f"in extension {trainer.extension_name!r} "
    return f"{extension}after iteration {trainer.updater.iteration}"


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
