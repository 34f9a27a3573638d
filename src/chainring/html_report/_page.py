"""The page: one file that contains all it needs and asks the network for nothing."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from chainring._version import __version__
from chainring.html_report._content import Content, template

SIGN = '<meta name="generator" content="chainring '
"""A page has this near its beginning."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SCRIPTS = ("charts.js", "saving.js", "media.js", "following.js", "page.js")
_SHORT = {"system": "CPU, GPU", "media": "Images, texts", "time": "Time"}  # titles in the bar of links


def page_of(content: Content, mark: str = "") -> str:
    """Return the page as it is now, as HTML; with a mark it listens to what changes after it, where it came from.

    Every text from a file is escaped, and a policy in the page lets only its own two scripts run and nothing be fetched.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    chart_script = _vendored("uPlot.iife.min.js")
    script = '"use strict";\n(() => {\n' + "".join(map(template, _SCRIPTS)) + "})();\n"
    connections = "; connect-src 'self'" if mark else ""
    unescaped = {
        "sign": SIGN,
        "policy": f"{_POLICY}; script-src {_hash(chart_script)} {_hash(script)}{connections}",
        "style": _vendored("uPlot.min.css") + template("page.css"),
        "data": json_of({**content.data, "mark": mark}).replace("<", "\\u003c"),
        "chart_script": chart_script,
        "script": script,
    }
    return environment.from_string(template("page.html")).render(
        {name: Markup(text) for name, text in unescaped.items()},
        title=content.title.encode("utf-8", "backslashreplace").decode(),
        sections=content.sections,
        short=_SHORT,
        parts={name: Markup(html) for name, html in content.parts.items()},
        is_one="log" in content.sections,
        is_watched=bool(mark),
        made=datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        version=__version__,
        licence=_vendored("LICENSE").splitlines()[2],
    )


def json_of(content: Mapping[str, Any]) -> str:
    """Return plain values as JSON without spaces, NaN and infinities."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _vendored(name: str) -> str:
    return resources.files(__package__).joinpath("vendor", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script for a content security policy (https://www.w3.org/TR/CSP3/#grammardef-hash-source)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
