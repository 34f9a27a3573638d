"""A run of a trainer: what it has and a trainer before it has not, how it starts, and how it ends come what may."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from chainring import _random
from chainring._messages import info
from chainring._naming import named_submodules
from chainring.iterators.base import share_among_ranks
from chainring.training import _run_record
from chainring.training._run_directory import RunDirectory, create_out
from chainring.training._signals import Interruption
from chainring.training._trainer_state import LoadedState
from chainring.training.extension import RollBack

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

logger = logging.getLogger("chainring")


class Run:
    """What a run has and a trainer before it has not.

    Attributes:
        has_begun: True once `Trainer.run` was called.
        loaded_state: what was loaded into the trainer, and waits for the start.
        earlier_time: seconds of training in the runs before a resume.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.loaded_state = LoadedState()
        self.earlier_time = 0.0
        self._started_at: float | None = None
        self._total_time: float | None = None
        self._directory: RunDirectory | None = None
        self._started_triggers: list[Any] = []

    @property
    def is_started(self) -> bool:
        """True once the state of an earlier run is back, so that no other state may be loaded."""
        return self._started_at is not None

    @property
    def elapsed_time(self) -> float:
        """Seconds of training, those of the runs before a resume included; it stands still when the run has ended."""
        if self._total_time is not None:
            return self._total_time
        return self.earlier_time + (time.monotonic() - self._started_at if self._started_at is not None else 0.0)

    @contextmanager
    def session(self, trainer: Trainer) -> Iterator[None]:
        """Start the run, and end it come what may.

        On an error, `on_error` of every extension that was initialized is called; in any case every extension and the
        updater are finalized. The first error is raised, and later ones become its notes. A signal that asks the run to
        end is not an error: when everything is finalized, `Interrupted` is raised.
        """
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
            self._total_time = self.elapsed_time
            if self._directory is not None:
                self._directory.release()
            if failure is None and trainer.interruption.signum is not None:
                failure = trainer.interruption.error()
        if failure is not None:
            raise failure

    def roll_back(self, trainer: Trainer, reason: RollBack) -> None:
        """Put a run that is under way back to its newest snapshot, as if it had ended and been started again.

        Raises:
            RollBack: there is no snapshot.
        """
        found = _newest_states(trainer, trainer.entries)
        if not found:
            raise reason
        iteration, load = max(found, key=lambda state: state[0])
        info(f"{reason}; the run goes back to iteration {iteration}")
        for entry in trainer.entries:
            entry.method("finalize")()
        self._start(trainer, [], load)

    def initialize_trigger(self, trigger: Any, trainer: Trainer) -> None:
        """Initialize a trigger once a run, however many extensions and other triggers share it."""
        if hasattr(trigger, "initialize") and all(other is not trigger for other in self._started_triggers):
            self._started_triggers.append(trigger)
            trigger.initialize(trainer)

    def _start(self, trainer: Trainer, initialized: list[Entry], load: Callable[[], None]) -> None:
        """Start a run, or start it again from an earlier state.

        Args:
            trainer: the trainer.
            initialized: extensions are added as they are initialized.
            load: puts the state back from which the run continues, if there is one.
        """
        self._started_at = None  # state may be loaded until it is set
        load()
        trainer.comm.barrier()  # rank 0 may move later snapshots, and cuts the log back, when all have loaded
        self._started_at = time.monotonic()
        if self._directory is not None:
            self._claim_directory(trainer, self._directory)
        prepare(trainer)
        self._started_triggers = []
        for trigger in (trainer.stop_trigger, *(entry.trigger for entry in trainer.entries)):
            self.initialize_trigger(trigger, trainer)
        self.loaded_state.warn_of_differences()
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            entry.method("initialize")(trainer)
            initialized.append(entry)
        trainer.extension_name = None
        _call_before_training(trainer)
        self._restore_generators(trainer)

    def _claim_directory(self, trainer: Trainer, directory: RunDirectory) -> None:
        """Move away in ``out`` what belongs to other runs, and record this start there."""
        entries = trainer.entries
        _check_names(entries)
        origin = self.loaded_state.directory
        earlier = _run_record.read(directory.path)
        files = {_run_record.FILENAME, *(name for entry in entries for name in getattr(entry.extension, "writes", ()))}
        known = files.union(earlier.get("files", ()))
        if trainer.is_resumed:
            directory.archive_later_snapshots(known, trainer.updater.iteration)
            earlier = (_run_record.read(origin) if origin is not None else {}) or earlier
            _run_record.write(trainer, earlier, known, self.loaded_state.changes)
        else:
            directory.archive_earlier_run(known)
            _run_record.write(trainer, {}, files, self.loaded_state.changes)

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


def _load_newest(trainer: Trainer) -> None:
    """Load the newest state that an extension with ``autoload`` has saved, unless the script has loaded one."""
    if trainer.is_resumed:
        return
    found = _newest_states(trainer, [entry for entry in trainer.entries if getattr(entry.extension, "autoload", False)])
    if found:
        _, load = max(found, key=lambda state: state[0])
        load()


def _newest_states(trainer: Trainer, entries: list[Entry]) -> list[tuple[int, Callable[[], None]]]:
    """Return the newest state of each extension that has one: its iteration, and the function that loads it."""
    found, name = [], trainer.extension_name
    for entry in entries:
        trainer.extension_name = entry.name
        state = entry.method("newest")(trainer)
        found += [] if state is None else [state]
    trainer.extension_name = name
    return found


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
            if entry.invoke_before_training and not skipped:
                if entry.observe is not None:
                    entry.observe(trainer)
                trainer.extension_name = entry.name
                entry.extension(trainer)
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
        failure = _try_call(f"on_error of {entry.name!r}", failure, entry.method("on_error"), trainer, failure)
    if isinstance(failure, Exception):  # logged now, because finalizing may take long or hang
        logger.error("training stops %s: %s: %s", position, type(failure).__name__, failure)
    for entry in trainer.entries:
        failure = _try_call(f"finalize of {entry.name!r}", failure, entry.method("finalize"))
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
