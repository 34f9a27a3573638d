"""Failures of ranks: every rank learns of the first one, and no rank waits forever for one that does not arrive."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from chainring._distributed.communicator import RankFailed
from chainring._distributed.processes import Board, Process, this_process
from chainring._distributed.watchdog import (
    BESIDE,
    Status,
    count_collectives,
    describe_late,
    find_late,
    format_stacks,
    is_ahead,
    lower_timeouts,
    noting,
    read_position,
)

T = TypeVar("T")
_FAILURE, _RECEIVED, _PARTED = "chainring/failure", "chainring/received", "chainring/parted"  # keys of the store
_QUESTION, _STATUS = "chainring/question", "chainring/status"
_POLL_PERIOD = 0.25  # seconds
_RECEIVE_TIMEOUT = 3.0  # seconds
_PATIENCE = 5.0  # seconds in which an exchange with a process that has ended fails by itself, nearly always in a few ms
_SILENCE = 1.0  # seconds after which others on its machine answer for a rank
_INQUIRY = 3.0  # seconds in which it is found out who has not arrived
_MARGIN = 4.0  # seconds after which an exchange itself ends with an error, when it is known why
_GRACE = 3.0  # seconds after that, in which this error reaches the script
_PAUSE = 5.0  # seconds without a turn of the watching thread that mean that this process was stopped


class _Failure(NamedTuple):
    """What was published first.

    Attributes:
        text: what every rank says.
        rank: the one that has published it.
        is_stall: whether ranks have not arrived; otherwise one has raised.
        late: these ranks; none if all wait for each other.
        collectives: how far the rank had come that has raised, or the first of these.
    """

    text: str
    rank: int
    is_stall: bool
    late: list[int]
    collectives: dict[str, Any]


class FailureBroadcast:
    """Tells every rank of the first failure, through the store through which the ranks have met.

    One thread serves the store, because a rank may be waiting in an exchange that only the end of the failed process ends,
    and the store may be in a process that is stopped. Where the process of rank 0 has made it, it ends with that process.

    Another thread watches how this rank and the processes of the others on this machine come along. If this one has waited
    in an exchange for ``timeout`` seconds, it asks all how far they have come, and the failure is that some have not
    arrived. Exchanges then end by their own timeout, a little later. A rank that continues waiting, and one that others have
    waited for, ends with the stacks of its threads: no error reaches its main thread.

    Args:
        store: a store of torch.distributed.
        rank: the number of this rank.
        size: how many there are.
        timeout: seconds.
        lowers: whether the timeouts of process groups that others have made are lowered to it.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, lowers: bool = False) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._limit, self._lowers = timeout, lowers
        self._owner = threading.get_ident()
        self._first: _Failure | None = None
        self._known_at = 0.0  # when it was received
        self._is_leaving = False  # True once this rank ends with an error
        self._processes: dict[int, Process] = {}  # of the other ranks
        self._waiting: dict[int, tuple[float, bool]] = {}  # since when each thread is in an exchange, and whether beside
        self._progress: Any = None  # how far this rank has come
        self._progress_at = self._awake_at = time.monotonic()  # when that has changed, when this process began to run again
        self._asked = 0  # how many questions were asked
        self._asked_at = 0.0  # when the last, as long as others may have to be answered for
        self._must_ask, self._ask_after = False, 0.0
        self._board = Board()
        self._write_board()
        noting(self._board.note)
        self._store_at = time.monotonic()  # when the store has last answered
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"chainring-watch-{name}", daemon=True)
            for name, target in (("store", self._serve_store), ("ranks", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def exchange(self, is_beside: bool = False) -> Iterator[None]:
        """Return the context of an exchange, in which this thread waits for the other ranks.

        Raises:
            RankFailed: some have not arrived.
        """
        thread = threading.get_ident()
        self._waiting[thread] = time.monotonic(), is_beside
        try:
            yield
        except RuntimeError as error:
            if "imed out" in str(error):
                self._inquire()
            if self._first is None or not self._first.is_stall:
                raise
            raise RankFailed(self._first.text) from error
        finally:
            self._waiting.pop(thread, None)

    def this_process(self) -> Process:
        """Return this process, for `watch_processes` of the other ranks."""
        return this_process(self._board)

    def watch_processes(self, processes: list[Process]) -> None:
        """Watch the processes of all ranks from now on, when the process groups are there."""
        if self._lowers:
            lower_timeouts(self._limit + _MARGIN)
        self._processes = {rank: process for rank, process in enumerate(processes) if rank != self._rank}

    def has_failed(self) -> bool:
        """Return whether a failure has been received."""
        return self._first is not None

    def publish(self, text: str) -> str:
        """Publish why this rank fails; return what was published first, which may be another rank's."""
        self._is_leaving = True
        failure = _Failure(text, self._rank, False, [], count_collectives())
        self._on_store(lambda: self._publish(failure))
        return text if self._first is None else self._first.text

    def poll(self, is_timeout: bool = False) -> str | None:
        """Return what was published first, ``None`` if nothing was: a rank publishes before it leaves.

        With ``is_timeout`` an exchange took too long, and the ranks that have not arrived are determined.
        """
        self._is_leaving = True
        if self._first is None:
            self._on_store(self._poll, _RECEIVE_TIMEOUT if self._store_answers() else _SILENCE)
        if is_timeout:
            self._inquire()
        return None if self._first is None else self._first.text

    def _inquire(self) -> None:
        """Let the other thread find out now who has not arrived, for some seconds at most."""
        until = time.monotonic() + _INQUIRY + _GRACE
        self._must_ask = True
        while self._first is None and time.monotonic() < until and self._threads[1].is_alive():
            time.sleep(_POLL_PERIOD / 10)
        self._must_ask = False

    def wait_for_others(self) -> None:
        """Let rank 0 stay until all ranks have received what was published, a few seconds at most."""
        late = 0 if self._first is None else len(self._first.late)
        until = time.monotonic() + _RECEIVE_TIMEOUT
        while self._rank == 0 and time.monotonic() < until:
            if (self._on_store(lambda: self._store.add(_RECEIVED, 0)) or 0) >= self._size - late:
                return
            time.sleep(_POLL_PERIOD / 10)

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(_RECEIVE_TIMEOUT if self._store_answers() else _POLL_PERIOD)
        if self._first is None and not self._is_leaving and not any(thread.is_alive() for thread in self._threads):
            self._part()
        noting(self._board.note, False)
        self._board.close()

    def _part(self) -> None:
        """Let rank 0 go last, a second at most: torch prints many lines on a rank that finds the store gone."""
        until = time.monotonic() + _SILENCE
        with contextlib.suppress(Exception):  # it is gone
            here = self._store.add(_PARTED, 1)
            while self._rank == 0 and here < self._size and time.monotonic() < until:
                time.sleep(_POLL_PERIOD / 50)
                here = self._store.add(_PARTED, 0)

    # the thread of the store

    def _on_store(self, function: Callable[[], T], patience: float = _RECEIVE_TIMEOUT) -> T | None:
        """Return what a function of the store returns, ``None`` if the store is gone or does not answer."""
        result: Future[T] = Future()

        def task() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        self._tasks.put(task)
        with contextlib.suppress(Exception):
            return result.result(patience)
        return None

    def _store_answers(self) -> bool:
        """Return False if the process that has the store is stopped."""
        return time.monotonic() < self._store_at + _SILENCE + _POLL_PERIOD

    def _serve_store(self) -> None:
        while not self._closed.is_set():
            self._store_at = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._tasks.get(timeout=_POLL_PERIOD)()
            if self._closed.is_set():
                return
            with contextlib.suppress(Exception):  # the store is gone, or one of someone else fails
                self._poll()
                self._answer_questions()

    def _publish(self, failure: _Failure) -> None:
        if self._first is None:
            self._receive(self._set_once(_FAILURE, json.dumps(failure)))

    def _set_once(self, key: str, text: str) -> bytes:
        """Write an entry of the store unless there is one; return the one that there is then."""
        with contextlib.suppress(RuntimeError):
            return bytes(self._store.compare_set(key, "", text))
        if self._store.add(f"{key}/claims", 1) == 1:  # a store of someone else that cannot compare
            self._store.set(key, text)
        return bytes(self._store.get(key))

    def _poll(self) -> None:
        if self._first is None and self._store.check([_FAILURE]):
            self._receive(self._store.get(_FAILURE))

    def _receive(self, text: bytes) -> None:
        self._known_at = time.monotonic()
        self._first = _Failure(*json.loads(text))
        self._store.add(_RECEIVED, 1)

    def _answer_questions(self) -> None:
        """Say how far this rank has come if one asks, and a little later for those on this machine that do not."""
        if self._store.check([f"{_QUESTION}/{self._asked + 1}"]):
            self._asked, self._asked_at = self._asked + 1, time.monotonic()
            self._ask_after = self._asked_at + _INQUIRY + _POLL_PERIOD
            self._answer(self._status(with_stacks=True))
        if self._asked_at and time.monotonic() > self._asked_at + _SILENCE:
            self._asked_at = 0.0
            near = sorted(rank for rank, process in self._processes.items() if process.is_near)
            states = {rank: self._find_state(rank) for rank in near}
            if any(rank < self._rank and not state for rank, state in states.items()):
                return  # that one answers for them
            for rank in (rank for rank, state in states.items() if state and self._read_answer(rank) is None):
                self._answer(self._status_of(rank, states[rank]))

    def _answer(self, status: Status) -> None:
        status.asked = self._asked
        self._store.set(f"{_STATUS}/{status.rank}", json.dumps(status.to_json()))

    def _read_answer(self, rank: int) -> Status | None:
        """Return the answer of a rank to the last question; ``None`` if it has given none."""
        key = f"{_STATUS}/{rank}"
        status = Status(**json.loads(self._store.get(key))) if self._store.check([key]) else None
        return None if status is None or status.asked < self._asked else status

    def _ask(self) -> dict[int, Status]:
        """Ask all how far they have come and return what they answer; nothing if another rank has asked just now."""
        number = self._asked + 1
        if self._set_once(f"{_QUESTION}/{number}", str(self._rank)) != str(self._rank).encode():
            return {}
        until = time.monotonic() + _INQUIRY
        found: dict[int, Status] = {}
        while len(found) < self._size and time.monotonic() < until:
            self._answer_questions()
            for rank in range(self._size):
                if rank not in found and (status := self._read_answer(rank)) is not None:
                    found[rank] = status
            time.sleep(_POLL_PERIOD / 5)
            self._store_at = time.monotonic()
            self._write_board()  # the other thread waits for this one
        for rank in range(self._size):
            if rank not in found:
                found[rank] = self._status_of(rank, "It does not answer: its process is stopped, or its machine is lost.")
        return found

    # the thread that watches

    def _watch(self) -> None:
        ended: dict[int, float] = {}  # when the process of a rank was found to have ended
        turn = time.monotonic()
        while not self._closed.wait(_POLL_PERIOD):
            now, before = time.monotonic(), turn
            turn = now
            if now > before + _PAUSE:
                self._awake_at = now
            self._note_progress(now)
            for rank, process in list(self._processes.items()):
                if rank not in ended and process.has_ended():
                    ended[rank] = now
            if ended and self._waits_since(max(ended.values())):
                self._stop_without(sorted(ended))
            if self._first is not None:
                self._end_if_stuck(now)
            elif now > self._ask_after and (self._must_ask or self._has_stalled(now)):
                self._find_late()

    def _note_progress(self, now: float) -> None:
        collectives = count_collectives()
        if self._lowers:
            lower_timeouts(self._limit + _MARGIN)
        progress = read_position(), {name: row[0] for name, row in collectives.items() if row[2] != BESIDE}
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        self._write_board()

    def _write_board(self) -> None:
        self._board.write([time.monotonic(), self._status().to_json()])

    def _status(self, with_stacks: bool = False) -> Status:
        now, waits = time.monotonic(), list(self._waiting.values())
        seconds = [
            max((now - since for since, beside in waits if beside == wanted), default=0.0) for wanted in (False, True)
        ]
        return Status(
            self._rank, *self._host_and_pid(), position=read_position(), idle=now - max(self._progress_at, self._awake_at),
            waited=min(seconds[0], now - self._awake_at), waited_beside=min(seconds[1], now - self._awake_at),
            collectives=count_collectives(), stacks=format_stacks(self._owner) if with_stacks else "",
        )  # fmt: skip

    def _find_state(self, rank: int) -> str:
        """Return why a rank on this machine does not answer; an empty text if its process runs."""
        process = self._processes[rank]
        if process.has_ended():
            return "Its process has ended."
        if process.is_stopped():
            return f"Its process is stopped, by SIGSTOP or a debugger: `kill -CONT {process.pid}` lets it continue."
        board = process.read_board()
        if board is not None and time.monotonic() > board[1][0] + _SILENCE:
            return "It does not answer, because a call of C code holds the interpreter, or the machine is overloaded."
        return ""

    def _status_of(self, rank: int, state: str) -> Status:
        """Return what is known on this machine of a rank that does not answer."""
        process = self._processes.get(rank)
        if process is None:
            return Status(rank, state=state)
        board = process.read_board()
        status = Status(rank)
        if board is not None:
            iteration, (written, content) = board
            status = Status(**content)
            status.idle += time.monotonic() - written
            if iteration > (-1 if status.position is None else status.position[0]):
                status.position = iteration, None
        status.host, status.pid, status.state = process.host, process.pid, state
        if not process.is_stopped():
            status.stacks = process.dump_stacks()
        return status

    def _has_stalled(self, now: float) -> bool:
        """Return True if this rank waits for long, or does nothing of which others would know."""
        since = min([self._progress_at, *(began for began, _ in list(self._waiting.values()))])
        return now > max(since, self._awake_at) + self._limit

    def _find_late(self) -> None:
        """Find out which ranks have not arrived, and publish it; if another rank asks, it does."""
        self._ask_after = time.monotonic() + _INQUIRY + _POLL_PERIOD
        statuses = self._on_store(self._ask, _INQUIRY + _POLL_PERIOD) if self._store_answers() else None
        if statuses == {}:
            return
        failure = (
            self._judge(self._near_statuses(), [self._rank]) if statuses is None else self._judge(statuses, list(statuses))
        )
        if failure is None:
            self._ask_after = time.monotonic() + (_SILENCE if statuses is None else max(_PATIENCE, self._limit / 10))
            return
        self._on_store(lambda: self._publish(failure), _SILENCE)
        if self._first is None:
            self._known_at, self._first = time.monotonic(), failure

    def _near_statuses(self) -> dict[int, Status]:
        """Return what is known on this machine, when the store does not answer."""
        statuses = {rank: Status(rank, collectives={}) for rank in range(self._size)}
        for rank, process in list(self._processes.items()):
            if process.is_near:
                statuses[rank] = self._status_of(rank, self._find_state(rank))
        statuses[self._rank] = self._status()
        is_lost = time.monotonic() > self._store_at + _PATIENCE  # and not only slow
        if self._rank and is_lost and not any(status.state for status in statuses.values()):
            state = "The store through which the ranks have met does not answer; rank 0 has it, unless torchrun has."
            statuses[0] = Status(0, state=state)
        return statuses

    def _judge(self, statuses: dict[int, Status], asking: list[int]) -> _Failure | None:
        """Return that some ranks have not arrived where one of others has waited for long; ``None`` if none has."""
        limit = self._limit - 2 * _POLL_PERIOD
        if self._must_ask:  # its exchange has ended by a timeout
            statuses[self._rank].waited = max(statuses[self._rank].waited, limit)
        for is_beside in (False, True):
            for waiting in sorted((statuses[rank] for rank in asking), key=lambda status: -status.seconds(is_beside)):
                if waiting.seconds(is_beside) < limit or waiting.state:
                    continue
                if late := find_late(waiting, statuses, is_beside):
                    text = describe_late(late, statuses, waiting.seconds(is_beside), self._limit)
                    return _Failure(text, self._rank, True, late, dict(statuses[late[0]].collectives or {}))
        if all(max(status.waited, status.waited_beside) >= limit for status in statuses.values()):
            text = describe_late([], statuses, statuses[self._rank].waited, self._limit)
            return _Failure(text, self._rank, True, [], {})
        return None

    def _end_if_stuck(self, now: float) -> None:
        """End this process if a failure does not reach its main thread: it waits where no error comes, or is itself late."""
        failure = self._first
        if failure is None or self._is_leaving:
            return
        known_for = now - self._known_at
        if self._rank in failure.late:
            is_stuck = known_for > _GRACE
        else:
            waiting = [since for since, is_beside in list(self._waiting.values()) if not is_beside]
            began = min([self._progress_at, *waiting])
            waits = waiting or not failure.collectives or is_ahead(count_collectives(), failure.collectives)
            limit = _PATIENCE
            if failure.is_stall:  # until its exchange should have ended
                limit = min(_MARGIN + _GRACE, began + self._limit + _MARGIN + _GRACE - self._known_at)
            is_stuck = bool(waits) and began < self._known_at + _GRACE and known_for > max(limit, _GRACE)
        if is_stuck:
            what = "had not arrived" if self._rank in failure.late else "kept waiting"
            self._stop(f"{failure.text}\nrank {self._rank} stops, because it {what}.")

    def _waits_since(self, moment: float) -> bool:
        """Return True if a thread has been in one exchange for long, and so long after a moment."""
        latest = time.monotonic() - _PATIENCE
        return moment < latest and any(began < latest for began, _ in list(self._waiting.values()))

    def _stop_without(self, ended: list[int]) -> None:
        others = ", ".join(f"{rank} (pid {self._processes[rank].pid})" for rank in ended)
        first = "" if self._first is None else f"{self._first.text}\n"
        self._stop(
            f"{first}rank {self._rank} stops: the process of rank {others} has ended, and this rank kept waiting for it "
            f"for {_PATIENCE:g} s. Its connections are still open: a child process that it has forked may hold them."
        )

    def _stop(self, text: str) -> None:
        """End this process, whose main thread waits in a place that no error reaches."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        sys.stderr.write(
            f"{text} Nothing that was saved is lost: start again to continue from the newest snapshot. The stacks of all "
            "threads:\n"
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os._exit(1)

    def _host_and_pid(self) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()
