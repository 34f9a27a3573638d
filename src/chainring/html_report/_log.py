"""A log of a run, read into columns: damaged lines are counted and left out, and a file that grows is read on."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chainring._checks import is_number
from chainring._files import from_json
from chainring.html_report._media import Series
from chainring.writers.base import COUNTERS

MAX_ROWS = 4_000  # that are kept as they were written, the last of a log
_CHUNK = 1 << 20  # bytes read at once
_TAIL = 256  # bytes by which a file that was cut back and written on is told from one that has grown
_WORDS = (b'"NaN"', b'Infinity"', b"\\u")  # without them a line has nothing that `from_json` changes


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers of one key: the indices of the rows that have one, and the values, NaN and infinities among them."""

    rows: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Log:
    """A log of a run, by the name of the file of its lines."""

    name: str
    count: int  # of its rows
    keys: list[str]  # of all rows: the counters first, then the others as they first occur
    columns: dict[str, Column]  # by key, those with a number
    rows: list[dict[str, Any]]  # the last; NaN and infinities as floats
    unreadable: int = 0  # the number of complete lines that are not rows
    media: list[Series] = field(default_factory=list)

    def column(self, key: str) -> NDArray[np.float64]:
        """Return a value for each row: NaN where the row has no number."""
        values = np.full(self.count, np.nan)
        if key in self.columns:
            values[self.columns[key].rows] = self.columns[key].values
        return values


class LogFile:
    """Reads a log, and later what was appended to it since."""

    def __init__(self, path: Path, name: str, max_rows: int = MAX_ROWS) -> None:
        self._path, self._name, self._max_rows = path, name, max_rows
        self._reset()

    def _reset(self) -> None:
        self._columns = Columns()
        self._rows: deque[dict[str, Any]] = deque(maxlen=self._max_rows)
        self._unreadable = 0
        self._end = 0  # of the lines that were read
        self._tail = b""

    def read(self) -> Log:
        """Return the log as it is now; a run that was resumed may have cut it back, and then it is read from the start."""
        with open(self._path, "rb") as file:
            file.seek(self._end - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._reset()
                file.seek(0)
            rest = b""
            while chunk := file.read(_CHUNK):
                text, end, rest = (rest + chunk).rpartition(b"\n")
                if end:
                    self._add(text.split(b"\n"))
                    self._end += len(text) + 1
                    self._tail = (self._tail + text + end)[-_TAIL:]
        # What is left has no end of its line yet: it is being written, or was cut by a kill.
        return self._columns.log(self._name, list(self._rows), self._unreadable)

    def _add(self, lines: list[bytes]) -> None:
        rows = parse_rows(lines)
        self._unreadable += len(lines) - len(rows)
        self._rows.extend(rows)
        self._columns.add(rows)


def parse_rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows among lines of a log."""
    text = b",0,".join(lines)  # all at once is much faster; between lines that are not whole a 0 fits nowhere
    try:
        items = json.loads(b"[" + text + b"]")
    except (ValueError, RecursionError):
        items = []
    if len(items) != 2 * len(lines) - 1 or any(items[1::2]) or not all(isinstance(item, dict) for item in items[::2]):
        found = map(_parse_row, lines)
        return [row for row in found if row is not None]
    rows: list[dict[str, Any]] = items[::2]
    return [from_json(row) for row in rows] if any(word in text for word in _WORDS) else rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        content = from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def log_of(name: str, rows: Sequence[dict[str, Any]]) -> Log:
    """Return a log of these rows."""
    columns = Columns()
    columns.add(rows)
    return columns.log(name, list(rows))


class Columns:
    """The numbers of rows by key, to which more rows are added."""

    def __init__(self) -> None:
        self._count = 0
        self._keys: dict[str, None] = {}
        self._parts: dict[str, list[Column]] = {}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows; those with the same keys, mostly all, are turned into arrays together."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for index, row in enumerate(rows):
            alike.setdefault(tuple(row), []).append(index)
        for keys, indices in alike.items():
            at = np.array(indices) + self._count
            chosen = [rows[index] for index in indices]
            for key in keys:
                self._keys.setdefault(key)
                if (part := _numbers(at, [row[key] for row in chosen])) is not None:
                    self._parts.setdefault(key, []).append(part)
        self._count += len(rows)

    def log(self, name: str, rows: list[dict[str, Any]], unreadable: int = 0) -> Log:
        """Return the rows so far as a log, with the last of them as they were written."""
        for key, parts in self._parts.items():
            if len(parts) > 1:
                self._parts[key] = [_joined(parts)]
        columns = {key: parts[0] for key, parts in self._parts.items()}
        counters = [key for key in COUNTERS if key in self._keys]
        keys = [*counters, *(key for key in self._keys if key not in COUNTERS)]
        return Log(name, self._count, keys, columns, rows, unreadable)


def _numbers(at: NDArray[np.int64], values: list[Any]) -> Column | None:
    if not set(map(type, values)) <= {int, float}:
        pairs = [(index, value) for index, value in zip(at, values, strict=True) if is_number(value)]
        if not pairs:
            return None
        at, values = np.array([index for index, _ in pairs]), [value for _, value in pairs]
    try:
        return Column(at, np.array(values, np.float64))
    except OverflowError:  # an integer of hundreds of digits
        return Column(at, np.array([_float(value) for value in values]))


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _joined(parts: Iterable[Column]) -> Column:
    """Return parts as one, in the order of the rows."""
    rows = np.concatenate([part.rows for part in parts])
    order = np.argsort(rows, kind="stable")
    return Column(rows[order], np.concatenate([part.values for part in parts])[order])


def modified(path: Path) -> tuple[int, int]:
    """Return the size and the time of a file, by which it is seen that it has changed; of none two zeros."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
