"""How far a rank has come: its record, which other ranks read, also on this machine when its process is stopped."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chainring._distributed.group import BACKGROUND_GROUP, count_collectives
from chainring._files import machine, start_of

_LONGEST_STACK = 20_000  # characters
_PAUSE = 5.0  # seconds without a turn of the watching thread that mean that this process was stopped
_STACK_SIGNAL_FROM_LAST = 7  # a real-time signal that hardly anything uses, counted from the last
_DUMP_TIME = 0.3  # seconds between two looks whether a process has written its stacks; a stopped one does not
_ITERATION = struct.Struct("=q")
_positions: list[Callable[[], tuple[int, str | None]]] = []  # of the runs in this process, the inner ones last
_boards: list[int] = []  # the files from which other processes read how far this one has come
_stacks: tuple[int, int] | None = None  # of this process: its pid, and the file into which it dumps its stacks


@contextmanager
def reporting_position(position: Callable[[], tuple[int, str | None]]) -> Iterator[None]:
    """Let a function say, during a run, its last iteration and the extension that is called."""
    _positions.append(position)
    try:
        yield
    finally:
        _positions.remove(position)


def note_iteration(iteration: int) -> None:
    """Note after each update how many there were, which a process that is stopped or hangs cannot say any more."""
    for board in _boards:
        os.pwrite(board, _ITERATION.pack(iteration), 0)


def _read_position() -> tuple[int, str | None] | None:
    """Return the last iteration of the run in this process and the extension that is called; ``None`` outside of runs."""
    for position in _positions[-1:]:
        with contextlib.suppress(Exception):  # an updater of someone else computes it, and not always
            iteration, extension = position()
            return int(iteration), extension
    return None


@dataclass
class Record:
    """How far a rank has come."""

    rank: int
    host: str = ""
    pid: int = 0
    position: list[Any] | tuple[int, str | None] | None = None  # its last iteration, and the extension that it calls
    idle: float = 0.0  # seconds since it has last begun a collective or ended an iteration
    waited: float = 0.0  # seconds for which it has waited in an exchange of its communicator; 0 if it does not
    waited_beside: float = 0.0  # the same of another thread, in which a snapshot is agreed upon
    collectives: Mapping[str, Any] | None = None  # what `count_collectives` returns; None if nothing is known of it
    answers: int = 0  # the number of the question that it answers; 0 if it answers none
    state: str = ""  # why it does not answer; an empty text if it does
    stacks: str = field(default="", repr=False)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Progress:
    """How far this rank has come, on which `turn` looks several times a second.

    Attributes:
        waiting: since when each thread waits in an exchange, and whether in one beside those of the training.
        changed_at: when it has last begun a collective or ended an iteration.
        awake_at: when this process has begun to run, or to run again after it was stopped.
        board: a file in memory with the number of updates, which is written after each, and the record of this rank. Other
            processes on this machine read it, also when this one is stopped.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._owner = rank, threading.get_ident()
        self.waiting: dict[int, tuple[float, bool]] = {}
        self._seen: Any = None
        self.changed_at = self.awake_at = self._turn_at = time.monotonic()
        self.board, self._length = -1, 0
        if hasattr(os, "memfd_create"):
            self.board = os.memfd_create("chainring-board")
            os.pwrite(self.board, _ITERATION.pack(-1), 0)  # not known yet
            _boards.append(self.board)
        self.turn()

    def turn(self) -> float:
        """Look how far this rank has come, and write its record on the board; return the time."""
        before, self._turn_at = self._turn_at, time.monotonic()
        if self._turn_at > before + _PAUSE:
            self.awake_at = self._turn_at
        seen = _read_position(), {name: row[0] for name, row in count_collectives().items() if row[2] != BACKGROUND_GROUP}
        if seen != self._seen:
            self._seen, self.changed_at = seen, self._turn_at
        if self.board >= 0:
            text = json.dumps([time.monotonic(), self.record().to_json()]).encode()
            os.pwrite(self.board, text.ljust(self._length), _ITERATION.size)  # at once, so that no reader sees half of it
            os.ftruncate(self.board, _ITERATION.size + len(text))
            self._length = len(text)
        return self._turn_at

    def record(self, with_stacks: bool = False) -> Record:
        """Return the record of this rank as of now."""
        now, waits = time.monotonic(), list(self.waiting.values())
        waited, beside = (
            min(max((now - since for since, is_beside in waits if is_beside == wanted), default=0.0), now - self.awake_at)
            for wanted in (False, True)
        )
        texts = []
        if with_stacks:  # that of the owner first, those of the library left out
            names, frames = {thread.ident: thread.name for thread in threading.enumerate()}, sys._current_frames()
            main = threading.main_thread().ident
            for ident in sorted(frames, key=lambda ident: (ident != self._owner, ident != main)):
                name = names.get(ident, "a thread")
                if not name.startswith("chainring-watch") and ident != threading.get_ident():
                    texts.append(f"{name} (most recent call last):\n{''.join(traceback.format_stack(frames[ident]))}")
        return Record(
            self._rank, socket.gethostname(), os.getpid(), _read_position(), now - max(self.changed_at, self.awake_at),
            waited, beside, count_collectives(), stacks="".join(texts)[:_LONGEST_STACK],
        )  # fmt: skip

    def is_stalled(self, seconds: float) -> bool:
        """Return whether this rank has waited for so long, or has done nothing since that other ranks would notice."""
        since = min([self.changed_at, *(began for began, _ in list(self.waiting.values()))])
        return time.monotonic() > max(since, self.awake_at) + seconds

    def close(self) -> None:
        board, self.board = self.board, -1
        if board >= 0:
            _boards.remove(board)
            os.close(board)


class Process(NamedTuple):
    """The process of a rank, as other processes on its machine see it."""

    machine: str  # what tells the machine, and the numbers of its processes, from others
    pid: int
    started: int | None  # when it was started, since its number may be used again
    board: int  # the number of the file of its `Progress`; -1 for none
    stacks: int  # the number of the file into which it dumps its stacks at a signal; -1 for none

    @property
    def is_near(self) -> bool:
        """True for a process on this machine; of another machine's nothing is known."""
        return self.machine == machine()

    def has_ended(self) -> bool:
        """Return True if the process was on this machine and has ended."""
        return self.is_near and start_of(self.pid) != self.started

    def read_board(self) -> tuple[Record, float] | None:
        """Return the record of a process on this machine and its age in seconds; ``None`` if it cannot be read."""
        if not self.is_near or self.board < 0:
            return None
        for _ in range(3):  # it may be writing
            with contextlib.suppress(OSError, ValueError, struct.error):
                content = Path(f"/proc/{self.pid}/fd/{self.board}").read_bytes()
                (iteration,) = _ITERATION.unpack_from(content)
                written, text = json.loads(content[_ITERATION.size :])
                record, age = Record(**json.loads(text)), time.monotonic() - written
                record.idle += age
                if iteration > (-1 if record.position is None else record.position[0]):
                    record.position = iteration, None
                return record, age
        return None

    def dump_stacks(self) -> str:
        """Let a process on this machine write its stacks, even if it holds the interpreter forever; return them."""
        if not self.is_near or self.stacks < 0 or self.has_ended():
            return ""
        file = Path(f"/proc/{self.pid}/fd/{self.stacks}")
        with contextlib.suppress(OSError):
            if not file.stat().st_size:  # another rank may have asked before
                os.kill(self.pid, signal.SIGRTMAX - _STACK_SIGNAL_FROM_LAST)
                for _ in range(10):
                    time.sleep(_DUMP_TIME)
                    if file.stat().st_size:
                        break
            return file.read_text(errors="replace")
        return ""


def this_process(board: int) -> Process:
    """Return this process, whose stacks a signal that nobody has taken dumps from now on into a file in memory."""
    global _stacks
    pid = os.getpid()
    known = machine(), pid, start_of(pid), board
    if _stacks is None or _stacks[0] != pid:
        number = getattr(signal, "SIGRTMAX", 0) - _STACK_SIGNAL_FROM_LAST
        if not hasattr(os, "memfd_create") or number < 0 or signal.getsignal(number) is not signal.SIG_DFL:
            return Process(*known, -1)
        _stacks = pid, os.memfd_create("chainring-stacks")
        faulthandler.register(number, file=_stacks[1])
    return Process(*known, _stacks[1])
