"""One run at a time in a directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

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
