"""The index of a run in an object store: which snapshots and links there are, and which process may change them.

It is one object, ``.lease``, which is replaced on the condition that it still is what was read. So every state of it has one
successor, and of several that are put at once one succeeds. The process that holds it replaces it whenever it publishes,
links, moves or removes a snapshot, and every few seconds. Whoever finds it missing, released, left by a process that has
ended, or not replaced for its seconds by the clock of the store takes it, with all that it lists. A holder that has lost it,
however long it was stopped, fails at its next replacement, and what it has put besides is not listed, and never valid.

A manifest that carries the stamp of this run for its name is valid while the index has its digest. Any other, such as that
of a snapshot that was copied there, is valid by itself. The same holds for the objects of links.

Clocks only decide how soon another may take the index: when that of the store has gone on by more than the seconds since the
last replacement. The holder asks its own, which also continues while a machine sleeps, and replaces the index before it does
anything else when its last replacement began about as long ago.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace

from chainring._files import machine, parse_strict, start_of
from chainring._messages import warn
from chainring._places.base import MANIFEST, STAMP, RemoteError
from chainring._places.bucket import MISSING, Bucket, Entry, StoredObject, Tag
from chainring._places.connection import ChangedError

SECONDS = 30  # for which nobody else takes an index that was replaced
PERIOD = 9.0  # seconds between replacements
KEY = ".lease"

_CLOCK = ".lease-clock"  # is written to see what time it is in the store
_FORMAT = 1
_MARGIN = 2  # seconds of difference between two clocks in `SECONDS`, and of a request on its way
_RESOLUTION = 1  # seconds: stores say when an object was written in whole ones
_TRIES = 20  # of a request to which the store says that another came between, although none has

_held: set[str] = set()  # the holders in this process


class LeaseLostError(OSError):
    """Another run writes here now. This one must not continue writing; what it puts from now on is not valid."""


@dataclass(frozen=True)
class Record:
    """The content of an index, besides its format, its checksum and a number that makes each one differ."""

    run: str  # the stamps of its snapshots and links begin with it
    token: int  # one more than that of the holder before
    snapshots: dict[str, str]  # the digests of the manifests by name
    links: dict[str, str]  # the snapshots to which links lead, by name
    is_held: bool  # False once it was released
    seconds: int  # for which nobody else takes it
    holder: str  # of which a process, that of the rest, may have several, one after the other
    pid: int
    host: str
    machine: str
    started: int

    @classmethod
    def parse(cls, content: bytes, address: str) -> Record:
        """Return what an object says; raise `RemoteError` if it is not an index, or that of a later version."""
        try:
            document = parse_strict(content)
            if document["format"] != _FORMAT:
                raise RemoteError(f"{address} has format {document['format']!r} of a later Chainring; upgrade to write here")
            if content != seal({key: value for key, value in document.items() if key != "crc"}):
                raise ValueError("it is damaged")
            values = {field.name: document[field.name] for field in fields(cls)}
            kinds = {field.name: str(field.type).partition("[")[0] for field in fields(cls)}
            if wrong := next((name for name, kind in kinds.items() if type(values[name]).__name__ != kind), None):
                raise ValueError(f"{wrong} is {values[wrong]!r}")
            if not all(type(text) is str for text in (*values["snapshots"].values(), *values["links"].values())):
                raise ValueError("a digest or a target is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"{address} is not a lease ({error}); if no run writes there, remove it") from None
        return cls(**values)

    def encode(self) -> bytes:
        """Return a content that no other has, because the condition of the next one may be a sum of this one's bytes."""
        return seal({"format": _FORMAT, **asdict(self), "nonce": secrets.token_hex(8)})

    def stamp(self, name: str) -> str:
        """Return what the manifest of a snapshot carries."""
        return f"{self.run}/{name}"

    def admits(self, name: str, stamp: object, digest: str) -> bool:
        """Return whether a manifest is valid that carries a stamp."""
        return stamp != self.stamp(name) or self.snapshots.get(name) == digest

    @property
    def writer(self) -> str:
        """The process that has put it, for messages."""
        return f"process {self.pid} on {self.host}"


def seal(document: Mapping[str, object]) -> bytes:
    """Return the text of an index, with its checksum: one that is damaged would make snapshots invalid."""
    crc = zlib.crc32(json.dumps(document).encode())
    return json.dumps({**document, "crc": f"{crc:08x}"}).encode()


def stamp_of(manifest: bytes) -> object:
    """Return the stamp that a manifest carries; ``None`` if it has none, or is damaged."""
    try:
        return parse_strict(manifest.rpartition(b"\n")[0])["about"][STAMP]
    except (ValueError, KeyError, TypeError):
        return None


def read_record(bucket: Bucket) -> Record | None:
    """Return what the index under an address says, ``None`` if there is none; raise `RemoteError` if it is damaged."""
    stored = _read(bucket)
    return None if stored is None else Record.parse(stored.content, f"{bucket.url}/{KEY}")


def is_held(bucket: Bucket) -> bool:
    """Return whether a run holds the index under an address."""
    stored = _read(bucket)
    return stored is not None and _seconds_left(bucket, Record.parse(stored.content, f"{bucket.url}/{KEY}"), stored) > 0


def list_run(bucket: Bucket, record: Record | None) -> list[Entry]:
    """Return the objects of a run; a listing without its index, or without what that lists, is none: see `Bucket.list`."""
    listed = () if record is None else record.snapshots
    return bucket.list(expected=(KEY, *(f"{name}/{MANIFEST}" for name in listed)))


def _read(bucket: Bucket) -> StoredObject | None:
    with suppress(FileNotFoundError):
        return bucket.get(KEY)
    return None


def _seconds_since_boot() -> float:
    """Return seconds of a clock that nobody sets, and that continues while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
    return time.monotonic() if clock is None else time.clock_gettime(clock)  # Windows has the former alone


class Index:
    """The index of a run while this process holds it, as one process does at a time.

    A thread replaces it every ``period`` seconds, unless that is ``None``, and nobody else takes it for ``seconds`` then. A
    process that this one forks has no part in it. The ``clock`` returns seconds, also those for which the machine slept.
    Processes that were ``lost``, given by number and host, are waited for: one that is not known to have ended may go on to
    write for as long as it can hold the index.

    Raises:
        BlockingIOError: another run holds it; the error names its process and host, and how long to wait.
        RemoteError: the store does not answer.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        seconds: int = SECONDS,
        period: float | None = PERIOD,
        clock: Callable[[], float] = _seconds_since_boot,
        lost: Collection[tuple[int, str]] = (),
    ) -> None:
        self._bucket, self._clock = bucket, clock
        self._address = f"{bucket.url}/{KEY}"
        self._lock = threading.Lock()  # of replacements
        self._stop = threading.Event()
        self._lost: str | None = None
        self._loss_was_raised = self._was_released = False
        self._replaced = 0.0
        self.record, self._tag = self._take(seconds, lost)
        if period is not None:
            threading.Thread(target=self._keep, args=(period,), name="chainring-index", daemon=True).start()

    def _take(self, seconds: int, lost: Collection[tuple[int, str]]) -> tuple[Record, Tag]:
        """Put the first record of a new holder; return it, and the state of the object then."""
        for _ in range(_TRIES):
            stored = _read(self._bucket)
            run, token, snapshots, links = secrets.token_hex(8), 0, dict[str, str](), dict[str, str]()
            if stored is not None:
                earlier = Record.parse(stored.content, self._address)
                if (left := _seconds_left(self._bucket, earlier, stored)) > 0:
                    if (earlier.pid, earlier.host) in lost:
                        time.sleep(left)
                        continue
                    raise BlockingIOError(
                        f"{self._bucket.url} is being written by another run: {earlier.writer}, which has a lease for "
                        f"another {left} s and may renew it. Wait for it to end, or so long if it was killed; or choose "
                        "another out"
                    )
                run, token, snapshots, links = earlier.run, earlier.token, earlier.snapshots, earlier.links
            record = Record(
                run=run, token=token + 1, snapshots=snapshots, links=links, is_held=True, seconds=seconds,
                holder=secrets.token_hex(8), pid=os.getpid(), host=socket.gethostname(), machine=machine(),
                started=start_of(os.getpid()) or 0,
            )  # fmt: skip
            self._replaced = self._clock()
            _held.add(record.holder)
            try:
                return record, self._bucket.put(KEY, record.encode(), MISSING if stored is None else stored.tag)
            except BaseException as error:
                _held.discard(record.holder)
                if not isinstance(error, (ChangedError, FileNotFoundError)):  # somebody else was faster
                    raise
        raise RemoteError(f"{self._address} is written again and again; try again later")

    def check(self) -> None:
        """See that this process holds the index, by a `change` if the thread has not been able to replace it."""
        self._raise_if_lost()
        if self._clock() - self._replaced > self.record.seconds - _MARGIN:
            self.change()

    def change(
        self, *, snapshots: Mapping[str, str | None] | None = None, links: Mapping[str, str | None] | None = None
    ) -> None:
        """Replace the index, with other snapshots and links, of which those with ``None`` are not there any more.

        That it succeeds says that nobody else has held it since it was taken.

        Raises:
            LeaseLostError: another run has taken it; the error names it.
            RemoteError: the store does not answer. The change may be there until the next one, which does not have it.
        """
        self._raise_if_lost()
        with self._lock:
            if self._lost is None and not self._was_released:
                merged = {**self.record.snapshots, **(snapshots or {})}, {**self.record.links, **(links or {})}
                listed, linked = ({name: to for name, to in names.items() if to is not None} for names in merged)
                self._replace(replace(self.record, snapshots=listed, links=linked))
        self._raise_if_lost()

    def release(self) -> None:
        """Let others take the index at once; warn where that is not possible. Calling it again does nothing."""
        if os.getpid() != self.record.pid:
            return
        self._stop.set()
        with self._lock:
            if self._was_released:
                return
            self._was_released = True
            _held.discard(self.record.holder)
            has_expired = self._clock() - self._replaced > self.record.seconds
            try:
                if self._lost is None and not has_expired:
                    self._replace(replace(self.record, is_held=False))
            except RemoteError as error:
                warn(f"another run may have to wait {self.record.seconds} s: {error}")
            if self._lost is not None and not self._loss_was_raised:
                warn(self._lost)

    def _keep(self, period: float) -> None:
        """Replace the index until it is released or lost."""
        while self._lost is None and not self._stop.wait(period):
            with suppress(RemoteError), self._lock:  # the store is away: what is to be written next asks again
                if self._lost is None and not self._was_released:
                    self._replace(self.record)

    def _replace(self, record: Record) -> None:
        """Write the index if it is ours; note who has it, if it is not."""
        for _ in range(_TRIES):
            began = self._clock()
            try:
                self._tag = self._bucket.put(KEY, record.encode(), self._tag)
            except (ChangedError, FileNotFoundError):
                stored = _read(self._bucket)
            else:
                self.record, self._replaced = record, began
                return
            reason = "its lease was removed"
            if stored is not None:
                try:
                    holder = Record.parse(stored.content, self._address)
                    reason = f"{holder.writer} has taken its lease"
                except RemoteError as error:
                    reason = str(error)
                else:
                    if holder.holder == record.holder:  # written by an earlier request of ours, of which the answer was lost
                        self._tag = stored.tag
                        continue
            _held.discard(record.holder)
            self._lost = f"{self._bucket.url} is not this run's any more: {reason}. Stop one of both, or choose another out"
            return
        raise RemoteError(f"{self._address} cannot be replaced, although nobody else has written it")

    def _raise_if_lost(self) -> None:
        if os.getpid() != self.record.pid:
            raise LeaseLostError(f"process {self.record.pid} writes to {self._bucket.url}, and none that it has forked")
        if self._lost is not None:
            self._loss_was_raised = True
            raise LeaseLostError(self._lost)


def _seconds_left(bucket: Bucket, holder: Record, stored: StoredObject) -> int:
    """Return for how long nobody else may take an index."""
    if not holder.is_held or _has_ended(holder):
        return 0
    bucket.put(_CLOCK, secrets.token_bytes(8))
    age = (bucket.head(_CLOCK).modified - stored.modified).total_seconds()
    return math.ceil(holder.seconds + _RESOLUTION - age)


def _has_ended(holder: Record) -> bool:
    """Return whether a holder was a process of this machine, and is known to have ended."""
    if (holder.host, holder.machine) != (socket.gethostname(), machine()) or holder.pid <= 0:
        return False
    started = start_of(holder.pid)
    if holder.pid == os.getpid() and holder.started == started:
        return holder.holder not in _held  # this process before it has replaced its program
    return started is None or (0 not in (started, holder.started) and started != holder.started)
