"""The page of a run: one file that contains all it needs and asks the network for nothing."""

from __future__ import annotations

import base64
import datetime
import hashlib
from importlib import resources
from string import Template

from chainring._version import __version__
from chainring.html_report import _parts, _tags
from chainring.html_report._curves import curves_and_tables
from chainring.html_report._run import DAMAGED, Run

_SECTIONS = {
    "curves": "Curves", "log": "Log", "settings": "Settings", "starts": "Starts", "plan": "Plan", "time": "Time",
    "parameters": "Parameters", "graph": "Graph", "snapshots": "Snapshots",
}  # fmt: skip

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SIGN = '<meta name="generator" content="chainring '
"""A page has this near its beginning."""


def page_of(run: Run, made: datetime.datetime) -> str:
    """Return the page as HTML.

    Every text from a file is escaped, and a policy in the page lets only its own two scripts run and nothing be fetched.

    Args:
        run: the content of its directory.
        made: when that was read, which the page says.
    """
    chart_script, script = _file("vendor/uPlot.iife.min.js"), _file("page.js")
    curves, tables, data = curves_and_tables(run.logs, run.starts)
    sections = (_parts.settings, _parts.starts, _parts.plan, _parts.time, _parts.parameters, _parts.graph, _parts.snapshots)
    return Template(_file("page.html")).substitute(
        sign=SIGN,
        policy=f"{_POLICY}; script-src {_hash(chart_script)} {_hash(script)}",
        title=_tags.text(run.directory.resolve().name or run.directory),
        style=_file("vendor/uPlot.min.css") + _file("page.css"),
        navigation="".join(f'<a href="#{name}">{title}</a>' for name, title in _SECTIONS.items()),
        facts=_facts(run),
        curves=curves,
        tables=tables,
        others="".join(section(run) for section in sections),
        made=made.isoformat(" ", "minutes"),
        version=__version__,
        licence=_tags.text(_file("vendor/LICENSE").splitlines()[2]),
        data=data,
        chart_script=chart_script,
        script=script,
    )


def _facts(run: Run) -> str:
    """Return the numbers at the head of the page."""
    last = run.logs[0].rows[-1] if run.logs and run.logs[0].rows else {}
    seconds = last.get("elapsed_time")
    facts = {
        "iterations": _count(last.get("iteration")),
        "epochs": _count(last.get("epoch")),
        "training": _tags.duration(seconds) if isinstance(seconds, (int, float)) and 0 <= seconds < 1e12 else None,
        "rows": _count(sum(len(log.rows) for log in run.logs)),
        "starts": _count(len(run.starts)),
        "parameters": _count(sum(model.count() for model in run.models)),
        "snapshots": _count(len(run.snapshots)),
        "damaged": _count(sum(snapshot.state == DAMAGED for snapshot in run.snapshots)),
    }
    shown = {name: fact for name, fact in facts.items() if fact is not None}
    return "".join(f'<div class="{name}"><dt>{name}</dt><dd>{fact}</dd></div>' for name, fact in shown.items())


def _count(value: object) -> str | None:
    return f"{value:,}" if type(value) is int and 0 < value < 10**18 else None


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script as a content security policy has it (https://www.w3.org/TR/CSP3/#grammardef-hash-source)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
