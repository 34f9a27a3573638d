"""Where snapshots lie: directories that are complete or absent.

A snapshot is written beside its place, in a directory whose name begins with a dot: its files, each flushed to the disk,
then ``manifest.json``, which lists them with their sizes and checksums, then the directory itself. One rename publishes
it, and the parent directory is flushed. So whatever has a name without a dot was written to its end, and the manifest
tells whether it still is what was written. (The order is that of SQLite and LevelDB: data, record, directory, rename.)

A store has few calls (`commit`, `listing`, `verify`, `remove`, `link`), so that one on another medium can take its place.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from chainring.files import described, flush_directory
from chainring.serializers.manifest import (
    MANIFEST,
    CorruptError,
    Manifest,
    checked_name,
    read_manifest,
    verify,
    write_manifest,
)

_UNFINISHED = re.compile(r"\..+-\d+-\d+\.(tmp|old)")  # .NAME-PID-NANOSECONDS.tmp

WriteFile = Callable[[Path], tuple[int, int]]
"""Writes a new file and flushes it to the disk; returns its size in bytes and its CRC-32."""


class Store:
    """Snapshots in one directory.

    Args:
        root: the directory; it exists.
        at: called with the name of each point of `commit` that is passed, for tests of what a fault there leaves behind.
    """

    def __init__(self, root: str | os.PathLike[str], *, at: Callable[[str], None] = lambda point: None) -> None:
        self.root = Path(root)
        self._at = at

    def commit(
        self, name: str, files: Mapping[str, WriteFile], iteration: int, about: Mapping[str, Any] | None = None
    ) -> None:
        """Writes a snapshot and publishes it under ``name``; afterwards it is on the disk.

        When anything fails, nothing is published and what was written is removed; but when the very last step fails, that
        flushes the name, the whole snapshot is there.

        Raises:
            FileExistsError: there is one of that name.
            OSError: the disk is full, say; the error names the path.
        """
        target = self.root / checked_name(name)
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; a snapshot is never written over: choose another name")
        beside = self.root / f".{name}-{os.getpid()}-{time.monotonic_ns()}.tmp"
        try:
            beside.mkdir()
            self._at("begun")
            written = {}
            for file, write in files.items():
                written[checked_name(file)] = write(beside / file)
                self._at(f"wrote {file}")
            write_manifest(beside / MANIFEST, Manifest(iteration, written, dict(about or {})))
            self._at("wrote manifest")
            flush_directory(beside)
            self._at("flushed")
            os.rename(beside, target)
            self._at("renamed")
            flush_directory(self.root)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            if isinstance(error, OSError):
                raise described(error, target) from error
            raise
        self._at("committed")

    def link(self, name: str, target: str) -> None:
        """Makes ``name`` a symbolic link to the snapshot ``target``, in the place of an earlier link by one rename.

        Raises:
            FileExistsError: something that is no link has that name.
        """
        place = self.root / checked_name(name)
        if os.path.lexists(place) and not place.is_symlink():
            raise FileExistsError(f"{place} is in the way of a link to {target!r}; move it, or choose another name")
        beside = self.root / f".{name}-{os.getpid()}-{time.monotonic_ns()}.tmp"
        try:
            os.symlink(checked_name(target), beside)
            os.rename(beside, place)
            flush_directory(self.root)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise described(error, place) from error

    def names(self) -> list[str]:
        """The names of the snapshots, those of the highest iteration first; whether they are sound is not looked at."""
        listed = [(name, manifest) for name, manifest in self.listing() if (self.root / name / MANIFEST).is_file()]
        return [name for name, manifest in listed if manifest] + [name for name, manifest in listed if not manifest]

    def listing(self, without: str | None = None) -> list[tuple[str, Manifest | None]]:
        """Every directory that may be a snapshot with its manifest: first those whose manifest cannot be read.

        Then comes the highest iteration, and so on down. Only manifests are read, but that of the one ``without``.
        """
        found = (entry for entry in self.root.iterdir() if not entry.name.startswith(".") and entry.name != without)
        entries = [entry for entry in found if entry.is_dir() and not entry.is_symlink()]
        listed = [(entry.name, _manifest_of(entry)) for entry in entries]
        return sorted(listed, key=lambda item: (item[1] is not None, -item[1].iteration if item[1] else 0, item[0]))

    def manifest(self, name: str) -> Manifest:
        """What a snapshot says about itself.

        Raises:
            CorruptError: its manifest is missing, or not what was written.
        """
        return read_manifest(self.root / checked_name(name))

    def holds(self, name: str, iteration: int) -> bool:
        """Whether there is a snapshot of that name, of that iteration."""
        manifest = _manifest_of(self.root / checked_name(name))
        return manifest is not None and manifest.iteration == iteration

    def linked(self, name: str) -> str | None:
        """The snapshot to which the link ``name`` points, or ``None`` where there is no such link."""
        try:
            return os.readlink(self.root / checked_name(name))
        except OSError:
            return None

    def verify(self, name: str) -> Manifest:
        """Reads every byte of a snapshot.

        Raises:
            CorruptError: a file is missing, too many, of another size or content, or no plain file.
        """
        return verify(self.root / name)

    def remove(self, name: str) -> None:
        """Removes a snapshot: unpublished by one rename first, so that it is never there in part."""
        aside = self.root / f".{name}-{os.getpid()}-{time.monotonic_ns()}.old"
        os.rename(self.root / checked_name(name), aside)
        flush_directory(self.root)
        shutil.rmtree(aside)

    def sweep(self) -> list[str]:
        """Removes what killed runs have left unfinished, and returns the names of it. Only the holder of the lock may."""
        left = [entry for entry in self.root.iterdir() if _UNFINISHED.fullmatch(entry.name)]
        for entry in left:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        return [entry.name for entry in left]


def _manifest_of(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except (OSError, CorruptError):
        return None


def newest(store: Store, names: Iterable[str], warn: Callable[[str], None]) -> str | None:
    """The first of ``names`` that verifies; each before it is warned about. ``None`` when there are no names at all.

    Raises:
        CorruptError: there are some, and none verifies: starting anew would bury what may still be saved by hand.
    """
    tried = []
    for name in names:
        try:
            store.verify(name)
        except (CorruptError, OSError) as error:
            warn(f"snapshot {name!r} is passed over: {error}")
            tried.append(name)
        else:
            return name
    if tried:
        raise CorruptError(f"none of the snapshots {tried} in {store.root} is sound; move them away to start anew")
    return None
