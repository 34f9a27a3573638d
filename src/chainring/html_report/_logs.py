"""The rows of a run's logs, read line by line while the run may still be writing them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chainring.plain import restored

COUNTERS = ("epoch", "iteration", "elapsed_time")


@dataclass(frozen=True, slots=True)
class Log:
    """A log of a run.

    Attributes:
        name: of the file of its lines.
        rows: the rows, NaN and infinities as floats.
        unreadable: how many whole lines are no row.
    """

    name: str
    rows: list[dict[str, Any]]
    unreadable: int = 0

    @property
    def keys(self) -> list[str]:
        """The keys of all rows: the counters first, then the others as they first occur."""
        found = dict.fromkeys(key for row in self.rows for key in row)
        return [key for key in COUNTERS if key in found] + [key for key in found if key not in COUNTERS]


def read_logs(directory: Path, files: Iterable[str]) -> list[Log]:
    """The logs among the files that a run says it writes; without such a list, the one of the default name.

    Of a log there are two files, ``log`` and ``log.jsonl``. The lines are read, to which every row is appended at once.
    """
    names = set(files)
    lines = sorted(name for name in names if name.endswith(".jsonl") and name.removesuffix(".jsonl") in names)
    if "log.jsonl" not in lines:
        lines.insert(0, "log.jsonl")
    return [read_log(path, name) for name in lines if (path := inside(directory, name)) is not None]


def inside(directory: Path, name: str) -> Path | None:
    """The plain file of this name in a directory, or ``None``: a name out of a file may lead anywhere."""
    try:
        path = (directory / name).resolve()
        return path if path.is_relative_to(directory.resolve()) and path.is_file() else None
    except (OSError, ValueError):
        return None


def read_log(path: Path, name: str) -> Log:
    """A log. A last line without its end is being written, or was cut by a kill: it does not count."""
    rows, unreadable = [], 0
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        row = _row(line)
        if row is None:
            unreadable += 1
        else:
            rows.append(row)
    return Log(name, rows, unreadable)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = restored(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
