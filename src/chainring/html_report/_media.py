"""The images, texts and histograms of a log: which of them a page shows, and in which form; nothing in a file is trusted."""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHOWN = 24  # of a key
_MAX_KEYS = 100
MAX_SIZE = 8 << 20  # characters of the images and texts on a page
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
    """What is shown of what was reported under one key, the oldest first, and how many rows have it."""

    key: str
    shown: list[Shown]
    count: int


def read_media(path: Path, number_of_rows: int, max_size: int = MAX_SIZE) -> list[Series]:
    """Read what belongs to the rows of a log; a line that is damaged, or of a row that is not there, is left out.

    Of many rows some are shown, evenly spaced, and so are those that there is room for.
    """
    series: dict[str, list[Shown]] = {}
    newest: dict[str, Shown] = {}
    counts: dict[str, int] = {}
    strides: dict[str, int] = {}  # of which rows are kept
    with open(path, "rb") as file:
        for line in file:
            row, content = _parse(line)
            if type(row.get("row")) is not int or not 0 <= row["row"] < number_of_rows:
                continue
            for key, item in content.items():
                shown = _shown(row.get("iteration"), item) if isinstance(item, dict) else None
                if shown is not None and (key in series or len(series) < _MAX_KEYS):
                    kept, count = series.setdefault(key, []), counts.get(key, 0)
                    if count % (stride := strides.setdefault(key, 1)) == 0:
                        kept.append(shown)
                    if len(kept) > 2 * MAX_SHOWN:
                        kept[:], strides[key] = kept[::2], 2 * stride
                    newest[key], counts[key] = shown, count + 1
    for key, kept in series.items():
        kept += [] if kept[-1] is newest[key] else [newest[key]]
    return _fitting([Series(key, _spread(kept, MAX_SHOWN), counts[key]) for key, kept in series.items()], max_size)


def _parse(line: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        row = json.loads(line) if line.endswith(b"\n") else None  # else it is being written, or was cut by a kill
    except (ValueError, RecursionError):
        row = None
    content = row.get("media") if isinstance(row, dict) else None
    return (row, content) if isinstance(row, dict) and isinstance(content, dict) else ({}, {})


def _spread(shown: list[Shown], number: int) -> list[Shown]:
    """Return so many, evenly spaced: the newest, and the oldest if there are two."""
    if len(shown) <= number:
        return shown
    return shown[-1:] if number == 1 else [shown[round(i * (len(shown) - 1) / (number - 1))] for i in range(number)]


def _fitting(series: list[Series], max_size: int) -> list[Series]:
    """Leave out some of the largest until all fit on a page."""
    sizes = [_size(one.shown) for one in series]
    while sum(sizes) > max_size:
        largest = sizes.index(max(sizes))
        shown = series[largest].shown
        shown[:] = _spread(shown, len(shown) - 1) if len(shown) > 1 else []
        sizes[largest] = _size(shown)
    return series


def _size(shown: list[Shown]) -> int:
    return sum(len(each.png or each.text or "") for each in shown)


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
