"""The lease by which one run writes to a place in an object store at a time, and by which late commits are known.

It is one object, ``.lease``, which its holder replaces every few seconds, on the condition that it still is what the holder
wrote last. Whoever finds it missing, released, left by a process that has ended, or not renewed for its seconds by the clock
of the store replaces it on the condition that it still is what was judged. So every state of the object has one successor,
of several that take it at once one succeeds, and its holders are in a row, each with a token one larger.

A holder that was stopped for a minute may still put a snapshot that it began before. Therefore each snapshot carries the
`Lease.stamp` of its writer, and each holder writes into the lease, with the request that takes it, which snapshots of those
before there are: no other of theirs is valid, now or later. That leaves no doubt about any snapshot, in whatever order the
requests of two writers, the earlier A and the later B, arrive:

- A renews the lease after its manifest is there, and only then calls the snapshot saved. That the renewal succeeds says that
  B has not taken the lease until then. The state that B replaces is this renewal or a later one, which B has read before it
  looked at the snapshots; so it has seen this one, and lists it. No clock is part of this argument.
- If the renewal fails, A stops. Its manifest is valid if B has seen it, and B continues from there; else it never will be.
- A snapshot that B has not seen and that is there later is therefore not valid for any reader that reads the lease after it.
- A may put its manifest once more, because it has not received the answer to the first time, when B has seen that one and
  removed it. So before B removes a snapshot of A, it writes the lease without it: `Lease.forget`.

Clocks only decide how soon B may take the lease: when that of the store has gone on by more than the seconds since the last
renewal. A asks its own, which also continues while a machine sleeps, and renews before it does anything else when its last
renewal began about as long ago. It continues if nobody has taken the lease, which is certain then, however long it was away.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace

from chainring._files import parse_strict
from chainring._messages import warn
from chainring._remote.bucket import MISSING, Bucket, ChangedError, Found, RemoteError, Tag

SECONDS = 30  # for which nobody else takes a lease that was renewed
PERIOD = 9.0  # seconds between renewals

_KEY = ".lease"
_CLOCK = ".lease-clock"  # is written to see what time it is in the store
_FORMAT = 1
_MARGIN = 2  # seconds of difference between two clocks in `SECONDS`, and of a request on its way
_RESOLUTION = 1  # seconds: stores say when an object was written in whole ones
_TRIES = 20  # of a request to which the store says that another came between, although none has

_held: set[str] = set()  # the holders in this process


class LeaseLostError(OSError):
    """Another run writes here now. This one must not continue writing; what it puts from now on is not valid."""


@dataclass(frozen=True)
class _Record:
    """The content of the lease, besides its format and a number that makes each one differ."""

    run: str
    token: int
    folders: tuple[str, ...]
    is_held: bool
    seconds: int
    holder: str  # of which a process may have several, one after the other
    pid: int
    host: str
    machine: str
    namespace: str
    started: int

    @classmethod
    def of_this_process(cls, run: str, token: int, folders: Iterable[str], seconds: int) -> _Record:
        """Return the record of a new holder."""
        pid = os.getpid()
        return cls(
            run=run,
            token=token,
            folders=tuple(sorted(folders)),
            is_held=True,
            seconds=seconds,
            holder=secrets.token_hex(8),
            pid=pid,
            host=socket.gethostname(),
            machine=_machine(),
            namespace=_namespace(),
            started=_started(pid),
        )

    @classmethod
    def parse(cls, content: bytes, place: str) -> _Record:
        """Return what an object says.

        Raises:
            RemoteError: it is not a lease, or that of a later version.
        """
        try:
            document = parse_strict(content)
            if document["format"] != _FORMAT:
                raise RemoteError(f"{place} has format {document['format']!r} of a later Chainring; upgrade to write here")
            if content != seal({key: value for key, value in document.items() if key != "crc"}):
                raise ValueError("it is damaged")
            values = {field.name: document[field.name] for field in fields(cls)}
            values["folders"] = tuple(values["folders"])
            for field in fields(cls):
                if type(values[field.name]).__name__ != str(field.type).partition("[")[0]:
                    raise ValueError(f"{field.name} is {values[field.name]!r}")
            if not all(isinstance(folder, str) for folder in values["folders"]):
                raise ValueError("a folder is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"{place} is not a lease ({error}); if no run writes there, remove it") from None
        return cls(**values)

    def encode(self) -> bytes:
        """Return a content that no other has, because the condition of the next one may be a sum of this one's bytes."""
        return seal({"format": _FORMAT, **asdict(self), "nonce": secrets.token_hex(8)})

    def name(self) -> str:
        """Return the process in words."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Fence:
    """Tells the snapshots of a run from what a writer has put after it had lost the lease.

    Attributes:
        run: what the stamps of this run begin with; snapshots copied from elsewhere have others, and are valid.
        token: that of the last holder.
        folders: of the snapshots of earlier holders that it has seen when it took the lease.

    Example:
        >>> fence = Fence("9f86d081884c7d65", 2, frozenset({"60303ae22b998861"}))
        >>> fence.admits("9f86d081884c7d65/1", "60303ae22b998861"), fence.admits("9f86d081884c7d65/1", "fd61a03af4f77d87")
        (True, False)
    """

    run: str = ""
    token: int = 0
    folders: frozenset[str] = frozenset()

    def admits(self, stamp: str | None, folder: str) -> bool:
        """Return whether a snapshot is valid.

        Args:
            stamp: the `Lease.stamp` in its manifest; ``None`` if it was written without a lease.
            folder: the name of the folder of its files, which no other snapshot has.

        Raises:
            ValueError: the stamp is not one.
        """
        if stamp is None:
            return True
        run, _, token = stamp.partition("/")
        return int(token) >= self.token or run != self.run or folder in self.folders


def read_fence(bucket: Bucket) -> Fence:
    """Return what tells which snapshots are valid; it is read after their manifests.

    Raises:
        RemoteError: the store does not answer, or the lease is damaged.
    """
    found = _read(bucket)
    return Fence() if found is None else _fence(_Record.parse(found.content, _place(bucket)))


class Lease:
    """The right to write to a place in an object store, which one run has at a time.

    A thread renews it. A process that this one forks has no part in it.

    Args:
        bucket: the place.
        snapshots: returns stamp and folder of every snapshot there, as `Fence.admits` takes them, archived ones too. It is
            called when the lease is about to be taken.
        seconds: for which nobody else takes it after it was renewed.
        period: seconds between renewals; ``None`` for no thread.
        clock: returns seconds, also those for which the machine slept.

    Attributes:
        stamp: what the manifest of each snapshot carries.
        fence: tells which snapshots are valid while this run has the lease.

    Raises:
        BlockingIOError: another run has it; the error names its process and host, and how long to wait.
        RemoteError: the store does not answer.

    Example:
        >>> bucket = Bucket("memory:///runs/lease")
        >>> lease = Lease(bucket, lambda: [])
        >>> lease.check()  # before a manifest is put
        >>> lease.renew()  # after it
        >>> lease.release()
    """

    def __init__(
        self,
        bucket: Bucket,
        snapshots: Callable[[], Iterable[tuple[str | None, str]]],
        *,
        seconds: int = SECONDS,
        period: float | None = PERIOD,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._bucket, self._clock = bucket, clock or _seconds_since_boot
        self._lock = threading.Lock()  # of renewals
        self._stop = threading.Event()
        self._lost: str | None = None
        self._loss_was_raised = self._was_released = False
        self._pending: tuple[bytes, float] | None = None  # a renewal of which no answer came, and when it began
        self._renewed = 0.0
        self._record, self._content, self._tag = self._take(snapshots, seconds)
        self.fence = _fence(self._record)
        self.stamp = f"{self._record.run}/{self._record.token}"
        if period is not None:
            threading.Thread(target=self._keep, args=(period,), name="chainring-lease", daemon=True).start()

    def check(self) -> None:
        """See that this run has the lease. That takes a request only if the thread has not been able to renew it.

        Raises:
            LeaseLostError: another run has taken it; the error names it.
            RemoteError: the store does not answer, and by its clock another may have taken the lease.
        """
        self._raise_if_lost()
        if self._clock() - self._renewed > self._record.seconds - _MARGIN:
            self.renew()

    def renew(self) -> None:
        """Renew the lease now, which proves that nobody else has had it since it was taken.

        Raises:
            LeaseLostError: another run has taken it; the error names it.
            RemoteError: the store does not answer.
        """
        self._raise_if_lost()
        self._renew()
        self._raise_if_lost()

    def forget(self, folder: str) -> None:
        """Make the snapshot of a folder invalid that is about to be removed, if it is one of an earlier holder.

        Raises:
            LeaseLostError: another run has taken the lease; the error names it.
            RemoteError: the store does not answer.
        """
        if folder not in self.fence.folders:
            return
        with self._lock:
            self._record = replace(self._record, folders=tuple(each for each in self._record.folders if each != folder))
        self.renew()
        self.fence = replace(self.fence, folders=self.fence.folders - {folder})

    def release(self) -> None:
        """Let others take the lease at once; warn where that is not possible. Calling it again does nothing."""
        if os.getpid() != self._record.pid:
            return
        self._stop.set()
        with self._lock:
            if self._was_released:
                return
            self._was_released = True
            _held.discard(self._record.holder)
            has_expired = self._clock() - self._renewed > self._record.seconds
            try:
                if self._lost is None and not has_expired:
                    self._replace(replace(self._record, is_held=False).encode())
            except RemoteError as error:
                warn(f"another run may have to wait {self._record.seconds} s: {error}")
            if self._lost is not None and not self._loss_was_raised:
                warn(self._lost)

    def _keep(self, period: float) -> None:
        """Renew the lease until it is released or lost."""
        while not self._stop.wait(period):
            with suppress(RemoteError):  # the store is away; what is to be written meanwhile asks again
                self._renew()
            if self._lost is not None:
                return

    def _renew(self) -> None:
        with self._lock:
            if self._lost is not None or self._was_released:
                return
            # A request that has failed may have arrived, or may still. It is made once more, and then another: only one
            # that has begun now says that a taker who has looked at the snapshots before now comes too late.
            for _ in range(1 if self._pending is None else 2):
                self._pending = self._pending or (self._record.encode(), self._clock())
                content, began = self._pending
                if not self._replace(content):
                    return
                self._pending, self._renewed = None, began

    def _take(self, snapshots: Callable[[], Iterable[tuple[str | None, str]]], seconds: int) -> tuple[_Record, bytes, Tag]:
        """Write the first record of a new holder; return it, how it is written, and the state of the lease then."""
        for _ in range(_TRIES):
            found = _read(self._bucket)
            run, token, fence = secrets.token_hex(8), 0, Fence()
            if found is not None:
                earlier = _Record.parse(found.content, _place(self._bucket))
                self._refuse(earlier, found)
                run, token, fence = earlier.run, earlier.token, _fence(earlier)
            folders = {
                folder
                for stamp, folder in snapshots()
                if stamp is not None and stamp.startswith(f"{run}/") and fence.admits(stamp, folder)
            }
            record = _Record.of_this_process(run, token + 1, folders, seconds)
            content, self._renewed = record.encode(), self._clock()
            _held.add(record.holder)
            try:
                return record, content, self._bucket.put(_KEY, content, MISSING if found is None else found.tag)
            except BaseException as error:
                _held.discard(record.holder)
                if not isinstance(error, (ChangedError, FileNotFoundError)):  # somebody else was faster
                    raise
        raise RemoteError(f"{_place(self._bucket)} is written again and again; try again later")

    def _refuse(self, holder: _Record, found: Found) -> None:
        """Raise an error if a lease may not be taken."""
        if not holder.is_held or _has_ended(holder):
            return
        self._bucket.put(_CLOCK, secrets.token_bytes(8))
        age = (self._bucket.head(_CLOCK).modified - found.modified).total_seconds()
        left = math.ceil(holder.seconds + _RESOLUTION - age)
        if left > 0:
            raise BlockingIOError(
                f"{self._bucket.url} is being written by another run: {holder.name()}, which has a lease for another "
                f"{left} s and may renew it. Wait for it to end, or so long if it was killed; or choose another out"
            )

    def _replace(self, content: bytes) -> bool:
        """Write the lease if it is ours; return False, and note who has it, if it is not."""
        for _ in range(_TRIES):
            try:
                self._tag, self._content = self._bucket.put(_KEY, content, self._tag), content
                return True
            except (ChangedError, FileNotFoundError):
                found = _read(self._bucket)
            if found is None or found.content not in (content, self._content):
                break
            self._tag, self._content = found.tag, found.content
            if found.content == content:
                return True  # an earlier try of which no answer came
        else:
            raise RemoteError(f"{_place(self._bucket)} cannot be replaced, although nobody else has written it")
        _held.discard(self._record.holder)
        if found is None:
            reason = "its lease was removed"
        else:
            try:
                reason = f"{_Record.parse(found.content, _place(self._bucket)).name()} has taken its lease"
            except RemoteError as error:
                reason = str(error)
        self._lost = f"{self._bucket.url} is not this run's any more: {reason}. Stop one of both, or choose another out"
        return False

    def _raise_if_lost(self) -> None:
        if os.getpid() != self._record.pid:
            raise LeaseLostError(f"process {self._record.pid} writes to {self._bucket.url}, and none that it has forked")
        if self._lost is not None:
            self._loss_was_raised = True
            raise LeaseLostError(self._lost)


def seal(document: Mapping[str, object]) -> bytes:
    """Return the text of a lease, with its checksum: a damaged one would let snapshots pass for those of a lost lease."""
    crc = zlib.crc32(json.dumps(document).encode())
    return json.dumps({**document, "crc": f"{crc:08x}"}).encode()


def _place(bucket: Bucket) -> str:
    return f"{bucket.url}/{_KEY}"


def _read(bucket: Bucket) -> Found | None:
    try:
        return bucket.get(_KEY)
    except FileNotFoundError:
        return None


def _fence(record: _Record) -> Fence:
    return Fence(record.run, record.token, frozenset(record.folders))


def _seconds_since_boot() -> float:
    """Return seconds of a clock that nobody sets, and that continues while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
    return time.monotonic() if clock is None else time.clock_gettime(clock)  # Windows has the former alone


def _has_ended(holder: _Record) -> bool:
    """Return whether a holder was a process of this machine, and is known to have ended."""
    here = socket.gethostname(), _machine(), _namespace()
    if (holder.host, holder.machine, holder.namespace) != here or holder.pid <= 0:
        return False
    if holder.pid == os.getpid() and holder.started == _started(holder.pid):
        return holder.holder not in _held  # this process before it has replaced its program
    if sys.platform == "win32":  # where there is no signal that does nothing
        return False
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # there is one, of another user
    return _is_zombie(holder.pid) or (holder.started > 0 and _started(holder.pid) not in (0, holder.started))


def _machine() -> str:
    """Return a name of this machine since it was started, or of its network card."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def _namespace() -> str:
    """Return the name of the namespace in which process ids are counted, such as that of a container; else an empty one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Return what the system says of a process from its state on, or nothing where it does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> int:
    """Return when a process was started, in ticks since that of the machine; 0 where that is not known."""
    stat = _stat(pid)
    return int(stat[19]) if len(stat) > 19 else 0


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended, with all its threads, and only its parent has not asked how."""
    try:
        return _stat(pid)[:1] == ["Z"] and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return False
