"""A directory of snapshots, and how one is committed there.

A snapshot is written under a temporary name: its files, each flushed to the disk, then its manifest, then the directory
itself. One rename publishes it, and the parent directory is flushed. So whatever has a name without a dot was written to its
end, and the manifest tells whether it still is what was written. (The order is that of SQLite and LevelDB: data, record,
directory, rename.)
"""

from __future__ import annotations

import os
import shutil
import stat
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from chainring._files import (
    Sink,
    flush,
    is_temporary,
    open_regular,
    read_at,
    temporary_path,
    write_bytes,
    write_error,
)
from chainring._places.base import MANIFEST, Place, StoredFile

_LARGEST_MANIFEST = 256 << 20


class Directory(Place):
    """A directory, which exists where anything is written.

    Args:
        root: its path.
        at: called with the name of each point of a commit that is passed, for tests of what a fault there leaves behind.
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

    def sizes(self, folder: str) -> dict[str, int | None]:
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
            write_bytes(directory / MANIFEST, manifest)
            self._at("wrote manifest")
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
        try:
            return os.readlink(self.root / name)
        except OSError:
            return None

    def persist(self, path: Path) -> None:
        flush(path)

    def sweep(self, folders_of: Callable[[Iterable[str]], Mapping[str, str | None]]) -> list[str]:
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
