"""LogFile: the rows of a log as lines of JSON and as one JSON array."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring._files import atomic_write
from chainring._json import from_json, to_json
from chainring.writers._common import check_path, set_aside
from chainring.writers.base import Record, Run, Writer

_SMALL = 1_000_000  # bytes up to which the array is replaced after each row
_SECONDS = 30.0  # between two replacements of a larger array


class LogFile(Writer):
    """Appends each row to ``<filename>.jsonl`` at once, and keeps all rows in ``<filename>`` as a JSON array.

    Both files are valid whenever they are opened. The array is replaced by a rename: after each row while it is small, every
    30 seconds beyond that, and by `flush` and `close`. NaN and infinities are ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.

    The values of a record are the whole row and are written as they are, because the ``postprocess`` of a `LogReport` may
    have moved or removed the epoch, the iteration and the time.

    Args:
        filename: of the array, in the run's ``out``.

    Attributes:
        path: of the file of lines, once the run has begun.
    """

    def __init__(self, filename: str = "log") -> None:
        filename = check_path("filename", filename)
        self.writes = (filename, f"{filename}.jsonl")
        self._array, self.path = map(Path, self.writes)
        self._lines: list[str] = []
        self._size = 0
        self._crc = 0
        self._replaced_at = -math.inf
        self._is_stale = False

    def begin(self, run: Run) -> None:
        """Begin with the rows of the run that is continued: the file is cut back to them, or set aside if it has others."""
        self._array, self.path = (run.out / name for name in self.writes)
        self._lines = [_line(record.values) for record in run.records]
        text = "".join(self._lines).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if _head(self.path, len(text)) != text:
            set_aside(self.path)
            with atomic_write(self.path) as file:
                file.write(text)
        os.truncate(self.path, len(text))
        self._size, self._crc = len(text), zlib.crc32(text)
        self._replace_array()

    def write(self, record: Record) -> None:
        line = _line(record.values)
        text = line.encode()
        with open(self.path, "ab") as file:
            file.write(text)
        self._lines.append(line)
        self._size, self._crc = self._size + len(text), zlib.crc32(text, self._crc)
        self._is_stale = True
        if self._size <= _SMALL or time.monotonic() - self._replaced_at >= _SECONDS:
            self._replace_array()

    def flush(self) -> None:
        """Bring the array up to date."""
        if self._is_stale:
            self._replace_array()

    def close(self) -> None:
        self.flush()

    def _replace_array(self) -> None:
        body = ",\n".join(line.rstrip("\n") for line in self._lines)
        with atomic_write(self._array) as file:
            file.write(f"[\n{body}\n]\n".encode() if body else b"[]\n")
        self._replaced_at, self._is_stale = time.monotonic(), False

    @property
    def checksum(self) -> list[Any]:
        """The name of the file of lines, its length in bytes, and its CRC-32."""
        return [self.path.name, self._size, self._crc]


def read_rows(path: Path, size: int, crc: int) -> list[dict[str, Any]] | None:
    """Return the rows in the first ``size`` bytes of a file of lines, or ``None`` if these have another checksum."""
    text = _head(path, size)
    if text is None or len(text) != size or zlib.crc32(text) != crc:
        return None
    return [from_json(json.loads(line)) for line in text.splitlines()]


def _head(path: Path, size: int) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(to_json(row), default=str, allow_nan=False) + "\n"
