"""Files that are complete whenever they are opened, JSON that every reader takes, and the lock of a directory."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_TEMPORARY = re.compile(
    r"\.chainring-[0-9a-f]{16}\.(tmp|old)"
    r"|\..+-\d+-\d{10,}\.(tmp|old)"  # of versions before 0.1: .NAME-PID-NANOSECONDS.tmp
)


def temporary_path(directory: Path, suffix: str = ".tmp") -> Path:
    """Return a path in a directory that nobody can guess, with the mark by which `is_temporary` knows it."""
    return directory / f".chainring-{secrets.token_hex(8)}{suffix}"


def is_temporary(name: str) -> bool:
    """Return whether a file or directory of this name is one of ours that a killed process did not finish."""
    return _TEMPORARY.fullmatch(name) is not None


@contextmanager
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` by one rename when the block ends.

    When anything fails, the new file is removed and ``path`` stays as it was. The new file has a name that nobody can guess
    and is created exclusively, so no link is followed; where ``path`` is a link, the link itself is replaced. With
    ``durable`` the file and its name are flushed to the disk, so that they survive a loss of power.

    Raises:
        OSError: it could not be written; the error names ``path`` and the free space.
    """
    temporary = temporary_path(path.parent)
    try:
        with open(temporary, "xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            flush(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(error, path) from error
        raise


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file, text in UTF-8, that takes the place of ``path`` as by `atomic_write`."""
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_error(error: OSError, path: Path) -> OSError:
    """Return the same error with the path that was to be written, and how much space is left there."""
    try:
        space = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        space = ""
    return OSError(error.errno, f"{error.strerror or error}: it could not be written{space}", str(path))


def write_bytes(path: Path, content: bytes) -> tuple[int, int]:
    """Write a new file and flush it to the disk; return its size and CRC-32."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content), zlib.crc32(content)


def flush(path: Path) -> None:
    """Flush a file to the disk, or a directory: what was created in it or renamed into it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, which is read in chunks."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(8 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def make_numbered_directory(parent: Path) -> Path:
    """Make the next of the directories ``parent/1``, ``parent/2``, ... and return it."""
    parent.mkdir(exist_ok=True)
    directory = parent / str(1 + max((int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()), default=0))
    directory.mkdir()
    return directory


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any) -> Any:
    """Return a value in the types of JSON: mappings become dicts, arrays and tensors lists, infinity and NaN strings."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and tensors, with or without dimensions
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # one of `_WORDS`
    return value


def from_json(value: Any) -> Any:
    """Return the numbers and containers from which `to_json` made ``value``."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def parse_strict(text: bytes) -> Any:
    """Return the value of a JSON document in UTF-8 that may come from anywhere.

    Raises:
        ValueError: it is not JSON, nested too deep, a key occurs twice in an object, or a number is not finite.
    """
    try:
        decoded = text.decode("utf-8")  # json.loads would take bytes for UTF-16 where they look like it
        return json.loads(decoded, object_pairs_hook=_unique_keys, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("the document is nested too deep; the file is damaged") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice in an object; the file is damaged")
    return found


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:40]} is not a finite number; the file is damaged")
    return value


class DirectoryLock:
    """The lock of a directory into which one run writes. It is free as soon as its process has ended, however it ended.

    It is a POSIX record lock: one made by ``flock`` would stay with worker processes that outlive a killed trainer.
    POSIX grants it again to the same process, so the directories that this process has locked are remembered. The file
    ``.lock`` is never removed.

    Raises:
        BlockingIOError: another run holds the lock; the error names its process and host.
        OSError: the file cannot be opened, or is a link.
    """

    _descriptors: dict[str, int] = {}  # noqa: RUF012 - one record for the process, as the lock itself is

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.path.realpath(directory)
        if self._directory in DirectoryLock._descriptors:
            raise _refusal(self._directory, os.getpid(), socket.gethostname())
        path = os.path.join(self._directory, ".lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either where another process holds it
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise _refusal(self._directory, holder.get("pid"), holder.get("host")) from None
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        DirectoryLock._descriptors[self._directory] = descriptor

    def release(self) -> None:
        """Release the lock. Calling it again does nothing."""
        descriptor = DirectoryLock._descriptors.pop(self._directory, None)
        if descriptor is not None:
            os.close(descriptor)


def _refusal(directory: str, pid: Any, host: Any) -> BlockingIOError:
    writer = f"process {pid} on {host}"
    return BlockingIOError(
        f"{directory} is being written by another run: {writer}. Wait for it to end, or choose another out"
    )


def _read_holder(descriptor: int) -> dict[str, Any]:
    """Return the process and host that wrote the file of a lock, as far as they can be read."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
