"""Reading an object in small pieces without a request for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

WINDOW = 8 << 20  # bytes that are asked for at once
AT_ONCE = 2  # of them, which is what is held


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
