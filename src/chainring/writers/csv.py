"""CsvWriter: the rows of a log as a table of text."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path

from chainring._files import numbered, plain, replace
from chainring._messages import info
from chainring.writers._common import checked_name, template
from chainring.writers.base import Record, Run, Writer

_OWN = ("epoch", "iteration", "elapsed_time")


class CsvWriter(Writer):
    """Writes each row at once into a CSV file, as RFC 4180 has it but with the line ends of Unix, in UTF-8.

    The first line names the columns: ``epoch``, ``iteration``, ``elapsed_time``, then the keys as they come. When a new key
    comes, the file is replaced by one with a column more; rows without a key have an empty cell there. NaN and infinities
    are ``NaN``, ``Infinity`` and ``-Infinity``, as in the log. After kill and resume each row is there exactly once.

    Args:
        filename: of the file in the run's ``out``, or an absolute path. A table there that the run does not continue is
            moved to ``abandoned/<n>`` beside it.

    Raises:
        TypeError: the file name is no path.
    """

    def __init__(self, filename: str = "log.csv") -> None:
        self._filename = checked_name("filename", filename)
        self.writes = (template(self._filename),)
        self._path: Path | None = None
        self._columns: list[str] = []

    def begin(self, run: Run) -> None:
        path = run.out / self._filename
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [_cells(record) for record in run.records]
        if not _is_continued(path, rows, run.iteration):
            _set_aside(path)
        self._path, self._columns = path, _columns(rows)
        self._replace(rows)

    def write(self, record: Record) -> None:
        if self._path is None:
            self.begin(Run())
        assert self._path is not None
        row = _cells(record)
        if not row.keys() <= set(self._columns):
            rows = [*_read(self._path), row]
            self._columns = _columns(rows)
            self._replace(rows)
            return
        with open(self._path, "ab") as file:
            file.write(_text(self._columns, [row]))

    def _replace(self, rows: Iterable[dict[str, str]]) -> None:
        assert self._path is not None
        replace(self._path, _text(self._columns, [dict(zip(self._columns, self._columns, strict=True)), *rows]))


def _cells(record: Record) -> dict[str, str]:
    own = (record.epoch, record.iteration, record.elapsed_time)
    row = {**dict(zip(_OWN, own, strict=True)), **record.values}
    return {key: str(plain(value)) for key, value in row.items()}


def _columns(rows: Iterable[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys([*_OWN, *(key for row in rows for key in row)]))


def _text(columns: list[str], rows: Iterable[dict[str, str]]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _read(path: Path) -> list[dict[str, str]]:
    """The rows in the file, without their empty cells."""
    with open(path, encoding="utf-8", newline="") as file:
        return [{key: cell for key, cell in row.items() if key and cell} for row in csv.DictReader(file, restval="")]


def _is_continued(path: Path, rows: list[dict[str, str]], iteration: int) -> bool:
    """Whether the file holds these rows up to this iteration, so that what is beyond them may be cut off."""
    if not path.exists():
        return True
    try:
        found = _read(path)
    except (ValueError, csv.Error):
        return False
    if iteration == 0:
        return not found
    return [row for row in found if _iteration(row) <= iteration] == [
        {key: cell for key, cell in row.items() if cell} for row in rows
    ]


def _iteration(row: dict[str, str]) -> float:
    """Of a row that a killed run has left half written it may be missing."""
    number = row.get("iteration", "")
    return int(number) if number.isdecimal() else float("inf")


def _set_aside(path: Path) -> None:
    place = numbered(path.parent / "abandoned") / path.name
    os.rename(path, place)
    info(f"{path} holds rows that this run does not continue: moved to {place}")
