"""The snapshots of a run: how one is read and verified, and the stores in which they lie, of which one is a directory.

The manifest of a snapshot lists its files with their sizes and checksums, and carries a checksum of its own. It is written
last, so what has one was written to its end.

In a directory a snapshot is written under a temporary name: its files, each flushed to the disk, then ``manifest.json``,
then the directory itself. One rename publishes it, and the parent directory is flushed. So whatever has a name without a
dot was written to its end, and the manifest tells whether it still is what was written. (The order is that of SQLite and
LevelDB: data, record, directory, rename.)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chainring._files import (
    Sink,
    flush,
    is_regular,
    is_temporary,
    is_url,
    open_regular,
    parse_strict,
    read_at,
    temporary_path,
    write_bytes,
    write_error,
)

Place = str | os.PathLike[str]
"""A path, or an address in an object store such as ``s3://bucket/run``."""

FORMAT = 1
MANIFEST = "manifest.json"

_CHUNK = 8 << 20  # bytes read at once
_LARGEST_MANIFEST = 256 << 20
_CHECKSUMS = re.compile(r"([0-9a-f]{8})+")
_PLAIN = re.compile(r"(?!\.\.?$)[^/\0]+")
_FOLDER = re.compile(r"((\.\./\.\./[^/.\0][^/\0]*/)?[0-9a-f]{16})?")


class CorruptError(ValueError):
    """A snapshot is damaged: a file is missing, has another size, or other bytes than were written.

    Example::

        try:
            serializers.load("result/snapshot_iter_1000", trainer)
        except CorruptError:
            serializers.load("result/snapshot_iter_900", trainer)
    """


class NewerFormat(CorruptError):  # noqa: N818 - it is not damage
    """A newer version of Chainring wrote the snapshot, and this version cannot tell whether it is damaged."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a snapshot: its iteration, its files with their checksums, and facts about it."""

    iteration: int
    files: Mapping[str, tuple[int, int]]  # size in bytes and CRC-32 by name
    about: Mapping[str, Any]  # anything else that was recorded, as plain JSON values
    # By name of a file of tensors the CRC-32 of its header and of each tensor in the order of the file, eight hexadecimal
    # digits each; earlier versions have recorded none.
    parts: Mapping[str, str] = field(default_factory=dict)
    # Where the files lie, from the place of the manifest: beside it, or in an object store in a folder of their own.
    folder: str = ""
    beside: Sequence[str] = ()  # the files of the run to which the state refers, such as its log


class StoredFile(ABC):
    """A file of a snapshot, of which any part can be read.

    Attributes:
        path: where it lies, for messages.
        size: its bytes.
    """

    path: str
    size: int

    @abstractmethod
    def read_into(self, start: int, view: memoryview, until: int | None = None) -> None:
        """Fill a buffer with the bytes from ``start`` on. The bytes up to ``until``, by default the end, will be read next.

        Raises:
            OSError: they cannot be read, or the file ends before.
        """

    def read(self, start: int, size: int, until: int | None = None) -> Tensor:
        """Return bytes of the file; see `read_into`."""
        content = torch.empty(size, dtype=torch.uint8)
        array: Any = content.numpy()
        self.read_into(start, memoryview(array), until)
        return content

    def read_all(self) -> bytes:
        """Return the whole content; raise as `read_into` does."""
        content = bytearray(self.size)
        self.read_into(0, memoryview(content))
        return bytes(content)

    def copy_to(self, path: Path) -> None:
        """Copy the content to a new file in chunks; raise as `read_into` does."""
        starts = range(0, self.size, _CHUNK)
        with open(path, "xb") as copy:
            copy.writelines(bytes(self.read(start, min(_CHUNK, self.size - start)).numpy()) for start in starts)

    def checksum(self, start: int = 0, crc: int = 0) -> int:
        """Return the CRC-32 of the content from ``start`` on, which is read in chunks; raise as `read_into` does.

        ``crc`` is that of what stands before.
        """
        buffer = bytearray(min(self.size, _CHUNK))
        for position in range(start, self.size, _CHUNK):
            view = memoryview(buffer)[: min(_CHUNK, self.size - position)]
            self.read_into(position, view)
            crc = zlib.crc32(view, crc)
        return crc


class SavedSnapshot(ABC):
    """A snapshot in a directory or in an object store, or what may be one.

    Attributes:
        path: where it lies, a path or an address.
        place: where the run lies that has taken it, the same for all of its snapshots: an absolute path, or an address.
        name: its name there.
        is_local: whether it lies in a directory.
    """

    path: str
    place: str
    name: str
    is_local = True

    def __str__(self) -> str:
        return self.path

    @abstractmethod
    def exists(self) -> bool:
        """Return whether it has a manifest, sound or not."""

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """Return the manifest, compared with its own checksum.

        Raises:
            CorruptError: it is missing, or not what was written; a `NewerFormat` if a newer version wrote it.
        """

    @abstractmethod
    def sizes(self, manifest: Manifest) -> dict[str, int | None]:
        """Return the bytes of each file that is there, without the manifest; ``None`` of what is not a regular file."""

    @abstractmethod
    def path_of(self, file: str, manifest: Manifest) -> str:
        """Return where a file lies, a path or an address."""

    @abstractmethod
    def open(self, file: str, manifest: Manifest) -> StoredFile:
        """Open a file.

        Raises:
            OSError: it cannot be opened.
        """

    @abstractmethod
    def folder_beside(self, manifest: Manifest) -> Path:
        """Return a folder with ``run.json`` and the other files beside the snapshot to which it refers, such as the log.

        Of a snapshot in an object store they are copied there now. One that is missing is missing there too.
        """

    def verify(self, *, content: bool = True) -> Manifest:
        """Return the manifest after every byte of the files, or without ``content`` their sizes, were verified.

        Raises:
            CorruptError: a file is missing, too many, of another size or content, or not a regular file.
            OSError: one of them cannot be read.
        """
        manifest = self.read_manifest()
        present = self.sizes(manifest)
        missing, extra = sorted(manifest.files.keys() - present.keys()), sorted(present.keys() - manifest.files.keys())
        if missing or extra:
            raise CorruptError(f"{self.path} is not what was written: missing {missing}, too many {extra}")
        for name, (size, _) in manifest.files.items():
            if present[name] is None:  # opening a pipe would wait for ever
                raise CorruptError(f"{self.path_of(name, manifest)} is not a regular file")
            if present[name] != size:
                raise CorruptError(f"{self.path_of(name, manifest)} has {present[name]} bytes, {size} were written")
        for name, (_, crc) in manifest.files.items() if content else ():
            if self.open(name, manifest).checksum() != crc:
                raise CorruptError(f"{self.path_of(name, manifest)} has other bytes than were written")
        return manifest


class DirectorySnapshot(SavedSnapshot):
    """A snapshot in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path, self.name = str(directory), directory.name
        self.place = os.path.realpath(directory.parent)

    def exists(self) -> bool:
        return (self.directory / MANIFEST).exists()

    def read_manifest(self) -> Manifest:
        path = self.directory / MANIFEST
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise CorruptError(f"{path} is not a regular file")
            with open(path, "rb") as file:
                text = file.read(min(os.fstat(file.fileno()).st_size, _LARGEST_MANIFEST) + 1)  # which is allocated first
        except FileNotFoundError:
            raise CorruptError(f"{self.path} is not a snapshot: it has no {MANIFEST}") from None
        return parse_manifest(text, self.path)

    def sizes(self, manifest: Manifest) -> dict[str, int | None]:
        folder = self.directory / manifest.folder
        entries = {entry.name: os.lstat(entry) for entry in os.scandir(folder)} if folder.is_dir() else {}
        if not manifest.folder:
            entries.pop(MANIFEST, None)
        return {name: entry.st_size if stat.S_ISREG(entry.st_mode) else None for name, entry in entries.items()}

    def path_of(self, file: str, manifest: Manifest) -> str:
        return str(self.directory / manifest.folder / file)

    def open(self, file: str, manifest: Manifest) -> StoredFile:
        return LocalFile(Path(self.path_of(file, manifest)))

    def folder_beside(self, manifest: Manifest) -> Path:
        return self.directory.resolve().parent


class LocalFile(StoredFile):
    """A file on the disk, which can be read to its end also when it has been removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, view: memoryview, until: int | None = None) -> None:
        while len(view):
            count = read_at(self._descriptor, view, start)
            if not count:
                raise OSError(f"{self.path} ends {len(view)} bytes too early")
            view, start = view[count:], start + count


Written = tuple[int, int] | tuple[int, int, str]
"""The size of a file in bytes and its CRC-32; of a file of tensors those of its parts too, see `Manifest`."""
WriteFile = Callable[[Sink], Written]
"""Writes the content of a new file."""


class Store(ABC):
    """The snapshots of a run, wherever they lie.

    Attributes:
        place: where they lie, an absolute path or an address, the same for all who reach it.
    """

    place: str

    def __str__(self) -> str:
        return self.place

    @abstractmethod
    def snapshot(self, name: str) -> SavedSnapshot:
        """Return the snapshot of a name, which need not be there."""

    @abstractmethod
    def begin(self, name: str) -> str:
        """Begin a snapshot; return its draft, for which all ranks can `write` files.

        Raises:
            FileExistsError: there is one of that name.
            OSError: it cannot be written.
        """

    @abstractmethod
    def write(self, draft: str, file: str, write: WriteFile) -> Written:
        """Write a file of a draft; afterwards it is there for good.

        Raises:
            OSError: it could not be written.
        """

    @abstractmethod
    def publish(self, draft: str, name: str, manifest: Manifest) -> None:
        """Give a draft, of which all files are written, its manifest and its name; discard it where that cannot be done.

        Raises:
            OSError: it could not be written.
        """

    @abstractmethod
    def discard(self, draft: str) -> None:
        """Remove a draft, as far as that can be done."""

    def commit(
        self,
        name: str,
        files: Mapping[str, WriteFile],
        iteration: int,
        about: Mapping[str, Any] | None = None,
        beside: Sequence[Path] = (),
    ) -> None:
        """Write a snapshot and publish it under ``name``; afterwards it is there for good.

        When anything fails, nothing is published and what was written is removed; but when the very last step fails, that
        flushes the name, the whole snapshot is there.

        Raises:
            FileExistsError: there is one of that name.
            OSError: it could not be written; the error names the path.
        """
        self.commit_by(
            name,
            lambda draft: {file: self.write(draft, file, write) for file, write in files.items()},
            iteration,
            about,
            beside,
        )

    def commit_by(
        self,
        name: str,
        write_files: Callable[[str], Mapping[str, Written]],
        iteration: int,
        about: Mapping[str, Any] | None = None,
        beside: Sequence[Path] = (),
    ) -> None:
        """Publish what a call has written for a draft, see `commit`; the files ``beside`` it are made to last first."""
        for path in beside:
            self.persist(path)
        draft = self.begin(name)
        try:
            try:
                written = write_files(draft)
            except BaseException:
                self.discard(draft)
                raise
            parts = {file: each[2] for file, each in written.items() if len(each) > 2}
            sizes = {check_name(file): each[:2] for file, each in written.items()}
            names = tuple(path.name for path in beside)
            self.publish(draft, name, Manifest(iteration, sizes, dict(about or {}), parts, beside=names))
        except OSError as error:
            raise self.explain(error, name) from error

    def explain(self, error: OSError, name: str) -> OSError:
        """Return the error of a snapshot that could not be written, with what helps to understand it."""
        return error

    @abstractmethod
    def persist(self, path: Path) -> None:
        """Bring a file to which a snapshot refers, such as the log, where it outlives this process and a loss of power.

        Raises:
            OSError: it could not be.
        """

    @abstractmethod
    def link(self, name: str, target: str) -> None:
        """Make ``name`` a link to the snapshot ``target``, in the place of an earlier link at once.

        Raises:
            FileExistsError: something that is not a link has that name.
        """

    @abstractmethod
    def link_target(self, name: str) -> str | None:
        """Return the snapshot to which the link ``name`` points, or ``None`` if there is no such link."""

    @abstractmethod
    def links(self) -> dict[str, str]:
        """Return the links by name, with their targets."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Remove a link."""

    @abstractmethod
    def renew_links(self) -> None:
        """Keep an earlier writer, which may not know yet that it has lost the store, from changing links."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether anything has that name: a snapshot, sound or not, a link or a file."""

    def names(self) -> list[str]:
        """Return the names of the snapshots, the highest iteration first, those with a damaged manifest last."""
        listed = [(name, manifest) for name, manifest in self.listing() if self.snapshot(name).exists()]
        return [name for name, manifest in listed if manifest] + [name for name, manifest in listed if not manifest]

    def listing(self, without: str | None = None) -> list[tuple[str, Manifest | None]]:
        """Return all that may be snapshots with their manifests, those first whose manifest cannot be read.

        Then comes the highest iteration, and so on down. Only manifests are read, but that of the one ``without``.
        """
        return sorted(
            self.manifests(without).items(),
            key=lambda item: (item[1] is not None, -item[1].iteration if item[1] else 0, item[0]),
        )

    @abstractmethod
    def candidates(self) -> Iterable[str]:
        """Return the names of all that may be snapshots."""

    @abstractmethod
    def manifests(self, without: str | None = None) -> dict[str, Manifest | None]:
        """Return the manifests of all but one, without their parts; ``None`` for those that cannot be read."""

    @abstractmethod
    def known_manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a snapshot for a list, without its parts; ``None`` if it cannot be read."""

    def holds(self, name: str, iteration: int) -> bool:
        """Return whether there is a snapshot of that name, of that iteration."""
        manifest = self.known_manifest(check_name(name))
        return manifest is not None and manifest.iteration == iteration

    def verify(self, name: str) -> Manifest:
        """Read every byte of a snapshot, see `SavedSnapshot.verify`."""
        return self.snapshot(name).verify()

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a snapshot, which is never there in part."""

    @abstractmethod
    def move(self, name: str, archive: str) -> None:
        """Move a snapshot or a link into a folder of the run, such as ``"previous/1"``."""

    @abstractmethod
    def leave_probe(self) -> str:
        """Leave something by which other processes find out whether they see the same store; return its name."""

    @abstractmethod
    def sees_probe(self, name: str) -> bool:
        """Return whether a probe is there."""

    @abstractmethod
    def remove_probe(self, name: str) -> None:
        """Remove a probe."""

    @abstractmethod
    def sweep(self) -> list[str]:
        """Remove what killed runs have left unfinished, and return its names. Only the run that writes there may."""


class DirectoryStore(Store):
    """Snapshots in one directory, which exists."""

    # `at` is called with the name of each point of `commit` that is passed, for tests of what a fault there leaves behind.
    def __init__(self, root: str | os.PathLike[str], *, at: Callable[[str], None] = lambda point: None) -> None:
        self.root = Path(root)
        self.place = os.path.realpath(root)
        self._at = at

    def snapshot(self, name: str) -> DirectorySnapshot:
        return DirectorySnapshot(self.root / name)

    def begin(self, name: str) -> str:
        target = self.root / check_name(name)
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; a snapshot is never written over: choose another name")
        temporary = temporary_path(self.root)
        try:
            temporary.mkdir()
            self._at("begun")
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(error, target) from error
            raise
        return str(temporary)

    def write(self, draft: str, file: str, write: WriteFile) -> Written:
        path = Path(draft, check_name(file))
        with path.open("xb") as target:
            written = write(target)
            target.flush()
            os.fsync(target.fileno())
        self._at(f"wrote {file}")
        return written

    def publish(self, draft: str, name: str, manifest: Manifest) -> None:
        temporary = Path(draft)
        try:
            write_bytes(temporary / MANIFEST, format_manifest(manifest))
            self._at("wrote manifest")
            flush(temporary)
            self._at("flushed")
            os.rename(temporary, self.root / check_name(name))
            self._at("renamed")
            flush(self.root)
        except BaseException:
            self.discard(draft)
            raise
        self._at("committed")

    def explain(self, error: OSError, name: str) -> OSError:
        return write_error(error, self.root / name)

    def discard(self, draft: str) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def persist(self, path: Path) -> None:
        flush(path)

    def link(self, name: str, target: str) -> None:
        path = self.root / check_name(name)
        if os.path.lexists(path) and not path.is_symlink():
            raise FileExistsError(f"{path} is in the way of a link to {target!r}; move it, or choose another name")
        temporary = temporary_path(self.root)
        try:
            os.symlink(check_name(target), temporary, target_is_directory=True)
            os.rename(temporary, path)
            flush(self.root)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(error, path) from error

    def link_target(self, name: str) -> str | None:
        return _target(self.root / check_name(name))

    def links(self) -> dict[str, str]:
        names = [entry.name for entry in os.scandir(self.root) if entry.is_symlink()]
        return {name: target for name in sorted(names) if (target := _target(self.root / name)) is not None}

    def unlink(self, name: str) -> None:
        os.unlink(self.root / name)

    def renew_links(self) -> None:
        """Do nothing: there is no other writer while the lock of the directory is held."""

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def candidates(self) -> list[str]:
        with os.scandir(self.root) as entries:  # which knows what each is, so that none of a thousand is asked for
            return [
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]

    def manifests(self, without: str | None = None) -> dict[str, Manifest | None]:
        return {name: self.known_manifest(name) for name in self.candidates() if name != without}

    def known_manifest(self, name: str) -> Manifest | None:
        directory = self.root / name
        try:
            status = os.lstat(directory / MANIFEST)
            return _read_once(directory, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        except (OSError, CorruptError):
            return None

    def remove(self, name: str) -> None:
        """Remove a snapshot: it is unpublished by one rename first, so that it is never there in part."""
        removed = temporary_path(self.root, ".old")
        os.rename(self.root / check_name(name), removed)
        flush(self.root)
        shutil.rmtree(removed)

    def move(self, name: str, archive: str) -> None:
        os.rename(self.root / name, self.root / archive / name)

    def leave_probe(self) -> str:
        probe = temporary_path(self.root)
        probe.touch(exist_ok=False)
        return probe.name

    def sees_probe(self, name: str) -> bool:
        return (self.root / name).exists()

    def remove_probe(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

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


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None


@lru_cache(4096)
def _read_once(directory: Path, *_status: int) -> Manifest:
    """Return a manifest for a list of snapshots, without its parts; read once as long as its file is not written again."""
    return replace(DirectorySnapshot(directory).read_manifest(), parts={})


def find_newest(
    store: Store, names: Iterable[str], warn: Callable[[str], None], known_damaged: Container[str] = ()
) -> str | None:
    """Return the first of ``names`` of which nothing is missing, ``None`` if there are no names; warn about each before it.

    Its content is verified only when it is loaded.

    Raises:
        CorruptError: all of them are damaged; a new start would hide files that may still be recovered by hand.
    """
    damaged = []
    for name in names:
        if name in known_damaged:
            damaged.append(name)
            continue
        try:
            store.snapshot(name).verify(content=False)
        except (CorruptError, OSError) as error:
            warn(f"snapshot {name!r} is skipped: {error}")
            damaged.append(name)
        else:
            return name
    if damaged:
        raise CorruptError(f"none of the snapshots {damaged} in {store} is undamaged; move them away to start again")
    return None


def split(place: Place) -> tuple[str, str]:
    """Return the path or the address above one, and its name there.

    Raises:
        ValueError: it is an address that has no name in a bucket.
    """
    if not is_url(place):
        return str(Path(place).parent), Path(place).name
    from chainring._remote.bucket import Bucket

    url = os.fspath(place)
    above, _, name = Bucket(url).url.rpartition("/")
    if not has_name(url):
        raise ValueError(f"{url} is a whole bucket; give what lies in it, such as {url.rstrip('/')}/run/snapshot_iter_100")
    return above, name


def has_name(url: str) -> bool:
    """Return whether an address is that of something in a bucket, and not of the bucket."""
    place = url.partition("://")[2]
    return "/" in place.strip("/") or (place.startswith("/") and place.strip("/") != "")


def open_file(place: Place) -> StoredFile:
    """Open a file at a path or an address.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be opened.
        ValueError: it is not a regular file.
    """
    if not is_url(place):
        resolved = Path(os.path.realpath(place))  # a person may have made a link to it
        if os.path.lexists(resolved) and not is_regular(resolved):
            raise ValueError(f"{place} is not a regular file; give the path of a model's file")
        file = LocalFile(resolved)
        file.path = os.fspath(place)
        return file
    from chainring._remote.bucket import Bucket
    from chainring.serializers._object_store import ObjectFile

    above, name = split(place)
    return ObjectFile(Bucket(above), name)


def open_store(place: Place) -> Store:
    """Return the store of the snapshots of a run, at a path or an address."""
    if not is_url(place):
        return DirectoryStore(place)
    from chainring._remote.bucket import Bucket
    from chainring.serializers._object_store import ObjectStore  # which derives from the one here

    return ObjectStore(Bucket(os.fspath(place)))


def find_snapshot(place: Place) -> SavedSnapshot:
    """Return what may be a snapshot at a path or an address; a link in an object store is followed."""
    if not is_url(place):
        return DirectorySnapshot(Path(place))
    from chainring._remote.bucket import Bucket
    from chainring.serializers._object_store import ObjectSnapshot

    url, name = split(place)
    return ObjectSnapshot.find(Bucket(url), name)


def format_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its checksum."""
    content: dict[str, Any] = {"format": FORMAT, "iteration": int(manifest.iteration), "files": dict(manifest.files)}
    content |= {"about": dict(manifest.about), "parts": dict(manifest.parts)}
    content |= {"folder": manifest.folder} if manifest.folder else {}
    content |= {"beside": list(manifest.beside)} if manifest.beside else {}
    body = json.dumps(content, indent=1).encode()
    return b"%s\n%08x" % (body, zlib.crc32(body))


def parse_manifest(text: bytes, place: str) -> Manifest:
    """Return the manifest of the snapshot at ``place``.

    Raises:
        CorruptError: it is not what was written; a `NewerFormat` if a newer version wrote it.
    """
    body, newline, crc = text.rpartition(b"\n")
    if not newline or crc != b"%08x" % zlib.crc32(body):  # as text: a number would forgive the case of a letter
        raise CorruptError(f"{place}/{MANIFEST} is not what was written")
    try:
        return _parse(body)
    except NewerFormat as error:
        raise NewerFormat(f"{place} {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{place}/{MANIFEST} is not a manifest that this version reads: {error}") from error


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
    files = {check_name(name): (size, crc) for name, (size, crc) in files.items()}
    if not all(type(value) is int for size_and_crc in files.values() for value in size_and_crc):
        raise ValueError("sizes and checksums are integers")
    parts, folder = content.get("parts", {}), content.get("folder", "")
    if type(parts) is not dict or not all(type(text) is str and _CHECKSUMS.fullmatch(text) for text in parts.values()):
        raise ValueError("checksums of parts are text, eight hexadecimal digits each")
    if type(folder) is not str or not _FOLDER.fullmatch(folder):
        raise ValueError("the folder of the files is sixteen hexadecimal digits")
    beside = content.get("beside", [])
    if type(beside) is not list or not all(type(name) is str and _PLAIN.fullmatch(name) for name in beside):
        raise ValueError("the files beside a snapshot are names")
    return Manifest(iteration, files, about, parts, folder, tuple(beside))


def check_name(name: str) -> str:
    """Return a name that cannot lead elsewhere."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a name in a snapshot store has no slash and begins with no dot, got {name!r}")
    return name
