"""What is known about where text goes: whether it is a terminal, and how wide."""

from __future__ import annotations

import os
from typing import Any


def is_terminal(out: Any) -> bool:
    """Whether the stream shows its text on a terminal, where a line can be drawn over."""
    return bool(getattr(out, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"


def columns_of(out: Any) -> int | None:
    """The width of the terminal that the stream writes to; ``None`` where it is none, or does not say."""
    try:
        return os.get_terminal_size(out.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def flush(out: Any) -> None:
    """Flushes a stream that can be flushed."""
    if hasattr(out, "flush"):
        out.flush()
