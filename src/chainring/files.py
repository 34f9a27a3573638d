"""Files that are whole whenever they are opened, and on the disk when that is said."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path


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
