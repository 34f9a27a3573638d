"""Objects that are sent in parts while they are written, and are there when all of it is."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from chainring._places.connection import Connection, obstore
from chainring._places.errors import RemoteError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART = 8 << 20  # bytes of a part

_PARTS = 10_000  # that stores take for one object
_PARTS_AT_ONCE = 4  # that are held: those on their way, and the one that is being written
_MARK = "chainring"  # the name of the attribute by which an upload knows its object


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
