"""The objects under an address in an object store, through obstore, with the conditions on which commits rest.

An object is there whole or not at all. `Bucket.put` may ask that it is not there yet, or that it still is what was read: of
several who do so one succeeds. A request is tried again for a minute when the store or the network fails, and whether a
conditional one has succeeded although its answer was lost is found out by reading.
"""

from __future__ import annotations

import io
import re
import secrets
import urllib.parse
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from chainring._files import ADDRESS_RULE, SCHEMES
from chainring._places.base import RemoteError, StoredFile
from chainring._places.connection import NOT_OF_A_STORE, PATIENCE, ChangedError, Connection, Patience, obstore

PART = 8 << 20  # bytes of a part of an upload
_PARTS = 10_000  # that stores take for one object
_PARTS_AT_ONCE = 4  # that are held: those on their way, and the one that is being written
_MARK = "chainring"  # the name of the attribute by which an upload knows its object
_WINDOW, _AT_ONCE = 8 << 20, 2  # bytes that are asked for at once when an object is read; of them, which is what is held
_SMALL = 64 << 10  # bytes, which any network that works sends in `Patience.answer`


class Tag(NamedTuple):
    """The state of an object, which changes whenever it is written."""

    e_tag: str | None
    version: str | None


MISSING = Tag(None, None)
"""The state of an object that is not there."""


class StoredObject(NamedTuple):
    """The content of an object, and its state."""

    content: bytes
    tag: Tag
    modified: datetime  # by the clock of the store


class Entry(NamedTuple):
    """An object in a listing."""

    key: str  # below the address of the bucket
    size: int  # bytes
    tag: Tag
    modified: datetime  # by the clock of the store


class Bucket:
    """The objects whose keys begin with an address, such as ``s3://bucket/run``.

    Raises:
        ImportError: obstore is not installed.
        ValueError: the address is not one of ``s3://``, ``gs://``, ``az://`` and ``memory://``, names no bucket, or has
            credentials in it.

    Attributes:
        url: the address, without a slash at its end.
    """

    def __init__(self, url: str, patience: Patience = PATIENCE) -> None:
        scheme, self._name, prefix = _parse(url)
        obstore()
        self._connection = Connection(scheme, self._name, patience)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"{scheme}://{self._name}" + (f"/{prefix}" if prefix else "")

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def get(self, key: str) -> StoredObject:
        """Return an object; raise `FileNotFoundError` if it is not there, `RemoteError` if it cannot be read."""
        path = self._path(key)

        def request() -> StoredObject:
            result = obstore().get(self._connection.asking, path)
            stored = StoredObject(bytes(result.bytes()), _tag(result.meta), result.meta["last_modified"])
            if stored.tag == MISSING:  # every store tells the state of an object
                raise OSError(NOT_OF_A_STORE)
            return stored

        return self._connection.call("read", f"{self.url}/{key}", request)

    def head(self, key: str) -> Entry:
        """Return what a listing says of an object; raise as `get` does."""
        path, place = self._path(key), f"{self.url}/{key}"
        try:
            return self._entry(self._connection.call("read", place, lambda: obstore().head(self._connection.asking, path)))
        except FileNotFoundError:
            pass  # this answer has no body that would say whether it is the bucket that is not there
        return self._entry(self._connection.call("read", place, lambda: obstore().get(self._connection.asking, path).meta))

    def open(self, key: str) -> RangeReader:
        """Return a reader of an object, which reads ahead; raise as `get` does."""
        entry = self.head(key)
        return RangeReader(partial(self._range, key, entry.tag.e_tag), f"{self.url}/{key}", entry.size, entry.tag)

    def _range(self, key: str, e_tag: str | None, start: int, stop: int) -> memoryview:
        path, place = self._path(key), f"{self.url}/{key}"
        options: dict[str, Any] = {"range": (start, stop)} | ({"if_match": e_tag} if e_tag else {})

        def request() -> memoryview:
            return memoryview(obstore().get(self._connection.asking, path, options=options).bytes())

        try:
            content = self._connection.call("read", place, request)
        except ChangedError:
            raise ChangedError(f"{place} was replaced while it was read; read it again from its beginning") from None
        if len(content) != stop - start:
            raise RemoteError(f"{place} ends {stop - start - len(content)} bytes too early")
        return content

    def put(self, key: str, content: bytes, expected: Tag | None = None) -> Tag:
        """Write an object, if it is in the ``expected`` state; return its new one.

        Raises:
            ChangedError: it is in another state; `ChangedError.is_certain` is False if it may have had this content before.
            RemoteError: it cannot be written.
        """
        mode: Any = "overwrite"
        if expected is not None:
            mode = "create" if expected == MISSING else {name: value for name, value in expected._asdict().items() if value}
        path, place = self._path(key), f"{self.url}/{key}"

        def request() -> Tag:
            store = self._connection.asking if len(content) <= _SMALL else self._connection.putting
            return _tag(obstore().put(store, path, content, mode=mode, use_multipart=False))

        try:
            return self._connection.call("written", place, request)
        except ChangedError as error:
            changed = error
        except FileNotFoundError:  # what S3 says of an update of what is not there
            changed = ChangedError(f"{place} was removed by somebody else")
        if not changed.is_certain:  # an earlier try may have succeeded, and only its answer was lost
            with suppress(FileNotFoundError):
                stored = self.get(key)
                if stored.content == content:
                    return stored.tag
        raise changed

    @contextmanager
    def upload(self, key: str) -> Iterator[Upload]:
        """Open a new object, which is there when the block ends; it is sent in parts while it is written.

        When anything fails it is not there. No more than a part for each of a few connections is held.
        """
        path = self._path(key)
        upload = Upload(self._connection, path, f"{self.url}/{key}", lambda content: self.put(key, content))
        try:
            yield upload
        except BaseException:
            upload.abort()
            raise
        upload.finish()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error."""

        def delete(paths: list[str]) -> None:
            try:
                self._connection.call("cleared", self.url, lambda: obstore().delete(self._connection.asking, paths))
            except FileNotFoundError:
                for path in paths if len(paths) > 1 else ():
                    delete([path])

        every = [self._path(key) for key in keys]
        for start in range(0, len(every), 1000):
            delete(every[start : start + 1000])

    def check_conditions(self) -> None:
        """Raise `ValueError` if the store does not know conditions, which is tried with an object that is removed again."""
        key, problem = f".probe-{secrets.token_hex(8)}", ""

        def put(expected: Tag) -> Tag | None:
            with suppress(ChangedError):
                return self.put(key, secrets.token_bytes(16), expected)
            return None

        try:
            if (first := put(MISSING)) is None or put(MISSING) is not None:
                problem = "lets an object be created twice"
            elif put(first) is None or put(first) is not None:
                problem = "lets an object be replaced that has changed meanwhile"
        finally:
            self.delete([key])
        if problem:
            raise ValueError(
                "a run needs a store that knows writes on a condition (If-None-Match and If-Match), without which two runs "
                f"could destroy one another's snapshots; {self.url} is in one that {problem}; choose another store, or a "
                "later version of this one"
            )

    def has(self, key: str) -> bool:
        """Return whether an object is there."""
        with suppress(FileNotFoundError):
            self.head(key)
            return True
        return False

    def list(self, prefix: str = "", expected: Iterable[str] = ()) -> list[Entry]:
        """Return the objects whose keys begin with ``prefix``, by key.

        An answer of something on the way to the store, such as the page of a login, reads like an empty or a shorter
        listing. So an empty one is asked for again, and one without an ``expected`` key is refused where that is there.

        Raises:
            RemoteError: it cannot be listed, or the answer is no listing.
        """
        folder, place = self._prefix + prefix.rpartition("/")[0], f"{self.url}/{prefix}".rstrip("/")

        def request() -> list[Entry]:
            chunks = obstore().list(self._connection.asking, folder or None)
            return [self._entry(meta) for chunk in chunks for meta in chunk]

        for is_last in (False, True):  # what was not there yet, and has come since, is in the second answer
            entries = self._connection.call("listed", place, request) or self._connection.call("listed", place, request)
            absent = set(expected) - {entry.key for entry in entries}
            lacking = next(filter(self.has, sorted(absent)), None)
            if lacking is None:
                break
            if is_last:
                raise RemoteError(
                    f"{place} cannot be listed: the answer is without {lacking}, which is there, so something on the way "
                    "has answered for the store, or it has cut the answer; try again"
                )
        return sorted(entry for entry in entries if entry.key.startswith(prefix))

    def _path(self, key: str) -> str:
        if not all(key.split("/")) or {".", ".."} & set(key.split("/")) or not key.isprintable():
            raise ValueError(f"a key is names with slashes between them, as of a file; got {key!r}")
        return self._prefix + key

    def _entry(self, meta: Any) -> Entry:
        return Entry(meta["path"].removeprefix(self._prefix), meta["size"], _tag(meta), meta["last_modified"])


def _parse(url: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the prefix of an address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{ADDRESS_RULE}; got {parts.scheme!r}")
    if "@" in url or ":" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{ADDRESS_RULE}, without credentials or settings, which the environment has; got one with them")
    if not parts.netloc and parts.scheme != "memory":
        raise ValueError(f"{ADDRESS_RULE}; got no bucket in {url!r}")
    if parts.netloc and not re.fullmatch(r"[\w.-]+", parts.netloc):
        raise ValueError(f"{ADDRESS_RULE}; got the bucket {parts.netloc!r}")
    names = [name for name in parts.path.split("/") if name]
    if {".", ".."} & set(names) or not parts.path.isprintable():
        raise ValueError(f"{ADDRESS_RULE}; got {url!r}")
    return parts.scheme, parts.netloc, "/".join(names)


def _tag(meta: Any) -> Tag:
    return Tag(meta.get("e_tag"), meta.get("version"))


class _Window(NamedTuple):
    """Bytes of an object that are on their way, or there."""

    start: int
    stop: int
    content: Future[memoryview]


class RangeReader(StoredFile):
    """An object whose pieces are read in any order; what follows is fetched in advance when they follow one another.

    At most two windows of 8 MB are held. After the first piece of a row of them as many bytes are fetched in advance as the
    row already has, so that little is fetched for nothing. Reading raises `FileNotFoundError` if the object is not there any
    more, `ChangedError` if it was replaced since it was opened, and `RemoteError` if it cannot be read. What ``fetch``
    returns, the bytes between two places, is always of the same state of the object.
    """

    def __init__(self, fetch: Callable[[int, int], memoryview], path: str, size: int, tag: Tag) -> None:
        self._fetch, self.path, self.size, self.tag = fetch, path, size, tag
        self._threads = ThreadPoolExecutor(_AT_ONCE, "chainring-read")
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        self._windows: deque[_Window] = deque()
        self._position = self._row = 0  # where the last piece ended, and the bytes of the row of pieces that ended there

    def read_into(self, start: int, view: memoryview, until: int | None = None) -> None:
        size, stop = len(view), start + len(view)
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"{self.path} has {self.size} bytes; got a request for {start} to {stop}")
        if start != self._position:
            self._row = 0
            if not (self._windows and self._windows[0].start <= start < self._windows[-1].stop):
                self._forget()
        self._row += size
        ahead = min(self._row, _AT_ONCE * _WINDOW) if self._row > size else 0
        self._position = stop
        goal = min(stop + ahead, self.size if until is None else max(stop, until))
        while start < stop:
            while self._windows and self._windows[0].stop <= start:
                self._windows.popleft()
            while len(self._windows) < _AT_ONCE and (begin := self._windows[-1].stop if self._windows else start) < goal:
                end = min(begin + _WINDOW, goal)
                self._windows.append(_Window(begin, end, self._threads.submit(self._fetch, begin, end)))
            window = self._windows[0]
            try:
                piece = window.content.result()[start - window.start : stop - window.start]
            except BaseException:
                self._forget()  # and so asks again next time
                raise
            view[: len(piece)] = piece
            view, start = view[len(piece) :], start + len(piece)

    def _forget(self) -> None:
        while self._windows:
            self._windows.pop().content.cancel()


class Upload(io.RawIOBase):
    """A file that is sent while it is written. It copies what it is given; ``put`` writes what is small at once."""

    def __init__(self, connection: Connection, path: str, place: str, put: Callable[[bytes], object]) -> None:
        self._connection, self._path, self._place, self._put = connection, path, place, put
        self._part_size = PART
        self._mark = secrets.token_hex(8)
        self._part, self._written = bytearray(), 0
        self._writer: Any = None  # of obstore, once there is more than a part
        self._has_failed = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def expect(self, size: int) -> None:
        """Take larger parts if an object of so many bytes would have more of them than stores take; before it is written."""
        self._part_size = max(PART, -(-size // (_PARTS << 10)) << 10)

    def write(self, data: Any, /) -> int:
        """Write bytes; return their number. A `ValueError` refuses more than a store takes in parts of this size."""
        self._checkClosed()
        with memoryview(data) as given, given.cast("B") as content:
            if self._written + len(content) > _PARTS * self._part_size:
                raise ValueError(
                    f"{self._place} is to have more than {_PARTS} parts of {self._part_size} bytes; call expect(size) first"
                )
            for start in range(0, len(content), self._part_size):
                piece = content[start : start + self._part_size]
                room = self._part_size - len(self._part)
                self._part += piece[:room]
                if len(self._part) == self._part_size:
                    self._send()
                    self._part += piece[room:]
            self._written += len(content)
            return len(content)

    def _send(self) -> None:
        """Send the part, and wait until there is room for another."""
        part, self._part = self._part, bytearray()

        def begin() -> None:
            writer = obstore().open_writer(
                self._connection.sending,
                self._path,
                attributes={_MARK: self._mark},
                buffer_size=self._part_size,
                max_concurrency=_PARTS_AT_ONCE,
            )
            writer.write(part)
            self._writer = writer

        if self._writer is None:
            self._request(begin, tries_again=True)
        else:
            self._request(lambda: self._writer.write(part))
        self._request(lambda: self._writer.write(b""))

    def _request(self, request: Callable[[], object], *, tries_again: bool = False) -> None:
        if self._has_failed:
            raise RemoteError(f"{self._place} cannot be written: a part of it was not")
        self._has_failed = True
        try:
            self._connection.call("written", self._place, request, tries_again=tries_again)
        except FileNotFoundError:
            reason = "something has aborted its upload, or removed the bucket"
            raise RemoteError(f"{self._place} cannot be written: {reason}") from None
        self._has_failed = False

    def finish(self) -> None:
        """Make the object of what was written; a `RemoteError` says that it is not there."""
        self.close()
        if self._writer is None:
            self._put(bytes(self._part))
            return
        try:
            if self._part:
                self._request(lambda: self._writer.write(self._part))
            self._request(self._writer.close)
        except RemoteError:
            if not self._is_there():  # the answer may have been lost that says so
                raise

    def _is_there(self) -> bool:
        asking = self._connection.asking
        with suppress(FileNotFoundError, RemoteError):
            head = self._connection.call(
                "read", self._place, lambda: obstore().get(asking, self._path, options={"head": True})
            )
            return bool(head.attributes.get(_MARK) == self._mark and head.meta["size"] == self._written)
        return False

    def abort(self) -> None:
        """Leave no object, and no parts of one as far as the store answers."""
        self.close()
        if self._writer is not None:
            with suppress(OSError):
                end = (RuntimeError, None, None)  # which tells obstore that there is to be no object
                self._connection.call("aborted", self._place, lambda: self._writer.__exit__(*end), tries_again=False)
