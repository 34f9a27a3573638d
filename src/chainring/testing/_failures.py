"""Runs that fail on purpose: the failure comes out as it is, and what was begun can be ended."""

from __future__ import annotations

import enum
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chainring import generators
from chainring.testing._courses import Build
from chainring.testing._manual_clock import ManualClock
from chainring.testing._rules import require, required
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_stop_trigger


class Planned(enum.Enum):
    """Where a run fails, as a sentence ends with it."""

    BEFORE = "that fails before it is initialized"
    AFTER = "that fails in its fourth iteration"
    NOT = "that does not fail"


class _Failure(RuntimeError):  # noqa: N818 - it is wanted
    """The planned failure of a run."""


class _Fails(Extension):
    """Raises before all others are initialized, or after all others were called."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.priority = 10**9 if planned is Planned.BEFORE else -(10**9)

    def initialize(self, trainer: Trainer) -> None:
        if self.planned is Planned.BEFORE:
            raise _Failure

    def __call__(self, trainer: Trainer) -> None:
        if self.planned is Planned.AFTER and trainer.updater.iteration == 4:
            raise _Failure


def require_finalized(build: Build, planned: Planned, remedy: str) -> None:
    """After a run that ends so, no ``on_error`` or ``finalize`` has added an error, and ``finalize`` may be called again."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as out, generators.preserved(), ManualClock():
        trainer, part = build(out)
        trainer.extend(_Fails(planned), name="fails")
        trainer.stop_trigger = get_stop_trigger((5, "iteration"))
        rule = f"a run {planned.value} ends with that error alone, and finalize is called"
        with required(rule, remedy):
            added = _notes_of(trainer)
        require(not added, rule, "; ".join(added), remedy)
        finalize: Any = getattr(part, "finalize", None)
        if callable(finalize):
            with required(f"after a run {planned.value} finalize may be called again", remedy):
                finalize()


def _notes_of(trainer: Trainer) -> list[str]:
    """Runs it; the errors that came after the planned one."""
    try:
        with _unsaid():
            trainer.run()
    except _Failure as failure:
        return [note for note in getattr(failure, "__notes__", []) if note.startswith("afterwards")]
    return []


@contextmanager
def _unsaid() -> Iterator[None]:
    """What a failing run logs is not logged, because the failure is planned."""
    logger = logging.getLogger("chainring")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
