"""What the rank that fails first says to the others, so that each of them ends with its traceback."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

_WORDS, _HEARD = "chainring/last words", "chainring/heard"
_PERIOD = 0.25  # seconds from one look to the next
_PATIENCE = 3.0  # seconds for the others to hear


class LastWords:
    """Goes by the store through which the ranks have met, which ends with the process of rank 0 where that has made it.

    A thread listens, because a rank may be waiting in an exchange that only the end of the failed process ends.

    Args:
        store: of torch.distributed.
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._first: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="chainring-last-words", daemon=True)
        self._thread.start()

    def say(self, text: str) -> str:
        """Says why this rank fails, and returns what was said first, which may be another's."""
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone
            if self._first is None:
                self._hear(self._store.compare_set(_WORDS, "", text))
        return self._first or text

    def said(self) -> str | None:
        """What was said first, ``None`` if nothing was: a rank speaks before it leaves, so there is nothing to wait for."""
        with contextlib.suppress(RuntimeError):
            self._look()
        return self._first

    def wait_for_others(self) -> None:
        """Lets rank 0 stay until all have heard what was said, a few seconds at most."""
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            while self._rank == 0 and self._store.add(_HEARD, 0) < self._size and time.monotonic() < until:
                time.sleep(_PERIOD / 10)

    def close(self) -> None:
        """Ends the listening."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):
            while self._first is None and not self._closed.wait(_PERIOD):
                self._look()

    def _look(self) -> None:
        with self._lock:
            if self._first is None and self._store.check([_WORDS]):
                self._hear(self._store.get(_WORDS))

    def _hear(self, words: bytes) -> None:
        self._first = str(words, "utf-8")
        self._store.add(_HEARD, 1)
