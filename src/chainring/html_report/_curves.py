"""The curves of a log: which keys share a chart, and which of many points are drawn."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chainring.html_report._logs import COUNTERS, Log

MOST_POINTS = 12_000  # of a page: with their places on the three axes, some 600 kB in the worst case
MOST_OF_A_CURVE = 2_000  # more than a screen has columns
FEWEST_OF_A_CURVE = 24

_EVALUATION = re.compile(r"validation(_\d+)?")


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one key that are drawn.

    Attributes:
        key: of the log.
        rows: the numbers of the rows.
        values: NaN where there is a gap.
        count: the points that the log has.
        gaps: how many of them are no finite number, by what they are.
    """

    key: str
    rows: list[int]
    values: list[float]
    count: int
    gaps: dict[str, int]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one metric, such as ``main/loss`` and ``validation/main/loss``."""

    name: str
    curves: list[Curve] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Charts:
    """What is drawn of a log.

    Attributes:
        axes: for each choice of the x-axis the place of every row, ``None`` where a row has none.
        charts: in the order in which their keys occur.
        left_out: keys for which a page has no room.
    """

    axes: dict[str, list[float | None]]
    charts: list[Chart]
    left_out: list[str]

    @property
    def drawn(self) -> int:
        """The points that are drawn."""
        return sum(len(curve.rows) for chart in self.charts for curve in chart.curves)

    @property
    def count(self) -> int:
        """The points that the log has of the curves that are drawn."""
        return sum(curve.count for chart in self.charts for curve in chart.curves)


def charts_of(log: Log, room: int = MOST_POINTS) -> Charts:
    """The charts of a log with at most ``room`` points, so that a page stays small however long the run was."""
    numbers = {key: found for key in log.keys if key not in COUNTERS and (found := _numbers(log.rows, key))[0]}
    kept = list(numbers)[: room // FEWEST_OF_A_CURVE]
    most = min(MOST_OF_A_CURVE, room // max(len(kept), 1))
    charts: dict[str, Chart] = {}
    for key in kept:
        name = _chart_of(key, numbers)
        charts.setdefault(name, Chart(name)).curves.append(_curve(key, *numbers[key], most))
    return Charts(_axes(log.rows), list(charts.values()), [key for key in numbers if key not in kept])


def sampled(values: Sequence[float], most: int) -> list[int]:
    """The positions of at most ``most`` values that look like all of them.

    The values are cut into pieces of equal length, and the least, the greatest and, if there is one, a NaN of each piece
    are kept, besides the first and the last value. So a spike is never lost, and neither is a gap.
    """
    if len(values) <= most:
        return list(range(len(values)))
    array = np.asarray(values, dtype=np.float64)
    kept = {0, len(array) - 1}
    of_each = 3 if np.isnan(array).any() else 2
    for piece in np.array_split(np.arange(len(array)), max((most - 2) // of_each, 1)):
        part = array[piece]
        is_gap = np.isnan(part)
        if is_gap.any():
            kept.add(int(piece[is_gap.argmax()]))
        if not is_gap.all():
            kept.update((int(piece[np.nanargmin(part)]), int(piece[np.nanargmax(part)])))
    return sorted(kept)


def _numbers(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """In which rows the key has a number, and which."""
    at = [number for number, row in enumerate(rows) if _is_number(row.get(key))]
    return at, [_float(rows[number][key]) for number in at]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _curve(key: str, rows: list[int], values: list[float], most: int) -> Curve:
    gaps = dict(Counter(word for value in values if (word := _word(value))))
    finite = [value if math.isfinite(value) else math.nan for value in values]
    kept = sampled(finite, most)
    return Curve(key, [rows[i] for i in kept], [finite[i] for i in kept], len(values), gaps)


def _word(value: float) -> str:
    if math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _chart_of(key: str, keys: Any) -> str:
    """The name of the chart: what an evaluator has put before a key is left off."""
    first, _, rest = key.partition("/")
    return rest if rest and (rest in keys or _EVALUATION.fullmatch(first)) else key


def _axes(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    found = {
        "iteration": [_place(row.get("iteration")) for row in rows],
        "epoch": _epochs(rows),
        "time": [_place(row.get("elapsed_time")) for row in rows],
    }
    axes = {name: places for name, places in found.items() if any(place is not None for place in places)}
    return axes or {"row": [float(number) for number in range(1, len(rows) + 1)]}


def _place(value: Any) -> float | None:
    return number if _is_number(value) and math.isfinite(number := _float(value)) else None


def _epochs(rows: list[dict[str, Any]]) -> list[float | None]:
    """The epoch of each row; with its fraction where several rows share one and all epochs are equally long.

    A row says how many epochs were complete, so n iterations in epoch e bound an epoch's length from above by n / e. The
    least bound fits all rows, unless the length has changed.
    """
    epochs = [_place(row.get("epoch")) for row in rows]
    iterations = [_place(row.get("iteration")) for row in rows]
    pairs = [(n, e) for n, e in zip(iterations, epochs, strict=True) if n is not None and e is not None]
    shared = len({e for _, e in pairs}) < len(pairs)
    bounds = [(n, e) for n, e in pairs if n > 0 and e > 0]
    if not shared or not bounds:
        return epochs
    most, whole = min(bounds, key=lambda pair: pair[0] / pair[1])
    if any(not e * most <= n * whole < (e + 1) * most for n, e in pairs):
        return epochs
    both = zip(iterations, epochs, strict=True)
    return [n * whole / most if n is not None and e is not None else e for n, e in both]
