"""The curves and the table of a log as parts of the page, and the points as JSON for its script."""

from __future__ import annotations

import json
import math
from typing import Any

from chainring.html_report import _tags
from chainring.html_report._curves import FEWEST_OF_A_CURVE, MOST_POINTS, Chart, Charts, charts_of
from chainring.html_report._logs import COUNTERS, Log

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
