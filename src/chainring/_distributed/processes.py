"""Processes of ranks, as another process on the same machine sees them."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

_STACK_SIGNAL_FROM_LAST = 7  # a real-time signal that hardly anything uses, counted from the last
_ITERATION = struct.Struct("=q")
_DUMP_TIME = 0.3  # seconds in which a process writes its stacks when it is asked to
_stacks: tuple[int, int] | None = None  # of this process: its pid, and the file into which it dumps its stacks


class Process(NamedTuple):
    """A process, and where and when it was started, since its number may be used again.

    Attributes:
        machine: what tells the machine, and the numbers of its processes, from others.
        host: the name of the machine.
        pid: the number of the process.
        started: when, as its system counts.
        board: the number of its file that says how far the rank has come; -1 for none.
        stacks: the number of its file into which it dumps its stacks at a signal; -1 for none.
    """

    machine: str
    host: str
    pid: int
    started: str
    board: int
    stacks: int

    @property
    def is_near(self) -> bool:
        """True for a process on this machine; of another machine's nothing is known."""
        return self.machine == _machine()

    def has_ended(self) -> bool:
        """Return True if the process was on this machine and has ended."""
        return self.is_near and self.started != _start_of(self.pid)

    def is_stopped(self) -> bool:
        """Return True if the process is on this machine, and a signal or a debugger has stopped it."""
        return self.is_near and _fields_of(self.pid)[:1] in (["T"], ["t"])

    def read_board(self) -> tuple[int, Any] | None:
        """Return what a process on this machine has last written on its board; ``None`` if that cannot be read."""
        if not self.is_near or self.board < 0:
            return None
        for _ in range(3):  # it may be writing
            with contextlib.suppress(OSError, ValueError, struct.error):
                content = Path(f"/proc/{self.pid}/fd/{self.board}").read_bytes()
                return _ITERATION.unpack_from(content)[0], json.loads(content[_ITERATION.size :])
        return None

    def dump_stacks(self) -> str:
        """Let a process on this machine write its stacks, even if it holds the interpreter forever; return them."""
        if not self.is_near or self.stacks < 0 or self.has_ended():
            return ""
        file = Path(f"/proc/{self.pid}/fd/{self.stacks}")
        with contextlib.suppress(OSError):
            if not file.stat().st_size:  # another rank may have asked before
                os.kill(self.pid, signal.SIGRTMAX - _STACK_SIGNAL_FROM_LAST)
                time.sleep(_DUMP_TIME)
            return file.read_text(errors="replace")
        return ""


class Board:
    """A file in memory that says how far this rank has come; others on this machine read it, also when it is stopped.

    It begins with the number of updates, which is written after each.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("chainring-board") if hasattr(os, "memfd_create") else -1
        self._text = b""
        self.note(-1)

    def note(self, iteration: int) -> None:
        """Write down the number of updates so far; -1 where it is not known."""
        if self.file >= 0:
            os.pwrite(self.file, _ITERATION.pack(iteration), 0)

    def write(self, content: Any) -> None:
        """Write down everything else."""
        text = json.dumps(content).encode()
        if self.file >= 0 and text != self._text:
            os.pwrite(self.file, text.ljust(len(self._text)), _ITERATION.size)  # at once, so that no reader sees a part
            os.ftruncate(self.file, _ITERATION.size + len(text))
            self._text = text

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


def this_process(board: Board) -> Process:
    """Return this process, which from now on dumps its stacks on request."""
    pid = os.getpid()
    return Process(_machine(), socket.gethostname(), pid, _start_of(pid), board.file, _register_stacks())


def _register_stacks() -> int:
    """Let a signal that nobody has taken dump the stacks of all threads into a file in memory; return its number, or -1."""
    global _stacks
    if _stacks is None or _stacks[0] != os.getpid():
        number = getattr(signal, "SIGRTMAX", 0) - _STACK_SIGNAL_FROM_LAST
        if not hasattr(os, "memfd_create") or number < 0 or signal.getsignal(number) is not signal.SIG_DFL:
            return -1
        _stacks = os.getpid(), os.memfd_create("chainring-stacks")
        faulthandler.register(number, file=_stacks[1])
    return _stacks[1]


def _machine() -> str:
    """Return what tells this machine, and the numbers of processes in this container, from others."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _fields_of(pid: int) -> list[str]:
    """Return what the system says of a process, from its state on: proc(5)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _start_of(pid: int) -> str:
    """Return when a process was started, as its system counts; an empty text if it has ended or is not known."""
    fields = _fields_of(pid)
    if not fields:
        return "" if Path("/proc/self/stat").exists() else "unknown"
    return "" if fields[0] in "ZX" else fields[19]
