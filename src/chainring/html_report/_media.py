"""The images, texts and histograms of a log: which of them a page shows, and in which form; nothing in a file is trusted."""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHOWN = 12  # of a key
_MAX_KEYS = 100
_MAX_SIZE = 8 << 20  # characters of the images and texts on a page
_MAX_TEXT = 4_000
_MAX_BINS = 1_000
_PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]{32,}={0,2}")  # the Base64 of a PNG file


@dataclass(frozen=True, slots=True)
class Shown:
    """An image, a text or a histogram at the iteration of its row; two of the three are ``None``."""

    iteration: Any
    png: str | None = None  # in Base64
    size: tuple[int, int] = (0, 0)  # of an image, its width and height
    text: str | None = None
    bars: list[float] | None = None  # the height of each bin of a histogram, the highest 1
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """What was reported under one key, the newest first, and how many rows have it."""

    key: str
    shown: deque[Shown]
    count: int


def read_media(path: Path, number_of_rows: int) -> list[Series]:
    """Read what belongs to the rows of a log; a line that is damaged, or of a row that is not there, is left out."""
    series: dict[str, deque[Shown]] = {}
    counts: dict[str, int] = {}
    with open(path, "rb") as file:
        for line in file:
            row, content = _parse(line)
            if type(row.get("row")) is not int or not 0 <= row["row"] < number_of_rows:
                continue
            for key, item in content.items():
                shown = _shown(row.get("iteration"), item) if isinstance(item, dict) else None
                if shown is not None and (key in series or len(series) < _MAX_KEYS):
                    series.setdefault(key, deque(maxlen=MAX_SHOWN)).appendleft(shown)
                    counts[key] = counts.get(key, 0) + 1
    return _fitting([Series(key, shown, counts[key]) for key, shown in series.items()])


def _parse(line: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        row = json.loads(line) if line.endswith(b"\n") else None  # else it is being written, or was cut by a kill
    except (ValueError, RecursionError):
        row = None
    content = row.get("media") if isinstance(row, dict) else None
    return (row, content) if isinstance(row, dict) and isinstance(content, dict) else ({}, {})


def _fitting(series: list[Series]) -> list[Series]:
    """Leave out the oldest of each key until all fit on a page."""
    sizes = [sum(len(each.png or each.text or "") for each in one.shown) for one in series]
    while sum(sizes) > _MAX_SIZE:
        longest = sizes.index(max(sizes))
        dropped = series[longest].shown.pop()
        sizes[longest] -= len(dropped.png or dropped.text or "")
    return series


def _shown(iteration: Any, item: dict[str, Any]) -> Shown | None:
    kind = item.get("kind")
    if kind == "image":
        return _image(iteration, item.get("png"))
    if kind == "text" and isinstance(text := item.get("text"), str):
        length = f" ({len(text):,} characters)" if len(text) > _MAX_TEXT else ""
        return Shown(iteration, text=text[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode(), summary=length)
    return _histogram(iteration, item) if kind == "histogram" else None


def _image(iteration: Any, png: Any) -> Shown | None:
    if not isinstance(png, str) or not _PNG.fullmatch(png):
        return None
    try:
        width, height = struct.unpack_from(">II", base64.b64decode(png[:40]), 16)
    except (binascii.Error, struct.error):
        return None
    return Shown(iteration, png=png, size=(width, height), summary=f"{width} x {height}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _histogram(iteration: Any, item: dict[str, Any]) -> Shown | None:
    counts, edges = item.get("counts"), item.get("edges")
    if not isinstance(counts, list) or not isinstance(edges, list) or len(counts) > _MAX_BINS:
        return None
    if not all(type(count) is int and 0 <= count < 1 << 60 for count in counts) or not all(map(_is_finite, edges)):
        return None
    parts = [f"{sum(counts):,} values" + (f" from {edges[0]:.4g} to {edges[-1]:.4g}" if edges else "")]
    names = {"nan": "NaN", "positive_infinity": "positive infinity", "negative_infinity": "negative infinity"}
    apart = {word: item.get(name) for name, word in names.items()}
    parts += [f"{count:,} {word}" for word, count in apart.items() if type(count) is int and 0 < count < 1 << 60]
    highest = max(counts, default=0) or 1
    return Shown(iteration, bars=[count / highest for count in counts], summary=", ".join(parts))
