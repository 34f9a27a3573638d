"""Messages of a run to its user: printed lines, changed settings, and warnings that are given once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chainring.serializers.base import AbstractSerializer

_is_muted = False
_recorded: ContextVar[dict[str, list[Any]] | None] = ContextVar("_recorded", default=None)


def mute() -> None:
    """Let this process print nothing from now on; of several ranks, only the first prints."""
    global _is_muted
    _is_muted = True


def info(text: str) -> None:
    """Print a line for the user, unless this process is muted."""
    if not _is_muted:
        print(text, flush=True)


def announce_change(name: str, saved: Any, given: Any, consequence: str = "the new value holds") -> None:
    """Print that a setting of a resumed run differs from that of the run which it continues, and which one holds."""
    changes = _recorded.get()
    if changes is not None:
        changes[name.removesuffix(",")] = [saved, given]
    info(f"resumed with {name} {given!r}, where the saved run had {saved!r}: {consequence}")


@contextmanager
def recording_changes(changes: dict[str, list[Any]]) -> Iterator[None]:
    """Inside, add each announced change to ``changes``: its name, with the saved and the given value."""
    token = _recorded.set(changes)
    try:
        yield
    finally:
        _recorded.reset(token)


class OneTimeWarning:
    """A warning that is given once in a run, however often the run is resumed.

    Attributes:
        was_given: True if it has been given.
    """

    def __init__(self) -> None:
        self.was_given = False

    def give(self, text: str, stacklevel: int) -> None:
        """Warn, unless this was done before."""
        if not self.was_given:
            self.was_given = True
            warnings.warn(text, stacklevel=stacklevel + 1)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load whether the warning has been given."""
        self.was_given = serializer("has_warned", self.was_given)
