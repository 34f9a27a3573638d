"""Processes and queues that are watched: a wait for a worker ends at once when one dies or stalls."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import os
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from chainring.iterators._indexed import Part
from chainring.iterators._work import Board


class _Worker(multiprocessing.process.BaseProcess):
    """A process that is waited for until ``ends_by``, and then killed: SIGTERM is ignored there."""

    ends_by: float | None = None

    def run(self) -> None:
        gc.freeze()  # garbage of the main process that is collected here would end other workers, which are not ours
        super().run()

    def join(self, timeout: float | None = None) -> None:
        if self.ends_by is not None:
            timeout = max(0.0, self.ends_by - time.monotonic())
        super().join(timeout)

    def terminate(self) -> None:
        self.ends_by = None
        self.kill()


class _Forked(_Worker, multiprocessing.context.ForkProcess):
    pass


class _Spawned(_Worker, multiprocessing.context.SpawnProcess):
    pass


class _ForkServed(_Worker, multiprocessing.context.ForkServerProcess):
    pass


_KINDS: dict[str, type[_Worker]] = {"fork": _Forked, "spawn": _Spawned, "forkserver": _ForkServed}


class _Queue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue whose reader in the main process is told when nothing can come any more."""

    _reader: Connection[Any, Any]
    _writer: Connection[Any, Any]
    _thread: threading.Thread | None

    watch: Watch | None = None  # only in the main process: pickling leaves it out

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.watch is None or self.watch.pid != os.getpid():
            return super().get(block, timeout)
        self.watch.wait_for(self._reader)
        try:
            return super().get(block, timeout)
        except (OSError, EOFError):  # it takes its files from the worker that sent it, which may be gone
            self.watch.raise_when_dead(patience=1.0)
            raise

    def end(self) -> None:
        """Closes both ends, and lets the thread go that writes."""
        self.cancel_join_thread()
        self.close()
        if self._thread is not None:
            self._thread.join(1.0)
        self._reader.close()
        self._writer.close()


class _Flag:
    """An event without a lock: one whose holder was killed would keep everyone else for ever."""

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)


class Context(multiprocessing.context.BaseContext):
    """What torch makes queues and processes with. It keeps them, so that they can be watched and ended."""

    def __init__(self, method: str, watch: Watch) -> None:
        self._method, self._base, self._watch = method, multiprocessing.get_context(method), watch
        self.queues: list[_Queue] = []

    def Process(self, **settings: Any) -> _Worker:  # noqa: N802
        process = _KINDS[self._method](**settings)
        self._watch.processes.append(process)
        return process

    def Queue(self, maxsize: int = 0) -> _Queue:  # noqa: N802
        queue = _Queue(maxsize, ctx=self._base)
        queue.watch = self._watch
        self.queues.append(queue)
        return queue

    def Event(self) -> Any:  # noqa: N802
        return _Flag(self._base)


class Watch:
    """Waits for what the workers send, and says why when it does not come.

    Args:
        name: what the iterator is called.
        timeout: seconds without a sign of life from the worker whose turn it is.
        board: where the workers give their signs.
    """

    def __init__(self, name: str, timeout: float, board: Board) -> None:
        self.pid = os.getpid()
        self.processes: list[_Worker] = []
        self.failure: Exception | None = None
        self._name, self._timeout, self._board = name, timeout, board
        self._awaited: list[int] = []
        self._parts: list[Part] = []
        self._since = 0.0

    def expect(self, awaited: Iterable[int], parts: list[Part]) -> None:
        """From now on one of these workers has to send something: the batch of these indices."""
        self._awaited, self._parts, self._since = list(awaited), parts, time.monotonic()

    def wait_for(self, reader: Any) -> None:
        """Returns when there is something to read.

        Raises:
            RuntimeError: a worker has died.
            TimeoutError: no awaited worker has given a sign for too long.
        """
        sentinels = [process.sentinel for process in self.processes if process.is_alive()]
        while True:
            self.raise_when_dead()
            signs = (self._board.seen(worker) for worker in self._awaited)
            left = max(self._since, *signs) + self._timeout - time.monotonic()
            ready = wait([reader, *sentinels], min(max(left, 0.0), 3600.0))
            if reader in ready:
                return
            if not ready and left <= 0:
                self._raise(TimeoutError(self._says_stalled()))

    def raise_when_dead(self, patience: float = 0.0) -> None:
        """Looks whether a worker has died, for as many seconds."""
        until = time.monotonic() + patience
        while True:
            for worker, process in enumerate(self.processes):
                if process.exitcode is not None:
                    self._raise(RuntimeError(self._says_dead(worker, process)))
            if time.monotonic() >= until:
                return
            time.sleep(0.005)  # its files are closed a little before it has ended

    def _raise(self, error: Exception) -> None:
        self.failure = error  # torch puts errors of its own in its place
        raise error

    def _says_dead(self, worker: int, process: _Worker) -> str:
        code, index = process.exitcode, self._board.at(worker)
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        where = "" if index is None else f" while it was at dataset[{index}]"
        return (
            f"a worker process of iterator {self._name!r} (pid {process.pid}) {how}{where}; workers must live as long as "
            "the iterator. Where the system kills for lack of memory, fewer n_processes or n_prefetch need less"
        )

    def _says_stalled(self) -> str:
        indices = [index for worker in self._awaited if (index := self._board.at(worker)) is not None]
        asked = [index for _, part in self._parts for index in part.tolist()]
        shown = ", ".join(map(str, asked[:20])) + (", ..." if len(asked) > 20 else "")
        at = " and ".join(f"dataset[{index}]" for index in indices) or "no example, as if it had never begun,"
        return (
            f"iterator {self._name!r} waited {self._timeout:g} seconds for {at} of the batch of the indices [{shown}]; "
            'raise dataset_timeout if an example may take longer, or try start_method="spawn" if a library that it uses '
            "hangs in forked processes"
        )
