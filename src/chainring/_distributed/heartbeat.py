"""Heartbeat: every rank learns of the first failure, and no rank waits forever for one that does not arrive.

All ranks look several times a second into the store through which they have met. What is published there first is the
failure of the run: the traceback of a rank that has raised, or which ranks have not arrived where others wait. To find that
out, a rank that has waited for ``timeout`` seconds asks a question; every rank answers with its record, and the one that has
asked judges them. Of ranks on its own machine it reads the records also when they do not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from chainring._distributed.communicator import RankFailed
from chainring._distributed.group import BESIDE, OWN, count_collectives, is_timeout, lower_timeouts
from chainring._distributed.late import judge
from chainring._distributed.progress import Process, Progress, Record, this_process

T = TypeVar("T")
_FAILURE, _RECEIVED, _LEFT = "chainring/failure", "chainring/received", "chainring/left"  # keys of the store
_QUESTION, _RECORD = "chainring/question", "chainring/record"
_TURN = 0.25  # seconds between two looks at the store, and at the progress of this rank
_SILENCE = 1.0  # seconds without a turn after which the store, or a process on this machine, is taken not to answer
_CALL = 3.0  # seconds that a call of the store may take
_ANSWER = 3.0  # seconds in which the others answer a question
_PATIENCE = 5.0  # seconds in which an exchange with a process that has ended fails by itself, nearly always in a few ms
_MARGIN = 4.0  # seconds after the timeout at which an exchange itself ends with an error, when it is known why
_GRACE = 3.0  # seconds after that, in which this error reaches the script


class Failure(NamedTuple):
    """What was published first.

    Attributes:
        text: what every rank says.
        rank: the one that has published it.
        late: the ranks that have not arrived, none if all wait for each other; ``None`` if a rank has raised.
        collectives: how far the rank had come that has raised, or the first of those that are late.
    """

    text: str
    rank: int
    late: list[int] | None
    collectives: dict[str, Any]


class _StoreThread:
    """A store that is called in a thread of its own, since a call of one whose process is stopped does not return.

    Args:
        store: a store of torch.distributed.
        turn: is called in that thread in each turn.
    """

    def __init__(self, store: Any, turn: Callable[[Any], None]) -> None:
        self._store, self._turn = store, turn
        self.answered_at = time.monotonic()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="chainring-watch-store", daemon=True)
        self.thread.start()

    def call(self, function: Callable[[Any], T], seconds: float = _CALL) -> T | None:
        """Return what a function of the store returns, ``None`` if the store is gone or does not answer."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function(self._store))
            except Exception as error:
                result.set_exception(error)

        self._calls.put(call)
        with contextlib.suppress(Exception):
            return result.result(seconds)
        return None

    def answers(self) -> bool:
        """Return False if the process that has the store is stopped."""
        return time.monotonic() < self.answered_at + _SILENCE + _TURN

    def close(self) -> None:
        self._closed.set()
        self.thread.join(_CALL if self.answers() else _TURN)

    def leave(self, rank: int, size: int) -> None:
        """Let rank 0 go last, a second at most: torch prints many lines on a rank that finds the store gone."""
        until = time.monotonic() + _SILENCE
        with contextlib.suppress(Exception):  # it is gone
            left = 0 if self.thread.is_alive() else self._store.add(_LEFT, 1)
            while 0 < left < size and rank == 0 and time.monotonic() < until:
                time.sleep(_TURN / 50)
                left = self._store.add(_LEFT, 0)

    def _serve(self) -> None:
        while not self._closed.is_set():
            self.answered_at = time.monotonic()
            with contextlib.suppress(queue.Empty):
                self._calls.get(timeout=_TURN)()
            if not self._closed.is_set():
                with contextlib.suppress(Exception):  # the store is gone, or one of someone else fails
                    self._turn(self._store)


class Heartbeat:
    """Tells every rank of the first failure, and that is also that ranks do not arrive where others wait for them.

    One thread calls the store. Another one watches the progress of this rank and the processes on this machine, asks all
    ranks for their records when this one has waited for ``timeout`` seconds, and ends the process if a failure does not
    reach its main thread: exchanges end with an error by their own timeout, a little later than it, but a rank may wait
    where there is none, or be itself the one that is late.

    Args:
        store: a store of torch.distributed. Where the process of rank 0 has made it, it ends with that process.
        rank: the number of this rank.
        size: how many there are.
        timeout: seconds.
        lowers: whether the timeouts of process groups that others have made are lowered to it.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, lowers: bool = False) -> None:
        self._rank, self._size, self._timeout, self._lowers = rank, size, timeout, lowers
        self._failure: Failure | None = None
        self._known_at = 0.0  # when that was received
        self._is_leaving = False  # True once this rank ends with an error
        self._processes: dict[int, Process] = {}  # of the other ranks
        self._progress = Progress(rank)
        self._asked, self._next_question, self._must_ask = 0, 0.0, False  # questions; when this rank may ask the next one
        self._store = _StoreThread(store, self._turn)
        self._closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="chainring-watch-ranks", daemon=True)
        self._watching.start()

    @contextmanager
    def exchange(self, is_beside: bool = False) -> Iterator[None]:
        """Return the context of an exchange, in which this thread waits for the other ranks.

        Raises:
            RankFailed: some have not arrived.
        """
        thread = threading.get_ident()
        self._progress.waiting[thread] = time.monotonic(), is_beside
        try:
            yield
        except RuntimeError as error:
            if is_timeout(error):
                self._inquire()
            if self._failure is None or self._failure.late is None:
                raise
            raise RankFailed(self._failure.text) from error
        finally:
            self._progress.waiting.pop(thread, None)

    def this_process(self) -> Process:
        """Return this process, for `watch_processes` of the other ranks."""
        return this_process(self._progress.board)

    def watch_processes(self, processes: list[Process]) -> None:
        """Watch the processes of all ranks from now on, when the process groups are there."""
        if self._lowers:
            lower_timeouts(self._timeout + _MARGIN)
        self._processes = {rank: process for rank, process in enumerate(processes) if rank != self._rank}

    def has_failed(self) -> bool:
        """Return whether a failure has been received."""
        return self._failure is not None

    def publish(self, text: str) -> str:
        """Publish why this rank fails; return what was published first, which may be another rank's."""
        self._is_leaving = True
        self._publish(Failure(text, self._rank, None, count_collectives()), _CALL)
        return text if self._failure is None else self._failure.text

    def poll(self, is_timeout: bool = False) -> str | None:
        """Return what was published first, ``None`` if nothing was: a rank publishes before it leaves.

        With ``is_timeout`` an exchange took too long, and the ranks that have not arrived are determined.
        """
        self._is_leaving = True
        if self._failure is None:
            self._store.call(self._receive, _CALL if self._store.answers() else _SILENCE)
        if is_timeout:
            self._inquire()
        return None if self._failure is None else self._failure.text

    def wait_for_others(self) -> None:
        """Let rank 0 stay until all ranks have received what was published, a few seconds at most."""
        late = 0 if self._failure is None else len(self._failure.late or ())
        until = time.monotonic() + _CALL
        while self._rank == 0 and time.monotonic() < until:
            if (self._store.call(lambda store: store.add(_RECEIVED, 0)) or 0) >= self._size - late:
                return
            time.sleep(_TURN / 10)

    def close(self) -> None:
        self._closed.set()
        self._store.close()
        self._watching.join(_CALL if self._store.answers() else _TURN)
        if self._failure is None and not self._is_leaving and not self._watching.is_alive():
            self._store.leave(self._rank, self._size)
        self._progress.close()

    # in the thread of the store

    def _turn(self, store: Any) -> None:
        """Receive a failure, or answer a question."""
        self._receive(store)
        if store.check([f"{_QUESTION}/{self._asked + 1}"]):
            self._asked += 1
            self._next_question = time.monotonic() + _ANSWER + _TURN
            record = self._progress.record(with_stacks=True)
            record.answers = self._asked
            store.set(f"{_RECORD}/{self._rank}", record.to_json())

    def _receive(self, store: Any) -> None:
        if self._failure is None and store.check([_FAILURE]):
            self._known_at, self._failure = time.monotonic(), Failure(*json.loads(store.get(_FAILURE)))
            store.add(_RECEIVED, 1)

    def _ask(self, store: Any) -> dict[int, Record] | None:
        """Ask all ranks for their records and return these; ``None`` if another rank has asked just now."""
        if not _set_once(store, f"{_QUESTION}/{self._asked + 1}", str(self._rank)):
            return None
        until, answers = time.monotonic() + _ANSWER, dict[int, Record]()
        while len(answers) < self._size and time.monotonic() < until:
            self._turn(store)
            for rank in range(self._size):
                record = None if rank in answers else _read_record(store, rank)
                if record is not None and record.answers >= self._asked:
                    answers[rank] = record
            self._store.answered_at = time.monotonic()
            time.sleep(_TURN / 5)
        silent = [rank for rank in range(self._size) if rank not in answers]
        return answers | {rank: self._describe_silent(rank) for rank in silent}

    # in the thread that watches

    def _watch(self) -> None:
        ended: dict[int, float] = {}  # when the process of a rank was found to have ended
        while not self._closed.wait(_TURN):
            if self._lowers:
                lower_timeouts(self._timeout + _MARGIN)
            now = self._progress.turn()
            for rank, process in list(self._processes.items()):
                if rank not in ended and process.has_ended():
                    ended[rank] = now
            if ended and self._has_waited_since(max(ended.values())):
                self._stop_without(sorted(ended))
            if self._failure is not None:
                self._stop_if_stuck(now, self._failure)
            elif now > self._next_question and (self._must_ask or self._progress.is_stalled(self._timeout)):
                self._find_late()

    def _inquire(self) -> None:
        """Let the watching thread find out now who has not arrived, for some seconds at most."""
        until = time.monotonic() + _ANSWER + _GRACE
        self._must_ask = True
        while self._failure is None and time.monotonic() < until and self._watching.is_alive():
            time.sleep(_TURN / 10)
        self._must_ask = False

    def _find_late(self) -> None:
        """Find out which ranks have not arrived, and publish it; if another rank asks, it does."""
        self._next_question = time.monotonic() + _ANSWER + _TURN
        has_answered, records = False, None
        if self._store.answers():
            answer = self._store.call(lambda store: [self._ask(store)], _ANSWER + 2 * _TURN)
            has_answered, records = answer is not None, answer[0] if answer else None
        if has_answered and records is None:
            return  # another rank asks
        if records is None:
            records = self._records_without_store()
        waited = self._timeout - 2 * _TURN
        if self._must_ask:  # its exchange has ended by a timeout
            records[self._rank].waited = max(records[self._rank].waited, waited)
        verdict = judge(records, records if has_answered else [self._rank], waited, self._timeout)
        if verdict is None:
            self._next_question = time.monotonic() + (max(_PATIENCE, self._timeout / 10) if has_answered else _SILENCE)
            return
        collectives = dict(records[verdict.late[0]].collectives or {}) if verdict.late else {}
        self._publish(failure := Failure(verdict.text, self._rank, verdict.late, collectives), _SILENCE)
        if self._failure is None:
            self._known_at, self._failure = time.monotonic(), failure

    def _records_without_store(self) -> dict[int, Record]:
        """Return what is known on this machine, when the store does not answer."""
        records = {rank: Record(rank, collectives={}) for rank in range(self._size)}
        for rank, process in list(self._processes.items()):
            board = process.read_board()
            if board is not None:
                records[rank] = board[0] if board[1] < _SILENCE else self._describe_silent(rank)
        records[self._rank] = self._progress.record()
        is_lost = time.monotonic() > self._store.answered_at + _PATIENCE  # and not only slow
        if self._rank and is_lost and not any(record.state for record in records.values()):
            state = "The store through which the ranks have met does not answer; rank 0 has it, unless torchrun has."
            records[0] = Record(0, state=state)
        return records

    def _describe_silent(self, rank: int) -> Record:
        """Return what is known of a rank that does not answer, which is its last record if it is on this machine."""
        process = self._processes.get(rank)
        board = None if process is None else process.read_board()
        record = Record(rank) if board is None else board[0]
        record.state = (
            "Its process has ended."
            if process is not None and process.has_ended()
            else "Its process is stopped, or a call of C code holds its interpreter, or its machine is overloaded or lost."
        )
        record.stacks = "" if process is None else process.dump_stacks()
        return record

    def _publish(self, failure: Failure, seconds: float) -> None:
        """Publish a failure unless there is one, and receive what was published first."""

        def publish(store: Any) -> None:
            if self._failure is None:
                _set_once(store, _FAILURE, json.dumps(failure))
                self._receive(store)

        self._store.call(publish, seconds)

    def _has_waited_since(self, moment: float) -> bool:
        """Return True if a thread has been in one exchange for long, and so long after a moment."""
        latest = time.monotonic() - _PATIENCE
        return moment < latest and any(began < latest for began, _ in list(self._progress.waiting.values()))

    def _stop_if_stuck(self, now: float, failure: Failure) -> None:
        """End this process if a failure does not reach its main thread: it waits where no error comes, or is itself late."""
        known_for = now - self._known_at
        if self._is_leaving:
            return
        if self._rank in (failure.late or ()):
            if known_for > _GRACE:
                self._stop(f"{failure.text}\nrank {self._rank} stops, because it had not arrived.")
            return
        waiting = [since for since, is_beside in list(self._progress.waiting.values()) if not is_beside]
        began = min([self._progress.changed_at, *waiting])
        waits = waiting or not failure.collectives or _is_ahead(failure.collectives)
        limit = _PATIENCE
        if failure.late is not None:  # until its exchange should have ended
            limit = min(_MARGIN + _GRACE, began + self._timeout + _MARGIN + _GRACE - self._known_at)
        if waits and began < self._known_at + _GRACE and known_for > max(limit, _GRACE):
            self._stop(f"{failure.text}\nrank {self._rank} stops, because it kept waiting.")

    def _stop_without(self, ended: list[int]) -> None:
        others = ", ".join(f"{rank} (pid {self._processes[rank].pid})" for rank in ended)
        first = "" if self._failure is None else f"{self._failure.text}\n"
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


def _set_once(store: Any, key: str, text: str) -> bool:
    """Write an entry of the store unless there is one; return whether it is this text then."""
    try:
        return bytes(store.compare_set(key, "", text)) == text.encode()
    except RuntimeError:  # a store of someone else that cannot compare
        if store.add(f"{key}/claims", 1) == 1:
            store.set(key, text)
        return bytes(store.get(key)) == text.encode()


def _read_record(store: Any, rank: int) -> Record | None:
    key = f"{_RECORD}/{rank}"
    return Record(**json.loads(store.get(key))) if store.check([key]) else None


def _is_ahead(others: dict[str, Any]) -> bool:
    """Return whether this rank has begun more than another in a group whose waits nobody notes, such as that of DDP."""
    return any(
        name in others and number > others[name][0]
        for name, (number, _, description) in count_collectives().items()
        if description not in (OWN, BESIDE)
    )
