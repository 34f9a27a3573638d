"""The page of a run: one file that contains all it needs and asks the network for nothing."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
from importlib import resources
from typing import Any

from chainring._version import __version__
from chainring.html_report._curves import MAX_CURVES, MAX_POINTS, charts_of, script_data
from chainring.html_report._run import DAMAGED, Log, Run
from chainring.writers.base import COUNTERS

SIGN = '<meta name="generator" content="chainring '
"""A page has this near its beginning."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MAX_ROWS = 300  # of a table
_MAX_CELLS = 4_000  # of the table of a log
_MAX_COLUMNS = 40
_MAX_CHARACTERS = 600  # of one text
_SMALL = 160  # pixels up to which an image is enlarged


def page_of(run: Run, made: datetime.datetime) -> str:
    """Return the page of a run whose directory was read at the time ``made``, as HTML.

    Every text from a file is escaped, and a policy in the page lets only its own two scripts run and nothing be fetched.
    """
    from jinja2 import Environment
    from markupsafe import Markup, escape

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.finalize = lambda value: value if isinstance(value, Markup) else _text(value)
    environment.filters |= {"count": "{:,}".format, "duration": _duration, "value": _value}
    full = [log for log in run.logs if log.rows]
    charts = [charts_of(log, MAX_POINTS // len(full)) for log in full]
    marks = [start["iteration"] for start in run.starts[1:] if isinstance(start.get("iteration"), int)]
    data = {"logs": [script_data(each) for each in charts], "marks": marks}
    plan = _mapping(run.record.get("plan"))
    extensions = plan.get("extensions")
    return environment.from_string(_file("page.html")).render(
        {name: Markup(text) for name, text in _unescaped(run, data).items()},
        run=run,
        title=run.directory.resolve().name or run.directory,
        facts=_facts(run),
        axes=dict.fromkeys(name for each in charts for name in each.axes),
        logs=[_log_table(log) | {"charts": each} for log, each in zip(full, charts, strict=True)],
        is_marked=bool(marks),
        config=_mapping(run.record.get("config")),
        made_with=_made_with(run.record),
        plan=plan,
        extensions=[each for each in extensions if isinstance(each, dict)] if isinstance(extensions, list) else [],
        cell=_cell,
        changes=_changes,
        product=math.prod,
        max_rows=_MAX_ROWS,
        max_curves=MAX_CURVES,
        made=made.isoformat(" ", "minutes"),
        version=__version__,
        markup=lambda text: Markup(escape(text)),
        small=_SMALL,
        licence=_file("vendor/LICENSE").splitlines()[2],
    )


def _unescaped(run: Run, data: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the page that are not escaped."""
    chart_script, script = _file("vendor/uPlot.iife.min.js"), _file("page.js")
    picture = (run.graph and run.graph.picture) or b""
    return {
        "sign": SIGN,
        "policy": f"{_POLICY}; script-src {_hash(chart_script)} {_hash(script)}",
        "style": _file("vendor/uPlot.min.css") + _file("page.css"),
        "picture": base64.b64encode(picture).decode(),
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "chart_script": chart_script,
        "script": script,
    }


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script for a content security policy (https://www.w3.org/TR/CSP3/#grammardef-hash-source)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _facts(run: Run) -> dict[str, str]:
    """Return the numbers at the head of the page, but those that are 0 or not known."""
    last = run.logs[0].rows[-1] if run.logs and run.logs[0].rows else {}
    seconds = last.get("elapsed_time")
    counts = {
        "iterations": last.get("iteration"),
        "epochs": last.get("epoch"),
        "rows": sum(len(log.rows) for log in run.logs),
        "starts": len(run.starts),
        "parameters": sum(model.count() for model in run.models),
        "snapshots": len(run.snapshots),
        "damaged": sum(snapshot.state == DAMAGED for snapshot in run.snapshots),
    }
    facts = {name: f"{count:,}" for name, count in counts.items() if type(count) is int and 0 < count < 10**18}
    if isinstance(seconds, (int, float)) and 0 <= seconds < 1e12:
        facts = {"training": _duration(seconds), **facts}
    return facts


def _log_table(log: Log) -> dict[str, Any]:
    keys = log.keys[:_MAX_COLUMNS]
    rows = log.rows[-max(_MAX_CELLS // max(len(keys), 1), 10) :]
    numeric = [column for column, key in enumerate(keys) if not any(isinstance(row.get(key), str) for row in rows)]
    counts = {"count": len(log.rows), "column_count": len(log.keys), "unreadable": log.unreadable}
    return {"name": log.name, "columns": keys, "rows": rows, "numeric": numeric, **counts}


def _cell(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    if key == "elapsed_time" and isinstance(row[key], float) and math.isfinite(row[key]):
        return f"{row[key]:.2f}"
    return f"{row[key]:,}" if key in COUNTERS and type(row[key]) is int and abs(row[key]) < 10**15 else _value(row[key])


def _made_with(record: dict[str, Any]) -> dict[str, Any]:
    names = {"argv": "command", "git_commit": "commit", "device": "device", "threads": "threads"}
    values = {name: record.get(key) for key, name in names.items()}
    for template, key in (("{} version", "versions"), ("optimizer {}", "optimizers"), ("seeds of {}", "seeds")):
        values |= {template.format(name): value for name, value in _mapping(record.get(key)).items()}
    return {name: value for name, value in values.items() if value is not None}


def _changes(start: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of the settings that had changed by a start."""
    changed = list(_mapping(start.get("changed")).items())[:_MAX_ROWS]
    return [(name, *(pair if isinstance(pair, list) and len(pair) == 2 else (None, pair))) for name, pair in changed]


def _text(value: object) -> str:
    text = str(value)
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}… ({len(text):,} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def _value(content: Any) -> str:
    """Return a value of JSON as text: a string without its quotes, a list of strings as words, anything else as JSON."""
    if isinstance(content, str) and content:
        return content
    if isinstance(content, list) and content and all(isinstance(word, str) for word in content):
        return " ".join(content)
    if isinstance(content, float) and math.isfinite(content):
        return f"{content:.6g}"
    return json.dumps(content, ensure_ascii=False)


def _duration(seconds: float) -> str:
    """Return seconds as a person reads them, such as ``2 h 5 min`` or ``12.3 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {int(seconds % 60)} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
