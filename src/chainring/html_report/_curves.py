"""The curves of a log: which keys share a chart, and which of many points are drawn."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chainring.html_report._log import Column, Log
from chainring.writers.base import COUNTERS

MAX_POINTS = 12_000  # of a page of one run: with their positions on the three axes, some 600 kB in the worst case
MAX_POINTS_OF_SEVERAL = 300_000  # of a page of several runs
MAX_CURVE_POINTS = 2_000  # more than a screen has columns
_MIN_CURVE_POINTS = 24

_EVALUATION = re.compile(r"validation(_\d+)?")


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
    curves = [_curve(key, _chart_name(key, numbers), log.columns[key], max_curve_points) for key in keys]
    return Curves(log, _axes(log), curves, numbers[len(keys) :])


def _chart_name(key: str, keys: Container[str]) -> str:
    """Return the key without the prefix of an evaluator."""
    first, _, rest = key.partition("/")
    return rest if rest and (rest in keys or _EVALUATION.fullmatch(first)) else key


def _curve(key: str, chart: str, column: Column, max_points: int) -> Curve:
    values = column.values
    kinds = {"NaN": np.isnan(values), "Infinity": values == math.inf, "-Infinity": values == -math.inf}
    gaps = {name: int(is_gap.sum()) for name, is_gap in kinds.items() if is_gap.any()}
    finite = np.where(np.isfinite(values), values, np.nan)
    kept = sample(finite, max_points)
    middles, means = _means(finite, max_points)
    return Curve(key, chart, column.rows[kept], finite[kept], len(values), gaps, column.rows[middles], means)


def sample(values: NDArray[np.float64], max_points: int) -> NDArray[np.int64]:
    """Return the indices of at most ``max_points`` values that look like all of them.

    The values are cut into sections of equal length, and the least, the greatest and, if there is one, a NaN of each section
    are kept, besides the first and the last value. So neither a spike nor a gap is ever lost.
    """
    if len(values) <= max_points:
        return np.arange(len(values))
    sections = _sections(values, max_points)
    is_gap = np.isnan(sections)
    first = np.arange(len(sections)) * sections.shape[1]
    has_values = ~is_gap.all(axis=1)
    is_gap[-1] &= first[-1] + np.arange(sections.shape[1]) < len(values)  # and not what fills the last section
    kept = [
        np.array([0, len(values) - 1]),
        (first + np.where(np.isnan(sections), np.inf, sections).argmin(axis=1))[has_values],
        (first + np.where(np.isnan(sections), -np.inf, sections).argmax(axis=1))[has_values],
        (first + is_gap.argmax(axis=1))[is_gap.any(axis=1)],
    ]
    return np.unique(np.concatenate(kept))


def _sections(values: NDArray[np.float64], max_points: int) -> NDArray[np.float64]:
    """Return the values with a row for each section of which points are kept; the last is filled with NaN."""
    points_per_section = 3 if np.isnan(values).any() else 2
    length = -(-len(values) // max((max_points - 2) // points_per_section, 1))
    filled = np.full(-(-len(values) // length) * length, np.nan)
    filled[: len(values)] = values
    return filled.reshape(-1, length)


def _means(values: NDArray[np.float64], max_points: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the index in the middle of each section, and its mean for a smooth curve; none if all points are drawn."""
    if len(values) <= max_points:
        return np.array([], np.int64), np.array([])
    sections = _sections(values, max_points)
    counts = (~np.isnan(sections)).sum(axis=1)
    means = np.nansum(sections / np.maximum(counts, 1)[:, None], axis=1)  # of values that are huge the sum may overflow
    middles = np.arange(len(sections)) * sections.shape[1] + sections.shape[1] // 2
    return np.minimum(middles, len(values) - 1), np.where(counts > 0, means, np.nan)


def _axes(log: Log) -> dict[str, NDArray[np.float64]]:
    axes = {"iteration": log.column("iteration"), "epoch": _epochs(log), "time": log.column("elapsed_time")}
    finite = {name: np.where(np.isfinite(column), column, np.nan) for name, column in axes.items()}
    known = {name: column for name, column in finite.items() if not np.isnan(column).all()}
    return known or {"row": np.arange(1.0, log.count + 1)}


def _epochs(log: Log) -> NDArray[np.float64]:
    """Return the epoch of each row; with its fraction if several rows share one and all epochs are equally long.

    A row has the number of complete epochs, so n iterations in epoch e bound an epoch's length from above by n / e. The
    least bound fits all rows, unless the length has changed.
    """
    iterations, epochs = log.column("iteration"), log.column("epoch")
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

    Numbers of integers of 32 bits are kept as such, others with the seven digits of a float of 32 bits, unless they are out
    of its range or, as integers, have more.
    """
    array = np.asarray(values, np.float64)
    finite = array[np.isfinite(array)]
    is_whole = bool((finite == np.floor(finite)).all())
    if is_whole and len(finite) == len(array) and (np.abs(finite) < 2**31).all():
        return _encoded("i", array.astype("<i4"))
    sizes = np.abs(finite[finite != 0])
    if ((sizes > 1e-37) & (sizes < 1e38)).all() and not (is_whole and (sizes > 2**24).any()):
        return _encoded("f", array.astype("<f4"))
    return _encoded("d", array.astype("<f8"))


def _encoded(letter: str, array: NDArray[Any]) -> str:
    return f"{letter}{base64.b64encode(array.tobytes()).decode()}"
