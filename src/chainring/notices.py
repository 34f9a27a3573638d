"""What a run says about itself in plain words."""

from __future__ import annotations

from typing import Any


def said(text: str) -> None:
    """Prints what the run does that its reader should know."""
    print(text, flush=True)


def changed_setting(what: str, saved: Any, given: Any, holds: str = "the new value holds") -> None:
    """Prints that a resumed run has another setting than the one it continues, and which of the two holds."""
    said(f"resumed with {what} {given!r}, where the saved run had {saved!r}: {holds}")
