"""The files that a run keeps beside its snapshots in an object store, and the local directory in which they are written.

Extensions write files as on a disk, into a directory below the temporary one. Each file there becomes an object whose key is
its path. Whoever has the lease owns these objects: a put rests on the state in which an object was seen last, and where it
has another one, the lease is renewed first. That fails for a writer that has lost it; for the holder it says that the other
bytes are those of such a writer, or its own of a request whose answer was lost, and it writes over them.
"""

from __future__ import annotations

import atexit
import errno
import functools
import getpass
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from chainring._files import open_regular, try_lock
from chainring._messages import OneTimeWarning, warn
from chainring._places.bucket import MISSING, PART, Bucket, ChangedError, Entry, RemoteError, Tag
from chainring._places.index import Index, LeaseLostError

LOOK = 10.0  # seconds between looks for files that have changed
PAUSE = 30.0  # seconds before a file is put again

_LARGE = PART  # bytes of a file that is sent in parts, and by a thread of its own, for which no small one waits
_CONNECTIONS = 8
_FAILURES = 4  # by which failed requests may outnumber the others before a look gives up
_BATCH = 10.0  # seconds after which a look begins with no further new file: the next one begins with those that grow
_SHARE = 100  # times as long as a look has worked comes the next one, unless that is too late
_RECENT = 100_000_000  # nanoseconds in which a file may change without another time
_TRIES = 5  # of an object that is written while it is read or written
_LONGEST_ADDRESS = 1024  # bytes
_LARGEST_LINK = 1000  # bytes
_MANIFEST = "manifest.json"
_ARCHIVED = re.compile(r"(?P<archive>(?:previous|abandoned)/)((?P<number>[0-9]{1,15})/)?.*", re.DOTALL)
_ARCHIVES = ("previous/", "abandoned/")
_DRAFT = re.compile(r"([^/]+)/([0-9a-f]{16})/.+", re.DOTALL)  # what is not finished of a snapshot lies in such folders
_NOT_IN_KEYS = re.compile(r"[\x00-\x1f\x7f\udc80-\udcff]|%(?=[0-9A-F]{2})")
_ESCAPE = re.compile(r"(?:%[0-9A-F]{2})+")

_HAS_USERS = hasattr(os, "geteuid")  # Windows gives each user a temporary directory that others cannot enter
_locked: set[int] = set()  # descriptors of the working directories of this process


def working_directory(url: str) -> Path:
    """Return the directory for the files of the run at an address, which nothing has made yet.

    It is the same for every process of this user on this machine; but for ``memory://``, which each process has for itself.
    """
    process = str(os.getpid()) if url.startswith("memory:") else ""
    endpoints = [value for name, value in sorted(os.environ.items()) if "ENDPOINT" in name]
    digest = hashlib.sha256(json.dumps([url, endpoints, process]).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rpartition("/")[2])[:64]
    return Path(tempfile.gettempdir(), f"chainring-{os.geteuid() if _HAS_USERS else getpass.getuser()}", f"{name}-{digest}")


class Mirror:
    """Keeps the files of a directory as objects beside the snapshots of a run.

    Names that begin with a dot, links, and what is not a file are left out. Files that cannot be read are too, with a
    warning. Threads look for files that have changed; nobody waits for them.

    Args:
        bucket: the objects of the run.
        folder: the directory, below the temporary one.
        lease: what allows this process to write.
        look: seconds between looks; ``None`` for no threads.
        pause: seconds before a file is put again that keeps changing.
        clock: returns seconds.

    Example:
        >>> import tempfile
        >>> bucket = Bucket("memory:///runs/mirror")
        >>> with tempfile.TemporaryDirectory() as place:
        ...     mirror = Mirror(bucket, Path(place, "run"), Index(bucket))
        ...     mirror.fetch()
        ...     _ = Path(place, "run", "log").write_text("[]")
        ...     mirror.close()
        >>> bucket.get("log").content
        b'[]'
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: str | os.PathLike[str],
        lease: Index,
        *,
        look: float | None = LOOK,
        pause: float = PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder)
        self._bucket, self._lease = bucket, lease
        self._look, self._pause, self._clock = look, pause, clock
        self._files: dict[str, _File] = {}
        self._left_out: set[str] = set()  # names that were warned about
        self._outage = OneTimeWarning()
        self._lock = threading.Lock()  # of the sets above
        self._deletes = threading.Lock()
        self._stop, self._large_waits = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._descriptor: int | None = None
        self._process = os.getpid()

    def fetch(self) -> None:
        """Empty the directory, copy the objects of the run into it that are not part of a snapshot, and start the threads.

        Of ``previous`` and ``abandoned`` only the empty folders are made, from which their numbers continue.

        Raises:
            BlockingIOError: a run on this machine works in the directory.
            OSError: the directory is not ours alone, or has no space; or the store does not answer.
        """
        _make_private(self.folder)
        self._descriptor = _lock(self.folder)
        if self._bucket.url.startswith("memory:"):  # which ends with the process
            atexit.register(_remove, self.folder, self._process)
        self._files.clear()
        self._stop.clear()
        self._large_waits.clear()
        try:
            _empty(self.folder)
            self._copy(self._bucket.list())
        except BaseException:
            self._release()
            raise
        if self._look is not None:
            targets: dict[str, Callable[[], None]] = {
                "chainring-mirror": functools.partial(self._keep, self._look),
                "chainring-mirror-large": self._keep_large,
            }
            self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()]
            for thread in self._threads:
                thread.start()

    def put(self) -> None:
        """Put every file that has changed, and delete the objects whose files are not there any more.

        Raises:
            LeaseLostError: another run has the lease.
            RemoteError: the store does not answer.
        """
        self._put(lambda file, status: True)

    def put_due(self, is_large: bool | None = None) -> bool:
        """Do as `put` for the files that were not put within the pause, only large ones, or only others.

        Returns:
            True if new files wait that this has not begun with, for the sake of those that grow.
        """
        ready, end = self._clock() - self._pause, self._clock() + _BATCH
        is_late = False

        def is_due(file: _File, status: _Status) -> bool:
            nonlocal is_late
            if file.put_at > ready:
                return False
            if is_large not in (None, status.size > _LARGE):
                if not is_large:
                    self._large_waits.set()
                return False
            if file.tag == MISSING and self._clock() > end:
                is_late = True
                return False
            return True

        self._put(is_due)
        return is_late

    def persist(self, path: str | os.PathLike[str]) -> None:
        """Put one file now, as far as it is written, if it has changed; one outside the directory is left alone.

        Raises:
            LeaseLostError: another run has the lease.
            RemoteError: the store does not answer.
        """
        folder, place = self.folder.absolute(), Path(os.path.abspath(path))
        if place == folder or not place.is_relative_to(folder):
            return
        parts = place.relative_to(folder).parts
        if any(part.startswith(".") for part in parts):
            self._leave_out("/".join(parts), "names that begin with a dot are those of what is not kept; rename it")
        elif _has_link(folder, parts):
            self._leave_out("/".join(parts), "it is a link, or in one, and none is followed; give the file another place")
        else:
            self._lease.check()
            self._put_archived()
            self._put_file("/".join(parts))

    def close(self) -> None:
        """Put what has changed, and leave the directory. Calling it again does nothing.

        Raises:
            LeaseLostError: another run has the lease.
            OSError: the store does not answer. The error names the directory beside it to which the files were moved, so
                that the next run does not empty it.
        """
        if self._descriptor is None or os.getpid() != self._process:
            return
        self._stop.set()
        self._large_waits.set()
        for thread in self._threads:
            thread.join()
        try:
            self.put()
        except OSError as error:
            cls = LeaseLostError if isinstance(error, LeaseLostError) else RemoteError
            raise cls(f"the last files of {self._bucket.url} are not there: {error}. {self._set_aside()}") from error
        finally:
            self._release()

    def _copy(self, entries: list[Entry]) -> None:
        """Copy objects into the empty directory."""
        for entry in entries:
            if (match := _ARCHIVED.fullmatch(entry.key)) and match["number"]:
                (self.folder / match["archive"] / match["number"]).mkdir(parents=True, exist_ok=True)
        files = dict(self._choose(entries))
        folders = {str(folder) for name in files for folder in Path(name).parents}
        for name in sorted(folders & files.keys()):
            if files.pop(name).size:  # consoles mark a folder by an empty object
                self._leave_out(name, "it is a folder too, which no disk can hold; rename the object, or move it away")
        errors = _in_parallel(lambda name: self._get_file(name, files[name]), files)
        if errors:
            raise errors[0]

    def _choose(self, entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
        """Return those objects that belong into the directory, by their paths there."""
        kept = [entry for entry in entries if not entry.key.startswith(".") and not _ARCHIVED.fullmatch(entry.key)]
        snapshots = {match[1] for entry in kept if (match := _DRAFT.fullmatch(entry.key))}
        for entry in kept:
            folder, slash, rest = entry.key.partition("/")
            if slash and rest == _MANIFEST and folder not in snapshots and self._is_manifest(entry):
                snapshots.add(folder)
        for entry in kept:
            folder, slash, rest = entry.key.partition("/")
            if slash and folder in snapshots:
                continue
            name = _name_of(entry.key)
            if any(part.startswith(".") for part in name.split("/")):
                continue
            if key_of(name) != entry.key or "\0" in name:
                self._leave_out(entry.key, "no file has such a key; rename the object, or move it away")
            else:
                yield name, entry

    def _is_manifest(self, entry: Entry) -> bool:
        """Return whether an object is a manifest of a snapshot that was copied here from a disk, by its checksum."""
        try:
            body, _, checksum = self._bucket.get(entry.key).content.rpartition(b"\n")
        except FileNotFoundError:
            return False
        return checksum == b"%08x" % zlib.crc32(body)

    def _get_file(self, name: str, entry: Entry) -> None:
        """Copy an object into the directory, unless it is a link, or was deleted meanwhile."""
        file, path = self._file(name), self.folder / name
        try:
            pieces = self._download(entry, file)
            first = next(pieces, b"")
            if _is_link(entry, first):
                file.forget()
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as output:
                output.writelines(itertools.chain((first,), pieces))
        except (FileNotFoundError, RemoteError) as error:
            path.unlink(missing_ok=True)
            file.forget()
            if isinstance(error, RemoteError):
                raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._leave_out(name, f"it cannot be written to {self.folder} ({error.strerror})")
                return
            rule = f"{error.strerror}; free some space, or set TMPDIR to a directory that has it"
            raise OSError(error.errno, rule, str(path)) from error
        else:
            file.status, file.size = _status(os.lstat(path)).unless_recent(), os.path.getsize(path)
            file.may_be_there = file.is_put = True

    def _download(self, entry: Entry, file: _File) -> Iterator[bytes | memoryview]:
        """Return an object in pieces; take note of its state and of the digest of its content."""
        if entry.size <= _LARGE:
            found = self._bucket.get(entry.key)
            file.tag, file.digest = found.tag, _digest([found.content])
            yield found.content
            return
        head, hasher = self._bucket.head(entry.key), hashlib.blake2b()
        for start in range(0, head.size, PART):
            piece = self._bucket.read(entry.key, start, min(PART, head.size - start))
            hasher.update(piece)
            yield piece
        if self._bucket.head(entry.key).tag != head.tag:
            raise RemoteError(f"{self._bucket.url}/{entry.key} was written while it was read; try again")
        file.tag, file.digest = head.tag, hasher.digest()

    def _keep(self, look: float) -> None:
        """Put small files that are due until this run ends or loses the lease."""
        wait = look
        while not self._stop.wait(wait):
            began = time.thread_time()
            is_late = self._try_to_put(is_large=False)
            spent = time.thread_time() - began  # which the training has not; 10,000 files take some tenths of a second
            wait = 0 if is_late else max(look, min(_SHARE * spent, 2 * look))

    def _keep_large(self) -> None:
        """Put large files whenever there are some that are due."""
        while self._large_waits.wait() and not self._stop.is_set():
            self._large_waits.clear()
            self._try_to_put(is_large=True)

    def _try_to_put(self, *, is_large: bool) -> bool:
        try:
            return self.put_due(is_large)
        except LeaseLostError:  # who saves or ends is told
            self._stop.set()
            self._large_waits.set()
        except OSError as error:
            with suppress(Warning):  # which nobody could catch here
                self._outage.give(f"the files of {self._bucket.url} wait in {self.folder}: {error}")
        except Warning:
            pass
        return False

    def _put(self, is_due: Callable[[_File, _Status], bool]) -> None:
        """Put the files that have changed and are due, and delete objects without one unless a file still waits."""
        self._lease.check()
        self._put_archived()
        found, hidden = self._scan()
        changed = {name: status for name, status in found.items() if self._has_changed(name, status)}
        order = sorted(changed, key=lambda name: (self._file(name).tag == MISSING, changed[name].size))
        manifests = [name for name in order if name.endswith(f"/{_MANIFEST}")]

        def put_if_due(name: str) -> None:
            if is_due(self._file(name), changed[name]):
                self._put_file(name)

        errors = _in_parallel(put_if_due, (name for name in order if name not in manifests))
        if not errors:
            errors = _in_parallel(put_if_due, (name for name in manifests if self._is_last(name, found)))
        if errors:
            raise next((error for error in errors if isinstance(error, LeaseLostError)), errors[0])
        if not any(self._file(name).tag == MISSING for name in found if name not in self._left_out):
            self._delete(name for name in list(self._files) if name not in found and not name.startswith(hidden))

    def _is_last(self, manifest: str, found: dict[str, _Status]) -> bool:
        """Return whether all files beside a manifest are put."""
        folder = manifest.removesuffix(_MANIFEST)
        beside = (
            (self._file(name), status) for name, status in found.items() if name.startswith(folder) and name != manifest
        )
        return all(file.is_put and file.size == status.size and file.status in (None, status) for file, status in beside)

    def _put_archived(self) -> None:
        """Put what was moved into an archive, before anything else is written over the objects that it had."""
        found, _ = self._scan(_ARCHIVES)
        new = [name for name in found if self._file(name).tag == MISSING and name not in self._left_out]
        if errors := _in_parallel(self._put_file, new):
            raise errors[0]

    def _scan(self, folders: Iterable[str] = ("",)) -> tuple[dict[str, _Status], tuple[str, ...]]:
        """Return the files there are, and beginnings of the names of those that cannot be seen."""
        found: dict[str, _Status] = {}
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
                                found[name] = _status(entry.stat(follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                if not folder:
                    raise RemoteError(f"the working directory of the run was removed: {self.folder}") from None
            except OSError as error:
                hidden.append(folder)
                self._leave_out(folder, f"it cannot be read ({error.strerror})")
        return found, tuple(hidden)

    def _has_changed(self, name: str, status: _Status) -> bool:
        return self._file(name).status != status

    def _put_file(self, name: str) -> None:
        """Put a file as it is, up to its size when this begins, unless it is as it was put."""
        file, key = self._file(name), key_of(name)
        if len(f"{self._bucket.url}/{key}".encode()) > _LONGEST_ADDRESS:
            self._leave_out(name, f"its address would have more than {_LONGEST_ADDRESS} bytes; give it a shorter name")
            return
        with file.lock:
            try:
                with open(open_regular(self.folder / name), "rb") as content:
                    self._put_content(name, file, content)
            except (RemoteError, LeaseLostError):
                raise
            except (FileNotFoundError, NotADirectoryError):
                pass  # it was moved or removed just now
            except _UnfitError as error:
                self._leave_out(name, str(error))
            except OSError as error:
                self._leave_out(name, f"it cannot be read ({error.strerror or error})")

    def _put_content(self, name: str, file: _File, content: BinaryIO) -> None:
        status = _status(os.fstat(content.fileno()))
        if status == file.status:
            return
        if file.is_put and status.size == file.size and _digest(_pieces(content, status.size)) == file.digest:
            file.status = status.unless_recent()
            return
        content.seek(0)
        hasher = hashlib.blake2b()
        put = self._put_large if status.size > _LARGE else self._put_small
        size = put(name, file, content, status.size, hasher)
        file.size, file.digest, file.put_at = size, hasher.digest(), self._clock()
        file.status = status.unless_recent() if size == status.size else None

    def _put_small(self, name: str, file: _File, source: BinaryIO, size: int, hasher: hashlib.blake2b) -> int:
        """Put a file by one request; return its size."""
        content, key = b"".join(_pieces(source, size)), key_of(name)
        hasher.update(content)
        for _ in range(_TRIES):
            expected, file.may_be_there, file.is_put = file.tag, True, False
            try:
                file.tag = self._bucket.put(key, content, expected)
            except (ChangedError, FileNotFoundError):
                self._lease.change()
                file.tag = self._find(name)
            else:
                file.is_put = True
                return len(content)
        raise RemoteError(f"{self._bucket.url}/{key} is written again and again by somebody else, who has no lease")

    def _put_large(self, name: str, file: _File, source: BinaryIO, size: int, hasher: hashlib.blake2b) -> int:
        """Put a file in parts, which no condition can be set on: the lease is renewed before, and asked for at the end."""
        self._lease.change()
        sent, key = 0, key_of(name)
        if file.tag == MISSING:
            self._find(name)
        file.may_be_there, file.is_put = True, False
        with self._bucket.upload(key) as upload:
            for piece in _pieces(source, size):
                hasher.update(piece)
                upload.write(piece)
                sent += len(piece)
            self._lease.check()
        file.tag, file.is_put = self._bucket.head(key).tag, True
        return sent

    def _find(self, name: str) -> Tag:
        """Return the state of the object of a file, which this run may write over; but not if it is a link."""
        try:
            entry = self._bucket.head(key_of(name))
            content = self._bucket.get(entry.key).content if entry.size <= _LARGEST_LINK else b""
        except FileNotFoundError:
            return MISSING
        if _is_link(entry, content):
            raise _UnfitError("in the store a link to a snapshot has its name; rename it")
        return entry.tag

    def _delete(self, names: Iterable[str]) -> None:
        """Delete the objects of files that are not there any more."""
        with self._deletes, ExitStack() as stack:
            gone = []
            for name in names:
                file = self._files[name]
                if file.may_be_there and file.lock.acquire(blocking=False):  # else it is being put just now
                    stack.callback(file.lock.release)
                    if not _is_file(self.folder / name):
                        gone.append(name)
            if not gone:
                return
            self._lease.change()
            manifests = [name for name in gone if name.endswith(f"/{_MANIFEST}")]
            for batch in manifests, [name for name in gone if name not in manifests]:
                self._bucket.delete(map(key_of, batch))
            for name in gone:
                self._files[name].forget()

    def _file(self, name: str) -> _File:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _File()
            return file

    def _leave_out(self, name: str, reason: str) -> None:
        """Warn that a file or an object is left out, once."""
        with self._lock:
            if name in self._left_out:
                return
            self._left_out.add(name)
        warn(f"{name!r} of {self._bucket.url} is left out: {reason}")

    def _set_aside(self) -> str:
        """Move the directory away before a run empties it; say where."""
        if not self.folder.exists():
            return "They are lost"
        for number in range(1, 1000):
            kept = self.folder.with_name(f"{self.folder.name}-kept-{number}")
            if not os.path.lexists(kept):
                try:
                    os.rename(self.folder, kept)
                except OSError as error:
                    return f"They are in {self.folder}, which the next run empties: copy it ({error.strerror})"
                return f"They are kept in {kept}"
        return f"They are in {self.folder}, which the next run empties: copy it"

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor in _locked:
            _locked.remove(descriptor)
            os.close(descriptor)


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
    digest: bytes = b""  # of these
    put_at: float = float("-inf")
    may_be_there: bool = False  # the object
    is_put: bool = False  # the object has these bytes
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """Take note that there is no object."""
        self.tag, self.status, self.digest, self.may_be_there, self.is_put = MISSING, None, b"", False, False


def _is_link(entry: Entry, content: bytes | memoryview) -> bool:
    """Return whether an object stands for a symbolic link to a snapshot."""
    if "/" in entry.key or entry.size > _LARGEST_LINK:
        return False
    try:
        document = json.loads(bytes(content))
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("chainring") == "link"


class _UnfitError(Exception):
    """A file cannot be put, whatever the store says."""


def key_of(name: str) -> str:
    """Return the key of a path: itself, but for what no store takes, or what belongs to a snapshot."""
    key = _NOT_IN_KEYS.sub(lambda match: f"%{ord(match[0]) & 0xFF:02X}", name)
    if match := _DRAFT.fullmatch(key):
        start = match.start(2)
        key = f"{key[:start]}%{ord(key[start]):02X}{key[start + 1 :]}"
    return key


def _name_of(key: str) -> str:
    """Return the path of which `key_of` has made a key."""
    return _ESCAPE.sub(lambda match: os.fsdecode(bytes.fromhex(match[0].replace("%", ""))), key)


def _status(status: os.stat_result) -> _Status:
    return _Status(status.st_size, status.st_mtime_ns, status.st_ino)


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISREG(os.lstat(path).st_mode)


def _has_link(folder: Path, parts: Iterable[str]) -> bool:
    """Return whether the last of the names below a folder, or one on the way to it, is a link."""
    for part in parts:
        folder /= part
        if folder.is_symlink():
            return True
    return False


def _pieces(source: BinaryIO, size: int) -> Iterator[bytes]:
    """Return the bytes of a file up to a size, in pieces."""
    while size:
        try:
            piece = source.read(min(size, 1 << 20))
        except OSError as error:
            raise _UnfitError(f"it cannot be read ({error.strerror or error})") from error
        if not piece:
            return
        size -= len(piece)
        yield piece


def _digest(pieces: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _in_parallel(function: Callable[[str], None], names: Iterable[str]) -> list[BaseException]:
    """Call a function with each name, several at once, until most calls have failed; return what they raised."""
    waiting = deque(names)
    errors: list[BaseException] = []
    done: list[str] = []

    def work() -> None:
        while len(errors) < len(done) + _FAILURES:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                function(name)
            except BaseException as error:
                errors.append(error)
            else:
                done.append(name)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_CONNECTIONS, len(waiting)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return errors


def _make_private(folder: Path) -> None:
    """Make a folder, with those above it, in the temporary directory.

    Raises:
        OSError: it is elsewhere, or somebody else may have put something there.
    """
    place, top = Path(os.path.abspath(folder)), Path(os.path.abspath(tempfile.gettempdir()))
    if not place.is_relative_to(top):
        top = Path(os.path.realpath(top))
    if place == top or not place.is_relative_to(top):
        rule = f"a working directory is emptied, so it is below the temporary directory {top}; choose another"
        raise OSError(errno.EINVAL, rule, str(folder))
    path = top
    for part in place.relative_to(top).parts:
        path /= part
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = os.lstat(path)
        fault = "open to others" if _HAS_USERS and status.st_mode & (0o077 if path == place else 0o022) else ""
        fault = "another user's" if _HAS_USERS and status.st_uid != os.geteuid() else fault
        if fault := fault if stat.S_ISDIR(status.st_mode) else "not a directory":
            rule = f"the files of the run would be written there, and it is {fault}; move it away, or set TMPDIR to your own"
            raise PermissionError(errno.EPERM, rule, str(path))


def _lock(folder: Path) -> int:
    """Return a descriptor with the lock of a directory, which also keeps the system from tidying it up.

    Raises:
        BlockingIOError: another run has it.
    """
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    else:  # Windows opens files alone
        descriptor = open_regular(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT)
    try:
        if not try_lock(descriptor):
            rule = "another run on this machine writes there; wait for it to end, or choose another out"
            raise BlockingIOError(errno.EAGAIN, rule, str(folder))
    except OSError:
        os.close(descriptor)
        raise
    _locked.add(descriptor)
    return descriptor


def _close_in_child() -> None:
    """Leave the locks to the parent of a forked process."""
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _remove(folder: Path, process: int) -> None:
    """Remove a folder, unless this is a process that was forked from the one that has made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Remove all that is in a folder."""
    for name in os.listdir(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
