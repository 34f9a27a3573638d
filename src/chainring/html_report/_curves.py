"""The curves of a log: which keys share a chart, and which of many points are drawn."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chainring.html_report import _tags
from chainring.html_report._run import COUNTERS, Log

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


_MOST_CELLS = 4_000  # of a table
_MOST_COLUMNS = 40
_FILTERED = 8  # charts from which on a field to find one is shown
_KEYS = "Drag to enlarge, double-click to see all. Arrow keys move the cursor, Escape lets it go."
_MARKS = " An upright line is where the run was resumed."
_HOW = "Add <code>extensions.LogReport()</code>: it writes a row an interval, of which the curves are drawn."


def curves_and_tables(logs: list[Log], starts: list[dict[str, Any]]) -> tuple[str, str, str]:
    """The section of the curves, the section of the tables, and the data of the script as JSON."""
    full = [log for log in logs if log.rows]
    if not full:
        empty = "The log has no row yet." if logs else _HOW
        nothing = _tags.section("curves", "Curves", _tags.note(empty)) + _tags.section("log", "Log", _tags.note(empty))
        return nothing, "", json.dumps({"logs": [], "marks": []})
    drawn = [charts_of(log, MOST_POINTS // len(full)) for log in full]
    curves = "".join(
        _charts(log, charts, number, len(full) > 1) for number, (log, charts) in enumerate(zip(full, drawn, strict=True))
    )
    tables = "".join(_rows(log, len(full) > 1) for log in full)
    marks = [start["iteration"] for start in starts[1:] if isinstance(start.get("iteration"), int)]
    controls = _controls(drawn, bool(marks))
    data = {"logs": [_data(charts) for charts in drawn], "marks": marks}
    return (
        _tags.section("curves", "Curves", controls, curves),
        _tags.section("log", "Log", tables),
        json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _controls(drawn: list[Charts], marked: bool) -> str:
    names = list(dict.fromkeys(name for charts in drawn for name in charts.axes))
    radios = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" if name == names[0] else ""}> {name}</label>'
        for name in names
    )
    find = '<label class="find">Find <input type="search" id="find" placeholder="loss"></label>'
    many = sum(len(charts.charts) for charts in drawn) >= _FILTERED
    return (
        f'<div class="controls" id="controls" hidden><fieldset><legend>x-axis</legend>{radios}</fieldset>'
        f'<label><input type="checkbox" id="logarithmic"> logarithmic y-axis</label>{find if many else ""}</div>'
        '<p id="unscripted">A script draws the curves, and this viewer runs none. The numbers are in the table.</p>'
        f'<p class="note" id="keys" hidden>{_KEYS}{_MARKS if marked else ""}</p>'
        '<p class="hidden" id="spoken" aria-live="polite"></p>'
    )


def _charts(log: Log, charts: Charts, number: int, named: bool) -> str:
    head = f"<h3>{_tags.text(log.name)}</h3>" if named else ""
    notes = []
    if charts.drawn < charts.count:
        notes.append(
            f"{charts.drawn:,} of {charts.count:,} points are drawn: of each stretch of a curve the least and the greatest. "
            f"All are in <code>{_tags.text(log.name)}</code>."
        )
    if charts.left_out:
        notes.append(
            f"{len(charts.left_out):,} more keys are not drawn, because a page has room for "
            f"{MOST_POINTS // FEWEST_OF_A_CURVE} curves; the first of them is <code>{_tags.text(charts.left_out[0])}</code>."
        )
    if not charts.charts:
        notes.append("No row has a number besides the counters; <code>chainring.report</code> reports one.")
    figures = "".join(_figure(chart, number, index) for index, chart in enumerate(charts.charts))
    return f'{head}{"".join(map(_tags.note, notes))}<div class="charts">{figures}</div>'


def _figure(chart: Chart, log: int, index: int) -> str:
    name = _tags.text(chart.name)
    gaps = [
        f"{_tags.text(curve.key)}: " + ", ".join(f"{count:,} {word}" for word, count in curve.gaps.items())
        for curve in chart.curves
        if curve.gaps
    ]
    said = f'<p class="note gaps">Gaps: {"; ".join(gaps)}</p>' if gaps else ""
    tag = "h4" if log else "h3"
    return (
        f'<figure class="chart" data-log="{log}" data-chart="{index}" data-name="{name}"><figcaption><{tag}>{name}</{tag}>'
        f'<output class="at"></output></figcaption><div class="legend" role="group" aria-label="Curves of {name}"></div>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{name}: {_tags.text(_summary(chart))}"></div>'
        f'<p class="note unseen" hidden></p>{said}</figure>'
    )


def _summary(chart: Chart) -> str:
    """The curves in words."""
    said = []
    for curve in chart.curves:
        values = [value for value in curve.values if math.isfinite(value)]
        if values:
            ends = f"from {_tags.number(values[0])} to {_tags.number(values[-1])}"
            said.append(f"{curve.key} {ends}, least {_tags.number(min(values))}, greatest {_tags.number(max(values))}")
    return "; ".join(said) or "no finite value"


def _data(charts: Charts) -> dict[str, Any]:
    """What the script needs: the rows that a curve has kept, their places, and of each curve positions and values."""
    rows = sorted({row for chart in charts.charts for curve in chart.curves for row in curve.rows})
    position = {row: number for number, row in enumerate(rows)}
    axes = {name: [_short(places[row], 10) for row in rows] for name, places in charts.axes.items()}
    drawn = [
        {
            "name": chart.name,
            "curves": [
                {
                    "key": curve.key,
                    "at": _steps([position[row] for row in curve.rows]),
                    "y": [_short(value, 6) for value in curve.values],
                }
                for curve in chart.curves
            ],
        }
        for chart in charts.charts
    ]
    return {"axes": axes, "charts": drawn}


def _steps(positions: list[int]) -> list[int]:
    """The differences, which take fewer digits."""
    return [position - before for position, before in zip(positions, [0, *positions], strict=False)]


def _short(value: float | None, digits: int) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _rows(log: Log, named: bool) -> str:
    keys = log.keys[:_MOST_COLUMNS]
    most = max(_MOST_CELLS // max(len(keys), 1), 10)
    shown = log.rows[-most:]
    place = f"<code>{_tags.text(log.name)}</code>"
    notes = []
    if len(shown) < len(log.rows):
        notes.append(f"The last {len(shown):,} of {len(log.rows):,} rows; all are in {place}.")
    if len(keys) < len(log.keys):
        notes.append(f"The first {len(keys)} of {len(log.keys):,} columns; all are in {place}.")
    if log.unreadable:
        notes.append(f"{log.unreadable:,} lines of {place} are no rows and are left out.")
    head = f"<h3>{_tags.text(log.name)}</h3>" if named else ""
    cells = [[_cell(row, key) for key in keys] for row in shown]
    numeric = [column for column, key in enumerate(keys) if not any(isinstance(row.get(key), str) for row in shown)]
    return head + "".join(map(_tags.note, notes)) + _tags.table(f"Rows of {log.name}", keys, cells, numeric)


def _cell(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    if key == "elapsed_time" and isinstance(row[key], float) and math.isfinite(row[key]):
        return f"{row[key]:.2f}"
    return f"{row[key]:,}" if key in COUNTERS and type(row[key]) is int and abs(row[key]) < 10**15 else _tags.value(row[key])
