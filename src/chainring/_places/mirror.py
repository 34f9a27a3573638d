"""The files that a run keeps beside its snapshots in an object store, and the local directory in which they are written.

Extensions write files as on a disk, into a directory below the temporary one. Each file there becomes an object whose key is
its path. Whoever holds the index of the run owns these objects: a put rests on the state in which an object was seen last,
and where it has another one, the index is replaced first. That fails for a writer that has lost it; for the holder it says
that the other bytes are those of such a writer, or its own of a request whose answer was lost, and it writes over them.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from chainring._files import is_regular, open_regular, parse_strict
from chainring._messages import OneTimeWarning, warn
from chainring._places.base import MANIFEST, RemoteError
from chainring._places.bucket import MISSING, PART, Bucket, Entry, RangeReader, StoredObject, Tag
from chainring._places.connection import ChangedError
from chainring._places.index import Index, LeaseLostError, Record, list_run

LOOK = 10.0  # seconds between looks for files that have changed
PAUSE = 30.0  # seconds before a file is put again

_LARGE = PART  # bytes of a file that is sent in parts, and by a thread of its own, for which no small one waits
_CONNECTIONS = 8
_FAILURES = 4  # of requests, after which a look gives up
_BATCH = 10.0  # seconds after which a look begins with no further new file: the next one begins with those that grow
_RECENT = 100_000_000  # nanoseconds in which a file may change without another time
_TRIES = 5  # of an object that is written while it is written here
_LONGEST_ADDRESS = 1024  # bytes
LARGEST_LINK = 1000  # bytes
_ARCHIVED = re.compile(r"(?P<archive>previous/|abandoned/)((?P<number>[0-9]{1,15})/)?.*", re.DOTALL)
_ARCHIVES = ("previous/", "abandoned/")
DRAFT = re.compile(r"(?P<draft>(?P<name>[^/]+)/[0-9a-f]{16})/.+", re.DOTALL)
"""Where the files of a snapshot lie, also of one that is not finished."""


def working_directory(url: str) -> Path:
    """Return a new path for the files of the run at an address, where nothing is yet."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rpartition("/")[2])[:64]
    return Path(tempfile.gettempdir(), f"chainring-{name}-{secrets.token_hex(8)}")


class Mirror:
    """Keeps the files of a directory as objects beside the snapshots of a run.

    Names that begin with a dot, links, and what is not a file are left out. So is, with a warning, what no store takes, and
    what cannot be read. A thread looks for files that have changed, every ``look`` seconds unless that is ``None``; nobody
    waits for it. A file that keeps changing is put again after ``pause`` seconds. There is nothing in the directory yet,
    and it is removed when this process ends, if all of its files were put.

    `put`, `put_due`, `persist` and `close` raise `LeaseLostError` where another run has the lease, and `RemoteError` where
    the store does not answer.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: str | os.PathLike[str],
        index: Index,
        *,
        look: float | None = LOOK,
        pause: float = PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._bucket, self._index = bucket, index
        self._look, self._pause, self._clock = look, pause, clock
        self._files: dict[str, _File] = {}
        self._left_out: set[str] = set()  # names that were warned about
        self._lock = threading.Lock()  # of the two above
        self._outage = OneTimeWarning()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._large: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def fetch(self) -> None:
        """Make the directory, copy the objects of the run into it that are not part of a snapshot, and start the thread.

        Of ``previous`` and ``abandoned`` only the empty folders are made, from which their numbers continue.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        atexit.register(self._remove)
        entries = list_run(self._bucket, self._index.record)
        for entry in entries:
            if (match := _ARCHIVED.fullmatch(entry.key)) and match["number"]:
                (self.folder / match["archive"] / match["number"]).mkdir(parents=True, exist_ok=True)
        files = dict(self._choose(entries))
        folders = {str(folder) for name in files for folder in Path(name).parents}
        for name in sorted(folders & files.keys()):
            if files.pop(name).size:  # consoles mark a folder by an empty object
                self._leave_out(name, "it is a folder too, which no disk can hold; rename the object, or move it away")
        if errors := _call_for_each(lambda name: self._get(name, files[name]), files):
            raise errors[0]
        self._large = ThreadPoolExecutor(1, "chainring-mirror-large")
        if self._look is not None:
            self._thread = threading.Thread(target=self._keep, args=(self._look,), name="chainring-mirror", daemon=True)
            self._thread.start()

    def put(self) -> None:
        """Put every file that has changed, and delete the objects whose files are not there any more."""
        self._put(lambda name, size: True)

    def put_due(self) -> None:
        """Do as `put` for the files that were not put within the pause; large ones are put later, by a thread of their own.

        For the sake of those that grow, new files with which it has not begun after a while wait for the next time.
        """
        ready, end = self._clock() - self._pause, self._clock() + _BATCH

        def is_due(name: str, size: int) -> bool:
            file = self._file(name)
            if file.put_at > ready:
                return False
            if size > _LARGE:
                if not file.lock.locked() and self._large is not None:  # it is not being put just now
                    file.put_at = self._clock()
                    self._large.submit(self._try, lambda: self._put_file(name))
                return False
            return file.tag != MISSING or self._clock() <= end

        self._put(is_due)

    def persist(self, path: str | os.PathLike[str]) -> None:
        """Put one file now, as far as it is written, if it has changed, or the directory with all of them.

        One outside of the directory is left alone.
        """
        target = Path(os.path.abspath(path))
        if target == self.folder:
            self.put()
        below = [part for part in (target, *target.parents) if self.folder in part.parents]
        if not below:
            return
        name = target.relative_to(self.folder).as_posix()
        if any(part.name.startswith(".") or part.is_symlink() for part in below):
            self._leave_out(
                name, "links, and names that begin with a dot, are not kept; give the file another place or name"
            )
        else:
            self._index.check()
            self._put_archived()
            self._put_file(name)

    def close(self) -> None:
        """Put what has changed, and leave the directory, which an error names; calling it again does nothing."""
        if self._large is None or os.getpid() != self._process:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._large.shutdown(cancel_futures=True)
        self._large = None
        try:
            self.put()
        except OSError as error:
            atexit.unregister(self._remove)
            cls = LeaseLostError if isinstance(error, LeaseLostError) else RemoteError
            rest = f"They are kept in {self.folder}" if self.folder.exists() else "They are lost"
            raise cls(f"the last files of {self._bucket.url} are not there: {error}. {rest}") from error

    def _remove(self) -> None:
        if os.getpid() == self._process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _choose(self, entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
        """Return those objects that belong into the directory, by their paths there."""
        kept = [entry for entry in entries if not entry.key.startswith(".") and not _ARCHIVED.fullmatch(entry.key)]
        snapshots = {match["name"] for entry in kept if (match := DRAFT.fullmatch(entry.key))}
        for entry in kept:
            folder, _, file = entry.key.partition("/")
            if file == MANIFEST and folder not in snapshots:
                with suppress(FileNotFoundError):  # a snapshot that was copied here from a disk, if the checksum says so
                    body, _, checksum = self._bucket.get(entry.key).content.rpartition(b"\n")
                    snapshots |= {folder} if checksum == b"%08x" % zlib.crc32(body) else set()
        for entry in kept:
            names = entry.key.split("/")
            if not (len(names) > 1 and names[0] in snapshots) and not any(name.startswith(".") for name in names):
                yield entry.key, entry

    def _get(self, name: str, entry: Entry) -> None:
        """Copy an object into the directory, unless it is a link, or was deleted meanwhile."""
        path = self.folder / name
        stored: StoredObject | RangeReader
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry.size <= PART:
                stored = self._bucket.get(name)
                if read_link(entry, stored.content):
                    return
                with open(path, "xb") as copy:
                    copy.write(stored.content)
            else:
                stored = self._bucket.open(name)
                stored.copy_to(path)
            with open(path, "rb") as copied:
                digest = hashlib.file_digest(copied, "blake2b").digest()
        except (FileNotFoundError, RemoteError) as error:
            path.unlink(missing_ok=True)
            if isinstance(error, RemoteError):
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                rule = f"{error.strerror}; free some space, or set TMPDIR to a directory that has it"
                raise OSError(error.errno, rule, str(path)) from error
            self._leave_out(name, f"it cannot be written to {self.folder} ({error.strerror})")
        else:
            file = self._file(name)
            file.tag, file.digest, file.size, file.may_be_there = stored.tag, digest, path.stat().st_size, True
            file.status = _status(path.stat()).unless_recent()

    def _keep(self, look: float) -> None:
        """Put files that are due until this run ends or loses the lease."""
        while not self._stop.wait(look):
            self._try(self.put_due)

    def _try(self, put: Callable[[], None]) -> None:
        try:
            put()
        except LeaseLostError:  # who saves or ends is told
            self._stop.set()
        except OSError as error:
            with suppress(Warning):  # which nobody could catch here
                self._outage.give(f"the files of {self._bucket.url} wait in {self.folder}: {error}")
        except Warning:
            pass

    def _put(self, is_due: Callable[[str, int], bool]) -> None:
        """Put the files that have changed and are due, and delete objects without one unless a file still waits."""
        self._index.check()
        self._put_archived()
        there, hidden = self._scan()
        changed = [name for name, status in there.items() if self._file(name).status != status]
        changed.sort(key=lambda name: (self._file(name).tag == MISSING, there[name].size))
        manifests = [name for name in changed if name.endswith(f"/{MANIFEST}")]

        def put_if_due(name: str) -> None:
            if is_due(name, there[name].size):
                self._put_file(name)

        def is_complete(manifest: str) -> bool:
            beside = [name for name in there if name.startswith(manifest.removesuffix(MANIFEST)) and name != manifest]
            return all(self._file(name).digest and self._file(name).size == there[name].size for name in beside)

        errors = _call_for_each(put_if_due, (name for name in changed if name not in manifests))
        if not errors:  # a manifest is put when all files beside it are
            errors = _call_for_each(put_if_due, filter(is_complete, manifests))
        if errors:
            raise next((error for error in errors if isinstance(error, LeaseLostError)), errors[0])
        if not all(self._file(name).tag != MISSING or name in self._left_out for name in there):
            return
        with self._lock:
            known = [(name, file) for name, file in self._files.items() if file.may_be_there and name not in there]
        with ExitStack() as locks:  # so that none of them is put again before its object is deleted
            gone = {name: file for name, file in known if not name.startswith(hidden) and file.lock.acquire(blocking=False)}
            for file in gone.values():
                locks.callback(file.lock.release)
            gone = {name: file for name, file in gone.items() if not is_regular(self.folder / name)}
            if not gone:
                return
            self._index.change()
            for is_manifest in True, False:  # of a snapshot that is moved, first
                self._bucket.delete(name for name in gone if name.endswith(f"/{MANIFEST}") == is_manifest)
            for file in gone.values():
                file.tag, file.status, file.digest, file.may_be_there = MISSING, None, b"", False

    def _put_archived(self) -> None:
        """Put what was moved into an archive, before anything else is written over the objects that it had."""
        files, _ = self._scan(_ARCHIVES)
        new = [name for name in files if self._file(name).tag == MISSING and name not in self._left_out]
        if errors := _call_for_each(self._put_file, new):
            raise errors[0]

    def _scan(self, folders: Iterable[str] = ("",)) -> tuple[dict[str, _Status], tuple[str, ...]]:
        """Return the files, and the beginnings of the names of those in folders that cannot be read."""
        files: dict[str, _Status] = {}
        hidden, waiting = [], list(folders)
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(self.folder / folder) as entries:
                    for entry in entries:
                        name = f"{folder}{entry.name}"
                        if entry.name.startswith(".") or entry.is_symlink():
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(f"{name}/")
                        elif entry.is_file(follow_symlinks=False):
                            with suppress(FileNotFoundError):
                                files[name] = _status(entry.stat(follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                if not folder:
                    raise RemoteError(f"the working directory of the run was removed: {self.folder}") from None
            except OSError as error:
                hidden.append(folder)
                self._leave_out(folder, f"it cannot be read ({error.strerror})")
        return files, tuple(hidden)

    def _put_file(self, name: str) -> None:
        """Put a file as it is, up to its size when this begins, unless it is as it was put."""
        if len(f"{self._bucket.url}/{name}".encode(errors="replace")) > _LONGEST_ADDRESS:
            self._leave_out(name, f"its address would have more than {_LONGEST_ADDRESS} bytes; give it a shorter name")
            return
        if not name.isprintable() or "\\" in name or DRAFT.fullmatch(name):
            self._leave_out(name, "no object beside snapshots can have such a name; rename it")
            return
        file = self._file(name)
        with file.lock:
            try:
                with open(open_regular(self.folder / name), "rb") as content:
                    self._put_content(name, file, content)
            except (RemoteError, LeaseLostError):
                raise
            except (FileNotFoundError, NotADirectoryError):
                pass  # it was moved or removed just now
            except OSError as error:
                self._leave_out(name, f"it cannot be read ({error.strerror or error})")

    def _put_content(self, name: str, file: _File, content: BufferedReader) -> None:
        status = _status(os.fstat(content.fileno()))
        if status == file.status:
            return
        if status.size == file.size and file.digest:
            if hashlib.file_digest(content, "blake2b").digest() == file.digest:
                file.status = status.unless_recent()
                return
            content.seek(0)
        file.digest, hasher = b"", hashlib.blake2b()
        if status.size > _LARGE:
            size = self._put_large(name, file, content, status.size, hasher)
        else:
            small = b"".join(_pieces(content, status.size, hasher))
            size = len(small)
            if not self._put_small(name, file, small):
                return
        file.size, file.digest, file.put_at = size, hasher.digest(), self._clock()
        file.status = status.unless_recent() if size == status.size else None

    def _put_small(self, name: str, file: _File, content: bytes) -> bool:
        """Put a file by one request; return False where it is left out."""
        for _ in range(_TRIES):
            file.may_be_there = True
            try:
                file.tag = self._bucket.put(name, content, file.tag)
                return True
            except (ChangedError, FileNotFoundError):
                self._index.change()
            if (tag := self._find(name)) is None:
                return False
            file.tag = tag
        raise RemoteError(f"{self._bucket.url}/{name} is written again and again by somebody else, who has no lease")

    def _put_large(self, name: str, file: _File, content: BufferedReader, size: int, hasher: hashlib.blake2b) -> int:
        """Put a file in parts, on which no condition can be set: the index is replaced before, and asked for at the end."""
        self._index.change()
        if file.tag == MISSING and self._find(name) is None:
            return 0
        file.may_be_there = True
        with self._bucket.upload(name) as upload:
            upload.expect(size)
            upload.writelines(_pieces(content, size, hasher))
            self._index.check()
        file.tag = self._bucket.head(name).tag
        return upload.tell()

    def _find(self, name: str) -> Tag | None:
        """Return the state of the object of a file, which this run may write over; ``None`` if it is a link."""
        try:
            entry = self._bucket.head(name)
            content = self._bucket.get(name).content if entry.size <= LARGEST_LINK else b""
        except FileNotFoundError:
            return MISSING
        if read_link(entry, content, self._index.record):
            self._leave_out(name, "in the store a link to a snapshot has its name; rename it")
            return None
        return entry.tag

    def _file(self, name: str) -> _File:
        with self._lock:
            return self._files.setdefault(name, _File())

    def _leave_out(self, name: str, reason: str) -> None:
        """Warn that a file or an object is left out, once."""
        with self._lock:
            if name in self._left_out:
                return
            self._left_out.add(name)
        warn(f"{name!r} of {self._bucket.url} is left out: {reason}")


class _Status(NamedTuple):
    """What changes with a file."""

    size: int
    modified: int  # nanoseconds
    inode: int

    def unless_recent(self) -> _Status | None:
        """Return it if whatever happens to the file from now on changes it."""
        return self if time.time_ns() - self.modified > _RECENT else None


@dataclass(slots=True)
class _File:
    """What is known of a file and of its object."""

    tag: Tag = MISSING  # of the object as it was last seen
    status: _Status | None = None  # of the file when it was put, if it can be compared
    size: int = 0  # bytes that were put
    digest: bytes = b""  # of these; empty while the object may have others
    put_at: float = float("-inf")
    may_be_there: bool = False  # the object
    lock: threading.Lock = field(default_factory=threading.Lock)


def _status(status: os.stat_result) -> _Status:
    return _Status(status.st_size, status.st_mtime_ns, status.st_ino)


def read_link(entry: Entry, content: bytes, record: Record | None = None) -> dict[str, Any] | None:
    """Return what an object says that stands for a symbolic link to a snapshot; ``None`` for any other.

    One of the run of a ``record`` is a link only while the record lists it.
    """
    if "/" in entry.key or entry.size > LARGEST_LINK:
        return None
    try:
        document = parse_strict(content)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("chainring") != "link":
        return None
    is_listed = record is None or document.get("run") != record.run or entry.key in record.links
    return document if is_listed else None


def _pieces(source: BufferedReader, size: int, hasher: hashlib.blake2b) -> Iterator[bytes]:
    """Return the bytes of a file up to a size, in pieces, which are hashed."""
    while size and (piece := source.read(min(size, 1 << 20))):
        hasher.update(piece)
        size -= len(piece)
        yield piece


def _call_for_each(function: Callable[[str], None], names: Iterable[str]) -> list[OSError]:
    """Call a function with each name, several at once, until some calls have failed; return what they raised."""
    errors: list[OSError] = []

    def call(name: str) -> None:
        if len(errors) < _FAILURES:
            try:
                function(name)
            except OSError as error:
                errors.append(error)

    with ThreadPoolExecutor(_CONNECTIONS, "chainring-mirror") as pool:
        list(pool.map(call, names))
    return errors
