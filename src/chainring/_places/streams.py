"""Reading an object in small pieces without a request for each, and sending one in parts while it is written."""

from __future__ import annotations

import io
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from chainring._places.base import RemoteError
from chainring._places.connection import Connection, obstore

if TYPE_CHECKING:
    from typing_extensions import Buffer

WINDOW = 8 << 20  # bytes that are asked for at once
AT_ONCE = 2  # of them, which is what is held
PART = 8 << 20  # bytes of a part

_PARTS = 10_000  # that stores take for one object
_PARTS_AT_ONCE = 4  # that are held: those on their way, and the one that is being written
_MARK = "chainring"  # the name of the attribute by which an upload knows its object


class Window(NamedTuple):
    """Bytes of an object that are on their way, or there."""

    start: int
    stop: int
    content: Future[memoryview]


class RangeReader:
    """Reads pieces of an object in any order; what follows is fetched in advance when they follow one another.

    At most `AT_ONCE` windows of `WINDOW` bytes are held, besides what `read` has returned. After the first piece of a row of
    them as many bytes are fetched in advance as the row already has, so that little is fetched for nothing.

    Example::

        with bucket.open("model.safetensors") as file:
            header = file.read(0, 8)

    Args:
        fetch: returns the bytes between two places, always of the same state of the object.
        place: the address of the object, for messages.
        size: its bytes.

    Attributes:
        size: its bytes.
    """

    def __init__(self, fetch: Callable[[int, int], memoryview], place: str, size: int) -> None:
        self._fetch, self._place, self.size = fetch, place, size
        self._threads = ThreadPoolExecutor(AT_ONCE, "chainring-read")
        self._windows: deque[Window] = deque()
        self._position = self._row = 0  # where the last piece ended, and the bytes of the row of pieces that ended there

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is on its way; nothing can be read afterwards."""
        self._forget()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def read(self, start: int, size: int, until: int | None = None) -> memoryview:
        """Return bytes of the object; what lies behind ``until`` is not fetched in advance.

        Raises:
            ValueError: it has not so many.
            FileNotFoundError: it is not there.
            ChangedError: it was replaced since the first piece was read.
            RemoteError: it cannot be read.
        """
        stop = start + size
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"{self._place} has {self.size} bytes; got a request for {start} to {stop}")
        if start != self._position:
            self._row = 0
            if not (self._windows and self._windows[0].start <= start < self._windows[-1].stop):
                self._forget()
        self._row += size
        ahead = min(self._row, AT_ONCE * WINDOW) if self._row > size else 0
        self._position = stop
        goal = min(stop + ahead, self.size if until is None else max(stop, until))
        piece = self._piece(start, stop, goal) if size else memoryview(b"")
        if len(piece) == size:
            return piece
        whole = memoryview(bytearray(size))
        filled = 0
        while True:
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled == size:
                return whole
            piece = self._piece(start + filled, stop, goal)

    def _piece(self, start: int, stop: int, goal: int) -> memoryview:
        """Return the bytes from a place on that one window has, while those after it are fetched up to a goal."""
        while self._windows and self._windows[0].stop <= start:
            self._windows.popleft()
        self._request(start, goal)
        window = self._windows[0]
        try:
            content = window.content.result()
        except BaseException:
            self._forget()  # and so asks again next time
            raise
        return content[start - window.start : stop - window.start]

    def _request(self, start: int, goal: int) -> None:
        while len(self._windows) < AT_ONCE and (begin := self._windows[-1].stop if self._windows else start) < goal:
            end = min(begin + WINDOW, goal)
            self._windows.append(Window(begin, end, self._threads.submit(self._fetch, begin, end)))

    def _forget(self) -> None:
        while self._windows:
            self._windows.pop().content.cancel()


class Upload(io.RawIOBase):
    """A file that is sent while it is written. It copies what it is given.

    Args:
        connection: the way to the bucket.
        path: the key of the object in it.
        place: the address of the object, for messages.
        size: how many bytes there will be, or more than that.
        put: writes a small object at once.
    """

    def __init__(self, connection: Connection, path: str, place: str, size: int, put: Callable[[bytes], object]) -> None:
        self._connection, self._path, self._place, self._put = connection, path, place, put
        self._part_size = max(PART, -(-size // (_PARTS << 10)) << 10)
        self._mark = secrets.token_hex(8)
        self._part = bytearray()
        self._written = 0
        self._writer: Any = None  # of obstore, once there is more than a part
        self._has_failed = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Buffer, /) -> int:
        """Write bytes; return their number.

        Raises:
            ValueError: they are more than a store takes in parts of this size.
            RemoteError: they cannot be sent.
        """
        self._checkClosed()
        with memoryview(data) as given, given.cast("B") as content:
            return self._write(content)

    def _write(self, content: memoryview) -> int:
        if self._written + len(content) > _PARTS * self._part_size:
            raise ValueError(f"{self._place} is to have more than {_PARTS} parts of {self._part_size} bytes; give its size")
        for start in range(0, len(content), self._part_size):
            self._add(content[start : start + self._part_size])
        self._written += len(content)
        return len(content)

    def _add(self, content: memoryview) -> None:
        room = self._part_size - len(self._part)
        self._part += content[:room]
        if len(self._part) == self._part_size:
            self._send()
            self._part += content[room:]

    def _send(self) -> None:
        """Send the part, and wait until there is room for another."""
        part, self._part = self._part, bytearray()
        if self._writer is None:
            self._request(lambda: self._begin(part), tries_again=True)
        else:
            self._request(lambda: self._writer.write(part))
        self._request(lambda: self._writer.write(b""))

    def _begin(self, part: bytearray) -> None:
        writer = obstore().open_writer(
            self._connection.sending,
            self._path,
            attributes={_MARK: self._mark},
            buffer_size=self._part_size,
            max_concurrency=_PARTS_AT_ONCE,
        )
        writer.write(part)
        self._writer = writer

    def _request(self, request: Callable[[], object], *, tries_again: bool = False) -> None:
        if self._has_failed:
            raise RemoteError(f"{self._place} cannot be written: a part of it was not")
        self._has_failed = True
        try:
            self._connection.call("written", self._place, request, tries_again=tries_again)
        except FileNotFoundError:
            gone = RemoteError(f"{self._place} cannot be written: something has aborted its upload, or removed the bucket")
        else:
            self._has_failed = False
            return
        raise gone

    def finish(self) -> None:
        """Make the object of what was written.

        Raises:
            RemoteError: it is not there.
        """
        self.close()
        if self._writer is None:
            self._put(bytes(self._part))
            return
        try:
            if self._part:
                self._request(lambda: self._writer.write(self._part))
            self._request(self._writer.close)
        except RemoteError as error:
            failure = error
        else:
            return
        if not self._is_there():  # the answer was lost that says so
            raise failure

    def _is_there(self) -> bool:
        options = {"head": True}
        try:
            found = self._connection.call(
                "read", self._place, lambda: obstore().get(self._connection.asking, self._path, options=options)
            )
        except (FileNotFoundError, RemoteError):
            return False
        return bool(found.attributes.get(_MARK) == self._mark and found.meta["size"] == self._written)

    def abort(self) -> None:
        """Leave no object, and no parts of one as far as the store answers."""
        self.close()
        if self._writer is not None:
            with suppress(OSError):
                end = (RuntimeError, None, None)  # which tells obstore that there is to be no object
                self._connection.call("aborted", self._place, lambda: self._writer.__exit__(*end), tries_again=False)
