"""Settings of a resumed run that differ from those of the saved run: recorded, and printed as one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from chainring._messages import info

_recorded: ContextVar[dict[str, list[Any]] | None] = ContextVar("_recorded", default=None)


class ChangedSetting(NamedTuple):
    """A setting of a resumed run that differs from the saved run, and the value that is used."""

    name: str
    saved: Any
    given: Any
    consequence: str


_untold: ContextVar[list[ChangedSetting] | None] = ContextVar("_untold", default=None)
_HOLDS = "the new value holds"


def announce_change(name: str, saved: Any, given: Any, consequence: str = _HOLDS) -> None:
    """Print that a setting of a resumed run differs; in `telling_changes` with the others, as one table."""
    changes, untold = _recorded.get(), _untold.get()
    setting = ChangedSetting(name, saved, given, consequence)
    if changes is not None:
        changes[name] = [saved, given]
    if untold is None:
        info(_format_changes([setting]))
    else:
        untold.append(setting)


@contextmanager
def recording_changes(changes: dict[str, list[Any]]) -> Iterator[None]:
    """Inside, add each announced change to ``changes``: its name, with the saved and the given value."""
    token = _recorded.set(changes)
    try:
        yield
    finally:
        _recorded.reset(token)


@contextmanager
def telling_changes(untold: list[ChangedSetting], is_complete: bool = True) -> Iterator[None]:
    """Inside, collect what is announced, and print it at the end as a table, unless this is inside another one.

    With ``is_complete=False`` more changes will follow, and nothing is printed.
    """
    if _untold.get() is not None:
        yield
        return
    token = _untold.set(untold)
    try:
        yield
    finally:
        _untold.reset(token)
    if untold and is_complete:
        info(_format_changes(untold))
        untold.clear()


def _format_changes(settings: Iterable[ChangedSetting]) -> str:
    """Return a table: ``setting  saved -> now``, and which value holds where that is not the new one."""
    rows = [("setting", "saved", "now", "")]
    for name, saved, given, consequence in dict.fromkeys(
        (s.name, repr(s.saved), repr(s.given), s.consequence) for s in settings
    ):
        rows.append((name, saved, given, "" if consequence == _HOLDS else f"  ({consequence})"))
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:{names}}  {saved:{values}} -> {given}{note}" for name, saved, given, note in rows]
    return "\n".join(["resumed with different settings from the saved run:", *lines])
