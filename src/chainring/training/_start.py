"""What comes before the loop: an earlier state, the directory, names, triggers, extensions, generators."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chainring import generators
from chainring.iterators.base import share_out
from chainring.names import named_parts
from chainring.training import _record
from chainring.training._directory import RunDirectory
from chainring.training.triggers.base import start

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
    earlier = _record.read(directory.path)
    files = {_record.NAME, *(name for entry in entries for name in getattr(entry.extension, "writes", ()))}
    known = files.union(earlier.get("files", ()))
    if trainer.is_resumed:
        directory.go_back(known, trainer.updater.iteration)
        earlier = (_record.read(origin) if origin is not None else {}) or earlier
        _record.write(trainer, entries, earlier, known)
    else:
        directory.begin(known)
        _record.write(trainer, entries, {}, files)


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
        for path, part in named_parts(name, model):
            trainer.reporter.add_observer(path, part)
    comm.begin()
    for source in updater.get_all_iterators().values():
        share_out(source, comm)
    if hasattr(updater, "start"):
        updater.start()


def _start_triggers(trainer: Trainer, entries: list[Entry]) -> None:
    vars(trainer).pop("_started_triggers", None)
    triggers = (trainer.stop_trigger, *(entry.trigger for entry in entries))
    for trigger in triggers:
        start(trigger, trainer)
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
        generators.set_state(restored.generators)
        restored.generators = None
    elif restored.happened:  # saved by fewer ranks
        generators.seed_all("rank", rank, trainer.updater.iteration)
    elif rank > 0:  # each rank draws from its own stream, and rank 0 from the one that the script has seeded
        generators.seed_all("rank", rank, torch.initial_seed())


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
