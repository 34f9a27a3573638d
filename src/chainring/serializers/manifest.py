"""What a snapshot says about itself, and whether its files still are what was written.

``manifest.json`` lists the files with their sizes and checksums, and ends with a checksum of its own.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chainring.files import checksum, write_bytes

FORMAT = 1
MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 16 << 20


class CorruptError(ValueError):
    """A snapshot is not what was written."""


class NewerFormat(CorruptError):  # noqa: N818 - it is no damage
    """A newer version of Chainring wrote the snapshot, and this one cannot tell whether it is sound."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot says about itself.

    Attributes:
        iteration: the updates that had been completed.
        files: size in bytes and CRC-32 of each file by its name.
        about: anything else that was recorded, as plain JSON values.
    """

    iteration: int
    files: Mapping[str, tuple[int, int]]
    about: Mapping[str, Any]


def verify(directory: Path) -> Manifest:
    """The manifest of a snapshot, after every byte has been compared with it, see `Store.verify`."""
    manifest = look(directory)
    for name, (_, crc) in manifest.files.items():
        if checksum(directory / name) != crc:
            raise CorruptError(f"{directory / name} has other bytes than were written")
    return manifest


def look(directory: Path) -> Manifest:
    """The manifest of a snapshot, after the names, kinds and sizes of its files have been compared with it."""
    manifest = read_manifest(directory)
    present = {entry.name for entry in os.scandir(directory)} - {MANIFEST}
    missing, extra = sorted(manifest.files.keys() - present), sorted(present - manifest.files.keys())
    if missing or extra:
        raise CorruptError(f"{directory} is not what was written: missing {missing}, too many {extra}")
    for name, (size, _) in manifest.files.items():
        status = os.lstat(directory / name)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise CorruptError(f"{directory / name} is no plain file")
        if status.st_size != size:
            raise CorruptError(f"{directory / name} has {status.st_size} bytes, {size} were written")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a snapshot, compared with its own checksum.

    Raises:
        CorruptError: it is missing, or not what was written.
        NewerFormat: a newer version wrote it.
    """
    path = directory / MANIFEST
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CorruptError(f"{path} is no plain file")
        with open(path, "rb") as file:
            text = file.read(_LARGEST_MANIFEST + 1)
    except FileNotFoundError:
        raise CorruptError(f"{directory} is no snapshot: it has no {MANIFEST}") from None
    body, newline, seal = text.rpartition(b"\n")
    # The seal is compared as it is spelled: a number read from hexadecimal would forgive the case of a letter.
    if not newline or seal != b"%08x" % zlib.crc32(body):
        raise CorruptError(f"{path} is not what was written")
    try:
        return _parsed(body)
    except NewerFormat as error:
        raise NewerFormat(f"{directory} {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{path} is no manifest that this version reads: {error}") from error


def _parsed(body: bytes) -> Manifest:
    """What a manifest says, each value of its type: the seal finds damage, and does not prove who wrote it."""
    content = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)  # bytes might be taken for UTF-16
    form = content["format"]
    if type(form) is int and form > FORMAT:
        raise NewerFormat(f"is of a newer Chainring, which writes format {form!r:.40}; this one reads {FORMAT}: update it")
    iteration, files, about = (content[key] for key in ("iteration", "files", "about"))
    if type(form) is not int or form != FORMAT:
        raise ValueError(f"it has format {form!r:.40}, and this version reads {FORMAT}")
    if type(iteration) is not int or type(files) is not dict or type(about) is not dict:
        raise ValueError('"iteration" is an integer, "files" and "about" are objects')
    files = {checked_name(name): (size, crc) for name, (size, crc) in files.items()}
    if not all(type(number) is int for sizes in files.values() for number in sizes):
        raise ValueError("sizes and checksums are integers")
    return Manifest(iteration, files, about)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice, and readers would differ on which counts")
    return found


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest with its checksum, and flushes it to the disk."""
    parts = {"files": dict(manifest.files), "about": dict(manifest.about)}
    body = json.dumps({"format": FORMAT, "iteration": int(manifest.iteration), **parts}, indent=1).encode()
    write_bytes(path, b"%s\n%08x" % (body, zlib.crc32(body)))


def checked_name(name: str) -> str:
    """A name that cannot lead elsewhere.

    Raises:
        ValueError: it is empty, has a slash, or begins with a dot.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a name in a snapshot store has no slash and begins with no dot, got {name!r}")
    return name
