"""What a run says about itself in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_silent = False
_noted: ContextVar[dict[str, list[Any]] | None] = ContextVar("_noted", default=None)


def be_silent() -> None:
    """Lets this process say nothing from now on: of several ranks, one speaks for all."""
    global _silent
    _silent = True


def said(text: str) -> None:
    """Prints what the run does that its reader should know."""
    if not _silent:
        print(text, flush=True)


def changed_setting(what: str, saved: Any, given: Any, holds: str = "the new value holds") -> None:
    """Prints that a resumed run has another setting than the one it continues, and which of the two holds."""
    noted = _noted.get()
    if noted is not None:
        noted[what.removesuffix(",")] = [saved, given]
    said(f"resumed with {what} {given!r}, where the saved run had {saved!r}: {holds}")


@contextmanager
def noting(changes: dict[str, list[Any]]) -> Iterator[None]:
    """What `changed_setting` says inside is also put into ``changes``: by its name, the old value and the new."""
    token = _noted.set(changes)
    try:
        yield
    finally:
        _noted.reset(token)
