"""WorkerPool: the worker processes of a `MultiprocessIterator`, started, watched and ended by the main process.

They are those of ``torch.utils.data.DataLoader``. Ours are the sampler that tells them what to fetch, and a context that
makes their queues and processes, so that a wait ends at once when a worker dies or stalls.
"""

from __future__ import annotations

import atexit
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

from chainring.iterators._worker_main import IGNORED_SIGNALS, BatchDataset, SharedStatus, Task, WorkerResult, init_worker
from chainring.iterators.serial import Segment

_GRACE = 1.0  # seconds that all workers together have to end by themselves
_GRACE_AFTER_ERROR = 0.2  # after a worker has died or stalled, which is to be reported at once


class WorkerPool:
    """The processes that make the batches of one iterator.

    ``make_dataset(status)`` returns what they run, and each is given ``depth`` batches at a time. A worker counts as stalled
    after ``timeout`` seconds without a report. The seed is for generators that are not seeded for each example.
    """

    def __init__(
        self,
        make_dataset: Callable[[SharedStatus], BatchDataset],
        name: str,
        n_workers: int,
        depth: int,
        timeout: float,
        start_method: str,
        seed: int,
    ) -> None:
        self._status = SharedStatus(n_workers, multiprocessing.get_context(start_method))
        self._monitor = _Monitor(name, timeout, self._status)
        self._context = _Context(start_method, self._monitor)
        self._sampler = _PrefetchSampler(self._status)
        self._n_workers, self._start_method = n_workers, start_method
        self._taken = 0
        self._iterator: Any = None
        with _ignore_warnings():
            self._loader: DataLoader[Any] = DataLoader(
                make_dataset(self._status),
                batch_size=None,
                sampler=self._sampler,
                num_workers=n_workers,
                prefetch_factor=depth,
                persistent_workers=True,
                multiprocessing_context=self._context,
                worker_init_fn=init_worker,
                generator=torch.Generator().manual_seed(seed),  # otherwise it draws from the global one
            )
        _pools.add(self)
        # In a multiprocessing.Process nothing that was registered with atexit is called.
        multiprocessing.util.Finalize(self, _close_pool, (weakref.ref(self),), exitpriority=20)

    @property
    def is_open(self) -> bool:
        return self._iterator is not None

    def take(self, segments: list[Segment], plan: Callable[[], PythonIterator[list[Segment]]]) -> WorkerResult:
        """Return the batch of these segments; unless it is the next one of the plan, begin again with another plan.

        Raises:
            RuntimeError: a worker has died.
            TimeoutError: the worker has stalled.
        """
        try:
            self._monitor.raise_if_dead()
            if not self._sampler.sent or not _are_equal(self._sampler.sent[0], segments):
                self._monitor.expect(range(self._n_workers), segments)
                self._sampler.restart(plan())
                self._start()
            self._monitor.expect([self._taken % self._n_workers], segments)
            result = next(self._iterator)
        except BaseException as error:
            self.close(_GRACE_AFTER_ERROR)  # after an interruption, too, the content of the queue is unknown
            if isinstance(error, Exception) and self._monitor.failure is not None:
                raise self._monitor.failure from None
            raise
        self._sampler.sent.popleft()
        self._taken += 1
        assert isinstance(result, WorkerResult)
        return result

    def _start(self) -> None:
        self._taken = 0
        if self._iterator is not None:
            iter(self._loader)  # empties the queue, and begins again with the same processes
            return
        multiprocessing.util.get_temp_dir()  # the workers then share it, and it is removed at the end of this process
        with _block_signals(), _ignore_warnings():
            try:
                self._iterator = iter(self._loader)
            except RuntimeError:
                self._monitor.raise_if_dead(patience=1.0)  # torch's handler was quicker
                raise
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                if self._start_method == "fork":
                    raise
                raise TypeError(
                    f"workers started by {self._start_method!r} are sent the dataset and the converter, and pickling one of "
                    f"them failed: {error}; define classes and functions at the top of a module and open files at first "
                    'use, or take start_method="fork" where the system has it'
                ) from error
        # Otherwise torch raises when a worker dies wherever this process happens to be, amid a step or a write.
        signal_handling._remove_worker_pids(id(self._iterator))  # type: ignore[attr-defined]
        self._iterator._worker_pids_set = False

    def close(self, grace: float = _GRACE) -> None:
        """End the processes, by force after ``grace`` seconds. Calling it again does nothing."""
        if os.getpid() != self._monitor.pid:
            return
        iterator, self._iterator = self._iterator, None
        self._status.set_generation(-1)
        deadline = time.monotonic() + grace
        for process in self._monitor.processes:
            process.deadline = deadline
        if iterator is not None:
            iterator._shutdown_workers()
        for queue in self._context.queues:
            queue.close_both_ends()
        self._context.queues.clear()
        for process in self._monitor.processes:
            if process.is_alive():  # torch does not know of it yet
                process.terminate()
                process.join(1.0)
            if process.exitcode == -getattr(signal, "SIGKILL", 9):
                _remove_shared_memory(process.pid)
            if process.exitcode is not None:
                process.close()
        self._monitor.processes.clear()

    def __del__(self) -> None:
        if hasattr(self, "_loader"):  # otherwise __init__ has failed
            self.close()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _close_pool(reference: weakref.ref[WorkerPool]) -> None:
    if (pool := reference()) is not None:
        pool.close()


@atexit.register
def _close_pools() -> None:
    """Close the pools before multiprocessing waits, at exit, for processes that ignore its signal."""
    for pool in list(_pools):
        pool.close()


def _are_equal(ours: list[Segment], theirs: list[Segment]) -> bool:
    return len(ours) == len(theirs) and all(
        key == other_key and np.array_equal(indices, other)
        for (key, indices), (other_key, other) in zip(ours, theirs, strict=True)
    )


def _remove_shared_memory(pid: int | None) -> None:
    """Remove the files of a worker that was killed between creating one in shared memory and unlinking its name."""
    # With the other strategy these names are used to open the files.
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


@contextmanager
def _block_signals() -> Generator[None]:
    """Block signals: a process that is started here inherits that, and must not act on them before it ignores them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows starts processes that inherit nothing
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ignore_warnings() -> Generator[None]:
    """Ignore torch's advice on the number of workers, and Python's on threads: both were chosen."""
    with warnings.catch_warnings():
        for message in ("This DataLoader will create", "Got pickle error", ".*use of fork"):
            warnings.filterwarnings("ignore", message=message)
        yield


class _PrefetchSampler:
    """Gives torch the segments of the next batches, ahead of what the iterator asks for, and remembers those sent."""

    def __init__(self, status: SharedStatus) -> None:
        self.sent: deque[list[Segment]] = deque()
        self._status, self._generation = status, 0
        self._plan: PythonIterator[list[Segment]] = iter(())

    def restart(self, plan: PythonIterator[list[Segment]]) -> None:
        """Follow another plan; the batches that were sent before are not wanted any more."""
        self._plan, self._generation = plan, self._generation + 1
        self._status.set_generation(self._generation)
        self.sent.clear()

    def __iter__(self) -> _PrefetchSampler:
        return self

    def __next__(self) -> Task:
        try:
            segments = next(self._plan)
        except Exception:  # an order sampler's error is raised when the iterator itself comes to that batch
            raise StopIteration from None
        self.sent.append(segments)
        return self._generation, segments


class _Monitor:
    """Waits for the results of the workers, and raises if a worker has died or stalled."""

    def __init__(self, name: str, timeout: float, status: SharedStatus) -> None:
        self.pid = os.getpid()
        self.processes: list[_Worker] = []
        self.failure: Exception | None = None
        self._name = name
        self._timeout = timeout
        self._status = status
        self._expected_workers: list[int] = []
        self._segments: list[Segment] = []
        self._start = 0.0

    def expect(self, workers: Iterable[int], segments: list[Segment]) -> None:
        """Expect the batch of these segments from one of these workers, from now on."""
        self._expected_workers = list(workers)
        self._segments = segments
        self._start = time.monotonic()

    def wait_for(self, reader: Any) -> None:
        """Return when there is something to read, or raise if a worker has died or no expected one has reported."""
        sentinels = [process.sentinel for process in self.processes if process.is_alive()]
        while True:
            self.raise_if_dead()
            last_seen = max(self._start, *map(self._status.last_seen, self._expected_workers))
            left = last_seen + self._timeout - time.monotonic()
            ready = wait([reader, *sentinels], min(max(left, 0.0), 3600.0))
            if reader in ready:
                return
            if not ready and left <= 0:
                self._raise(TimeoutError(self._stalled_message()))

    def raise_if_dead(self, patience: float = 0.0) -> None:
        """Raise if a worker has died, or dies within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            for worker, process in enumerate(self.processes):
                if process.exitcode is not None:
                    self._raise(RuntimeError(self._dead_message(worker, process)))
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)  # its files are closed a little before it has ended

    def _raise(self, error: Exception) -> None:
        self.failure = error  # torch replaces it by errors of its own
        raise error

    def _dead_message(self, worker: int, process: _Worker) -> str:
        code, index = process.exitcode, self._status.example_of(worker)
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        where = "" if index is None else f" while it was at dataset[{index}]"
        return (
            f"a worker process of iterator {self._name!r} (pid {process.pid}) {how}{where}; workers must live as long as "
            "the iterator. If the system kills for lack of memory, fewer n_processes or n_prefetch need less"
        )

    def _stalled_message(self) -> str:
        examples = [self._status.example_of(worker) for worker in self._expected_workers]
        fetching = " and ".join(f"dataset[{index}]" for index in examples if index is not None)
        batch = [index for _, indices in self._segments for index in indices.tolist()]
        shown = ", ".join(map(str, batch[:20])) + (", ..." if len(batch) > 20 else "")
        return (
            f"iterator {self._name!r} waited {self._timeout:g} seconds for {fetching or 'a worker that has not begun'} "
            f"in the batch of the indices [{shown}]; "
            'raise dataset_timeout if an example may take longer, or try start_method="spawn" if a library that it uses '
            "hangs in forked processes"
        )


class _Context(multiprocessing.context.BaseContext):
    """The context from which torch gets queues and processes; it keeps them, so that they can be watched and ended."""

    def __init__(self, start_method: str, monitor: _Monitor) -> None:
        self._base, self._monitor = multiprocessing.get_context(start_method), monitor
        classes = {"fork": _ForkWorker, "spawn": _SpawnWorker, "forkserver": _ForkServerWorker}
        self._worker_class: type[_Worker] = classes[start_method]
        self.queues: list[_Queue] = []

    def Process(self, **settings: Any) -> _Worker:  # noqa: N802
        process = self._worker_class(**settings)
        self._monitor.processes.append(process)
        return process

    def Queue(self, maxsize: int = 0) -> _Queue:  # noqa: N802
        queue = _Queue(maxsize, ctx=self._base)
        queue.monitor = self._monitor
        self.queues.append(queue)
        return queue

    def Event(self) -> Any:  # noqa: N802
        return _Flag(self._base)


class _Worker(multiprocessing.process.BaseProcess):
    """A process that is waited for until its deadline, and then killed: it ignores SIGTERM."""

    deadline: float | None = None

    def run(self) -> None:
        gc.freeze()  # garbage of the main process that is collected here would end other workers, which are not ours
        super().run()

    def join(self, timeout: float | None = None) -> None:
        if self.deadline is not None:
            timeout = max(0.0, self.deadline - time.monotonic())
        super().join(timeout)

    def terminate(self) -> None:
        self.deadline = None
        self.kill()


class _ForkWorker(_Worker, multiprocessing.context.ForkProcess):
    pass


class _SpawnWorker(_Worker, multiprocessing.context.SpawnProcess):
    pass


class _ForkServerWorker(_Worker, multiprocessing.context.ForkServerProcess):
    pass


class _Queue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue whose reader in the main process learns that nothing can come any more."""

    _reader: Connection[Any, Any]
    _writer: Connection[Any, Any]
    _thread: threading.Thread | None

    monitor: _Monitor | None = None  # only in the main process: pickling leaves it out

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.monitor is None or self.monitor.pid != os.getpid():
            return super().get(block, timeout)
        self.monitor.wait_for(self._reader)
        try:
            return super().get(block, timeout)
        except (OSError, EOFError):  # it takes its files from the worker that sent it, which may be gone
            self.monitor.raise_if_dead(patience=1.0)
            raise

    def close_both_ends(self) -> None:
        self.cancel_join_thread()
        self.close()
        if self._thread is not None:
            self._thread.join(1.0)
        self._reader.close()
        self._writer.close()


class _Flag:
    """An event without a lock: one whose holder was killed would block everyone else for ever."""

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)
