"""Signals that ask a run to end: recorded when they come, acted upon at the end of the iteration."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Self

from chainring._distributed.communicator import Communicator


class Interrupted(SystemExit):
    """Raised after a signal has ended the run: the iteration is complete, snapshots are saved and everything is finalized.

    If it is not caught, the process exits with the code of one killed by the signal: 143 for SIGTERM, 130 for SIGINT.

    Example::

        with contextlib.suppress(Interrupted):
            trainer.run()
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)

    def __str__(self) -> str:
        return f"the run was ended by {signal.Signals(int(str(self.code)) - 128).name}"


class Interruption:
    """While it is entered, SIGTERM and the first SIGINT only set `signum`; the second SIGINT raises KeyboardInterrupt.

    A handler that was there is called too, and is restored at the end. An ignored signal stays ignored. In a thread, where
    Python sets no handlers, nothing is changed. Several ranks end after the same iteration: at the beginning of each they
    start to compare what they have received, and at the beginning of the next they read the result, so none waits.

    A run inside an extension or an update of another run is a part of that run's iteration, and this iteration ends. So the
    inner run continues to its end, and the signal ends the outer one.
    """

    _entered: ClassVar[list[Interruption]] = []

    def __init__(self, comm: Communicator | None = None) -> None:
        self.signum: int | None = None  # the first signal; of several ranks, the largest that any received
        self.ends_run = False  # True when the run ends because of it: at once in one process, or when the ranks agree
        self._comm = comm or Communicator()
        self.is_shared = self._comm.world.size > 1  # several ranks have to agree
        self.is_nested = False  # True for a run inside an iteration of another one
        self.is_acknowledged = False  # True once a nested run has saved its state
        self._read_maximum: Callable[[], int] = lambda: 0  # the result of the last comparison
        self._sigint_count = 0
        self._handlers: dict[int, Any] = {}  # those that were there
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """The name of the signal, such as ``SIGTERM``."""
        return signal.Signals(self.signum or 0).name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.is_nested = any(outer._pid == self._pid for outer in self._entered)
            self._entered.append(self)
            for signum in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(signum)
                if handler not in (None, signal.SIG_IGN):  # None: not set by Python, which could not restore it
                    self._handlers[signum] = handler
                    signal.signal(signum, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
        if self in self._entered:
            self._entered.remove(self)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked worker has inherited this handler, and its trainer decides
        self._sigint_count += signum == signal.SIGINT
        self.signum = self.signum or signum
        self.ends_run = self.ends_run or not self.is_shared
        handler = self._handlers.get(signum)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(signum, frame)
        if self._sigint_count > 1 and signum == signal.SIGINT:
            raise KeyboardInterrupt

    def compare(self) -> None:
        """Begin to compare what the ranks have received, and read the result of the comparison before."""
        read, self._read_maximum = self._read_maximum, self._comm.start_max(self.signum or 0)
        if agreed := read():
            self.signum, self.ends_run = agreed, True

    def settle(self) -> None:
        """Drop, at the end of the loop, a signal that came too late for several ranks to agree upon."""
        if self.is_shared:
            self.signum = self._read_maximum() or None

    def error(self) -> BaseException:
        """Return what ends the run; in a notebook, whose kernel must continue, SIGINT stays a KeyboardInterrupt."""
        assert self.signum is not None
        shell = sys.modules.get("IPython")
        if self.signum == signal.SIGINT and shell is not None and hasattr(shell.get_ipython(), "kernel"):
            return KeyboardInterrupt(f"{self.name}: the run has ended at the end of an iteration")
        return Interrupted(self.signum)
