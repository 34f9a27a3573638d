"""The sections of the curves and of the rows of a log: which keys share a chart, and which of many points are drawn."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chainring._checks import is_number
from chainring.html_report import _tags
from chainring.html_report._run import Log
from chainring.writers.base import COUNTERS

MAX_POINTS = 12_000  # of a page: with their positions on the three axes, some 600 kB in the worst case
MAX_CURVE_POINTS = 2_000  # more than a screen has columns
MIN_CURVE_POINTS = 24

_MAX_CELLS = 4_000  # of a table
_MAX_COLUMNS = 40
_MIN_SEARCHABLE = 8  # charts from which on there is a search field
_EVALUATION = re.compile(r"validation(_\d+)?")
_HELP = "Drag to enlarge, double-click to see all. Arrow keys move the cursor, Escape lets it go."
_MARKS_HELP = " An upright line is where the run was resumed."
_NO_LOG = "Add <code>extensions.LogReport()</code>: it writes a row an interval, of which the curves are drawn."


def curves_and_tables(logs: list[Log], starts: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return the section of the curves, the section of the rows, and the data of the script as JSON."""
    full = [log for log in logs if log.rows]
    if not full:
        note = _tags.note("The log has no row yet." if logs else _NO_LOG)
        sections = _tags.section("curves", "Curves", note) + _tags.section("log", "Log", note)
        return sections, "", json.dumps({"logs": [], "marks": []})
    charts = [charts_of(log, MAX_POINTS // len(full)) for log in full]
    marks = [start["iteration"] for start in starts[1:] if isinstance(start.get("iteration"), int)]
    heads = [f"<h3>{_tags.text(log.name)}</h3>" if len(full) > 1 else "" for log in full]
    curves = [head + _figures(log, charts[index], index) for index, (head, log) in enumerate(zip(heads, full, strict=True))]
    tables = [head + _table(log) for head, log in zip(heads, full, strict=True)]
    data = {"logs": [_script_data(each) for each in charts], "marks": marks}
    return (
        _tags.section("curves", "Curves", _controls(charts, bool(marks)), *curves),
        _tags.section("log", "Log", *tables),
        json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _controls(logs: list[Charts], is_marked: bool) -> str:
    names = list(dict.fromkeys(name for charts in logs for name in charts.axes))
    radios = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" if name == names[0] else ""}> {name}</label>'
        for name in names
    )
    search = '<label class="find">Find <input type="search" id="find" placeholder="loss"></label>'
    is_searchable = sum(len(charts.charts) for charts in logs) >= _MIN_SEARCHABLE
    return (
        f'<div class="controls" id="controls" hidden><fieldset><legend>x-axis</legend>{radios}</fieldset>'
        '<label><input type="checkbox" id="logarithmic"> logarithmic y-axis</label>'
        f"{search if is_searchable else ''}</div>"
        '<p id="unscripted">A script draws the curves, and this viewer runs none. The numbers are in the table.</p>'
        f'<p class="note" id="keys" hidden>{_HELP}{_MARKS_HELP if is_marked else ""}</p>'
        '<p class="hidden" id="spoken" aria-live="polite"></p>'
    )


def _figures(log: Log, charts: Charts, log_index: int) -> str:
    notes = []
    if charts.drawn < charts.count:
        notes.append(
            f"{charts.drawn:,} of {charts.count:,} points are drawn: the least and the greatest of each section of a curve. "
            f"All are in <code>{_tags.text(log.name)}</code>."
        )
    if charts.left_out:
        notes.append(
            f"{len(charts.left_out):,} more keys are not drawn, because a page has room for "
            f"{MAX_POINTS // MIN_CURVE_POINTS} curves; the first of them is <code>{_tags.text(charts.left_out[0])}</code>."
        )
    if not charts.charts:
        notes.append("No row has a number besides the counters; <code>chainring.report</code> reports one.")
    figures = "".join(_figure(chart, log_index, index) for index, chart in enumerate(charts.charts))
    return f'{"".join(map(_tags.note, notes))}<div class="charts">{figures}</div>'


def _figure(chart: Chart, log_index: int, index: int) -> str:
    name, tag = _tags.text(chart.name), "h4" if log_index else "h3"
    gaps = [
        f"{_tags.text(curve.key)}: " + ", ".join(f"{count:,} {name}" for name, count in curve.gaps.items())
        for curve in chart.curves
        if curve.gaps
    ]
    note = f'<p class="note gaps">Gaps: {"; ".join(gaps)}</p>' if gaps else ""
    return (
        f'<figure class="chart" data-log="{log_index}" data-chart="{index}" data-name="{name}">'
        f'<figcaption><{tag}>{name}</{tag}><output class="at"></output></figcaption>'
        f'<div class="legend" role="group" aria-label="Curves of {name}"></div>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{name}: {_tags.text(_summary(chart))}"></div>'
        f'<p class="note unseen" hidden></p>{note}</figure>'
    )


def _summary(chart: Chart) -> str:
    """Describe the curves in words."""
    sentences = []
    for curve in chart.curves:
        values = [value for value in curve.values if math.isfinite(value)]
        if values:
            first, last, least, greatest = map(_tags.number, (values[0], values[-1], min(values), max(values)))
            sentences.append(f"{curve.key} from {first} to {last}, least {least}, greatest {greatest}")
    return "; ".join(sentences) or "no finite value"


def _script_data(charts: Charts) -> dict[str, Any]:
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


def _table(log: Log) -> str:
    keys = log.keys[:_MAX_COLUMNS]
    rows = log.rows[-max(_MAX_CELLS // max(len(keys), 1), 10) :]
    file = f"<code>{_tags.text(log.name)}</code>"
    notes = []
    if len(rows) < len(log.rows):
        notes.append(f"The last {len(rows):,} of {len(log.rows):,} rows; all are in {file}.")
    if len(keys) < len(log.keys):
        notes.append(f"The first {len(keys)} of {len(log.keys):,} columns; all are in {file}.")
    if log.unreadable:
        notes.append(f"{log.unreadable:,} lines of {file} are not rows and are left out.")
    cells = [[_cell(row, key) for key in keys] for row in rows]
    numeric = [column for column, key in enumerate(keys) if not any(isinstance(row.get(key), str) for row in rows)]
    return "".join(map(_tags.note, notes)) + _tags.table(f"Rows of {log.name}", keys, cells, numeric)


def _cell(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    if key == "elapsed_time" and isinstance(row[key], float) and math.isfinite(row[key]):
        return f"{row[key]:.2f}"
    return f"{row[key]:,}" if key in COUNTERS and type(row[key]) is int and abs(row[key]) < 10**15 else _tags.value(row[key])


# --- choosing the points ---


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one key that are drawn.

    Attributes:
        key: of the log.
        rows: the indices of the rows.
        values: NaN for a gap.
        count: the points that the log has.
        gaps: the number of points that are not finite by ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
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
    """The charts of a log.

    Attributes:
        axes: by the name of each x-axis the position of every row, ``None`` for a row that has none.
        charts: in the order in which their keys occur.
        left_out: keys for which a page has no room.
    """

    axes: dict[str, list[float | None]]
    charts: list[Chart]
    left_out: list[str]

    @property
    def drawn(self) -> int:
        """The number of points that are drawn."""
        return sum(len(curve.rows) for chart in self.charts for curve in chart.curves)

    @property
    def count(self) -> int:
        """The number of points that the log has of the curves that are drawn."""
        return sum(curve.count for chart in self.charts for curve in chart.curves)


def charts_of(log: Log, max_points: int = MAX_POINTS) -> Charts:
    """Return the charts of a log with at most ``max_points`` points, so that a page stays small however long the run was."""
    numbers = {}
    for key in log.keys:
        rows = [index for index, row in enumerate(log.rows) if _is_number(row.get(key))]
        if rows and key not in COUNTERS:
            numbers[key] = rows
    keys = list(numbers)[: max_points // MIN_CURVE_POINTS]
    max_curve_points = min(MAX_CURVE_POINTS, max_points // max(len(keys), 1))
    charts: dict[str, Chart] = {}
    for key in keys:
        values = [_float(log.rows[index][key]) for index in numbers[key]]
        name = _chart_name(key, numbers)
        charts.setdefault(name, Chart(name)).curves.append(_curve(key, numbers[key], values, max_curve_points))
    return Charts(_axes(log.rows), list(charts.values()), [key for key in numbers if key not in keys])


def _is_number(value: Any) -> bool:
    return is_number(value)


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
    values = [_float(row[key]) if _is_number(row.get(key)) else math.nan for row in rows]
    return [value if math.isfinite(value) else None for value in values]


def _epochs(rows: list[dict[str, Any]]) -> list[float | None]:
    """Return the epoch of each row; with its fraction if several rows share one and all epochs are equally long.

    A row has the number of complete epochs, so n iterations in epoch e bound an epoch's length from above by n / e. The
    least bound fits all rows, unless the length has changed.
    """
    epochs, iterations = _column(rows, "epoch"), _column(rows, "iteration")
    pairs = [(n, e) for n, e in zip(iterations, epochs, strict=True) if n is not None and e is not None]
    is_shared = len({e for _, e in pairs}) < len(pairs)
    bounds = [(n, e) for n, e in pairs if n > 0 and e > 0]
    if not is_shared or not bounds:
        return epochs
    length, count = min(bounds, key=lambda pair: pair[0] / pair[1])  # iterations of this number of epochs
    if any(not e * length <= n * count < (e + 1) * length for n, e in pairs):
        return epochs
    both = zip(iterations, epochs, strict=True)
    return [n * count / length if n is not None and e is not None else e for n, e in both]
