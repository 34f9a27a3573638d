"""Files that are whole whenever they are opened, and on the disk when that is said."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """As JSON has it: arrays are lists, and infinity and NaN, which it lacks, are strings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and tensors, with or without dimensions
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def restored(value: Any) -> Any:
    """What `plain` made of numbers and containers, back."""
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


NAME = ".lock"


class DirectoryLock:
    """Held by the run that writes into a directory, and free at once when its process has ended, however it ended.

    It is a POSIX record lock: one made by ``flock`` would stay with worker processes that outlive a killed trainer.
    Within a process it is not seen by POSIX, so the directories held here are remembered. The file stays where it is.

    Args:
        directory: the directory; it exists.

    Raises:
        BlockingIOError: another run holds it; the error names its process and host.
    """

    _held: dict[str, int] = {}  # noqa: RUF012 - one process-wide record, as the lock itself is of the process

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = os.path.realpath(Path(directory) / NAME)
        if self._path in DirectoryLock._held:
            raise BlockingIOError(self._refusal(os.getpid(), socket.gethostname()))
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX leaves open which of the two means that it is held
            holder = _holder(descriptor)
            os.close(descriptor)
            raise BlockingIOError(self._refusal(holder.get("pid"), holder.get("host"))) from None
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        DirectoryLock._held[self._path] = descriptor

    def _refusal(self, pid: Any, host: Any) -> str:
        return (
            f"{os.path.dirname(self._path)} is being written by another run: process {pid} on {host}. "
            "Wait for it to end, or choose another out"
        )

    def release(self) -> None:
        """Lets another run in. Calling it again does nothing."""
        descriptor = DirectoryLock._held.pop(self._path, None)
        if descriptor is not None:
            os.close(descriptor)


def _holder(descriptor: int) -> dict[str, Any]:
    """Who wrote the file: its process and host, as far as can be read."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def replace(path: Path, content: bytes) -> None:
    """Puts a file with this content in the place of what is there, by one rename."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_bytes(content)
    os.replace(beside, path)


def numbered(parent: Path) -> Path:
    """Makes the next of the directories ``parent/1``, ``parent/2``, ... and returns it."""
    parent.mkdir(exist_ok=True)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    place = parent / str(max(taken, default=0) + 1)
    place.mkdir()
    return place


def flush_file(path: Path) -> None:
    """Makes what was written to a file survive a loss of power."""
    _flush(path, os.O_RDONLY)


def flush_directory(directory: Path) -> None:
    """Makes what was created in or renamed into a directory survive a loss of power."""
    _flush(directory, os.O_RDONLY | os.O_DIRECTORY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, text: bytes) -> tuple[int, int]:
    """Writes a new file and flushes it to the disk; returns its size and CRC-32."""
    with open(path, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return len(text), zlib.crc32(text)


def checksum(path: Path) -> int:
    """The CRC-32 of a file, read in pieces."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(8 << 20):
            crc = zlib.crc32(piece, crc)
    return crc


def described(error: OSError, target: Path) -> OSError:
    """The same error with what the reader needs: which path, and how much room is left there."""
    try:
        room = f"; {shutil.disk_usage(target.parent).free:,} bytes are free there"
    except OSError:
        room = ""
    return OSError(error.errno, f"{error.strerror or error}: it could not be written{room}", str(target))
