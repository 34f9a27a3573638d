"""PrintReport: the rows of a LogReport as a table."""

from __future__ import annotations

import html
import importlib
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from chainring._messages import showable, try_to_show, warn
from chainring.training.extension import Extension
from chainring.training.extensions.log_report import key_list
from chainring.training.extensions.progress_bar import TextStream, check_stream, is_notebook, terminal_width
from chainring.training.trainer import Trainer
from chainring.writers.base import COUNTERS

_SECONDS = 0.2  # at least between two updates of a notebook, each of which goes over the network
_ROWS = 100  # the newest, which each update sends
_WIDE, _NARROW = 10, 7  # characters of the narrowest column, and of that of a narrow terminal


class PrintReport(Extension):
    """Prints each new row of a `LogReport` as a row of a table; after a resume, the earlier rows are printed first.

    If a terminal is too narrow for the table, titles are shortened, such as ``validation/main/accuracy`` to
    ``val/accuracy``, and numbers are rounded; if that is not enough, a row takes several lines. A notebook shows one
    growing HTML table of the newest rows. If the stream cannot be written to, such as a closed pipe, there is a warning,
    and it prints no more in this run.

    Example::

        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "elapsed_time"]))

    Args:
        entries: the keys to print as columns; ``None`` takes those of the first row.
        log_report: the name under which the LogReport is registered.
        out: the stream to print to; ``None`` is the current ``sys.stdout``.
    """

    skip_on_resume = True

    def __init__(
        self, entries: Iterable[str] | None = None, log_report: str = "LogReport", out: TextStream | None = None
    ) -> None:
        if not isinstance(log_report, str) and not hasattr(log_report, "log"):
            raise TypeError(f'log_report is the name of a LogReport in the trainer, such as "LogReport"; got {log_report!r}')
        check_stream(out)
        self._entries = None if entries is None else key_list("entries", entries)
        self._log_report = log_report
        self._out = out
        self._report: Any = None  # during the run
        self._keys: dict[str, None] = {}  # of the rows so far
        self._said: Collection[str] = ()  # as the reporter's
        self._printed = 0
        self._table: _NotebookTable | None = None
        self._lines: list[list[tuple[str, int]]] | None = None  # the columns and their widths, line by line
        self._titles: Mapping[str, str] = {}  # of the columns
        self._is_narrow = False  # the table does not fit into the terminal as it is

    @property
    def watched_keys(self) -> Sequence[str]:
        """The columns for which no row has a value so far, except those that every row has."""
        known = {*COUNTERS, *self._keys, *(key for row in self._new_rows() for key in row)}
        return [key for key in self._entries or () if key not in known]

    def initialize(self, trainer: Trainer) -> None:
        self._printed, self._lines, self._keys = 0, None, {}
        if not trainer.comm.is_main:
            return
        report: Any = self._log_report
        try:
            report = report if hasattr(report, "log") else trainer.get_extension(report)
        except KeyError as error:
            remedy = "extend the trainer by one, trainer.extend(extensions.LogReport()), or give log_report= its name"
            raise KeyError(f"PrintReport shows the rows of a LogReport: {error.args[0]}; {remedy}") from None
        if not hasattr(report, "log"):
            raise TypeError(f"PrintReport shows the rows of a LogReport, and {self._log_report!r} has no log")
        self._report, self._said, out = report, trainer.reporter.said, self._stream()
        self._table = _NotebookTable(self._entries, out) if is_notebook(out) else None
        self._print_new(immediately=True)

    def observe_start(self, trainer: Trainer) -> None:
        """Print the row of iteration 0, if the log has one."""
        self._print_new()

    def __call__(self, trainer: Trainer) -> None:
        self._print_new()

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        self._print_new(immediately=True)
        self._report = None  # no warning of keys that have not come yet

    def finalize(self) -> None:
        self._print_new(immediately=True)
        # Only now, because a key may come late, such as that of an occasional evaluation.
        blank = [key for key in self._entries or () if key not in self._keys and not self._is_said(key)]
        if self._report is not None and self._keys and blank:
            warn(f"PrintReport found no values for {blank}; the rows have {list(self._keys)}")
        self._report = None

    def _is_said(self, key: str) -> bool:
        """Return True if another warning has said why a key has no values; an evaluation has put its name before some."""
        return any(key.startswith(said) if said.endswith("/") else f"/{key}".endswith(f"/{said}") for said in self._said)

    def _new_rows(self) -> list[dict[str, Any]]:
        report = self._report
        if report is None:
            return []
        return report.rows_from(self._printed) if hasattr(report, "rows_from") else report.log[self._printed :]  # type: ignore[no-any-return]

    def _print_new(self, immediately: bool = False) -> None:
        rows = self._new_rows()
        if rows and not try_to_show("PrintReport", lambda: self._show(rows, immediately)):
            self._report = None

    def _show(self, rows: list[dict[str, Any]], immediately: bool) -> None:
        if self._table is not None and not self._table.show(rows, immediately):
            return
        self._printed += len(rows)
        self._keys |= dict.fromkeys(key for row in rows for key in row)
        if self._table is not None:
            return
        if self._lines is None:
            self._lines = self._layout(list(rows[0] if self._entries is None else self._entries))
            self._print(self._titles)
        for row in rows:
            self._print(row)

    def _layout(self, keys: list[str]) -> list[list[tuple[str, int]]]:
        """Return columns side by side up to the width of the terminal; further lines begin under the second column."""
        max_width = terminal_width(self._stream()) or sys.maxsize
        self._titles = {key: key for key in keys}
        columns = [(key, max(_WIDE, len(key))) for key in keys]
        self._is_narrow = _width_of(columns) > max_width
        if self._is_narrow:
            shorter = {key: _without_main(key) for key in keys}
            counts = Counter([*shorter.values(), *keys])
            self._titles = {key: new if counts[new] == 1 else key for key, new in shorter.items()}  # no two alike
            columns = [(key, max(_NARROW, len(title))) for key, title in self._titles.items()]
        lines: list[list[tuple[str, int]]] = [[]]
        for column in columns:
            if lines[-1] and _width_of([*lines[-1], column]) > max_width:
                lines.append([("", columns[0][1])])
            lines[-1].append(column)
        return lines

    def _print(self, row: Mapping[str, Any]) -> None:
        if (out := self._stream()) is None:  # the standard output of a process that has none
            return
        for line in self._lines or ():
            text = "  ".join(self._format(row.get(key, ""), width).ljust(width) for key, width in line)
            tqdm.write(showable(text.rstrip(), out), file=out)  # steps aside for a progress bar, if there is one
        getattr(out, "flush", lambda: None)()

    def _format(self, value: Any, width: int) -> str:
        """Return a cell; in a narrow terminal whole numbers in full, others as wide as the column."""
        if not self._is_narrow or isinstance(value, bool) or not isinstance(value, (int, float)):
            return _format_cell(value)
        if isinstance(value, int):
            return str(value)
        return next((text for digits in (4, 3, 2) if len(text := f"{value:.{digits}g}") <= width), f"{value:.1g}")

    def _stream(self) -> TextStream | None:
        return sys.stdout if self._out is None else self._out


class _NotebookTable:
    """The newest rows of a log as one table under the cell, as HTML and as text for IPython to choose from."""

    def __init__(self, entries: Sequence[str] | None, out: Any) -> None:
        self._entries = entries
        self._out = out
        self._handle: Any = None
        self._columns: list[str] | None = None
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_ROWS)
        self._count = 0
        self._next = 0.0

    def show(self, rows: Sequence[Mapping[str, Any]], immediately: bool) -> bool:
        """Show further rows; return False, having done nothing, if the last update was just now."""
        now = time.monotonic()
        if now < self._next and not immediately:
            return False
        if self._columns is None:
            self._columns = list(rows[0] if self._entries is None else self._entries)
        self._rows.extend(rows)
        self._count += len(rows)
        self._cells = [self._columns, *([_format_cell(row.get(key, "")) for key in self._columns] for row in self._rows)]
        left_out = self._count - _ROWS
        self._notes = [f"the newest {_ROWS} rows; the log has {left_out} earlier ones"] if left_out > 0 else []
        if self._handle is None:
            with tqdm.external_write_mode(file=self._out):
                self._handle = importlib.import_module("IPython.display").display(self, display_id=True)
        else:
            self._handle.update(self)
        self._next = now + _SECONDS
        return True

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(text) for text in row] for row in self._cells]
        caption = "".join(f"<caption>{note}</caption>" for note in self._notes)
        header = "".join(f'<th scope="col">{text}</th>' for text in head)
        body = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
        style = 'style="font-variant-numeric: tabular-nums"'
        return f"<table {style}>{caption}<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in self._cells]
        return "\n".join([*self._notes, *lines])


def _width_of(columns: Sequence[tuple[str, int]]) -> int:
    return sum(width + 2 for _, width in columns) - 2


def _without_main(title: str) -> str:
    parts = [part for part in title.split("/") if part != "main"]
    return "/".join(re.sub(r"^validation(?=_\d+$|$)", "val", part) for part in parts) or title


def _format_cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
