"""The worker processes of a `MultiprocessIterator`, seen from the main process: begun, watched, ended.

They are those of ``torch.utils.data.DataLoader``. What is ours is the sampler that tells them what to fetch, and a
context that makes their queues and processes, so that a wait ends at once when one of them dies or stalls.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Iterator as PythonIterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from chainring.iterators._indexed import Part
from chainring.iterators._watch import Context, Watch
from chainring.iterators._work import IGNORED, Answer, Board, Task, Work, begin

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
