"""Failures of ranks: every rank learns of the first one, and none waits for a process that has ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_FAILURE, _RECEIVED, _PROCESS = "chainring/failure", "chainring/received", "chainring/process"  # keys of the store
_POLL_PERIOD = 0.25  # seconds
_RECEIVE_TIMEOUT = 3.0  # seconds
_PATIENCE = 5.0  # seconds in which an exchange with a process that has ended fails by itself, nearly always in a few ms


class FailureBroadcast:
    """Tells every rank of the first failure, through the store through which the ranks have met.

    A thread polls the store, because a rank may be waiting in an exchange that only the end of the failed process ends.
    Where the process of rank 0 has made the store, it ends with that process.

    The same thread watches the processes of the other ranks on this machine. The end of one closes its connections, by
    which the others notice it, unless a child process that it has forked keeps them open, or gloo misses it. A rank that
    goes on waiting then says why, with the stacks of its threads, and ends.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._first: str | None = None
        self._processes: dict[int, _Process] = {}  # of the other ranks
        self._waiting: dict[int, float] = {}  # since when each thread is in an exchange
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="chainring-failures", daemon=True)
        self._thread.start()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Return the context of an exchange, in which this thread waits for the other ranks."""
        thread = threading.get_ident()
        self._waiting[thread] = time.monotonic()
        try:
            yield
        finally:
            self._waiting.pop(thread, None)

    def publish(self, text: str) -> str:
        """Publish why this rank fails; return what was published first, which may be another rank's."""
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone
            if self._first is None:
                self._receive(self._store.compare_set(_FAILURE, "", text))
        return self._first or text

    def poll(self) -> str | None:
        """Return what was published first, ``None`` if nothing was: a rank publishes before it leaves."""
        with contextlib.suppress(RuntimeError):
            self._poll()
        return self._first

    def wait_for_others(self) -> None:
        """Let rank 0 stay until all ranks have received what was published, a few seconds at most."""
        until = time.monotonic() + _RECEIVE_TIMEOUT
        with contextlib.suppress(RuntimeError):
            while self._rank == 0 and self._store.add(_RECEIVED, 0) < self._size and time.monotonic() < until:
                time.sleep(_POLL_PERIOD / 10)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        ended: dict[int, float] = {}  # when the process of a rank was found to have ended
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_PROCESS}/{self._rank}", _this_process().to_text())
        while not self._closed.wait(_POLL_PERIOD):
            with contextlib.suppress(RuntimeError):
                if self._first is None:
                    self._poll()
                self._find_processes()
            for rank, process in self._processes.items():
                if rank not in ended and process.has_ended():
                    ended[rank] = time.monotonic()
            if ended and self._waits_since(max(ended.values())):
                self._stop(sorted(ended))

    def _find_processes(self) -> None:
        """Look for the processes of other ranks, each of which writes its own into the store when it starts."""
        if len(self._processes) == self._size - 1:
            return
        for rank in range(self._size):
            key = f"{_PROCESS}/{rank}"
            if rank != self._rank and rank not in self._processes and self._store.check([key]):
                self._processes[rank] = _Process.from_text(str(self._store.get(key), "utf-8"))

    def _waits_since(self, moment: float) -> bool:
        """Return True if a thread has been in one exchange for long, and so long after a moment."""
        latest = time.monotonic() - _PATIENCE
        return moment < latest and any(began < latest for began in list(self._waiting.values()))

    def _stop(self, ended: list[int]) -> None:
        """End this process, whose main thread waits in a place that no error reaches."""
        others = ", ".join(f"{rank} (pid {self._processes[rank].pid})" for rank in ended)
        first = "" if self._first is None else f"{self._first}\n"
        sys.stdout.flush()
        sys.stderr.write(
            f"{first}rank {self._rank} stops: the process of rank {others} has ended, and this rank went on waiting for it "
            f"for {_PATIENCE:g} s. Its connections are still open: a child process that it has forked may hold them. "
            "Nothing that was saved is lost: start again to go on from the newest snapshot. The stacks of all threads:\n"
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os._exit(1)

    def _poll(self) -> None:
        with self._lock:
            if self._first is None and self._store.check([_FAILURE]):
                self._receive(self._store.get(_FAILURE))

    def _receive(self, text: bytes) -> None:
        self._first = str(text, "utf-8")
        self._store.add(_RECEIVED, 1)


class _Process(NamedTuple):
    """A process, and where and when it was started, since its number may be used again."""

    machine: str
    pid: int
    started: str

    def to_text(self) -> str:
        return "\n".join([self.machine, str(self.pid), self.started])

    @classmethod
    def from_text(cls, text: str) -> _Process:
        machine, pid, started = text.split("\n")
        return cls(machine, int(pid), started)

    def has_ended(self) -> bool:
        """Return True if the process was on this machine and is there no more; of another machine nothing is known."""
        return self.machine == _machine() and self.started != _start_of(self.pid)


def _this_process() -> _Process:
    return _Process(_machine(), os.getpid(), _start_of(os.getpid()))


def _machine() -> str:
    """Return what tells this machine, and the numbers of processes in this container, from others."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_of(pid: int) -> str:
    """Return when a process was started, as its system counts; an empty text if it has ended or is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third on: proc(5)
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "unknown"
    return "" if fields[0] in "ZX" else fields[19]
