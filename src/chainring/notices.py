"""What a run says about itself in plain words."""

from __future__ import annotations

from typing import Any

_silent = False


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
    said(f"resumed with {what} {given!r}, where the saved run had {saved!r}: {holds}")
