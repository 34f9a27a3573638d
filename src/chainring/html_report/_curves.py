"""The curves of a log: which keys share a chart, and which of many points are drawn."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chainring._checks import is_number
from chainring.html_report._run import Log
from chainring.writers.base import COUNTERS

MAX_POINTS = 12_000  # of a page: with their positions on the three axes, some 600 kB in the worst case
MAX_CURVE_POINTS = 2_000  # more than a screen has columns
_MIN_CURVE_POINTS = 24
MAX_CURVES = MAX_POINTS // _MIN_CURVE_POINTS

_EVALUATION = re.compile(r"validation(_\d+)?")


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one key that are drawn."""

    key: str
    rows: list[int]  # indices of the rows of the log
    values: list[float]  # NaN for a gap
    count: int  # of the points that the log has
    gaps: dict[str, int]  # by "NaN", "Infinity" and "-Infinity" the number of points that are not finite


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one metric, such as ``main/loss`` and ``validation/main/loss``."""

    name: str
    curves: list[Curve] = field(default_factory=list)

    @property
    def summary(self) -> str:
        sentences = []
        for curve in self.curves:
            if values := [value for value in curve.values if math.isfinite(value)]:
                ends = f"{values[0]:.6g} to {values[-1]:.6g}"
                sentences.append(f"{curve.key} from {ends}, least {min(values):.6g}, greatest {max(values):.6g}")
        return "; ".join(sentences) or "no finite value"


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of a log, in the order in which their keys occur."""

    axes: dict[str, list[float | None]]  # by the name of each x-axis the position of every row, if it has one
    charts: list[Chart]
    left_out: list[str]  # keys for which a page has no room

    @property
    def drawn(self) -> int:
        """The number of points that are drawn, of the `count` that the log has."""
        return sum(len(curve.rows) for chart in self.charts for curve in chart.curves)

    @property
    def count(self) -> int:
        return sum(curve.count for chart in self.charts for curve in chart.curves)


def charts_of(log: Log, max_points: int = MAX_POINTS) -> Charts:
    """Return the charts of a log with at most ``max_points`` points, so that a page stays small however long the run was."""
    numbers = {}
    for key in log.keys:
        rows = [index for index, row in enumerate(log.rows) if is_number(row.get(key))]
        if rows and key not in COUNTERS:
            numbers[key] = rows
    keys = list(numbers)[: max_points // _MIN_CURVE_POINTS]
    max_curve_points = min(MAX_CURVE_POINTS, max_points // max(len(keys), 1))
    charts: dict[str, Chart] = {}
    for key in keys:
        values = [_float(log.rows[index][key]) for index in numbers[key]]
        name = _chart_name(key, numbers)
        charts.setdefault(name, Chart(name)).curves.append(_curve(key, numbers[key], values, max_curve_points))
    return Charts(_axes(log.rows), list(charts.values()), [key for key in numbers if key not in keys])


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _chart_name(key: str, keys: Container[str]) -> str:
    """Return the key without the prefix of an evaluator."""
    first, _, rest = key.partition("/")
    return rest if rest and (rest in keys or _EVALUATION.fullmatch(first)) else key


def _curve(key: str, rows: list[int], values: list[float], max_points: int) -> Curve:
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    gaps = Counter(names.get(value, "NaN") for value in values if not math.isfinite(value))
    finite = [value if math.isfinite(value) else math.nan for value in values]
    kept = sample(finite, max_points)
    return Curve(key, [rows[i] for i in kept], [finite[i] for i in kept], len(values), dict(gaps))


def sample(values: Sequence[float], max_points: int) -> list[int]:
    """Return the indices of at most ``max_points`` values that look like all of them.

    The values are cut into sections of equal length, and the least, the greatest and, if there is one, a NaN of each section
    are kept, besides the first and the last value. So neither a spike nor a gap is ever lost.
    """
    if len(values) <= max_points:
        return list(range(len(values)))
    array = np.asarray(values, dtype=np.float64)
    kept = {0, len(array) - 1}
    points_per_section = 3 if np.isnan(array).any() else 2
    for indices in np.array_split(np.arange(len(array)), max((max_points - 2) // points_per_section, 1)):
        section = array[indices]
        is_gap = np.isnan(section)
        if is_gap.any():
            kept.add(int(indices[is_gap.argmax()]))
        if not is_gap.all():
            kept.update((int(indices[np.nanargmin(section)]), int(indices[np.nanargmax(section)])))
    return sorted(kept)


def _axes(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    axes = {"iteration": _column(rows, "iteration"), "epoch": _epochs(rows), "time": _column(rows, "elapsed_time")}
    known = {name: column for name, column in axes.items() if any(value is not None for value in column)}
    return known or {"row": [float(index) for index in range(1, len(rows) + 1)]}


def _column(rows: list[dict[str, Any]], key: str) -> list[float | None]:
    values = [_float(row[key]) if is_number(row.get(key)) else math.nan for row in rows]
    return [value if math.isfinite(value) else None for value in values]


def _epochs(rows: list[dict[str, Any]]) -> list[float | None]:
    """Return the epoch of each row; with its fraction if several rows share one and all epochs are equally long.

    A row has the number of complete epochs, so n iterations in epoch e bound an epoch's length from above by n / e. The
    least bound fits all rows, unless the length has changed.
    """
    epochs, iterations = _column(rows, "epoch"), _column(rows, "iteration")
    rows_of_log = list(zip(iterations, epochs, strict=True))
    pairs = [(n, e) for n, e in rows_of_log if n is not None and e is not None]
    bounds = [(n, e) for n, e in pairs if n > 0 and e > 0]
    if len({e for _, e in pairs}) == len(pairs) or not bounds:
        return epochs
    length, count = min(bounds, key=lambda pair: pair[0] / pair[1])  # iterations of this number of epochs
    if any(not e * length <= n * count < (e + 1) * length for n, e in pairs):
        return epochs
    return [n * count / length if n is not None and e is not None else e for n, e in rows_of_log]


def script_data(charts: Charts) -> dict[str, Any]:
    """Return the positions on the axes of the rows that are drawn, and of each curve the rows and values."""
    rows = sorted({row for chart in charts.charts for curve in chart.curves for row in curve.rows})
    indices = {row: index for index, row in enumerate(rows)}
    axes = {name: [_rounded(positions[row], 10) for row in rows] for name, positions in charts.axes.items()}
    drawn = []
    for chart in charts.charts:
        curves = []
        for curve in chart.curves:
            at = [indices[row] for row in curve.rows]
            steps = [index - before for index, before in zip(at, [0, *at], strict=False)]  # take fewer digits
            curves.append({"key": curve.key, "at": steps, "y": [_rounded(value, 6) for value in curve.values]})
        drawn.append({"name": chart.name, "curves": curves})
    return {"axes": axes, "charts": drawn}


def _rounded(value: float | None, digits: int) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
