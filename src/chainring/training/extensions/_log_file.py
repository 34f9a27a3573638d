"""The two files of a log: ``log.jsonl``, to which each row is appended, and ``log``, the same rows as one JSON array."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chainring.files import numbered, replace
from chainring.notices import said
from chainring.plain import plain, restored

_OFTEN = 1_000_000  # bytes up to which the array is replaced after each row
_SELDOM = 30.0  # seconds between two replacements beyond that


class LogFile:
    """Writes the rows of a log so that both files are valid whenever they are opened.

    The array is replaced by a rename, after each row while it is small and every 30 s when it is not.

    Args:
        path: of the array; the lines go to the same with ``.jsonl``.

    Attributes:
        lines: the file of the lines.
    """

    def __init__(self, path: Path) -> None:
        self._array = path
        self.lines = path.with_name(path.name + ".jsonl")
        self._texts: list[str] = []
        self._size = 0
        self._crc = 0
        self._replaced_at = -math.inf
        self._stale = False

    def open(self, rows: Sequence[Mapping[str, Any]], keep: bool = False) -> None:
        """Begins with the rows of the run that is continued: what its file holds beyond them is cut off.

        A file that does not begin with them, or that is to be kept, is moved to ``abandoned/<n>`` beside it.
        """
        self._texts = [_line(row) for row in rows]
        text = "".join(self._texts).encode()
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        if keep or not self._begins_with(text):
            self._set_aside()
            replace(self.lines, text)
        os.truncate(self.lines, len(text))
        self._size, self._crc = len(text), zlib.crc32(text)
        self.replace_array()

    def _begins_with(self, text: bytes) -> bool:
        try:
            with open(self.lines, "rb") as file:
                return file.read(len(text)) == text
        except FileNotFoundError:
            return False

    def _set_aside(self) -> None:
        if self.lines.exists() and self.lines.stat().st_size:
            place = numbered(self.lines.parent / "abandoned") / self.lines.name
            os.rename(self.lines, place)
            said(f"{self.lines} holds rows that this run does not continue: moved to {place}")

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the lines at once, and to the array when it is due."""
        line = _line(row)
        with open(self.lines, "ab") as file:
            file.write(line.encode())
        self._texts.append(line)
        self._size += len(line.encode())
        self._crc = zlib.crc32(line.encode(), self._crc)
        self._stale = True
        if self._size <= _OFTEN or time.monotonic() - self._replaced_at >= _SELDOM:
            self.replace_array()

    def replace_array(self) -> None:
        """Brings the array up to date."""
        body = ",\n".join(text.rstrip("\n") for text in self._texts)
        replace(self._array, f"[\n{body}\n]\n".encode() if body else b"[]\n")
        self._replaced_at, self._stale = time.monotonic(), False

    def flush(self) -> None:
        """Brings the array up to date if it is not."""
        if self._stale:
            self.replace_array()

    @property
    def checksum(self) -> list[Any]:
        """The name of the lines' file, its length in bytes, and its CRC-32."""
        return [self.lines.name, self._size, self._crc]


def key_list(name: str, keys: Any) -> list[str]:
    """The keys of a log's columns.

    Raises:
        TypeError: they are no iterable of strings, or a single string.
    """
    if isinstance(keys, str):
        raise TypeError(f"{name} is an iterable of keys, got the string {keys!r}; write [{keys!r}]")
    listed = list(keys) if isinstance(keys, Iterable) else None
    if listed is None or not all(isinstance(key, str) for key in listed):
        raise TypeError(f'{name} is an iterable of keys, such as ["epoch", "main/loss"]; got {keys!r}')
    return listed


def read_rows(path: Path, size: int, crc: int) -> list[dict[str, Any]] | None:
    """The rows in the first ``size`` bytes of a file of lines, or ``None`` where these are not what was written."""
    try:
        with open(path, "rb") as file:
            text = file.read(size)
    except OSError:
        return None
    if len(text) != size or zlib.crc32(text) != crc:
        return None
    return [restored(json.loads(line)) for line in text.splitlines()]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), default=str, allow_nan=False) + "\n"
