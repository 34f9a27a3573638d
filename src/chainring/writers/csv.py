"""CsvWriter: writes the rows of a log to a CSV file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chainring._files import AppendOnly, make_folder, open_regular, replace_file, set_rows_aside, to_json
from chainring.writers.base import COUNTERS, Record, Run, Writer, check_path, counters_of, escape_fields


class CsvWriter(Writer):
    """Writes each row at once to a CSV file in UTF-8, in the format of RFC 4180 but with Unix line ends.

    The first line names the columns: ``epoch``, ``iteration``, ``elapsed_time``, then the keys in the order of their
    first report. When a new key appears, the file is replaced by one with another column; rows without the key have an
    empty cell. A key or text that begins like a formula, such as ``=1+1``, begins with an apostrophe. NaN and infinities
    are ``NaN``, ``Infinity`` and ``-Infinity``. After a kill and a resume, the file contains each row exactly once.

    Example::

        trainer.extend(extensions.LogReport(writers=[CsvWriter()]))  # result/log.csv

    Args:
        filename: the name of the file in the run's ``out``, or an absolute path. An existing file of another run is moved
            to ``abandoned/<n>`` beside it.

    Raises:
        TypeError: the file name is not a path.
    """

    def __init__(self, filename: str = "log.csv") -> None:
        self._filename = check_path("filename", filename)
        self.writes = (escape_fields(self._filename),)
        self._file = AppendOnly()
        self._columns: list[str] = []

    def begin(self, run: Run) -> None:
        folder = make_folder(run.out, Path(self._filename).parent)
        path = folder / Path(self._filename).name
        rows = [_cells(record) for record in run.records]
        if not _is_continued(path, rows, run.iteration):
            set_rows_aside(path)
        self._replace(path, rows)

    def write(self, record: Record) -> None:
        if self._file.path is None:
            self.begin(Run())
        assert self._file.path is not None
        row = _cells(record)
        if row.keys() <= set(self._columns):
            self._file.append(_text(self._columns, [row]))
        else:
            self._replace(self._file.path, [*_read(self._file.path), row])

    def _replace(self, path: Path, rows: list[dict[str, str]]) -> None:
        """Write a table with a column for each key in the rows."""
        self._columns = list(dict.fromkeys([*COUNTERS, *(key for row in rows for key in row)]))
        content = _text(self._columns, [{column: column for column in self._columns}, *rows])
        replace_file(path, content)
        self._file = replace(AppendOnly.of(content), path=path)


def _cells(record: Record) -> dict[str, str]:
    row: dict[str, Any] = {**counters_of(record), **record.values}
    return {_shown(key): _shown(value) if isinstance(value, str) else str(to_json(value)) for key, value in row.items()}


def _shown(text: str) -> str:
    """Return a text as a spreadsheet shows it, which computes what begins as a formula does."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _text(columns: list[str], rows: Iterable[dict[str, str]]) -> bytes:
    lines = []
    for row in rows:
        text = io.StringIO()
        csv.DictWriter(text, columns, restval="", lineterminator="\r\n").writerow(row)  # quotes both signs inside a cell
        lines.append(text.getvalue().removesuffix("\r\n") + "\n")
    return "".join(lines).encode()


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the file, without their empty cells."""
    with open(open_regular(path), encoding="utf-8", newline="") as file:
        return [{key: cell for key, cell in row.items() if key and cell} for row in csv.DictReader(file, restval="")]


def _is_continued(path: Path, rows: list[dict[str, str]], iteration: int) -> bool:
    """Return True if the file has these rows up to this iteration, so that later ones may be cut off, or lacks the last."""
    if not os.path.lexists(path):
        return True
    try:
        rows_there = _read(path)
    except (OSError, ValueError, csv.Error):
        return False
    known = [{key: cell for key, cell in row.items() if cell} for row in rows]
    if iteration == 0 or len(rows_there) < len(known):
        return rows_there == known[: len(rows_there)]
    # A row that a killed run has half written may lack the iteration, and counts as a later one.
    earlier = [row for row in rows_there if row.get("iteration", "").isdecimal() and int(row["iteration"]) <= iteration]
    return earlier == known
