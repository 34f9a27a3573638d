"""A store of snapshots: directories that are complete or absent.

A snapshot is written into a directory with a temporary name: its files, each flushed to the disk, then ``manifest.json``,
which lists them with their sizes and checksums, then the directory itself. One rename publishes it, and the parent
directory is flushed. So whatever has a name without a dot was written to its end, and the manifest tells whether it still
is what was written. (The order is that of SQLite and LevelDB: data, record, directory, rename.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from chainring._files import checksum, flush, is_temporary, parse_strict, temporary_path, write_bytes, write_error

FORMAT = 1
MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 256 << 20
_CHECKSUMS = re.compile(r"([0-9a-f]{8})+")

Written = tuple[int, int] | tuple[int, int, str]
"""The size of a file in bytes and its CRC-32; of a file of tensors those of its parts too, see `Manifest`."""
WriteFile = Callable[[Path], Written]
"""Writes a new file and flushes it to the disk."""


class CorruptError(ValueError):
    """A snapshot is not as it was written: a file is missing, longer, shorter, or has other bytes.

    Example::

        try:
            serializers.load("result/snapshot_iter_1000", trainer)
        except CorruptError:
            serializers.load("result/snapshot_iter_900", trainer)
    """


class NewerFormat(CorruptError):  # noqa: N818 - it is not damage
    """A newer version of Chainring wrote the snapshot, and this one cannot tell whether it is sound."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a snapshot: its iteration, its files with their checksums, and facts about it."""

    iteration: int
    files: Mapping[str, tuple[int, int]]  # size in bytes and CRC-32 by name
    about: Mapping[str, Any]  # anything else that was recorded, as plain JSON values
    # By name of a file of tensors the CRC-32 of its header and of each tensor in the order of the file, eight hexadecimal
    # digits each; earlier versions have recorded none.
    parts: Mapping[str, str] = field(default_factory=dict)


class Store:
    """Snapshots in one directory, which exists."""

    # `at` is called with the name of each point of `commit` that is passed, for tests of what a fault there leaves behind.
    def __init__(self, root: str | os.PathLike[str], *, at: Callable[[str], None] = lambda point: None) -> None:
        self.root = Path(root)
        self._at = at

    def commit(
        self, name: str, files: Mapping[str, WriteFile], iteration: int, about: Mapping[str, Any] | None = None
    ) -> None:
        """Write a snapshot and publish it under ``name``; afterwards it is on the disk.

        When anything fails, nothing is published and what was written is removed; but when the very last step fails, that
        flushes the name, the whole snapshot is there.

        Raises:
            FileExistsError: there is one of that name.
            OSError: it could not be written; the error names the path.
        """
        target = self.root / _check_name(name)
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; a snapshot is never written over: choose another name")
        temporary = temporary_path(self.root)
        try:
            temporary.mkdir()
            self._at("begun")
            written: dict[str, Written] = {}
            for file, write in files.items():
                written[_check_name(file)] = write(temporary / file)
                self._at(f"wrote {file}")
            parts = {file: each[2] for file, each in written.items() if len(each) > 2}
            sizes = {file: each[:2] for file, each in written.items()}
            _write_manifest(temporary / MANIFEST, Manifest(iteration, sizes, dict(about or {}), parts))
            self._at("wrote manifest")
            flush(temporary)
            self._at("flushed")
            os.rename(temporary, target)
            self._at("renamed")
            flush(self.root)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(error, target) from error
            raise
        self._at("committed")

    def link(self, name: str, target: str) -> None:
        """Make ``name`` a symbolic link to the snapshot ``target``, in the place of an earlier link by one rename.

        Raises:
            FileExistsError: something that is not a link has that name.
        """
        path = self.root / _check_name(name)
        if os.path.lexists(path) and not path.is_symlink():
            raise FileExistsError(f"{path} is in the way of a link to {target!r}; move it, or choose another name")
        temporary = temporary_path(self.root)
        try:
            os.symlink(_check_name(target), temporary)
            os.rename(temporary, path)
            flush(self.root)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(error, path) from error

    def link_target(self, name: str) -> str | None:
        """Return the snapshot to which the link ``name`` points, or ``None`` if there is no such link."""
        try:
            return os.readlink(self.root / _check_name(name))
        except OSError:
            return None

    def names(self) -> list[str]:
        """Return the names of the snapshots, the highest iteration first, those with a damaged manifest last."""
        listed = [(name, manifest) for name, manifest in self.listing() if (self.root / name / MANIFEST).is_file()]
        return [name for name, manifest in listed if manifest] + [name for name, manifest in listed if not manifest]

    def listing(self, without: str | None = None) -> list[tuple[str, Manifest | None]]:
        """Return every directory that may be a snapshot with its manifest: first those whose manifest cannot be read.

        Then comes the highest iteration, and so on down. Only manifests are read, but that of the one ``without``.
        """
        found = (entry for entry in self.root.iterdir() if not entry.name.startswith(".") and entry.name != without)
        entries = [entry for entry in found if entry.is_dir() and not entry.is_symlink()]
        listed = [(entry.name, _manifest_of(entry)) for entry in entries]
        return sorted(listed, key=lambda item: (item[1] is not None, -item[1].iteration if item[1] else 0, item[0]))

    def holds(self, name: str, iteration: int) -> bool:
        """Return whether there is a snapshot of that name, of that iteration."""
        manifest = _manifest_of(self.root / _check_name(name))
        return manifest is not None and manifest.iteration == iteration

    def verify(self, name: str) -> Manifest:
        """Read every byte of a snapshot, see `verify`."""
        return verify(self.root / name)

    def remove(self, name: str) -> None:
        """Remove a snapshot: it is unpublished by one rename first, so that it is never there in part."""
        removed = temporary_path(self.root, ".old")
        os.rename(self.root / _check_name(name), removed)
        flush(self.root)
        shutil.rmtree(removed)

    def sweep(self) -> list[str]:
        """Remove what killed runs have left unfinished, and return its names. Only the holder of the lock may call this.

        Folders below are swept too, but for those with a lock of their own, where another run may be writing.
        """
        swept = []
        for folder, folders, files in os.walk(self.root):
            if ".lock" in files and Path(folder) != self.root:
                folders.clear()
                continue
            unfinished = list(filter(is_temporary, (*folders, *files)))
            for path in (Path(folder, name) for name in unfinished):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            folders[:] = [name for name in folders if name not in unfinished]
            swept += unfinished
        return swept


def find_newest(
    store: Store, names: Iterable[str], warn: Callable[[str], None], known_damaged: Container[str] = ()
) -> str | None:
    """Return the first of ``names`` of which nothing is missing, ``None`` if there are no names; warn about each before it.

    Whether its bytes are those that were written shows when it is loaded.

    Raises:
        CorruptError: there are some, and none is sound: starting anew would bury what may still be saved by hand.
    """
    damaged = []
    for name in names:
        if name in known_damaged:
            damaged.append(name)
            continue
        try:
            verify(store.root / name, content=False)
        except (CorruptError, OSError) as error:
            warn(f"snapshot {name!r} is passed over: {error}")
            damaged.append(name)
        else:
            return name
    if damaged:
        raise CorruptError(f"none of the snapshots {damaged} in {store.root} is sound; move them away to start anew")
    return None


def verify(directory: Path, *, content: bool = True) -> Manifest:
    """Return the manifest of a snapshot, after every byte of its files, or without ``content`` their sizes, were verified.

    Raises:
        CorruptError: a file is missing, too many, of another size or content, or not a regular file.
    """
    manifest = read_manifest(directory)
    present = {entry.name for entry in os.scandir(directory)} - {MANIFEST}
    missing, extra = sorted(manifest.files.keys() - present), sorted(present - manifest.files.keys())
    if missing or extra:
        raise CorruptError(f"{directory} is not what was written: missing {missing}, too many {extra}")
    for name, (size, _) in manifest.files.items():
        status = os.lstat(directory / name)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise CorruptError(f"{directory / name} is not a regular file")
        if status.st_size != size:
            raise CorruptError(f"{directory / name} has {status.st_size} bytes, {size} were written")
    for name, (_, crc) in manifest.files.items() if content else ():
        if checksum(directory / name) != crc:
            raise CorruptError(f"{directory / name} has other bytes than were written")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a snapshot, compared with its own checksum.

    Raises:
        CorruptError: it is missing, or not what was written; a `NewerFormat` if a newer version wrote it.
    """
    path = directory / MANIFEST
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CorruptError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            text = file.read(min(os.fstat(file.fileno()).st_size, _LARGEST_MANIFEST) + 1)  # which is allocated first
    except FileNotFoundError:
        raise CorruptError(f"{directory} is not a snapshot: it has no {MANIFEST}") from None
    body, newline, crc = text.rpartition(b"\n")
    if not newline or crc != b"%08x" % zlib.crc32(body):  # as text: a number would forgive the case of a letter
        raise CorruptError(f"{path} is not what was written")
    try:
        return _parse(body)
    except NewerFormat as error:
        raise NewerFormat(f"{directory} {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is not a manifest that this version reads: {error}") from error


def _parse(body: bytes) -> Manifest:
    """Return a manifest with values of its types: the checksum finds damage, and does not prove who wrote it."""
    content = parse_strict(body)
    version = content["format"]
    if type(version) is not int or version < FORMAT:
        raise ValueError(f"it has format {version!r:.40}, and this version reads {FORMAT}")
    if version > FORMAT:
        raise NewerFormat(
            f"is of a newer Chainring, which writes format {version!r:.40}; this one reads {FORMAT}: update it"
        )
    iteration, files, about = (content[key] for key in ("iteration", "files", "about"))
    if type(iteration) is not int or type(files) is not dict or type(about) is not dict:
        raise ValueError('"iteration" is an integer, "files" and "about" are objects')
    files = {_check_name(name): (size, crc) for name, (size, crc) in files.items()}
    if not all(type(value) is int for size_and_crc in files.values() for value in size_and_crc):
        raise ValueError("sizes and checksums are integers")
    parts = content.get("parts", {})
    if type(parts) is not dict or not all(type(text) is str and _CHECKSUMS.fullmatch(text) for text in parts.values()):
        raise ValueError("checksums of parts are text, eight hexadecimal digits each")
    return Manifest(iteration, files, about, parts)


def _manifest_of(directory: Path) -> Manifest | None:
    try:
        status = os.lstat(directory / MANIFEST)
        return _read_once(directory, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except (OSError, CorruptError):
        return None


@lru_cache(4096)
def _read_once(directory: Path, *_status: int) -> Manifest:
    """Return a manifest for a list of snapshots, without its parts; read once as long as its file is not written anew."""
    return replace(read_manifest(directory), parts={})


def _write_manifest(path: Path, manifest: Manifest) -> None:
    content = {"format": FORMAT, "iteration": int(manifest.iteration), "files": dict(manifest.files)}
    body = json.dumps({**content, "about": dict(manifest.about), "parts": dict(manifest.parts)}, indent=1).encode()
    write_bytes(path, b"%s\n%08x" % (body, zlib.crc32(body)))


def _check_name(name: str) -> str:
    """Return a name that cannot lead elsewhere."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a name in a snapshot store has no slash and begins with no dot, got {name!r}")
    return name
