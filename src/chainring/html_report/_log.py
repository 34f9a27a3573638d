"""A log of a run: its numbers in columns, its last rows, and its images, texts and histograms; nothing in it is trusted."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chainring._checks import is_number
from chainring._runs.finished import RowReader
from chainring.writers.base import COUNTERS

MAX_ROWS = 4_000  # that are kept as they were written, the last of a log
MAX_SIZE = 8 << 20  # characters of the images and texts on a page
MAX_SHOWN = 24  # images, texts or histograms of a key
_MAX_KEYS = 100
_MAX_TEXT = 4_000
_MAX_BINS = 1_000
_PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]{32,}={0,2}")  # the Base64 of a PNG file


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers of one key: the indices of the rows that have one, and the values, NaN and infinities among them."""

    rows: NDArray[np.int64]
    values: NDArray[np.float64]

    def last(self) -> Column:
        """Return the last number alone, without keeping the others in memory."""
        return Column(self.rows[-1:].copy(), self.values[-1:].copy())


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
        self._reader, self._name, self._max_rows = RowReader(path), name, max_rows
        self._begin()

    def _begin(self) -> None:
        self._columns = Columns()
        self._rows: deque[dict[str, Any]] = deque(maxlen=self._max_rows)
        self._unreadable = 0

    def read(self) -> Log:
        """Return the log as it is now; a run that was resumed may have cut it back, and then it is read from the start."""
        for lines in self._reader.read(self._begin):
            rows = [row for row in lines if row is not None]
            self._unreadable += len(lines) - len(rows)
            self._rows.extend(rows)
            self._columns.add(rows)
        return self._columns.log(self._name, list(self._rows), self._unreadable)


class Columns:
    """The numbers of rows by key, to which more rows are added."""

    def __init__(self) -> None:
        self._count = 0
        self._keys: dict[str, None] = {}
        self._columns: dict[str, list[Column]] = {}  # by key, one for each time that rows were added

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
                if (column := _numbers(at, [row[key] for row in chosen])) is not None:
                    self._columns.setdefault(key, []).append(column)
        self._count += len(rows)

    def log(self, name: str, rows: list[dict[str, Any]], unreadable: int = 0) -> Log:
        """Return the rows so far as a log, with the last of them as they were written."""
        self._columns = {key: [_joined(columns)] for key, columns in self._columns.items()}
        counters = [key for key in COUNTERS if key in self._keys]
        keys = [*counters, *(key for key in self._keys if key not in COUNTERS)]
        return Log(name, self._count, keys, {key: column for key, (column,) in self._columns.items()}, rows, unreadable)


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


def _joined(columns: Sequence[Column]) -> Column:
    """Return columns as one, in the order of the rows."""
    if len(columns) == 1:
        return columns[0]
    rows = np.concatenate([column.rows for column in columns])
    order = np.argsort(rows, kind="stable")
    return Column(rows[order], np.concatenate([column.values for column in columns])[order])


@dataclass(frozen=True, slots=True)
class Shown:
    """An image, a text or a histogram at the iteration of its row; two of the three are ``None``."""

    iteration: Any
    png: str | None = None  # in Base64
    size: tuple[int, int] = (0, 0)  # of an image, its width and height
    text: str | None = None
    bars: list[float] | None = None  # the height of each bin of a histogram, the highest 1
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """What is shown of what was reported under one key, the oldest first, and how many rows have it."""

    key: str
    shown: list[Shown]
    count: int


@dataclass(slots=True)
class _Sample:
    """What is kept of many images, texts or histograms of one key: some that are evenly spaced, and the newest."""

    kept: list[Shown] = field(default_factory=list)
    count: int = 0
    stride: int = 1
    newest: list[Shown] = field(default_factory=list)  # if it is not kept anyway

    def add(self, shown: Shown) -> None:
        is_kept = self.count % self.stride == 0
        (self.kept if is_kept else self.newest).append(shown)
        self.newest = [] if is_kept else self.newest[-1:]
        if len(self.kept) > 2 * MAX_SHOWN:  # of an odd number the last stays too
            self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.count += 1

    def spread(self) -> list[Shown]:
        return _spread([*self.kept, *self.newest], MAX_SHOWN)


def read_media(path: Path, number_of_rows: int, max_size: int = MAX_SIZE) -> list[Series]:
    """Read what belongs to the rows of a log; a line that is damaged, or of a row that is not there, is left out.

    Of many rows some are shown, evenly spaced, and so are those that there is room for.
    """
    samples: dict[str, _Sample] = {}
    with open(path, "rb") as file:
        for line in file:
            try:
                row: Any = json.loads(line) if line.endswith(b"\n") else None  # else it was cut, or is being written
                number, content = row["row"], row["media"]
            except (ValueError, RecursionError, LookupError, TypeError):
                continue
            if type(number) is not int or not 0 <= number < number_of_rows or not isinstance(content, dict):
                continue
            for key, item in content.items():
                shown = _shown(row.get("iteration"), item) if isinstance(item, dict) else None
                if shown is not None and (key in samples or len(samples) < _MAX_KEYS):
                    samples.setdefault(key, _Sample()).add(shown)
    series = [Series(key, sample.spread(), sample.count) for key, sample in samples.items()]
    sizes = [_size(of_key.shown) for of_key in series]
    while sum(sizes) > max_size:
        largest = sizes.index(max(sizes))
        shown_there = series[largest].shown
        shown_there[:] = _spread(shown_there, len(shown_there) - 1) if len(shown_there) > 1 else []
        sizes[largest] = _size(shown_there)
    return series


def _spread(shown: list[Shown], number: int) -> list[Shown]:
    """Return so many, evenly spaced: the newest, and the oldest if there are two."""
    if len(shown) <= number:
        return shown
    return shown[-1:] if number == 1 else [shown[round(i * (len(shown) - 1) / (number - 1))] for i in range(number)]


def _size(shown: list[Shown]) -> int:
    return sum(len(item.png or item.text or "") for item in shown)


def _shown(iteration: Any, item: dict[str, Any]) -> Shown | None:
    kind = item.get("kind")
    if kind == "image":
        return _image(iteration, item.get("png"))
    if kind == "text" and isinstance(text := item.get("text"), str):
        length = f" ({len(text):,} characters)" if len(text) > _MAX_TEXT else ""
        return Shown(iteration, text=text[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode(), summary=length)
    return _histogram(iteration, item) if kind == "histogram" else None


def _image(iteration: Any, png: Any) -> Shown | None:
    if not isinstance(png, str) or not _PNG.fullmatch(png):
        return None
    try:
        width, height = struct.unpack_from(">II", base64.b64decode(png[:40]), 16)
    except (binascii.Error, struct.error):
        return None
    return Shown(iteration, png=png, size=(width, height), summary=f"{width} x {height}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _histogram(iteration: Any, item: dict[str, Any]) -> Shown | None:
    counts, edges = item.get("counts"), item.get("edges")
    if not isinstance(counts, list) or not isinstance(edges, list) or len(counts) > _MAX_BINS:
        return None
    if not all(type(count) is int and 0 <= count < 1 << 60 for count in counts) or not all(map(_is_finite, edges)):
        return None
    words = [f"{sum(counts):,} values" + (f" from {edges[0]:.4g} to {edges[-1]:.4g}" if edges else "")]
    names = {"nan": "NaN", "positive_infinity": "positive infinity", "negative_infinity": "negative infinity"}
    apart = {word: item.get(name) for name, word in names.items()}
    words += [f"{count:,} {word}" for word, count in apart.items() if type(count) is int and 0 < count < 1 << 60]
    highest = max(counts, default=0) or 1
    return Shown(iteration, bars=[count / highest for count in counts], summary=", ".join(words))
