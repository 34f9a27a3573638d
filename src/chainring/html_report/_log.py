"""A log of a run: its numbers in columns, its last rows, and its curves; nothing in it is trusted."""

from __future__ import annotations

import base64
import math
import re
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
MAX_POINTS = 12_000  # of a page of one run: with their positions on the three axes, some 600 kB in the worst case
MAX_CURVE_POINTS = 2_000  # more than a screen has columns
_MIN_CURVE_POINTS = 24
_EVALUATION = re.compile(r"validation(_\d+)?")


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
    media: list[Any] = field(default_factory=list)


class LogFile:
    """Reads a log, and later what was appended to it since."""

    def __init__(self, path: Path, name: str, max_rows: int = MAX_ROWS) -> None:
        self._reader, self._name, self._max_rows = RowReader(path), name, max_rows
        self._begin()

    def _begin(self) -> None:
        self._count = self._unreadable = 0
        self._keys: dict[str, None] = {}
        self._columns: dict[str, list[Column]] = {}  # by key, one for each time that rows were added
        self._rows: deque[dict[str, Any]] = deque(maxlen=self._max_rows)

    def read(self) -> Log:
        """Return the log as it is now; a run that was resumed may have cut it back, and then it is read from the start."""
        for lines in self._reader.read(self._begin):
            rows = [row for row in lines if row is not None]
            self._unreadable += len(lines) - len(rows)
            self._rows.extend(rows)
            cells: dict[str, tuple[list[int], list[Any]]] = {}  # by key the indices of the rows that have it, and the values
            for index, row in enumerate(rows, self._count):
                for key, value in row.items():
                    at, values = cells.setdefault(key, ([], []))
                    at.append(index)
                    values.append(value)
            for key, (at, values) in cells.items():
                self._keys.setdefault(key)
                if (column := _numbers(np.array(at), values)) is not None:
                    self._columns.setdefault(key, []).append(column)
            self._count += len(rows)
        for columns in self._columns.values():
            all_rows = np.concatenate([column.rows for column in columns])
            columns[:] = [Column(all_rows, np.concatenate([column.values for column in columns]))]
        keys = [*(key for key in COUNTERS if key in self._keys), *(key for key in self._keys if key not in COUNTERS)]
        columns_by_key = {key: column for key, (column,) in self._columns.items()}
        return Log(self._name, self._count, keys, columns_by_key, list(self._rows), self._unreadable)


def _numbers(at: NDArray[np.int64], values: list[Any]) -> Column | None:
    """Return the numbers among values, with the rows that they are of."""
    if not set(map(type, values)) <= {int, float}:
        pairs = [(index, value) for index, value in zip(at, values, strict=True) if is_number(value)]
        if not pairs:
            return None
        at, values = np.array([index for index, _ in pairs]), [value for _, value in pairs]
    try:
        return Column(at, np.array(values, np.float64))
    except OverflowError:  # an integer of hundreds of digits, which as text becomes an infinity
        return Column(at, np.array([float(str(value)) for value in values]))


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one key that are drawn."""

    key: str
    chart: str  # the metric, such as ``main/loss`` for ``validation/main/loss``
    rows: NDArray[np.int64]  # indices of the rows of the log
    values: NDArray[np.float64]  # NaN for a gap
    count: int  # of the points that the log has
    gaps: dict[str, int]  # by "NaN", "Infinity" and "-Infinity" the number of points that are not finite
    mean_rows: NDArray[np.int64]  # in the middle of each section of which not all points are drawn
    means: NDArray[np.float64]  # of those sections


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of a log, in the order in which their keys occur."""

    log: Log
    axes: dict[str, NDArray[np.float64]]  # by the name of each x-axis the position of every row, NaN if it has none
    curves: list[Curve]
    left_out: list[str]  # keys for which a page has no room

    @property
    def drawn(self) -> int:
        """The number of points that are drawn, of the `count` that the log has."""
        return sum(len(curve.rows) for curve in self.curves)

    @property
    def count(self) -> int:
        return sum(curve.count for curve in self.curves)


def curves_of(log: Log, max_points: int = MAX_POINTS) -> Curves:
    """Return the curves of a log with at most ``max_points`` points, so that a page stays small however long the run was."""
    numbers = [key for key in log.keys if key in log.columns and key not in COUNTERS]
    keys = numbers[: max_points // _MIN_CURVE_POINTS]
    max_curve_points = min(MAX_CURVE_POINTS, max_points // max(len(keys), 1))
    curves = []
    for key in keys:
        rows, values = log.columns[key].rows, log.columns[key].values
        first, _, rest = key.partition("/")
        chart = rest if rest and (rest in numbers or _EVALUATION.fullmatch(first)) else key  # without that of an evaluator
        kinds = {"NaN": np.isnan(values), "Infinity": values == math.inf, "-Infinity": values == -math.inf}
        gaps = {name: int(is_gap.sum()) for name, is_gap in kinds.items() if is_gap.any()}
        finite = np.where(np.isfinite(values), values, np.nan)
        kept, middles, means = sample(finite, max_curve_points)
        curves.append(Curve(key, chart, rows[kept], finite[kept], len(values), gaps, rows[middles], means))
    columns = {}
    for key in COUNTERS:
        columns[key] = np.full(log.count, np.nan)
        if key in log.columns:
            columns[key][log.columns[key].rows] = log.columns[key].values
    iterations, epochs, times = (columns[key] for key in ("iteration", "epoch", "elapsed_time"))
    axes = {"iteration": iterations, "epoch": _fractions(iterations, epochs), "time": times}
    axes = {name: np.where(np.isfinite(column), column, np.nan) for name, column in axes.items()}
    axes = {name: column for name, column in axes.items() if not np.isnan(column).all()}
    return Curves(log, axes or {"row": np.arange(1.0, log.count + 1)}, curves, numbers[len(keys) :])


def sample(values: NDArray[np.float64], max_points: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the indices of at most ``max_points`` values that look like all of them, and a smooth curve.

    The values are cut into sections of equal length, and the least, the greatest and, if there is one, a NaN of each section
    are kept, besides the first and the last value. So neither a spike nor a gap is ever lost. The smooth curve is the index
    in the middle of each section, and its mean; it is empty if all values are kept.
    """
    count = len(values)
    if count <= max_points:
        return np.arange(count), np.array([], np.int64), np.array([])
    points_per_section = 3 if np.isnan(values).any() else 2
    length = -(-count // max((max_points - 2) // points_per_section, 1))
    filled = np.full(-(-count // length) * length, np.nan)
    filled[:count] = values
    sections = filled.reshape(-1, length)
    first = np.arange(len(sections)) * length
    is_gap = np.isnan(sections)
    sizes = (~is_gap).sum(axis=1)
    kept = [
        np.array([0, count - 1]),
        (first + np.where(is_gap, np.inf, sections).argmin(axis=1))[sizes > 0],
        (first + np.where(is_gap, -np.inf, sections).argmax(axis=1))[sizes > 0],
    ]
    is_gap[-1] &= first[-1] + np.arange(length) < count  # and not what fills the last section
    kept.append((first + is_gap.argmax(axis=1))[is_gap.any(axis=1)])
    means = np.nansum(sections / np.maximum(sizes, 1)[:, None], axis=1)  # of values that are huge the sum may overflow
    middles = np.minimum(first + length // 2, count - 1)
    return np.unique(np.concatenate(kept)), middles, np.where(sizes > 0, means, np.nan)


def _fractions(iterations: NDArray[np.float64], epochs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the epoch of each row; with its fraction if several rows share one and all epochs are equally long.

    A row has the number of complete epochs, so n iterations in epoch e bound an epoch's length from above by n / e. The
    least bound fits all rows, unless the length has changed.
    """
    known = np.isfinite(iterations) & np.isfinite(epochs)
    n, e = iterations[known], epochs[known]
    bounds = (n > 0) & (e > 0)
    if len(np.unique(e)) == len(e) or not bounds.any():
        return epochs
    least = np.argmin(n[bounds] / e[bounds])
    length, count = n[bounds][least], e[bounds][least]  # iterations of this number of epochs
    if not ((e * length <= n * count) & (n * count < (e + 1) * length)).all():
        return epochs
    return np.where(known, iterations * count / length, epochs)


def script_data(curves: Curves) -> dict[str, Any]:
    """Return the positions on the axes of the rows that are drawn, and of each curve the rows and values."""
    drawn = [rows for curve in curves.curves for rows in (curve.rows, curve.mean_rows)]
    rows = np.unique(np.concatenate(drawn)) if drawn else np.array([], np.int64)
    entries = []
    for curve in curves.curves:
        entry = {"key": curve.key, "chart": curve.chart, "count": curve.count, "gaps": curve.gaps}
        entry |= {"at": packed(np.searchsorted(rows, curve.rows)), "y": packed(curve.values)}
        if len(curve.means):
            entry |= {"meanAt": packed(np.searchsorted(rows, curve.mean_rows)), "means": packed(curve.means)}
        entries.append(entry)
    axes = {name: packed(positions[rows]) for name, positions in curves.axes.items()}
    return {"name": curves.log.name, "count": curves.log.count, "axes": axes, "curves": entries}


def packed(values: Sequence[float] | NDArray[Any]) -> str:
    """Return numbers as a letter for their type and the Base64 of their bytes, which a browser reads faster than digits.

    They are kept with the seven digits of a float of 32 bits, unless they are out of its range or, as integers, have more.
    """
    array = np.asarray(values, np.float64)
    finite = array[np.isfinite(array)]
    sizes, is_whole = np.abs(finite[finite != 0]), (finite == np.floor(finite)).all()
    letter = "f" if ((sizes > 1e-37) & (sizes <= (2**24 if is_whole else 1e38))).all() else "d"
    return letter + base64.b64encode(array.astype({"f": "<f4", "d": "<f8"}[letter]).tobytes()).decode()
