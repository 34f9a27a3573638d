"""A place: where snapshots and the files beside them lie, a directory or the objects under an address.

In a directory, a snapshot is written under a temporary name: its files, each flushed to the disk, then its manifest, then
the directory itself. One rename publishes it, and the parent directory is flushed. So whatever has a name without a dot was
written to its end, and the manifest tells whether it still is what was written. (The order is that of SQLite and LevelDB:
data, record, directory, rename.)
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chainring._files import Sink, atomic_write, flush, is_temporary, open_regular, temporary_path, write_error

MANIFEST = "manifest.json"
STAMP = "lease"  # the key of what a manifest says of the run that has written it

_CHUNK = 8 << 20  # bytes read at once
_LARGEST_MANIFEST = 256 << 20
_position = threading.Lock()  # of a file on Windows, which reads there, and which threads share


class RemoteError(OSError):
    """The store does not answer, or refuses."""


def check_name(name: str) -> str:
    """Return a name that cannot lead elsewhere."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a name in a snapshot store has no slash and begins with no dot, got {name!r}")
    return name


def digest_of(manifest: bytes) -> str:
    """Return by what a manifest is known."""
    return hashlib.sha256(manifest).hexdigest()[:16]


class StoredFile(ABC):
    """A file of which any range of bytes can be read."""

    path: str  # where it lies, for messages
    size: int  # bytes

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

    def read_bytes(self, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes of the file, by default all."""
        content = bytearray(self.size if size is None else size)
        self.read_into(start, memoryview(content))
        return bytes(content)

    def copy_to(self, path: Path) -> None:
        """Copy the content to a new file in chunks."""
        starts = range(0, self.size, _CHUNK)
        with open(path, "xb") as copy:
            copy.writelines(self.read_bytes(start, min(_CHUNK, self.size - start)) for start in starts)

    def checksum(self, start: int = 0, crc: int = 0) -> int:
        """Return the CRC-32 of the content from ``start`` on, read in chunks; ``crc`` is that of what stands before."""
        buffer = bytearray(min(self.size, _CHUNK))
        for position in range(start, self.size, _CHUNK):
            view = memoryview(buffer)[: min(_CHUNK, self.size - position)]
            self.read_into(position, view)
            crc = zlib.crc32(view, crc)
        return crc


class Place(ABC):
    """Named bytes in a directory or under an address: the snapshots of a run, each in a folder, and the files beside them.

    Names are relative, with slashes. A snapshot is written in three steps: `draft` begins it, any process can `create` files
    of the draft, and `publish` gives them, with a manifest, the name, at once or not at all.
    """

    url: str  # an absolute path or an address, the same for all who reach the place
    is_local: bool  # whether it is a directory

    def __str__(self) -> str:
        return self.url

    def path_of(self, name: str) -> str:
        """Return the path or the address of a name."""
        return f"{self.url}/{name}"

    def folders(self) -> Set[str]:
        """Return the names of all that may be snapshots."""
        return self.states().keys()

    @abstractmethod
    def states(self) -> dict[str, Hashable | None]:
        """Return of all that may be snapshots what changes when the manifest does, by name; ``None`` where there is none."""

    @abstractmethod
    def state(self, name: str) -> Hashable | None:
        """Return that of one."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether anything has that name: a snapshot, sound or not, a link or a file."""

    @abstractmethod
    def sizes(self, folder: str, expected: Iterable[str] = ()) -> dict[str, int | None]:
        """Return the bytes of what is in a folder; ``None`` of what is not a regular file.

        An answer that hides ``expected`` files, as that of an object store may, is an error.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a small file, such as a manifest; a `ValueError` says that it is not a regular one."""

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """Open a file; raise as `read` does."""

    @abstractmethod
    def folder_beside(self, name: str, files: Iterable[str]) -> Path:
        """Return a directory with the files beside a snapshot, or a copy of those that are there."""

    @abstractmethod
    def draft(self, name: str) -> str:
        """Return a new folder for the files of a snapshot; behind its slash, if it has one, is their folder in that.

        A `FileExistsError` says that there is something of that name.
        """

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Open a new file of a draft, which is there for good when the block ends."""

    @abstractmethod
    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        """Give a draft whose files are all written its manifest and its name; discard it where that cannot be done."""

    @abstractmethod
    def discard(self, draft: str) -> None:
        """Remove a draft, as far as that can be done."""

    def stamp(self, name: str) -> str | None:
        """Return what the manifest of a snapshot has to carry for `admits`."""
        return None

    def admits(self, name: str, stamp: object, digest: str) -> bool:
        """Return whether a manifest is valid: not if its writer has put it after another run had taken the place."""
        return True

    @abstractmethod
    def remove(self, name: str, files: Iterable[str]) -> None:
        """Remove a snapshot with its files, given by their paths; it is never there in part."""

    @abstractmethod
    def move(self, name: str, archive: str, manifest: bytes | None) -> None:
        """Move a snapshot or a link into a folder of the run, such as ``"previous/1"``.

        ``manifest`` is that of the snapshot there, where its files stay where they are.
        """

    @abstractmethod
    def link(self, name: str, target: str | None) -> None:
        """Make ``name`` a link to the snapshot ``target``, in the place of an earlier link at once; with ``None`` remove it.

        A `FileExistsError` says that something that is not a link has that name.
        """

    @abstractmethod
    def links(self) -> dict[str, str]:
        """Return the links by name, with their targets."""

    @abstractmethod
    def link_target(self, name: str) -> str | None:
        """Return the snapshot to which the link ``name`` points, or ``None`` if there is no such link."""

    @abstractmethod
    def persist(self, path: Path) -> None:
        """Bring a file to which a snapshot refers, such as the log, where it outlives this process and a loss of power.

        The path of the directory of a run stands for all files in it, as far as a process alone has them.
        """

    @contextmanager
    def probe(self) -> Iterator[str]:
        """Leave something during the block by whose name, and `exists`, others find out whether they see the same place."""
        draft = self.draft(f"probe-{secrets.token_hex(8)}")
        try:
            with self.create(f"{draft}/probe") as sink:
                sink.write(b"")
            yield f"{draft}/probe"
        finally:
            self.discard(draft)

    @abstractmethod
    def sweep(self, folders_of: Callable[[Iterable[str]], Mapping[str, str | None]]) -> list[str]:
        """Remove what killed runs have left unfinished, and return its names. Only the run that writes there may.

        ``folders_of`` returns for names of snapshots that are valid the folders of their files, ``None`` for damaged ones.
        """


class Directory(Place):
    """A directory, which exists where anything is written.

    Each point of a commit that is passed is told to ``at`` by name, for tests of what a fault there leaves behind.
    """

    is_local = True

    def __init__(self, root: str | os.PathLike[str], *, at: Callable[[str], None] = lambda point: None) -> None:
        self.root = Path(root)
        self.url = os.path.realpath(root)
        self._at = at

    def __str__(self) -> str:
        return str(self.root)

    def path_of(self, name: str) -> str:
        return str(self.root / name)

    def folders(self) -> Set[str]:
        with os.scandir(self.root) as entries:  # which knows what each is, so that none of a thousand is asked for that
            return {e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)}

    def states(self) -> dict[str, Hashable | None]:
        return {name: self.state(name) for name in self.folders()}

    def state(self, name: str) -> Hashable | None:
        try:
            status = os.lstat(self.root / name / MANIFEST)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def sizes(self, folder: str, expected: Iterable[str] = ()) -> dict[str, int | None]:
        path = self.root / folder
        entries = {entry.name: os.lstat(entry) for entry in os.scandir(path)} if path.is_dir() else {}
        return {name: entry.st_size if stat.S_ISREG(entry.st_mode) else None for name, entry in entries.items()}

    def read(self, name: str) -> bytes:
        path = self.root / name
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            return file.read(min(os.fstat(file.fileno()).st_size, _LARGEST_MANIFEST) + 1)  # which is allocated first

    def open(self, name: str) -> StoredFile:
        return LocalFile(self.root / name)

    def folder_beside(self, name: str, files: Iterable[str]) -> Path:
        return (self.root / name).resolve().parent

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        with (self.root / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self._at(f"wrote {os.path.basename(name)}")

    def draft(self, name: str) -> str:
        target = self.root / name
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; a snapshot is never written over: choose another name")
        draft = temporary_path(self.root)
        try:
            draft.mkdir()
            self._at("begun")
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(error, target) from error
            raise
        return draft.name

    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        directory = self.root / draft
        try:
            with self.create(f"{draft}/{MANIFEST}") as sink:
                sink.write(manifest)
            flush(directory)
            self._at("flushed")
            os.rename(directory, self.root / name)
            self._at("renamed")
            flush(self.root)
        except BaseException:
            self.discard(draft)
            raise
        self._at("committed")

    def discard(self, draft: str) -> None:
        shutil.rmtree(self.root / draft, ignore_errors=True)

    def remove(self, name: str, files: Iterable[str]) -> None:
        removed = temporary_path(self.root, ".old")
        os.rename(self.root / name, removed)
        flush(self.root)
        shutil.rmtree(removed)

    def empty(self, name: str, manifest: bytes | None, files: Iterable[str]) -> None:
        """Give a snapshot another manifest, by one rename, and then remove files of it."""
        folder = self.root / name
        if manifest is not None:
            # In the snapshot, a draft that a kill leaves would be a file too many; here the next run removes it.
            with atomic_write(folder / MANIFEST, durable=True, draft_in=self.root) as draft:
                draft.write(manifest)
        for file in files:
            (folder / file).unlink()

    def move(self, name: str, archive: str, manifest: bytes | None) -> None:
        os.rename(self.root / name, self.root / archive / name)

    def link(self, name: str, target: str | None) -> None:
        path = self.root / name
        if target is None:
            os.unlink(path)
            return
        if os.path.lexists(path) and not path.is_symlink():
            raise FileExistsError(f"{path} is in the way of a link to {target!r}; move it, or choose another name")
        temporary = temporary_path(self.root)
        try:
            os.symlink(target, temporary, target_is_directory=True)
            os.rename(temporary, path)
            flush(self.root)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(error, path) from error

    def links(self) -> dict[str, str]:
        names = sorted(entry.name for entry in os.scandir(self.root) if entry.is_symlink())
        return {name: target for name in names if (target := self.link_target(name)) is not None}

    def link_target(self, name: str) -> str | None:
        with suppress(OSError):
            return os.readlink(self.root / name)
        return None

    def persist(self, path: Path) -> None:
        flush(path)

    def sweep(self, folders_of: Callable[[Iterable[str]], Mapping[str, str | None]]) -> list[str]:
        swept = []
        for folder, folders, files in os.walk(self.root):
            if ".lock" in files and Path(folder) != self.root:  # where another run may be writing
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


class LocalFile(StoredFile):
    """A file on the disk, which can be read to its end also when it has been removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, view: memoryview, until: int | None = None) -> None:
        while len(view):
            if hasattr(os, "preadv"):
                count = os.preadv(self._descriptor, [view], start)
            else:
                with _position:
                    os.lseek(self._descriptor, start, os.SEEK_SET)
                    content = os.read(self._descriptor, len(view))
                count = len(content)
                view[:count] = content
            if not count:
                raise OSError(f"{self.path} ends {len(view)} bytes too early")
            view, start = view[count:], start + count
