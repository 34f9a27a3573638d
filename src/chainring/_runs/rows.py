"""The rows of a file of lines, such as ``log.jsonl``, to which a run appends one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chainring._files import from_json, open_regular

_CHUNK = 1 << 20  # bytes read at once
_TAIL = 256  # bytes by which a file that was cut back and written on is told from one that has grown
_WORDS = (b'"NaN"', b'Infinity"', b"\\u")  # without them a line has nothing that `from_json` changes

Rows = list[dict[str, Any] | None]
"""For each line the row, or ``None`` where it is not one: it was damaged, or changed by hand."""


def read_rows(path: Path) -> Rows:
    """Return the rows of a file; a last line without its end is being written, or was cut by a kill, and does not count."""
    return [row for rows in RowReader(path).read() for row in rows]


class RowReader:
    """Reads the rows of a file, and later what was appended to it since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # of the lines that were read
        self._tail = b""

    def read(self, begin_again: Callable[[], None] = lambda: None) -> Iterator[Rows]:
        """Yield the rows after those that were read, in blocks.

        A run that was resumed may have cut the file back: then ``begin_again`` is called, and it is read from the start.
        """
        with open(open_regular(self._path), "rb") as file:
            file.seek(self._end - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._end, self._tail = 0, b""
                file.seek(0)
                begin_again()
            rest = b""
            while chunk := file.read(_CHUNK):
                text, end, rest = (rest + chunk).rpartition(b"\n")
                if end:
                    self._end += len(text) + 1
                    self._tail = (self._tail + text + end)[-_TAIL:]
                    yield parse_rows(text.split(b"\n"))


def parse_rows(lines: Sequence[bytes]) -> Rows:
    """Return the row of each line, with the words for NaN and infinities as numbers."""
    text = b",0,".join(lines)  # all at once is much faster; between lines that are not whole a 0 fits nowhere
    try:
        items = json.loads(b"[" + text + b"]")
    except (ValueError, RecursionError):
        items = []
    if len(items) != 2 * len(lines) - 1 or any(items[1::2]) or not all(isinstance(item, dict) for item in items[::2]):
        return [_parse_row(line) for line in lines]
    rows: Rows = items[::2]
    return [from_json(row) for row in rows] if any(word in text for word in _WORDS) else rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        content = from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
