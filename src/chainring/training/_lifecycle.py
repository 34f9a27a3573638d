"""The lifecycle around the loop: what comes before it, and what comes after it whatever happens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chainring import _random
from chainring._messages import info
from chainring._naming import named_submodules
from chainring.iterators.base import share_among_ranks
from chainring.training import _run_record
from chainring.training._run_directory import RunDirectory
from chainring.training._signals import Interruption
from chainring.training.extension import RollBack
from chainring.training.triggers.base import initialize_trigger

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer


def begin(
    trainer: Trainer, entries: list[Entry], started: list[Entry], load: Callable[[Trainer, list[Entry]], None]
) -> None:
    """Begins a run, or begins it again from an earlier state.

    Args:
        trainer: the trainer.
        entries: its extensions, in their order.
        started: takes up the extensions as they are initialized.
        load: puts the state back from which the run goes on, if there is one.
    """
    trainer._started_at = None  # until then state may be loaded
    load(trainer, entries)
    trainer.comm.barrier()  # rank 0 may move later snapshots, and cuts the log back, when all have loaded
    trainer._started_at = time.monotonic()
    if trainer._directory is not None:
        _settle(trainer, trainer._directory, entries)
    prepare(trainer)
    _start_triggers(trainer, entries)
    for entry in entries:
        trainer.extension_name = entry.name
        entry.method("initialize")(trainer)
        started.append(entry)
    trainer.extension_name = None
    _call_before_training(trainer, entries)
    _restore_generators(trainer)


def load_newest(trainer: Trainer, entries: list[Entry]) -> None:
    """Continues from the newest state that an extension offers, before anything is initialized.

    Not where state was loaded already: who names a snapshot means that one.
    """
    found = []
    for entry in entries:
        trainer.extension_name = entry.name
        offer = entry.method("offer")(trainer)
        found += [] if offer is None else [offer]
    trainer.extension_name = None
    if found and not trainer.is_resumed:
        _, load = max(found, key=lambda offer: offer[0])
        load()


def _settle(trainer: Trainer, directory: RunDirectory, entries: list[Entry]) -> None:
    """Makes room in ``out`` for the run, and records its start there."""
    _check_names(entries)
    origin = trainer._restored.origin
    earlier = _run_record.read(directory.path)
    files = {_run_record.NAME, *(name for entry in entries for name in getattr(entry.extension, "writes", ()))}
    known = files.union(earlier.get("files", ()))
    if trainer.is_resumed:
        directory.go_back(known, trainer.updater.iteration)
        earlier = (_run_record.read(origin) if origin is not None else {}) or earlier
        _run_record.write(trainer, entries, earlier, known)
    else:
        directory.begin(known)
        _run_record.write(trainer, entries, {}, files)


def _check_names(entries: list[Entry]) -> None:
    """Refuses two extensions that would write what differs under one name."""
    targets: dict[str, Any] = {}
    for entry in entries:
        for name in getattr(entry.extension, "writes", ()) if entry.is_snapshot else ():
            target = getattr(entry.extension, "target", None)
            if targets.setdefault(name, target) is not target:
                raise ValueError(f"two snapshots of other targets have the name {name!r}; give filename= to one of them")


def prepare(trainer: Trainer) -> None:
    """What must be in place before an extension is initialized: the names of models, the shares of data."""
    updater, comm = trainer.updater, trainer.comm
    for name, model in updater.get_all_models().items():
        for path, part in named_submodules(name, model):
            trainer.reporter.add_observer(path, part)
    comm.begin()
    for source in updater.get_all_iterators().values():
        share_among_ranks(source, comm)
    if hasattr(updater, "start"):
        updater.start()


def _start_triggers(trainer: Trainer, entries: list[Entry]) -> None:
    vars(trainer).pop("_started_triggers", None)
    triggers = (trainer.stop_trigger, *(entry.trigger for entry in entries))
    for trigger in triggers:
        initialize_trigger(trigger, trainer)
    trainer._restored.warn_of_differences()


def _call_before_training(trainer: Trainer, entries: list[Entry]) -> None:
    """The calls of ``invoke_before_training``. On a resumed run what they report is thrown away."""
    kept = trainer.observation
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        for entry in entries:
            skipped = trainer.is_resumed and getattr(entry.extension, "skip_on_resume", False)
            if entry.invoke_before_training and not skipped:
                if entry.observe is not None:
                    entry.observe(trainer)
                trainer.extension_name = entry.name
                entry.extension(trainer)
    trainer.extension_name = None
    if trainer.is_resumed:
        trainer.observation = kept


def _restore_generators(trainer: Trainer) -> None:
    restored, rank = trainer._restored, trainer.comm.rank
    if restored.generators is not None:
        _random.set_rng_state(restored.generators)
        restored.generators = None
    elif restored.happened:  # saved by fewer ranks
        _random.seed_all("rank", rank, trainer.updater.iteration)
    elif rank > 0:  # each rank draws from its own stream, and rank 0 from the one that the script has seeded
        _random.seed_all("rank", rank, torch.initial_seed())


def check_out(out: Any) -> None:
    """Refuses an ``out`` that cannot become a directory one may write to, without making anything.

    Raises:
        TypeError: it is no path of text.
        OSError: something else is in the way, or the permission is missing.
    """
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f'out is the path of a directory, such as "result"; got {out!r} of type {type(out).__name__}')
    path = Path(out).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(f"out must be a directory, and {existing} is none; choose another out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"out must be a directory one may write to, and {existing} is not; choose another out")


def make_out(out: Any) -> None:
    """Makes the directory and tries whether a file can be written there.

    Raises:
        OSError: it cannot.
    """
    try:
        os.makedirs(out, exist_ok=True)
        probe = Path(out) / f".writable-{os.getpid()}-{time.monotonic_ns()}.tmp"  # of a name that is swept
        probe.touch()
        probe.unlink()
    except OSError as error:
        rule = f"out must be a directory one may write to ({error.strerror}); choose another out"
        raise OSError(error.errno, rule, os.fspath(out)) from error


logger = logging.getLogger("chainring")

Step = tuple[str, Any, tuple[Any, ...]]
"""What is called, the call, and its arguments."""


@contextmanager
def session(trainer: Trainer) -> Iterator[tuple[list[Entry], list[Entry]]]:
    """Starts a run and ends it, come what may; gives the extensions in their order, and the snapshots in theirs.

    When something fails, every extension that has started is told (`on_error`); in any case every extension and the
    updater are finalized. The first error is the one raised, and later ones become its notes. A signal that asks the
    run to end is no failure: when everything is finalized, `Interrupted` is raised.
    """
    with Interruption(trainer.comm) as trainer.interruption:
        failure = yield from _lived(trainer)
        if failure is None and trainer.interruption.received is not None:
            failure = trainer.interruption.error()
    if failure is not None:
        raise failure


def _lived(trainer: Trainer) -> Generator[tuple[list[Entry], list[Entry]], None, BaseException | None]:
    """The life of a run; returns what has made it fail."""
    entries = trainer._ordered()
    started: list[Entry] = []
    trainer._has_begun = True
    failure: BaseException | None = None
    try:
        if trainer.comm.rank == 0:  # which alone writes there
            make_out(trainer.out)
            trainer._directory = RunDirectory(trainer.out)
        begin(trainer, entries, started, load_newest)
        yield [entry for entry in entries if not entry.is_snapshot], [entry for entry in entries if entry.is_snapshot]
    except BaseException as error:
        error.add_note(f"raised {_where(trainer)}")
        failure = trainer.comm.failed(error)
    failure = _end(trainer, entries, started, failure)
    trainer._total_time = trainer.elapsed_time
    if trainer._directory is not None:
        trainer._directory.release()
    return failure


def go_back(trainer: Trainer, reason: RollBack) -> None:
    """Puts a run that is under way back to its newest snapshot, as if it had been ended and begun again.

    Raises:
        RollBack: there is no snapshot to go back to.
    """
    entries = trainer._ordered()
    found = [offer for entry in entries if (offer := entry.method("newest")(trainer)) is not None]
    if not found:
        raise reason
    iteration, load = max(found, key=lambda offer: offer[0])
    info(f"{reason}; the run goes back to iteration {iteration}")
    for entry in entries:
        entry.method("finalize")()
    begin(trainer, entries, [], lambda *_: load())


def _where(trainer: Trainer) -> str:
    where = "" if trainer.extension_name is None else f"in extension {trainer.extension_name!r} "
    return f"{where}after iteration {trainer.updater.iteration}"


def _end(
    trainer: Trainer, entries: list[Entry], started: list[Entry], failure: BaseException | None
) -> BaseException | None:
    """Calls every ``on_error`` and every ``finalize``; returns the first error, with the later ones as its notes."""
    where = _where(trainer)
    if failure is not None:
        told = [(f"on_error of {entry.name!r}", entry.method("on_error"), (trainer, failure)) for entry in started]
        failure = _call_all(told, failure)
    if isinstance(failure, Exception):  # said now, because finalizing may take long or hang
        logger.error("training stops %s: %s: %s", where, type(failure).__name__, failure)
    ended: list[Step] = [(f"finalize of {entry.name!r}", entry.method("finalize"), ()) for entry in entries]
    ended.append(("finalize of the updater", getattr(trainer.updater, "finalize", lambda: None), ()))
    failure = _call_all(ended, failure)
    trainer.extension_name = None
    return failure


def _call_all(steps: list[Step], failure: BaseException | None) -> BaseException | None:
    """Calls each come what may; the first error is returned, those after it become its notes."""
    for what, call, arguments in steps:
        try:
            call(*arguments)
        except BaseException as error:
            if failure is None:
                failure = error
                failure.add_note(f"raised in {what}")
            elif error is not failure:
                failure.add_note(f"afterwards {what} raised {type(error).__name__}: {error}")
    return failure
