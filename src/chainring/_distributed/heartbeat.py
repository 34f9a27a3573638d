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
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from chainring._distributed.communicator import RankFailed
from chainring._distributed.group import BACKGROUND_GROUP, MAIN_GROUP, count_collectives, is_timeout, lower_timeouts
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
_MOST_DESCRIBED = 4  # ranks


class Failure(NamedTuple):
    """What was published first."""

    text: str  # what every rank says
    rank: int  # the one that has published it
    late: list[int] | None  # the ranks that have not arrived, none if all wait for each other; None if a rank has raised
    collectives: dict[str, Any]  # how far the rank had come that has raised, or the first of those that are late


class _StoreThread:
    """A store that is called in a thread of its own, since a call of one whose process is stopped does not return.

    That thread also calls ``turn`` with it, several times a second.
    """

    def __init__(self, store: Any, turn: Callable[[Any], None]) -> None:
        self._store, self._turn = store, turn
        self.answered_at = time.monotonic()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="chainring-watch-store", daemon=True)
        self.thread.start()

    def call(self, function: Callable[[Any], T], seconds: float = _CALL) -> T | None:
        """Call a function with the store; return its result, ``None`` if the store is gone or does not answer."""
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
        self._calls.put(lambda: None)  # it may wait for a call
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
    where there is none, or be itself the one that is late. Where the process of rank 0 has made the store of
    torch.distributed, it ends with that process. If this ``lowers`` them, the timeouts of process groups that others have
    made become ``timeout`` too.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, lowers: bool = False) -> None:
        self._rank, self._size, self._timeout, self._lowers = rank, size, timeout, lowers
        self.failure: Failure | None = None
        self._known_at = 0.0  # when that was received
        self._is_leaving = False  # True once this rank ends with an error
        self._processes: dict[int, Process] = {}  # of the other ranks
        self._progress = Progress(rank)
        self._asked, self._next_question, self._must_ask = 0, 0.0, False  # questions; when this rank may ask the next one
        self._store = _StoreThread(store, self._turn)
        self._closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="chainring-watch-ranks", daemon=True)
        self._watching.start()

    def among(self, store: Any, rank: int, size: int) -> Heartbeat:
        """Return that of this process among other ranks."""
        return Heartbeat(store, rank, size, self._timeout, self._lowers)

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
            if self.failure is None or self.failure.late is None:
                raise
            raise RankFailed(self.failure.text) from error
        finally:
            self._progress.waiting.pop(thread, None)

    def watch_processes(self, gather: Callable[[Process], list[Process]]) -> None:
        """Watch the processes of all ranks from now on, when the process groups are there."""
        processes = gather(this_process(self._progress.board))
        if self._lowers:
            lower_timeouts(self._timeout + _MARGIN)
        self._processes = {rank: process for rank, process in enumerate(processes) if rank != self._rank}

    def publish(self, text: str) -> str:
        """Publish why this rank fails; return what was published first, which may be another rank's."""
        self._is_leaving = True
        self._publish(Failure(text, self._rank, None, count_collectives()), _CALL)
        return text if self.failure is None else self.failure.text

    def poll(self, is_timeout: bool = False) -> str | None:
        """Return what was published first, ``None`` if nothing was: a rank publishes before it leaves.

        With ``is_timeout`` an exchange took too long, and the ranks that have not arrived are determined.
        """
        self._is_leaving = True
        if self.failure is None:
            self._store.call(self._receive, _CALL if self._store.answers() else _SILENCE)
        if is_timeout:
            self._inquire()
        return None if self.failure is None else self.failure.text

    def find_silent(self) -> list[int] | None:
        """Ask all ranks for their records; return those that do not answer, ``None`` if another rank asks just now."""
        answers = self._store.call(self._ask, _CALL + _ANSWER)
        return None if answers is None else [rank for rank in range(self._size) if rank not in answers]

    def wait_for_others(self) -> None:
        """Let rank 0 stay until all ranks have received what was published, a few seconds at most."""
        late = 0 if self.failure is None else len(self.failure.late or ())
        until = time.monotonic() + _CALL
        while self._rank == 0 and time.monotonic() < until:
            if (self._store.call(lambda store: store.add(_RECEIVED, 0)) or 0) >= self._size - late:
                return
            time.sleep(_TURN / 10)

    def close(self) -> None:
        self._closed.set()
        self._store.close()
        self._watching.join(_CALL if self._store.answers() else _TURN)
        if self.failure is None and not self._is_leaving and not self._watching.is_alive():
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
        if self.failure is None and store.check([_FAILURE]):
            self._known_at, self.failure = time.monotonic(), Failure(*json.loads(store.get(_FAILURE)))
            store.add(_RECEIVED, 1)

    def _ask(self, store: Any) -> dict[int, Record] | None:
        """Ask all ranks for their records and return those that come; ``None`` if another rank has asked just now."""
        if not set_once(store, f"{_QUESTION}/{self._asked + 1}", str(self._rank)):
            return None
        until, answers = time.monotonic() + _ANSWER, dict[int, Record]()
        while len(answers) < self._size and time.monotonic() < until:
            self._turn(store)
            for rank in set(range(self._size)) - answers.keys():
                if store.check([key := f"{_RECORD}/{rank}"]):
                    record = Record(**json.loads(store.get(key)))
                    if record.answers >= self._asked:
                        answers[rank] = record
            self._store.answered_at = time.monotonic()
            time.sleep(_TURN / 5)
        return answers

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
            latest = time.monotonic() - _PATIENCE
            waits = any(began < latest for began, _ in list(self._progress.waiting.values()))
            if ended and waits and max(ended.values()) < latest:
                others = ", ".join(f"{rank} (pid {self._processes[rank].pid})" for rank in sorted(ended))
                first = "" if self.failure is None else f"{self.failure.text}\n"
                self.stop(
                    f"{first}rank {self._rank} stops: the process of rank {others} has ended, and this rank kept waiting "
                    f"for it for {_PATIENCE:g} s. Its connections are still open: a child process that it has forked may "
                    "hold them."
                )
            if self.failure is not None:
                self._stop_if_stuck(now, self.failure)
            elif now > self._next_question and (self._must_ask or self._progress.is_stalled(self._timeout)):
                self._find_late()

    def _inquire(self) -> None:
        """Let the watching thread find out now who has not arrived, for some seconds at most."""
        until = time.monotonic() + _ANSWER + _GRACE
        self._must_ask = True
        while self.failure is None and time.monotonic() < until and self._watching.is_alive():
            time.sleep(_TURN / 10)
        self._must_ask = False

    def _find_late(self) -> None:
        """Find out which ranks have not arrived, and publish it; if another rank asks, it does."""
        self._next_question = time.monotonic() + _ANSWER + _TURN
        asked = self._store.call(lambda store: [self._ask(store)], _ANSWER + 2 * _TURN) if self._store.answers() else None
        if asked is None:
            records, asking = self._records_without_store(), [self._rank]
        elif (answers := asked[0]) is None:
            return  # another rank asks
        else:  # not in the thread of the store, which meanwhile answers the others
            records = {rank: answers.get(rank) or self._describe_silent(rank) for rank in range(self._size)}
            asking = list(records)
        waited = self._timeout - 2 * _TURN
        if self._must_ask:  # its exchange has ended by a timeout
            records[self._rank].waited = max(records[self._rank].waited, waited)
        verdict = judge(records, asking, waited, self._timeout)
        if verdict is None:
            self._next_question = time.monotonic() + (_SILENCE if asked is None else max(_PATIENCE, self._timeout / 10))
            return
        late, text = verdict
        collectives = dict(records[late[0]].collectives or {}) if late else {}
        self._publish(failure := Failure(text, self._rank, late, collectives), _SILENCE)
        if self.failure is None:
            self._known_at, self.failure = time.monotonic(), failure

    def _records_without_store(self) -> dict[int, Record]:
        """Return what is known of the ranks when the store does not answer: of those on other machines, nothing."""
        records = {rank: Record(rank) for rank in range(self._size)}
        boards = {rank: process.read_board() for rank, process in self._processes.items()}
        for rank, board in boards.items():
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
            if self.failure is None:
                set_once(store, _FAILURE, json.dumps(failure))
                self._receive(store)

        self._store.call(publish, seconds)

    def _stop_if_stuck(self, now: float, failure: Failure) -> None:
        """End this process if a failure does not reach its main thread: it waits where no error comes, or is itself late."""
        known_for = now - self._known_at
        if self._is_leaving:
            return
        if self._rank in (failure.late or ()):
            if known_for > _GRACE:
                self.stop(f"{failure.text}\nrank {self._rank} stops, because it had not arrived.")
            return
        waiting = [since for since, is_beside in list(self._progress.waiting.values()) if not is_beside]
        began = min([self._progress.changed_at, *waiting])
        is_ahead = any(  # in a group whose waits nobody notes, such as that of DDP
            name in failure.collectives and number > failure.collectives[name][0]
            for name, (number, _, description) in count_collectives().items()
            if description not in (MAIN_GROUP, BACKGROUND_GROUP)
        )
        limit = _PATIENCE
        if failure.late is not None:  # until its exchange should have ended
            limit = min(_MARGIN + _GRACE, began + self._timeout + _MARGIN + _GRACE - self._known_at)
        waits = waiting or not failure.collectives or is_ahead
        if waits and began < self._known_at + _GRACE and known_for > max(limit, _GRACE):
            self.stop(f"{failure.text}\nrank {self._rank} stops, because it kept waiting.")

    def stop(self, text: str) -> None:
        """End this process, whose main thread waits in a place that no error reaches."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        sys.stderr.write(
            f"{text} Nothing that was saved is lost: start again to continue from the newest snapshot. The stacks of all "
            "threads:\n"
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        os._exit(1)


def set_once(store: Any, key: str, text: str) -> bool:
    """Write an entry of the store unless there is one; return whether it is this text then."""
    try:
        return bytes(store.compare_set(key, "", text)) == text.encode()
    except RuntimeError:  # a store of someone else that cannot compare
        if store.add(f"{key}/claims", 1) == 1:
            store.set(key, text)
        return bytes(store.get(key)) == text.encode()


def judge(
    records: Mapping[int, Record], asking: Collection[int], waited: float, timeout: float
) -> tuple[list[int], str] | None:
    """Return the ranks that have not arrived where another has waited for too long, and what all say of that.

    It is none of them if all wait for each other; ``None`` if none has waited for ``waited`` seconds. Of ranks that are not
    ``asking`` it may not be known if they still wait.
    """
    for is_beside in (False, True):
        seconds = {
            rank: records[rank].waited_beside if is_beside else records[rank].waited or records[rank].idle for rank in asking
        }
        for rank in sorted(seconds, key=seconds.__getitem__, reverse=True):
            if seconds[rank] < waited or records[rank].state or not (late := find_late(records[rank], records, is_beside)):
                continue
            verb, waiting = "has" if len(late) == 1 else "have", [other for other in records if other not in late]
            details = "\n".join(_describe(records[other]) for other in late[:_MOST_DESCRIBED])
            return late, (
                f"{_name_ranks(late)} {verb} not arrived in an exchange in which {_name_ranks(waiting)} waited for "
                f"{seconds[rank]:.0f} s (timeout={timeout:g}).\n{details}\n"
                "Start again, to continue from the newest snapshot. If the rank is only slow there, give it more time by "
                "create_communicator(timeout=), or let all ranks do that work."
            )
    shortest = min(max(record.waited, record.waited_beside) for record in records.values())
    if shortest < waited:
        return None
    details = "\n".join(map(_describe, list(records.values())[:_MOST_DESCRIBED]))
    return [], (
        f"all ranks wait for each other for {shortest:.0f} s (timeout={timeout:g}): they are in different exchanges, or the "
        f"network is lost.\n{details}\n"
        "All ranks call the same methods of a communicator, and the same collectives of torch, in the same order: see "
        "where the stacks differ."
    )


def find_late(asking: Record, records: Mapping[int, Record], is_beside: bool) -> list[int]:
    """Return the ranks for which one waits, and which do not wait themselves; none if all wait for each other.

    A rank waits for those that have begun fewer collectives in a group than it has, and so for those that they wait for;
    ``is_beside`` in a group of another thread, where a snapshot is agreed upon.
    """
    reached, late, pending = {asking.rank}, set(), [asking.rank]
    while pending:
        waited_for = _waited_for(records[pending.pop()], records, is_beside)
        for rank in waited_for - reached:
            if _waited_for(records[rank], records, is_beside) and not records[rank].state:
                pending.append(rank)
            else:
                late.add(rank)
        reached |= waited_for
    late = {rank for rank in late if records[rank].collectives is not None} or late  # surely, or possibly
    return sorted(late) or [rank for rank, record in records.items() if record.state]


def _waited_for(record: Record, records: Mapping[int, Record], is_beside: bool) -> set[int]:
    """Return the ranks that have not arrived where a rank waits, or may not have, because nothing is known of them."""
    waited_for = set()
    for name, (number, ranks, description) in (record.collectives or {}).items():
        if (description == BACKGROUND_GROUP) == is_beside and (is_beside or record.waited or description != MAIN_GROUP):
            for rank in set(ranks) - {record.rank}:
                known = records[rank].collectives
                if known is None or (name in known and known[name][0] < number):
                    waited_for.add(rank)
    return waited_for


def _describe(record: Record) -> str:
    who = f"rank {record.rank}"
    if record.pid:
        who += f", process {record.pid} on {record.host},"
    if record.position is None:
        where = "is outside of a run" if record.collectives is not None else "has said nothing of its iteration"
    else:
        iteration, extension = record.position
        where = f"has iteration {iteration} as its last" + (
            "" if extension is None else f" and is in extension {extension!r}"
        )
    state = f" {record.state}" if record.state else f" It has begun no exchange for {record.idle:.0f} s."
    return f"{who} {where}.{state}" + (f" Its stack:\n{record.stacks.rstrip()}" if record.stacks else "")


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
