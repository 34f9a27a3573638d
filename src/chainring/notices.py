"""What a run says about itself in plain words."""

from __future__ import annotations

from typing import Any


def changed_setting(what: str, saved: Any, given: Any, holds: str = "the new value holds") -> None:
    """Prints that a resumed run has another setting than the one it continues, and which of the two holds."""
    print(f"resumed with {what} {given!r}, where the saved run had {saved!r}: {holds}", flush=True)
