"""What a notebook shows instead of text: a table that is replaced in place, and tqdm's bar of widgets."""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm


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


_SECONDS = 0.2  # at least between two updates: what changes faster is not read, and each update goes over the network
_ROWS = 100  # that are shown, the newest: each update sends all of them


def is_notebook(out: Any) -> bool:
    """Whether the stream is the output of a cell, under which HTML can be shown.

    Spyder and Qt consoles have the same kernel and show text; tqdm tells them by the same variables.
    """
    streams = sys.modules.get("ipykernel.iostream")
    text_only = any(name == "QT_API" or name.startswith("SPYDER") for name in os.environ)
    return streams is not None and isinstance(out, streams.OutStream) and not text_only


def bar_of_widgets() -> Any:
    """The class of tqdm's bar for notebooks; ``None`` without ipywidgets, which draws it."""
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
    """The newest rows of a log as one table under the cell, which is updated as they come.

    Args:
        entries: the keys that are columns; ``None`` takes those of the first row.
        out: the stream of the cell, whose bar of text steps aside for the table.
    """

    def __init__(self, entries: Sequence[str] | None, out: Any) -> None:
        self._entries = entries
        self._out = out
        self._handle: Any = None
        self._shown = 0
        self._next = 0.0

    def show(self, rows: Sequence[Mapping[str, Any]], at_once: bool) -> int:
        """Shows these rows, unless the last update was just now; returns how many of them it has shown."""
        now = time.monotonic()
        if now < self._next and not at_once:
            return self._shown
        table = Table(list(rows[0] if self._entries is None else self._entries), rows)
        if self._handle is None:
            with tqdm.external_write_mode(file=self._out):
                display = importlib.import_module("IPython.display").display
                self._handle = display(table, display_id=True)
        else:
            self._handle.update(table)
        self._shown, self._next = len(rows), now + _SECONDS
        return self._shown


class Table:
    """The newest rows under a header, as IPython wants what it shows: as HTML, and as text for who has none."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        self._left_out = max(0, len(rows) - _ROWS)
        self._cells = [list(columns), *([cell(row.get(key, "")) for key in columns] for row in rows[-_ROWS:])]

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


def cell(value: Any) -> str:
    """A value as a table has it."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
