"""Signals that ask a run to end: taken down when they come, acted upon at the end of the iteration."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(SystemExit):
    """A signal has ended the run, after the iteration was finished, snapshots were taken and everything was finalized.

    Left alone, it ends the process with the code of a process that the signal has killed: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)

    def __str__(self) -> str:
        return f"the run was ended by {signal.Signals(int(str(self.code)) - 128).name}"


class Interruption:
    """While it is entered, SIGTERM and the first SIGINT only set `received`; the second SIGINT raises KeyboardInterrupt.

    A handler that was there is called too, and is put back at the end. What is ignored stays ignored. In a thread, where
    Python sets no handlers, nothing is changed.

    Of several ranks, all end after the same iteration: at the beginning of each they start to compare what they have
    received, and read at the beginning of the next what came out. So none waits for the others, and a run ends at most two
    iterations after the signal.

    Args:
        comm: the communicator of the ranks.

    Attributes:
        received: the number of the first signal, ``None`` before one came; of several ranks, of the largest that any got.
    """

    def __init__(self, comm: Any = None) -> None:
        self.received: int | None = None
        self._comm = comm
        self._compared: Callable[[], int] | None = None
        self._count = 0
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: set by other than Python, and it could not be put back
                    self._before[number] = before
                    signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def asks_to_end(self) -> bool:
        """Whether the run is to end here; asked at the beginning of each iteration."""
        if self._comm is None or self._comm.size == 1:
            return self.received is not None
        compared, self._compared = self._compared, self._comm.start_max(self.received or 0)
        number = 0 if compared is None else compared()
        self.received = number or self.received
        return number > 0

    def settle(self) -> None:
        """At the end of the loop: what was received too late to be agreed upon does not count among several ranks."""
        if self._comm is not None and self._comm.size > 1:
            compared, self._compared = self._compared, None
            number = 0 if compared is None else compared()
            self.received = number or None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked worker has inherited this handler, and its trainer decides
        self._count += number == signal.SIGINT
        self.received = self.received or number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if number == signal.SIGINT and self._count > 1:
            raise KeyboardInterrupt

    @property
    def name(self) -> str:
        """What the signal is called."""
        return signal.Signals(self.received or 0).name

    def error(self) -> BaseException:
        """What ends the run; in a notebook, whose kernel must not end, SIGINT stays the interrupt that it is there."""
        assert self.received is not None
        if self.received == signal.SIGINT and _is_in_notebook():
            return KeyboardInterrupt(f"{self.name}: the iteration was finished and its state saved")
        return Interrupted(self.received)


def _is_in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")
