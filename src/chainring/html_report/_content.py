"""A page: one file that contains all it needs and asks the network for nothing. All that comes from a file is escaped.

Several runs lie beside one another: with names to tell them apart, the settings that differ, and what they came to.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from chainring._runs.finished import as_mapping, planned_extensions
from chainring._version import __version__
from chainring.html_report._log import MAX_POINTS, Column, Curves, curves_of, script_data
from chainring.html_report._run import DAMAGED, Run, Series, shape_of
from chainring.serializers._store import Place
from chainring.training._run_directory import Settings
from chainring.training.triggers.best_value import mode_of_key
from chainring.writers.base import COUNTERS

SIGN = '<meta name="generator" content="chainring '
"""A page has this near its beginning."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SCRIPTS = ("charts.js", "saving.js", "media.js", "following.js", "page.js")
_SHORT = {"system": "CPU, GPU", "media": "Images, texts", "time": "Time"}  # titles in the bar of links
_MAX_POINTS_OF_SEVERAL = 300_000  # of a page of several runs
_MAX_RUNS_AS_COLUMNS = 5
_MAX_SETTINGS = 60
_MAX_VALUES = 6  # last values of each run in a table
_MAX_ROWS = 300  # of a table
_MAX_CELLS = 4_000  # of the table of a log
_MAX_COLUMNS = 40
_MAX_CHARACTERS = 600  # of one text
_SHAPE = re.compile(r"(models\..+\.parameters)\.")  # the path of the setting that is the shape of a parameter
_SMALL = 160  # pixels up to which an image is enlarged
_SYSTEM = ("cpu_percent", "process_cpu_percent", "memory_percent", "process_memory_mib", "accelerator_percent",
           "accelerator_memory_mib")  # the keys of extensions.SystemMetrics, after its name  # fmt: skip

SECTIONS = {
    "curves": "Curves", "system": "CPU, GPU and memory", "log": "Log", "media": "Images, texts and histograms",
    "settings": "Settings", "starts": "Starts", "plan": "Plan", "time": "Time by phase", "parameters": "Parameters",
    "graph": "Graph", "snapshots": "Snapshots", "notes": "Notes",
}  # fmt: skip
SECTIONS_OF_SEVERAL = {
    "curves": "Curves", "runs": "Runs", "settings": "Settings that differ", "system": "CPU, GPU and memory",
    "media": "Images, texts and histograms", "notes": "Notes",
}  # fmt: skip

_SOURCES: dict[str, tuple[str, Callable[[Run], Any]]] = {
    "curves": ("extensions.LogReport()", lambda run: run.logs),
    "CPU, GPU and memory": ("extensions.SystemMetrics()", lambda run: _has_system([run])),
    "images, texts and histograms": ("chainring.report_image", lambda run: any(log.media for log in run.logs)),
    "the configuration": ("Trainer(..., config=vars(args))", lambda run: run.record.get("config")),
    "the time by phase": ("extensions.Profiler()", lambda run: run.profile or run.rank_seconds),
    "the graph": ('extensions.dump_graph("main/loss")', lambda run: run.graph),
    "snapshots": ("extensions.snapshot(autoload=True)", lambda run: run.snapshots),
    "notes": ("notes.md", lambda run: run.notes),
}
"""What a page of a run shows, what writes it, and whether a run has it."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a page shows."""

    title: str
    sections: Mapping[str, str]  # by name their titles
    parts: Mapping[str, str]  # by name the HTML of each section, and of the facts at its head
    data: Mapping[str, Any]  # what the script draws
    rows: int  # of all logs


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A run, and the points of its curves that a page has."""

    run: Run  # of its logs, if there are several runs, only the last row and numbers are kept
    data: Mapping[str, Any]  # its curves, for the script
    drawn: int  # points, of the `count` that its logs have
    count: int
    left_out: Sequence[str]  # keys for which there is no room
    curves: Sequence[Curves] = field(default=())  # those of each log that has rows, of a page of one run


def drawn_run(run: Run, number_of_runs: int = 1) -> DrawnRun:
    """Return a run as it is on a page of so many runs."""
    room = MAX_POINTS if number_of_runs == 1 else min(MAX_POINTS, _MAX_POINTS_OF_SEVERAL // number_of_runs)
    full = [log for log in run.logs if log.count]
    curves = [curves_of(log, room // len(full)) for log in full]
    commands = [command for command in run.commands if "refused" not in command]
    marks = [mark["iteration"] for mark in [*run.starts[1:], *commands] if type(mark.get("iteration")) is int]
    data = {"logs": [script_data(of_log) for of_log in curves], "marks": marks}
    drawn, count = sum(of_log.drawn for of_log in curves), sum(of_log.count for of_log in curves)
    left_out = [key for of_log in curves for key in of_log.left_out]
    if number_of_runs == 1:
        return DrawnRun(run, data, drawn, count, left_out, curves)
    logs = []
    for log in run.logs:  # copies of the last numbers, which do not keep the others in memory
        last = {key: Column(column.rows[-1:].copy(), column.values[-1:].copy()) for key, column in log.columns.items()}
        logs.append(replace(log, columns=last))
    return DrawnRun(replace(run, logs=logs), data, drawn, count, left_out)


def content_of(drawn: DrawnRun) -> Content:
    """Return the content of the page of a run."""
    run = drawn.run
    phases = sorted(run.profile.seconds.items(), key=lambda phase: -phase[1]) if run.profile else []
    logs = []
    for curves in drawn.curves:
        log, keys = curves.log, curves.log.keys[:_MAX_COLUMNS]
        rows = log.rows[-max(_MAX_CELLS // max(len(keys), 1), 10) :]
        numeric = [column for column, key in enumerate(keys) if not any(isinstance(row.get(key), str) for row in rows)]
        counts = {"count": log.count, "column_count": len(log.keys), "unreadable": log.unreadable}
        logs.append({"name": log.name, "columns": keys, "rows": rows, "numeric": numeric, "curves": curves, **counts})
    parts = _render(
        "one.html",
        ["facts", *SECTIONS, "missing"],
        run=run,
        absent={what: code for what, (code, is_there) in _SOURCES.items() if not is_there(run)},
        facts_of=_facts(run),
        logs=logs,
        is_marked=bool(drawn.data["marks"]),
        has_system=_has_system([run]),
        config=run.record.get("config"),
        made_with=_made_with(run.record),
        recorded_plan=as_mapping(run.record.get("plan")),
        extensions=planned_extensions(run.record),
        phases=phases,
        picture=base64.b64encode((run.graph and run.graph.picture) or b"").decode(),
        cell=_cell,
        changes=_changes,
        product=math.prod,
    )
    data = {"runs": [{"name": run.name, **drawn.data}], "partings": []}
    return Content(run.name, SECTIONS, parts, data, sum(log.count for log in run.logs))


def content_of_several(names: Sequence[str], drawn: Sequence[DrawnRun], partings: Sequence[Parting] = ()) -> Content:
    """Return the content of the page of several runs."""
    runs = [of_run.run for of_run in drawn]
    keys, values, best = _last_values(runs)
    count = sum(log.count for run in runs for log in run.logs)
    differing, differing_count = _differing_settings(names, runs)
    lines = [{"run": parting.run, "iteration": parting.iteration} for parting in partings if parting.iteration is not None]
    remarks = []
    for name, run in zip(names, runs, strict=True):
        remarks += [] if run.record_error is None else [f"{name}: run.json cannot be read: {run.record_error}"]
        for log in (log for log in run.logs if log.unreadable):
            remarks.append(f"{name}: {log.unreadable:,} lines of {log.name} are not rows and are left out.")
    series_of_keys: dict[str, list[tuple[str, Series]]] = {}
    for name, run in zip(names, runs, strict=True):
        for series in (series for log in run.logs for series in log.media):
            series_of_keys.setdefault(series.key, []).append((name, series))
    rows = [_row(run) for run in runs]
    are_in_table = len(partings) > 1
    if are_in_table:
        iterations = {parting.run: parting.iteration for parting in partings if parting.iteration is not None}
        rows = [[*row, f"{iterations[index]:,}" if index in iterations else ""] for index, row in enumerate(rows)]
        remarks += [f"{parting.text}." for parting in partings if parting.iteration is None]
    parts = _render(
        "several.html",
        ["facts", *SECTIONS_OF_SEVERAL],
        best=best,
        names=names,
        facts_of={"runs": f"{len(runs):,}", "rows": f"{count:,}"},
        partings=partings,
        drawn=sum(of_run.drawn for of_run in drawn),
        count=sum(of_run.count for of_run in drawn),
        left_out=max((of_run.left_out for of_run in drawn), key=len, default=[]),
        has_system=_has_system(runs),
        rows=[last + row for row, last in zip(rows, values, strict=True)],
        keys=keys,
        are_in_table=are_in_table,
        remarks=remarks,
        differing=differing,
        differing_count=differing_count,
        series_of_keys=series_of_keys,
        notes_of={name: run.notes for name, run in zip(names, runs, strict=True) if run.notes},
    )
    data = [{"name": _text(name), **of_run.data} for name, of_run in zip(names, drawn, strict=True)]
    return Content(f"{len(runs)} runs", SECTIONS_OF_SEVERAL, parts, {"runs": data, "partings": lines}, count)


def _render(file: str, macros: Sequence[str], /, **values: Any) -> dict[str, str]:
    """Return the macros of a template as HTML, empty where there is nothing to show."""
    module = _environment().get_template(file).make_module(values)
    return {name: str(getattr(module, name)()).strip() for name in macros}


@cache
def _environment() -> Any:
    """Return what makes HTML of templates: it cuts a text that is too long, and escapes it."""
    from jinja2 import Environment, FunctionLoader
    from markupsafe import Markup, escape

    loader = FunctionLoader(lambda name: _read(f"templates/{name}"))
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.finalize = lambda value: value if isinstance(value, Markup) else _text(value)
    environment.filters |= {"count": "{:,}".format, "duration": _duration, "value": _value}
    environment.globals |= {"max_rows": _MAX_ROWS, "small": _SMALL, "markup": lambda text: Markup(escape(text))}
    return environment


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def page_of(content: Content, mark: str = "") -> str:
    """Return the page as it is now, as HTML; with a mark it listens to what changes after it, where it came from.

    Every text from a file is escaped, and a policy in the page lets only its own two scripts run and nothing be fetched.
    """
    from markupsafe import Markup

    chart_script = _read("vendor/uPlot.iife.min.js")
    script = '"use strict";\n(() => {\n' + "".join(_read(f"templates/{name}") for name in _SCRIPTS) + "})();\n"
    # https://www.w3.org/TR/CSP3/#grammardef-hash-source
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (chart_script, script)]
    policy = f"{_POLICY}; script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'"
    unescaped = {
        "sign": SIGN,
        "policy": f"{policy}; connect-src 'self'" if mark else policy,
        "style": _read("vendor/uPlot.min.css") + _read("templates/page.css"),
        "data": json_of({**content.data, "mark": mark}).replace("<", "\\u003c"),
        "chart_script": chart_script,
        "script": script,
    }
    page: str = (
        _environment()
        .get_template("page.html")
        .render(
            {name: Markup(text) for name, text in unescaped.items()},
            title=content.title,
            sections=content.sections,
            short=_SHORT,
            parts={name: Markup(html) for name, html in content.parts.items()},
            is_one="log" in content.sections,
            is_watched=bool(mark),
            made=datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
            version=__version__,
            licence=_read("vendor/LICENSE").splitlines()[2],
        )
    )
    return page


def json_of(content: Mapping[str, Any]) -> str:
    """Return plain values as JSON without spaces, NaN and infinities."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _has_system(runs: Sequence[Run]) -> bool:
    return any(key.rpartition("/")[2] in _SYSTEM for run in runs for log in run.logs for key in log.columns)


def _facts(run: Run) -> dict[str, str]:
    """Return the numbers at the head of the page, but those that are 0 or not known."""
    iterations, epochs, time = _progress(run)
    counts = {
        "iterations": iterations,
        "epochs": epochs,
        "rows": sum(log.count for log in run.logs),
        "starts": len(run.starts) - run.rollbacks,
        "rollbacks": run.rollbacks,
        "faults": len(run.faults),
        "parameters": sum(model.count() for model in run.models),
        "snapshots": len(run.snapshots),
        "damaged": sum(snapshot.state == DAMAGED for snapshot in run.snapshots),
    }
    facts = {name: f"{count:,}" for name, count in counts.items() if type(count) is int and 0 < count < 10**18}
    return ({"training": time} if time else {}) | _results(run) | facts


def _results(run: Run) -> dict[str, str]:
    """Return the last and the best value of one key, that of an evaluation if there is one, by names for them."""
    columns = run.logs[0].columns if run.logs else {}
    keys = [key for key in columns if mode_of_key(key) is not None and np.isfinite(columns[key].values).any()]
    key = min(keys, key=lambda key: (not key.startswith("validation"), mode_of_key(key) == "min"), default=None)
    if key is None:
        return {}
    rows, values, iterations = columns[key].rows, columns[key].values, columns.get("iteration")
    index = int(np.nanargmax(values) if mode_of_key(key) == "max" else np.nanargmin(values))
    at = [] if iterations is None else iterations.values[iterations.rows == rows[index]]
    return {key: f"{values[-1]:.5g}", "best": f"{values[index]:.5g}" + "".join(f", iteration {int(n):,}" for n in at)}


def _progress(run: Run) -> tuple[Any, Any, str]:
    """Return what the last row says of iterations and epochs, whatever it is, and the time of training in words."""
    last = run.logs[0].rows[-1] if run.logs and run.logs[0].rows else {}
    seconds = last.get("elapsed_time")
    time = _duration(seconds) if isinstance(seconds, (int, float)) and 0 <= seconds < 1e12 else ""
    return last.get("iteration"), last.get("epoch"), time


def _row(run: Run) -> list[str]:
    """Return the cells of a run in the table of several."""
    *counters, time = _progress(run)
    counts = [sum(log.count for log in run.logs), len(run.starts) - run.rollbacks, run.rollbacks]
    texts = [f"{count:,}" if type(count) is int and abs(count) < 10**18 else "" for count in counters]
    return [*texts, time, *(f"{count:,}" for count in counts)]


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
        values |= {template.format(name): value for name, value in as_mapping(record.get(key)).items()}
    return {name: value for name, value in values.items() if value is not None}


def _changes(start: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return name, old and new value of the settings that had changed by a start."""
    changed = list(as_mapping(start.get("changed")).items())[:_MAX_ROWS]
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


# --- several runs ---


@dataclass(frozen=True, slots=True)
class Parting:
    """The point at which a run diverges from the first run of a page."""

    run: int  # its index on the page
    iteration: int | None  # the first in which they differ, ``None`` if what was compared is the same or nothing could be
    text: str  # what is known about it, in words


def names_of(places: Sequence[Place]) -> list[str]:
    """Return a name for each run: the last part of its path, and as many before it as tell it from the others."""
    paths = [os.path.abspath(place).split(os.sep) if "://" not in str(place) else str(place).split("/") for place in places]
    paths = [list(filter(None, path)) or ["/"] for path in paths]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    twice = next(place for index, place in enumerate(places) if names[index] in names[:index])
    raise ValueError(f"{twice} is given twice; give each run once")


def _differing_settings(names: Sequence[str], runs: Sequence[Run]) -> tuple[dict[str, list[Any]], int]:
    """Return a table of settings that not all runs share, and how many do; of few runs each is a column, of many a row."""
    settings = [_fold(Settings.recorded(run.record)) if run.record else {} for run in runs]
    all_names = dict.fromkeys(name for of_run in settings for name in of_run)
    texts = {name: {json.dumps(of_run.get(name), sort_keys=True) for of_run in settings if of_run} for name in all_names}
    differing = [name for name in all_names if len(texts[name]) > 1]
    shown = differing[:_MAX_SETTINGS]
    cells = [[of_run.get(name) for of_run in settings] for name in shown]
    if len(runs) <= _MAX_RUNS_AS_COLUMNS:
        return {"heads": ["setting", *names], "titles": shown, "cells": cells}, len(differing)
    cells = list(map(list, zip(*cells, strict=True))) or [[] for _ in runs]
    return {"heads": ["run", *shown], "titles": list(names), "cells": cells}, len(differing)


def _fold(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the number of parameters of a model in the place of their shapes."""
    folded: dict[str, Any] = {}
    for path, value in settings.items():
        if (match := _SHAPE.match(path)) is None:
            folded[path] = value
        else:
            folded[match[1]] = folded.get(match[1], 0) + math.prod(shape_of(value) or ())
    return folded


def _last_values(runs: Sequence[Run]) -> tuple[list[str], list[list[str]], set[tuple[int, int]]]:
    """Return some keys of the logs, for each run the last value of each as text, and the run and the key of the best."""
    columns = [run.logs[0].columns if run.logs else {} for run in runs]
    in_order = dict.fromkeys(key for run in runs for log in run.logs[:1] for key in log.keys if key in log.columns)
    keys = [key for key in in_order if key not in COUNTERS]
    keys = sorted(keys, key=lambda key: not key.startswith("validation"))[:_MAX_VALUES]
    texts = [[f"{of_run[key].values[-1]:.5g}" if key in of_run else "" for key in keys] for of_run in columns]
    best = set()
    for number, key in enumerate(keys):
        last = {index: float(of_run[key].values[-1]) for index, of_run in enumerate(columns) if key in of_run}
        last = {index: value for index, value in last.items() if math.isfinite(value)}
        if (mode := mode_of_key(key)) is not None and len(set(last.values())) > 1:
            most = (max if mode == "max" else min)(last.values())
            best |= {(index, number) for index, value in last.items() if value == most}
    return keys, texts, best
