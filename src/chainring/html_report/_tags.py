"""Pieces of HTML. All that comes from a file is escaped here, and cut if it would fill the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_MAX_CHARACTERS = 600  # of one text


def text(value: object) -> str:
    """Return any value as text for between tags or between quotes."""
    shown = str(value)
    if len(shown) > _MAX_CHARACTERS:
        shown = f"{shown[:_MAX_CHARACTERS]}… ({len(shown):,} characters)"
    return escape(shown.encode("utf-8", "backslashreplace").decode())


def value(content: Any) -> str:
    """Return a value of JSON as text: a string without its quotes, anything else as in JSON."""
    if isinstance(content, str) and content:
        return text(content)
    if isinstance(content, float) and math.isfinite(content):
        return text(number(content))
    return text(json.dumps(content, ensure_ascii=False))


def number(content: float) -> str:
    """Return a number with six digits, as a table shows it."""
    return f"{content:.6g}"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """Return a table, whose first column names its rows, in a region that scrolls by itself.

    Args:
        caption: for readers who do not see the heading above it.
        head: the names of its columns, as text.
        rows: the cells, as HTML.
        numeric: the columns to be set flush right.
    """
    right = dict.fromkeys(numeric, ' class="number"')
    top = "".join(f'<th scope="col"{right.get(column, "")}>{text(name)}</th>' for column, name in enumerate(head))
    body = "".join(f"<tr>{_cells(row, right)}</tr>\n" for row in rows)
    label = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def _cells(row: Sequence[str], right: dict[int, str]) -> str:
    first, *others = row
    rest = "".join(f"<td{right.get(column, '')}>{cell}</td>" for column, cell in enumerate(others, 1))
    return f'<th scope="row"{right.get(0, "")}>{first}</th>{rest}'


def note(content: str) -> str:
    """Return a paragraph of explanation; ``content`` is HTML."""
    return f'<p class="note">{content}</p>'


def section(name: str, title: str, *content: str) -> str:
    """Return a section of the page with its heading; ``content`` is HTML."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{"".join(content)}</section>'
    )


def size(count: int) -> str:
    """Return a number of bytes as a person reads it."""
    scaled = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if scaled < 1000:
            return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"
        scaled /= 1000
    return f"{scaled:.1f} TB"


def duration(seconds: float) -> str:
    """Return seconds as a person reads them, such as ``2 h 5 min`` or ``12.3 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"
