"""Terminals and notebooks: the kind of a stream, a table that grows under a cell, and tqdm's bar of widgets."""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tqdm import tqdm

_SECONDS = 0.2  # at least between two updates, each of which goes over the network
_ROWS = 100  # the newest, which each update sends


class TextStream(Protocol):
    """A text file, or any object with ``write``."""

    def write(self, text: str, /) -> object: ...


def check_stream(out: TextStream | None) -> None:
    """Raise a `TypeError` if an ``out`` is neither ``None`` nor can be written to."""
    if out is not None and not callable(getattr(out, "write", None)):
        raise TypeError(f"out is a text file, or None for the standard output; got {out!r}")


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


def notebook_bar_class() -> Any:
    """Return the class of tqdm's bar for notebooks; ``None`` without ipywidgets, which draws it."""
    try:
        importlib.import_module("ipywidgets")
    except ImportError:
        return None
    from tqdm.notebook import tqdm_notebook

    class NotebookBar(tqdm_notebook):  # type: ignore[type-arg]
        """Green at the end, also where a stop trigger ends the run before its length; red where it failed."""

        monitor_interval = 0
        failed = False

        def display(
            self,
            msg: Any = None,
            pos: Any = None,
            close: bool = False,
            bar_style: str | None = None,
            check_delay: bool = True,
        ) -> None:
            style = "success" if bar_style == "danger" and not self.failed else bar_style
            super().display(msg, pos, close, style, check_delay)

    return NotebookBar


class NotebookTable:
    """The newest rows of a log as one table under the cell, which is updated as they come; see `PrintReport`."""

    def __init__(self, entries: Sequence[str] | None, out: Any) -> None:
        self._entries = entries
        self._out = out
        self._handle: Any = None
        self._shown = 0
        self._next = 0.0

    def show(self, rows: Sequence[Mapping[str, Any]], immediately: bool) -> int:
        """Show these rows, unless the last update was just now; return how many rows are shown."""
        now = time.monotonic()
        if now < self._next and not immediately:
            return self._shown
        table = _Table(list(rows[0] if self._entries is None else self._entries), rows)
        if self._handle is None:
            with tqdm.external_write_mode(file=self._out):
                display = importlib.import_module("IPython.display").display
                self._handle = display(table, display_id=True)
        else:
            self._handle.update(table)
        self._shown, self._next = len(rows), now + _SECONDS
        return self._shown


class _Table:
    """The newest rows under a header, as HTML and as text for IPython to choose from."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        self._left_out = max(0, len(rows) - _ROWS)
        self._cells = [list(columns), *([format_cell(row.get(key, "")) for key in columns] for row in rows[-_ROWS:])]

    def _note(self) -> str:
        return f"the newest {_ROWS} rows; the log has {self._left_out} earlier ones" if self._left_out else ""

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(text) for text in row] for row in self._cells]
        caption = f"<caption>{self._note()}</caption>" if self._left_out else ""
        header = "".join(f'<th scope="col">{text}</th>' for text in head)
        body = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
        style = 'style="font-variant-numeric: tabular-nums"'
        return f"<table {style}>{caption}<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in self._cells
        ]
        return "\n".join([*([self._note()] if self._left_out else []), *lines])


def format_cell(value: Any) -> str:
    """Return a value as text for a table."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
