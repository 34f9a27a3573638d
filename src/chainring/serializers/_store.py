"""Where snapshots lie: directories that are complete or absent.

A snapshot is written beside its place, in a directory whose name begins with a dot: its files, each flushed to the disk,
then ``manifest.json``, which lists them with their sizes and checksums, then the directory itself. One rename publishes
it, and the parent directory is flushed. So whatever has a name without a dot was written to its end, and the manifest
tells whether it still is what was written. (The order is that of SQLite and LevelDB: data, record, directory, rename.)

A store has few calls (`commit`, `listing`, `verify`, `remove`, `link`), so that one on another medium can take its place.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chainring._files import checksum, flush_directory, is_temporary, temporary_path, write_bytes, write_error

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
    manifest = verify_sizes(directory)
    for name, (_, crc) in manifest.files.items():
        if checksum(directory / name) != crc:
            raise CorruptError(f"{directory / name} has other bytes than were written")
    return manifest


def verify_sizes(directory: Path) -> Manifest:
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
    files = {check_name(name): (size, crc) for name, (size, crc) in files.items()}
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


def check_name(name: str) -> str:
    """A name that cannot lead elsewhere.

    Raises:
        ValueError: it is empty, has a slash, or begins with a dot.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a name in a snapshot store has no slash and begins with no dot, got {name!r}")
    return name


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
        target = self.root / check_name(name)
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; a snapshot is never written over: choose another name")
        temporary = temporary_path(self.root)
        try:
            temporary.mkdir()
            self._at("begun")
            written = {}
            for file, write in files.items():
                written[check_name(file)] = write(temporary / file)
                self._at(f"wrote {file}")
            write_manifest(temporary / MANIFEST, Manifest(iteration, written, dict(about or {})))
            self._at("wrote manifest")
            flush_directory(temporary)
            self._at("flushed")
            os.rename(temporary, target)
            self._at("renamed")
            flush_directory(self.root)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(error, target) from error
            raise
        self._at("committed")

    def link(self, name: str, target: str) -> None:
        """Makes ``name`` a symbolic link to the snapshot ``target``, in the place of an earlier link by one rename.

        Raises:
            FileExistsError: something that is no link has that name.
        """
        place = self.root / check_name(name)
        if os.path.lexists(place) and not place.is_symlink():
            raise FileExistsError(f"{place} is in the way of a link to {target!r}; move it, or choose another name")
        temporary = temporary_path(self.root)
        try:
            os.symlink(check_name(target), temporary)
            os.rename(temporary, place)
            flush_directory(self.root)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(error, place) from error

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
        return read_manifest(self.root / check_name(name))

    def holds(self, name: str, iteration: int) -> bool:
        """Whether there is a snapshot of that name, of that iteration."""
        manifest = _manifest_of(self.root / check_name(name))
        return manifest is not None and manifest.iteration == iteration

    def link_target(self, name: str) -> str | None:
        """The snapshot to which the link ``name`` points, or ``None`` where there is no such link."""
        try:
            return os.readlink(self.root / check_name(name))
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
        removed = temporary_path(self.root, ".old")
        os.rename(self.root / check_name(name), removed)
        flush_directory(self.root)
        shutil.rmtree(removed)

    def sweep(self) -> list[str]:
        """Removes what killed runs have left unfinished, and returns the names of it. Only the holder of the lock may."""
        left = [entry for entry in self.root.iterdir() if is_temporary(entry.name)]
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


def find_newest(store: Store, names: Iterable[str], warn: Callable[[str], None]) -> str | None:
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
