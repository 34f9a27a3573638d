"""The worker processes of a `MultiprocessIterator`, seen from the main process: begun, watched, ended.

They are those of ``torch.utils.data.DataLoader``. What is ours is the sampler that tells them what to fetch, and a
context that makes their queues and processes, so that a wait ends at once when one of them dies or stalls.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Iterator as PythonIterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from chainring.iterators._indexed import Part
from chainring.iterators._worker_main import IGNORED, Answer, Board, Task, Work, begin


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


_GRACE = 1.0  # seconds that all workers together have to end by themselves
_GRACE_AFTER_ERROR = 0.2  # when one has died or stalled, which is to be told at once


class Ahead:
    """The sampler: tells torch what to fetch next, ahead of what the iterator asks for, and keeps what was told."""

    def __init__(self, board: Board) -> None:
        self.told: deque[list[Part]] = deque()
        self._board, self._round = board, 0
        self._plan: PythonIterator[Iterable[Part]] = iter(())

    def start(self, plan: PythonIterator[Iterable[Part]]) -> None:
        """From now on it follows another plan; what was told before is not wanted any more."""
        self._plan, self._round = plan, self._round + 1
        self._board.want(self._round)
        self.told.clear()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Task:
        try:
            parts = list(next(self._plan))
        except Exception:  # an order sampler's error is raised when the iterator itself comes to that batch
            raise StopIteration from None
        self.told.append(parts)
        return self._round, parts


class Workers:
    """The processes that make the batches of one iterator.

    Args:
        make: ``make(board)`` returns what they run.
        name: what the iterator is called.
        number: how many there are.
        depth: how many batches each is given at a time.
        timeout: seconds without a sign of life after which a worker counts as stalled.
        method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        seed: of the generators of the workers, where the examples do not seed them.
    """

    def __init__(
        self, make: Callable[[Board], Work], name: str, number: int, depth: int, timeout: float, method: str, seed: int
    ) -> None:
        self._board = Board(number, multiprocessing.get_context(method))
        self._watch = Watch(name, timeout, self._board)
        self._context = Context(method, self._watch)
        self._ahead = Ahead(self._board)
        self._number, self._method = number, method
        self._taken = 0
        self._iterator: Any = None
        with _quiet():
            self._loader: DataLoader[Any] = DataLoader(
                make(self._board),
                batch_size=None,
                sampler=self._ahead,
                num_workers=number,
                collate_fn=_unchanged,
                prefetch_factor=depth,
                persistent_workers=True,
                multiprocessing_context=self._context,
                worker_init_fn=begin,
                generator=torch.Generator().manual_seed(seed),  # otherwise it draws from the global one
            )
        _at_exit().add(self)

    def take(self, parts: list[Part], plan: Callable[[], PythonIterator[Iterable[Part]]]) -> Answer:
        """The batch of these indices.

        Args:
            parts: what is wanted now. Unless it is just what comes next, everything under way is dropped.
            plan: makes an iterator over what will be wanted, from now on.

        Raises:
            RuntimeError: a worker has died.
            TimeoutError: the worker has stalled.
        """
        try:
            self._watch.raise_when_dead()
            if not self._ahead.told or not _same(self._ahead.told[0], parts):
                self._watch.expect(range(self._number), parts)
                self._ahead.start(plan())
                self._begin()
            self._watch.expect([self._taken % self._number], parts)
            answer = next(self._iterator)
        except BaseException as error:
            self.close(_GRACE_AFTER_ERROR)  # after an interruption, too, nobody knows what is in the queue
            if isinstance(error, Exception) and self._watch.failure is not None:
                raise self._watch.failure from None
            raise
        self._ahead.told.popleft()
        self._taken += 1
        assert isinstance(answer, Answer)
        return answer

    def _begin(self) -> None:
        self._taken = 0
        if self._iterator is not None:
            iter(self._loader)  # takes what is under way out of the queue, and begins again with the same processes
            return
        multiprocessing.util.get_temp_dir()  # the workers then share it, and it is removed at the end of this process
        with _blocked(), _quiet():
            try:
                self._iterator = iter(self._loader)
            except RuntimeError:
                self._watch.raise_when_dead(patience=1.0)  # torch's handler was quicker
                raise
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                if self._method == "fork":
                    raise
                raise TypeError(
                    f"workers started by {self._method!r} are sent the dataset and the converter, and pickling one of "
                    f"them failed: {error}; define classes and functions at the top of a module and open files at first "
                    'use, or take start_method="fork" where the system has it'
                ) from error
        # Otherwise torch raises when a worker dies wherever this process happens to be, amid a step or a write.
        signal_handling._remove_worker_pids(id(self._iterator))  # type: ignore[attr-defined]
        self._iterator._worker_pids_set = False

    def close(self, grace: float = _GRACE) -> None:
        """Ends the processes: in peace where they can, by force after ``grace`` seconds. Again, it does nothing."""
        if os.getpid() != self._watch.pid:
            return
        iterator, self._iterator = self._iterator, None
        self._board.want(-1)
        ends_by = time.monotonic() + grace
        for process in self._watch.processes:
            process.ends_by = ends_by
        if iterator is not None:
            iterator._shutdown_workers()
        for queue in self._context.queues:
            queue.end()
        self._context.queues.clear()
        for process in self._watch.processes:
            if process.is_alive():  # torch has not got so far as to know of it
                process.terminate()
                process.join(1.0)
            if process.exitcode == -signal.SIGKILL:
                _remove_shared_memory(process.pid)
            if process.exitcode is not None:
                process.close()
        self._watch.processes.clear()

    @property
    def is_open(self) -> bool:
        """Whether there are processes to take from."""
        return self._iterator is not None

    def __del__(self) -> None:
        if hasattr(self, "_loader"):  # otherwise __init__ has failed
            self.close()


def _remove_shared_memory(pid: int | None) -> None:
    """Removes what a worker left that was killed between making a file in shared memory and taking its name away."""
    # otherwise others open it by its name
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _unchanged(answer: Any) -> Any:
    return answer


def _same(ours: list[Part], theirs: list[Part]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b and np.array_equal(i, j) for (a, i), (b, j) in zip(ours, theirs, strict=True)
    )


@contextmanager
def _blocked() -> Generator[None]:
    """Signals wait meanwhile: a process begun here inherits that, and must not act on them before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _quiet() -> Generator[None]:
    """Without torch's advice on the number of workers, and Python's on threads: both were chosen."""
    with warnings.catch_warnings():
        for message in ("This DataLoader will create", "Got pickle error", ".*use of fork"):
            warnings.filterwarnings("ignore", message=message)
        yield


@functools.cache
def _at_exit() -> weakref.WeakSet[Workers]:
    """Those to be ended before multiprocessing waits, at the exit of the interpreter, for processes that ignore it."""
    every: weakref.WeakSet[Workers] = weakref.WeakSet()

    def close() -> None:
        for workers in list(every):
            workers.close()

    atexit.register(close)
    return every
