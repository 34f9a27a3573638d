"""The lifecycle around the loop: what comes before it, and what comes after it whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chainring.notices import said
from chainring.training._directory import RunDirectory
from chainring.training._signals import Interruption
from chainring.training._start import begin, load_newest, make_out
from chainring.training.extension import RollBack

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

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
    said(f"{reason}; the run goes back to iteration {iteration}")
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
