"""The files that a program writes of its own: which they are, and how those of a resumed run differ."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from chainring._files import is_temporary
from chainring.serializers._store import MANIFEST

_WRITING = os.O_WRONLY | os.O_RDWR
_NOT_RESULTS = (os.sep + "__pycache__" + os.sep, os.sep + ".cache" + os.sep, os.sep + "matplotlib" + os.sep)
_NOT_OF_THE_RUN = ("run.json", "previous", "abandoned")  # of the directory, which tells of every start
_LARGEST = 1 << 26
_MAX_SHOWN = 100  # characters of a line

Files = dict[str, bytes]
"""By path, what a run has written."""


def record_written(record: Path, directory: str) -> None:
    """Have this process write down each file outside of a directory that it opens for writing, and how long it was then."""
    seen: set[str] = set()
    inside = os.path.join(os.path.realpath(directory), "")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, bytes)) or not is_writing(*arguments[1:3]):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path in seen or path.startswith((inside, "/dev/", "/proc/")) or any(part in path for part in _NOT_RESULTS):
            return
        seen.add(path)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        appends = "a" in (arguments[1] or "") or bool((arguments[2] or 0) & os.O_APPEND)
        descriptor = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, (json.dumps([path, size if appends else 0]) + "\n").encode())
        os.close(descriptor)

    seen.add(os.path.realpath(record))
    sys.addaudithook(audit)


def is_writing(mode: Any, flags: Any) -> bool:
    """Return whether an ``open`` of this mode, or of these flags, may change the file."""
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)


def read_elsewhere(records: list[list[str]]) -> Files:
    """Return what the processes of a run have written outside of its directory, given the lines that each has recorded."""
    starts: dict[str, int] = {}
    for lines in records:
        for path, start in map(json.loads, lines):
            starts.setdefault(path, start)
    found = {}
    for path, start in starts.items():
        if os.path.isfile(path) and os.path.getsize(path) - start <= _LARGEST:
            with open(path, "rb") as file:
                file.seek(start)
                found[path] = file.read()
    return found


def read_out(out: str, logs: Collection[str]) -> Files:
    """Return the files in the directory of a run beside logs, snapshots and the record of the run."""
    left_out = {*logs, *(log.removesuffix(".jsonl") for log in logs), *_NOT_OF_THE_RUN}
    found = {}
    for parent, directories, names in os.walk(out):
        at = os.path.relpath(parent, out)
        directories[:] = [name for name in directories if not _is_left_out(os.path.join(parent, name), at, name, left_out)]
        for name in names:
            path = os.path.join(parent, name)
            if not _is_left_out(path, at, name, left_out) and os.path.getsize(path) <= _LARGEST:
                content = Path(path).read_bytes()
                if not _is_model(content):
                    found[os.path.normpath(os.path.join(at, name))] = content
    return found


def _is_left_out(path: str, at: str, name: str, left_out: set[str]) -> bool:
    """Return whether it is a log, a snapshot, which may have been lost with the kill, or no plain file."""
    if os.path.islink(path) or (at == "." and name.startswith(".")) or is_temporary(name):
        return True
    return os.path.normpath(os.path.join(at, name)) in left_out or os.path.exists(os.path.join(path, MANIFEST))


def _is_model(content: bytes) -> bool:
    """Return whether it is a file of safetensors, such as `snapshot_object` takes: its state is compared at the end."""
    return content[8:9] == b"{" and int.from_bytes(content[:8], "little") <= len(content)


def compare_files(first: Files, second: Files, resumed: Files) -> tuple[dict[str, str], list[str]]:
    """Return how the files of a resumed run differ, and which could not be compared as two runs write them differently.

    Of text that two uninterrupted runs write differently in the same number of lines, such as times, that number counts.
    """
    differing, left_out = {}, []
    unrepeatable = {_without_digits(path) for path in first.keys() ^ second.keys()}
    for path in first | resumed:
        if os.path.isabs(path) and path not in second:
            continue  # made by the first run once for all, such as data, or under a name that is drawn
        if _without_digits(path) in unrepeatable or (path in resumed and path not in first and path in second):
            left_out.append(path)
            continue
        one, other = first.get(path), resumed.get(path)
        is_repeatable = one == second.get(path)
        if one is None or other is None:
            differing[path] = f"only in the {'uninterrupted' if other is None else 'resumed'} run"
        elif is_repeatable and one != other:
            differing[path] = _difference(one, other)
        elif not is_repeatable:
            counts = [content.count(b"\n") for content in (one, second[path], other)]
            if b"\0" in one or counts[0] != counts[1]:
                left_out.append(path)
            elif counts[0] != counts[2]:
                differing[path] = f"{counts[0]} lines -> {counts[2]} lines"
    return differing, left_out


def _without_digits(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _difference(one: bytes, other: bytes) -> str:
    if b"\0" in one or b"\0" in other:
        return f"{len(one)} bytes -> {len(other)} bytes" if len(one) != len(other) else f"{len(one)} other bytes"
    lines, others = (content.decode(errors="replace").splitlines() for content in (one, other))
    index = next((i for i, (a, b) in enumerate(zip(lines, others, strict=False)) if a != b), min(len(lines), len(others)))
    texts = [repr(each[index][:_MAX_SHOWN]) if index < len(each) else "nothing" for each in (lines, others)]
    counts = f", and {len(lines)} -> {len(others)} lines" if len(lines) != len(others) else ""
    return f"line {index + 1}: {' -> '.join(texts)}{counts}"
