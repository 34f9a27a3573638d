"""The streams on which reports are shown: terminals, notebooks and files."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol


class TextStream(Protocol):
    """A text file, or any object with ``write``."""

    def write(self, text: str, /) -> object: ...


def check_stream(out: TextStream | None) -> None:
    """Raise a `TypeError` if an ``out`` is neither ``None`` nor can be written to."""
    if out is not None and not callable(getattr(out, "write", None)):
        raise TypeError(f"out is a text stream, or None for the standard output; got {out!r}")


def flush(out: Any) -> None:
    """Flush a stream that can be flushed."""
    if hasattr(out, "flush"):
        out.flush()


def is_terminal(out: Any) -> bool:
    """Return True if the stream shows its text on a terminal, where a line can be drawn over."""
    return bool(getattr(out, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"


def terminal_width(out: Any) -> int | None:
    """Return the number of columns of the terminal of a stream; ``None`` if it has none or its width is unknown."""
    try:
        return os.get_terminal_size(out.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def is_notebook(out: Any) -> bool:
    """Return True if the stream is the output of a cell, under which HTML can be shown.

    Spyder and Qt consoles have the same kernel and show text; tqdm recognises them by the same variables.
    """
    streams = sys.modules.get("ipykernel.iostream")
    text_only = any(name == "QT_API" or name.startswith("SPYDER") for name in os.environ)
    return streams is not None and isinstance(out, streams.OutStream) and not text_only
