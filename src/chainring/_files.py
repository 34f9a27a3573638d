"""Files that are complete whenever they are opened, or grow; JSON that every reader takes; the lock of a directory.

Also which process has taken a lock, and whether it still runs: numbers are used again, and each machine counts its own.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol, Self, TypeVar, runtime_checkable

from chainring._messages import info, warn

SCHEMES = ("s3", "gs", "az", "memory")
"""Of addresses in object stores."""
ADDRESS_RULE = 'an address in an object store is written "s3://bucket/run", also with gs, az or memory'
_NEAR = {"gcs": "gs", "s3a": "s3", "s3n": "s3", "azure": "az"}  # what is written for some of them
_ADDRESS = re.compile(  # an address, or what is meant as one
    rf"[\s\"']*((?P<scheme>(?i:{'|'.join((*SCHEMES, *_NEAR))}))\s*:(//)?|(?P<other>[A-Za-z][\w.+-]+):[/\\])"
)

_CHUNK = 1 << 20  # bytes that are read at once
_IS_WINDOWS = sys.platform == "win32"
_AS_IT_IS = sum(getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "NOCTTY", "BINARY"))
"""Flags for opening a file that somebody may have put there, as far as the system has them."""

P = TypeVar("P")


def is_url(address: object) -> bool:
    """Return whether this is an address in an object store, such as ``"s3://bucket/run"``, and not a path.

    Raises:
        ValueError: it looks like an address and is none that is known, or it is the path that pathlib makes of one.
    """
    text = os.fspath(address) if isinstance(address, os.PathLike) else address
    if not isinstance(text, str) or (match := _ADDRESS.match(text)) is None:
        return False
    is_path, scheme = isinstance(address, PurePath), match["scheme"] or match["other"]
    if match[0] == f"{scheme}://" and scheme in SCHEMES and not is_path:
        return True
    likely, rest = _NEAR.get(scheme.lower(), scheme.lower()), text[match.end() :].strip("/\\ ")
    rule = "an address is given as text, because a Path joins its slashes" if is_path else ADDRESS_RULE
    if likely not in SCHEMES:
        raise ValueError(f"{rule}; got one with {scheme!r}. A directory whose path begins so is given with ./ before it")
    raise ValueError(rule if any(sign in rest for sign in "@?#") else f"{rule}: {likely}://{rest}")


def below_home(path: P) -> P:
    """Return a path that begins with ``~`` as a shell reads it, below a home directory; any other as it is.

    Raises:
        ValueError: there is no such user.
    """
    text = str(path) if isinstance(path, (str, os.PathLike)) else ""
    if not text.startswith("~"):
        return path
    if (expanded := os.path.expanduser(text)).startswith("~"):
        raise ValueError(f"{text} begins with the home directory of a user who does not exist; for this name write ./{text}")
    return type(path)(expanded)  # type: ignore[call-arg]


def temporary_path(directory: Path, suffix: str = ".tmp") -> Path:
    """Return a path in a directory that nobody can guess, with the mark by which `is_temporary` knows it."""
    return directory / f".chainring-{secrets.token_hex(8)}{suffix}"


is_temporary = re.compile(r"\.chainring-[0-9a-f]{16}\.(tmp|old)").fullmatch
"""Tells whether a file or directory of a name is one of ours that a killed process did not finish."""


class Sink(Protocol):
    """What a file is written to: one on the disk, or an upload."""

    def write(self, data: Any, /) -> Any:
        """Take over these bytes."""


@runtime_checkable
class SizedSink(Sink, Protocol):
    """An upload, whose parts have to be larger the more bytes it has."""

    def expect(self, size: int) -> None:
        """Take note of how many bytes there will be, before the first is written."""


@contextmanager
def atomic_write(path: Path, *, durable: bool = False, draft_in: Path | None = None) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` by one rename when the block ends.

    Until then it lies in the folder ``draft_in``, by default in that of ``path``. When anything fails, the new file is
    removed and ``path`` stays as it was. The new file has a name that nobody can guess and is created exclusively, so no
    link is followed; where ``path`` is a link, the link itself is replaced. With ``durable`` the file and its name are
    flushed to the disk, so that they survive a loss of power.

    Raises:
        OSError: it could not be written; the error names ``path`` and the free space.
    """
    temporary = temporary_path(draft_in or path.parent)
    try:
        with open(temporary, "xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            flush(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(error, path) from error
        raise


def replace_file(path: Path, content: bytes | str) -> None:
    """Write a file, text in UTF-8, that takes the place of ``path`` as by `atomic_write`."""
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_error(error: OSError, path: Path) -> OSError:
    """Return the same error with the path that was to be written, and how much space is left there."""
    try:
        space = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        space = ""
    return OSError(error.errno, f"{error.strerror or error}: it could not be written{space}", str(path))


def flush(path: Path) -> None:
    """Flush a file to the disk, or a directory: what was created in it or renamed into it survives a loss of power."""
    if _IS_WINDOWS and path.is_dir():
        return
    access = os.O_RDWR if _IS_WINDOWS else os.O_RDONLY  # Windows flushes only what may be written
    descriptor = os.open(path, access | getattr(os, "O_NONBLOCK", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)  # which some systems and file systems cannot flush
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not is_folder:
            raise
    finally:
        os.close(descriptor)


def is_regular(path: Path) -> bool:
    """Return whether there is a regular file: not a link, nor a pipe, which would be waited for, nor a device."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file that may have been put there by anybody.

    One that is to be written has no other name: what is appended to a hard link changes a file elsewhere.

    Raises:
        OSError: it is missing, a link, a pipe, a device or a directory; or for writing, it has other names.
    """
    is_written = flags & (os.O_WRONLY | os.O_RDWR) != 0
    descriptor = -1
    for is_open in (False, True):  # before it is opened, which alone may do something to a device, and then what was opened
        if is_open:
            descriptor = os.open(path, flags | _AS_IT_IS, 0o666)
        elif flags & os.O_CREAT and not os.path.lexists(path):
            continue
        status = os.fstat(descriptor) if is_open else os.lstat(path)
        problem = "" if stat.S_ISREG(status.st_mode) else "not a regular file"
        if is_written and status.st_nlink > 1:
            problem = problem or "a file that has another name too"
        if problem:
            if is_open:
                os.close(descriptor)
            raise OSError(errno.EINVAL, f"it is {problem}, and is left alone; move it away", str(path))
    return descriptor


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a file, see `open_regular`.

    Raises:
        OSError: see there.
        ValueError: it has more than ``limit`` bytes.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def make_folder(root: Path, folder: str | os.PathLike[str]) -> Path:
    """Make a folder below ``root``, with those above it, and return it; no link there is followed.

    A ``folder`` that leads elsewhere, such as an absolute path, is the user's own and is made as it is.

    Raises:
        FileExistsError: something that is not a folder has its name, or a link to one.
    """
    path = root / folder
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ("..",)
    if ".." in parts:
        path.mkdir(parents=True, exist_ok=True)
        return path
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, len(parts) + 1):
        part = root.joinpath(*parts[:number])
        if part.is_symlink() or (os.path.lexists(part) and not part.is_dir()):
            raise FileExistsError(errno.EEXIST, "a link or a file is in the way of a folder; move it away", str(part))
        part.mkdir(exist_ok=True)
    return path


def make_numbered_directory(parent: Path) -> Path:
    """Make the next of the directories ``parent/1``, ``parent/2``, ... and return it."""
    make_folder(parent.parent, parent.name)
    numbers = [int(name) for name in os.listdir(parent) if name.isdecimal() and len(name) < _LONGEST_NUMBER]
    directory = parent / str(1 + max(numbers, default=0))
    directory.mkdir()
    return directory


def set_aside(path: Path) -> Path | None:
    """Move what is there to ``abandoned/<n>`` beside it, unless it is an empty file; return its new path."""
    if not os.path.lexists(path) or (is_regular(path) and (status := os.lstat(path)).st_nlink == 1 and not status.st_size):
        return None
    destination = make_numbered_directory(path.parent / "abandoned") / path.name
    os.rename(path, destination)
    return destination


@dataclass(slots=True)
class AppendOnly:
    """What a run has appended to a file, or will: the file, the number of bytes, and their CRC-32.

    A snapshot beside the file has these three in place of the bytes: it does not grow with the file. More bytes may follow
    in the file, of updates after the snapshot, or a tail that the next write replaces. Without a path, as in a run in
    memory, the bytes are in ``content``; of a file that another process appends to, the last that it was given, or if it
    ``keeps`` them all that it was given. Where these are all, the file need not be there.
    """

    path: Path | None = None
    size: int = 0
    crc: int = 0
    content: bytearray = field(default_factory=bytearray)
    keeps: bool = False

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return bytes that are in no file yet."""
        return cls(None, len(content), zlib.crc32(content), bytearray(content))

    @classmethod
    def restore(cls, state: list[Any], directory: Path | None) -> Self:
        """Return what `state` has described, beside a snapshot that is now in ``directory``."""
        name, size, crc, *_ = state
        return cls((directory or Path()) / Path(name).name, size, crc)

    def state(self, directory: Path | None, refer: Callable[[Path], None]) -> list[Any] | None:
        """Return name, size and CRC-32 for a snapshot in the directory of the file, which refers to it; else ``None``."""
        if self.path is None or directory is None or directory.resolve() != self.path.parent.resolve():
            return None
        refer(self.path)
        return [self.path.name, self.size, self.crc]

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, as far as they are there."""
        if self.path is None or len(self.content) == self.size:
            yield bytes(self.content)
            return
        # The path may be a link, of a file that a person has moved: the checksum tells whose bytes it leads to.
        with suppress(OSError), open(open_regular(Path(os.path.realpath(self.path))), "rb") as file:
            left = self.size
            while chunk := file.read(min(left, _CHUNK)):
                left -= len(chunk)
                yield chunk

    def is_intact(self) -> bool:
        """Return whether the bytes are those that were written."""
        size = crc = 0
        for chunk in self.chunks():
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return (size, crc) == (self.size, self.crc)

    def read(self) -> bytes | None:
        """Return the bytes; ``None`` if they are not those that were written."""
        content = b"".join(self.chunks())
        return content if (len(content), zlib.crc32(content)) == (self.size, self.crc) else None

    def warn_of_loss(self, loss: str) -> None:
        """Warn that the bytes are not those that were written; ``loss`` says what goes on without which."""
        warn(
            f"{loss}: {self.path} does not begin with the {self.size} bytes that it had when the snapshot was taken; move a "
            "snapshot together with the files beside it",
        )

    def begin(self, path: Path, more: bytes = b"", *, loss: str) -> bool:
        """Go on in the file at ``path``, with these bytes and ``more``. Return False, with a warning, if these are lost.

        A file that begins with all of them is cut back to them, and one that lacks the last of them gets those. Anything
        else of that name is set aside, and a new file is made.
        """
        whole = AppendOnly(path, self.size + len(more), zlib.crc32(more, self.crc))
        is_lost = False
        if not is_regular(path) or not (whole.is_intact() or whole._complete(self.content + more, may_cut=not more)):
            if is_lost := not self.is_intact():
                self.warn_of_loss(loss)
                whole = AppendOnly(path, len(more), zlib.crc32(more))
            with atomic_write(path) as file:
                for chunk in () if is_lost else self.chunks():
                    file.write(chunk)
                file.write(more)
                set_rows_aside(path)
        with open(open_regular(path, os.O_RDWR), "r+b") as file:
            file.truncate(whole.size)
        self.path, self.size, self.crc, self.content = path, whole.size, whole.crc, bytearray()
        return not is_lost

    def _complete(self, last: bytes | bytearray, may_cut: bool) -> bool:
        """Write the last bytes again, if the file has all before them, and after these only such, or what it ``may_cut``."""
        assert self.path is not None
        with suppress(OSError), open(open_regular(self.path, os.O_RDWR), "r+b") as file:
            start, crc = self.size - len(last), 0
            while chunk := file.read(min(self.size - len(last) - file.tell(), _CHUNK)):
                crc = zlib.crc32(chunk, crc)
            is_ours = file.tell() == start and zlib.crc32(last, crc) == self.crc
            if is_ours and (last.startswith(file.read(len(last) + 1)) or (may_cut and start > 0)):
                file.seek(start)
                file.write(last)
                return True
        return False

    def append(self, content: bytes, *, counts: bool = True) -> None:
        """Append bytes; those that do not count yet are replaced by the next write.

        A file that is not there is made: a person may have removed it. See `open_regular` for errors. Without a path, bytes
        are counted that another process appends to the file, in which this one may have to go on.
        """
        if self.path is None:
            if counts:
                self.size, self.crc = self.size + len(content), zlib.crc32(content, self.crc)
                if not self.keeps:
                    self.content.clear()
                self.content += content
            return
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            with open(descriptor, "r+b") as file:
                file.seek(min(self.size, os.fstat(descriptor).st_size))
                file.write(content)
                file.truncate()
        except OSError as error:
            raise write_error(error, self.path) from error
        if counts:
            self.size, self.crc = self.size + len(content), zlib.crc32(content, self.crc)


def set_rows_aside(path: Path) -> None:
    """Move a file with rows of another run to ``abandoned/<n>`` beside it, and say so."""
    if (destination := set_aside(path)) is not None:
        info(f"{path} holds rows that this run does not continue: moved to {destination}")


_LONGEST_NUMBER = 16  # digits of a numbered directory
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any) -> Any:
    """Return a value in the types of JSON: mappings become dicts, arrays and tensors lists, infinity and NaN strings."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and tensors, with or without dimensions
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # one of `_WORDS`
    return value


def from_json(value: Any) -> Any:
    """Return the numbers and containers from which `to_json` made ``value``."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def parse_strict(text: bytes) -> Any:
    """Return the value of a JSON document in UTF-8 that may come from anywhere.

    Raises:
        ValueError: it is not JSON, nested too deep, a key occurs twice in an object, or a number is not finite.
    """
    try:
        decoded = text.decode("utf-8")  # json.loads would take bytes for UTF-16 where they look like it
        return json.loads(decoded, object_pairs_hook=_unique_keys, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("the document is nested too deep; the file is damaged") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice in an object; the file is damaged")
    return mapping


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:40]} is not a finite number; the file is damaged")
    return value


class DirectoryLock:
    """The lock of a directory into which one run writes. It is free as soon as its process has ended, however it ended.

    It belongs to the open file, so that nothing else in the process releases it, such as a copy of the directory, which
    opens and closes ``.lock`` too. From a process that was ``lost``, given by its number and host, it is taken: it writes
    no more. Processes that this one forks close their copies of the descriptor: workers that outlive a killed trainer do
    not keep the lock. The file ``.lock`` is never removed. On Linux and macOS it is that of ``flock``; on NFS it is the
    server's since Linux 2.6.12, and excludes other hosts too.

    Raises:
        BlockingIOError: another run holds the lock; the error names its process and host.
        OSError: the file cannot be opened, is not a regular file, or has another name.
    """

    _descriptors: set[int] = set()  # noqa: RUF012 - one record for the process, for those that it forks

    def __init__(self, directory: str | os.PathLike[str], lost: Collection[tuple[int, str]] = ()) -> None:
        import filelock  # for those who write

        path = Path(os.path.realpath(directory), ".lock")
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            while not filelock.lock_descriptor(descriptor, blocking=False):
                holder: Any = {}
                for start in (0, 1):  # Windows lets nobody read the first byte, a space, which is locked
                    with suppress(OSError, ValueError):
                        os.lseek(descriptor, start, os.SEEK_SET)
                        holder = json.loads(os.read(descriptor, 4096))
                        break
                pid, host = (holder.get("pid"), holder.get("host")) if isinstance(holder, dict) else (None, None)
                if (pid, host) not in lost:
                    raise BlockingIOError(
                        f"{path.parent} is being written by another run: process {pid} on {host}. Wait for it to end, or "
                        "choose another out"
                    )
                path.unlink(missing_ok=True)
                os.close(descriptor)
                descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, b" " + json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        DirectoryLock._descriptors.add(descriptor)

    @staticmethod
    def is_held(directory: str | os.PathLike[str]) -> bool:
        """Return whether a run writes into a directory."""
        import filelock

        with suppress(FileNotFoundError), open(open_regular(Path(directory, ".lock"), os.O_RDWR), "rb") as file:
            return not filelock.lock_descriptor(file.fileno(), blocking=False)
        return False

    def release(self) -> None:
        """Release the lock. Calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor in DirectoryLock._descriptors:
            DirectoryLock._descriptors.remove(descriptor)
            os.close(descriptor)

    @classmethod
    def close_in_child(cls) -> None:
        """Close the descriptors that a forked process has inherited; the locks stay with its parent."""
        for descriptor in cls._descriptors:
            os.close(descriptor)
        cls._descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DirectoryLock.close_in_child)


# --- processes ---


def machine() -> str:
    """Return a name of this machine since it was started, and of the container in which process ids are counted."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{uuid.getnode():012x}"  # its network card


def start_of(pid: int) -> int | None:
    """Return when a process was started, in ticks since that of the machine (proc(5)); 0 if not known, ``None`` if it ended.

    One whose parent has not asked how it ended counts as ended, if all of its threads have.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) == 1 else int(fields[19])
    if _IS_WINDOWS:  # where there is no signal that does nothing
        return 0
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass  # there is one, of another user
    return 0
