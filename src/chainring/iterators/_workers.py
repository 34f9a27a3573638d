"""The worker processes of a `MultiprocessIterator`: what they run, and how they are started, watched and ended.

They are those of ``torch.utils.data.DataLoader``. Ours are the sampler that tells them what to fetch, and a context that
makes their queues and processes, so that a wait ends at once when a worker dies or stalls.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Iterator as PythonIterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from chainring._random import example_keys, set_seed
from chainring.converters import concat_examples
from chainring.iterators._order import Epochs, members_of
from chainring.iterators.serial import Segment

Task = tuple[int, list[Segment]]  # the generation that a batch belongs to, and its segments

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals to which a run reacts. They may be sent to a whole process group: workers leave them to the main process."""

_MAX_BYTES_BY_VALUE = 1 << 18  # handing over a file takes longer than copying so many (0.7 against 0.3 ms)
_GRACE = 1.0  # seconds that all workers together have to end by themselves
_GRACE_AFTER_ERROR = 0.2  # after a worker has died or stalled, which is to be reported at once

# --- in a worker ---


def _init_worker(worker: int) -> None:
    for ignored in END_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)  # blocked while the processes were started
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """End this process when the main process is gone, even if the dataset or a full pipe blocks it."""
    parent, parent_pid = multiprocessing.parent_process(), os.getppid()
    while os.getppid() == parent_pid and (parent is None or parent.is_alive()):
        time.sleep(1)
    os._exit(1)


@dataclass(eq=False)
class BatchDataset(Dataset[Any]):
    """A dataset for torch whose examples are whole batches; without a converter the user's examples are sent."""

    dataset: Any
    seeds_examples: bool
    converter: Callable[..., Any] | None
    status: SharedStatus | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # that of Python floats, also in a new process
    epochs: Epochs | None = None  # of this process

    def __getitem__(self, task: Task) -> _PickledResult:
        generation, segments = task
        info: Any = get_worker_info()
        status: Any = self.status
        index: int | None = None
        order = segments[0][0][1]
        torch.set_default_dtype(self.dtype)
        self.epochs = self.epochs or Epochs(members_of(self.dataset))
        try:
            examples = []
            for (seed, order), indices in segments:
                self.epochs.tell(order)
                keys = example_keys(seed, order, indices) if self.seeds_examples else repeat(None)
                for index, key in zip(indices.tolist(), keys, strict=False):
                    if status.generation.value != generation:
                        return _PickledResult(WorkerResult())
                    if key is not None:
                        set_seed(key)
                    status.report(info.id, index)
                    examples.append(self.dataset[index])
            index = None
            return _PickledResult(self._collate(examples))
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            pickled: bytes | None = None
            with suppress(Exception):  # exceptions with their own constructor or attributes often cannot be pickled
                content = pickle.dumps(error.with_traceback(None))
                pickled = content if type(pickle.loads(content)) is type(error) else None
            failure = Failure(pickled, f"{type(error).__name__}: {error}", text, index, order, os.getpid())
            return _PickledResult(WorkerResult(failure=failure))
        finally:
            status.report(info.id)

    def _collate(self, examples: list[Any]) -> WorkerResult:
        if self.converter is None:
            return WorkerResult(examples=examples)
        if self.converter is not concat_examples:
            return WorkerResult(columns=self.converter(examples, None))
        try:
            return WorkerResult(columns=concat_examples(examples))
        except (ValueError, TypeError):  # ragged, or not of numbers: left to the updater's converter
            return WorkerResult(examples=examples)


class SharedStatus:
    """The progress of the workers, in memory that they share with the main process."""

    def __init__(self, n_workers: int, context: Any) -> None:
        self.generation = context.RawValue("q", 0)  # of the batches that are wanted
        self.examples = context.RawArray("q", [-1] * n_workers)  # the index that each fetches, or -1
        self.last_seen = context.RawArray("d", n_workers)  # on the monotonic clock, which all processes share

    def report(self, worker: int, example: int = -1) -> None:
        self.examples[worker], self.last_seen[worker] = example, time.monotonic()


class Failure(NamedTuple):
    """An exception of the dataset or the converter on its way to the main process."""

    error: bytes | None  # the pickled exception, if it can be pickled
    summary: str
    traceback: str
    example: int | None  # the index of the example that raised
    order: int  # the index of its order
    pid: int


class WorkerResult(NamedTuple):
    """A batch as columns, or as examples if they cannot be collated; or the failure."""

    columns: Any = None
    examples: list[Any] | None = None
    failure: Failure | None = None


class _PickledResult:
    """A result as bytes. It is pickled here and not by the queue, whose thread would drop what it cannot pickle."""

    def __init__(self, result: WorkerResult) -> None:
        stream = io.BytesIO()
        # Tensors among examples go by value too: one descriptor for each of them would soon be too many.
        _TensorPickler(stream, _MAX_BYTES_BY_VALUE if result.examples is None else None).dump(result)
        self._bytes = stream.getvalue()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return pickle.loads, (self._bytes,)  # the reader of the queue has the result, and closes its files


class _TensorPickler(ForkingPickler):
    """Pickles tensors by value up to a number of bytes; larger ones go through shared memory."""

    def __init__(self, stream: io.BytesIO, max_bytes: int | None) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._max_bytes = max_bytes

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or (self._max_bytes is not None and value.nbytes > self._max_bytes):
            return NotImplemented
        plain = value.resolve_conj().resolve_neg().contiguous()
        return _rebuild_tensor, (plain.view(-1).view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _rebuild_tensor(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


# --- in the main process ---


def unguarded() -> RuntimeError:
    """Return the error of a process that imports the script to begin, and would train or start workers too.

    What its parent sends is read first, because it keeps both ends of the pipe, and would wait for a reader for ever.
    """
    frame = sys._getframe()
    while frame.f_back is not None and "from_parent" not in frame.f_locals:  # of multiprocessing.spawn
        frame = frame.f_back
    if "from_parent" in frame.f_locals:
        pipe = frame.f_locals["from_parent"].fileno()
        while select.select([pipe], [], [], 1.0)[0] and os.read(pipe, 1 << 20):
            pass
    return RuntimeError(
        "a worker process imports the script to begin, and would train too: put what trains into a function, main(), and "
        'call it under `if __name__ == "__main__":`, which a script needs whose workers start by spawn or forkserver'
    )


class WorkerPool:
    """The processes that make the batches of one iterator.

    Each is given ``depth`` batches at a time, and counts as stalled after ``timeout`` seconds without a report. The seed is
    for generators that are not seeded for each example.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        name: str,
        n_workers: int,
        depth: int,
        timeout: float,
        start_method: str,
        seed: int,
    ) -> None:
        self._status = dataset.status = SharedStatus(n_workers, multiprocessing.get_context(start_method))
        self._monitor = _Monitor(name, timeout, self._status)
        self._context = _Context(start_method, self._monitor)
        self._sampler = _PrefetchSampler(self._status)
        self._n_workers, self._start_method = n_workers, start_method
        self._taken = 0
        self._iterator: Any = None
        with _ignore_warnings():
            self._loader: DataLoader[Any] = DataLoader(
                dataset,
                batch_size=None,
                sampler=self._sampler,
                num_workers=n_workers,
                prefetch_factor=depth,
                persistent_workers=True,
                multiprocessing_context=self._context,
                worker_init_fn=_init_worker,
                generator=torch.Generator().manual_seed(seed),  # otherwise it draws from the global one
            )
        # At exit, before multiprocessing waits for processes that ignore its signal; and also in a Process, unlike atexit.
        multiprocessing.util.Finalize(self, _close_pool, (weakref.ref(self),), exitpriority=20)

    @property
    def is_open(self) -> bool:
        return self._iterator is not None

    def take(self, segments: list[Segment], plan: Callable[[], PythonIterator[list[Segment]]]) -> WorkerResult:
        """Return the batch of these segments; unless it is the next one of the plan, begin again with another plan."""
        try:
            self._monitor.raise_if_dead()
            if not self._sampler.sent or not _are_equal(self._sampler.sent[0], segments):
                self._monitor.expect(range(self._n_workers), segments)
                self._sampler.restart(plan())
                self._start()
            self._monitor.expect([self._taken % self._n_workers], segments)
            result: WorkerResult = next(self._iterator)
        except BaseException as error:
            self.close(_GRACE_AFTER_ERROR)  # after an interruption, too, the content of the queue is unknown
            if isinstance(error, Exception) and self._monitor.failure is not None:
                raise self._monitor.failure from None
            raise
        self._sampler.sent.popleft()
        self._taken += 1
        return result

    def _start(self) -> None:
        self._taken = 0
        if self._iterator is not None:
            iter(self._loader)  # empties the queue, and begins again with the same processes
            return
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # what multiprocessing itself asks
            raise unguarded()
        multiprocessing.util.get_temp_dir()  # the workers then share it, and it is removed at the end of this process
        with ExitStack() as stack, _ignore_warnings():
            if hasattr(signal, "pthread_sigmask"):  # a new process inherits the mask, until it ignores them itself
                before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
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
        self._status.generation.value = -1
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
            # One that was killed between creating a file in shared memory and unlinking its name has left it. With the
            # other strategy these names are used to open the files.
            strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
            if process.exitcode == -getattr(signal, "SIGKILL", 9) and strategy == "file_descriptor":
                for path in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
                    path.unlink(missing_ok=True)
            if process.exitcode is not None:
                process.close()
        self._monitor.processes.clear()

    def __del__(self) -> None:
        if hasattr(self, "_loader"):  # otherwise __init__ has failed
            self.close()


def _close_pool(reference: weakref.ref[WorkerPool]) -> None:
    if (pool := reference()) is not None:
        pool.close()


def _are_equal(ours: list[Segment], theirs: list[Segment]) -> bool:
    return len(ours) == len(theirs) and all(
        key == other_key and np.array_equal(indices, other)
        for (key, indices), (other_key, other) in zip(ours, theirs, strict=True)
    )


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
        self._status = status
        self._plan: PythonIterator[list[Segment]] = iter(())

    def restart(self, plan: PythonIterator[list[Segment]]) -> None:
        """Follow another plan; the batches that were sent before are not wanted any more."""
        self._plan = plan
        self._status.generation.value += 1
        self.sent.clear()

    def __iter__(self) -> _PrefetchSampler:
        return self

    def __next__(self) -> Task:
        try:
            segments = next(self._plan)
        except Exception:  # an order sampler's error is raised when the iterator itself comes to that batch
            raise StopIteration from None
        self.sent.append(segments)
        return self._status.generation.value, segments


class _Monitor:
    """Waits for the results of the workers, and raises if a worker has died or stalled."""

    def __init__(self, name: str, timeout: float, status: SharedStatus) -> None:
        self.pid = os.getpid()
        self.processes: list[_Worker] = []
        self.failure: Exception | None = None  # torch replaces it by errors of its own
        self._name, self._timeout, self._status = name, timeout, status
        self.expect([], [])

    def expect(self, workers: Iterable[int], segments: list[Segment]) -> None:
        """Expect the batch of these segments from one of these workers, from now on."""
        self._expected_workers, self._segments, self._start = list(workers), segments, time.monotonic()

    def wait_for(self, reader: Any) -> None:
        """Return when there is something to read, or raise if a worker has died or no expected one has reported."""
        sentinels = [process.sentinel for process in self.processes if process.is_alive()]
        while True:
            self.raise_if_dead()
            last_seen = max([self._start, *[self._status.last_seen[worker] for worker in self._expected_workers]])
            left = last_seen + self._timeout - time.monotonic()
            ready = wait([reader, *sentinels], min(max(left, 0.0), 3600.0))
            if reader in ready:
                return
            if not ready and left <= 0:
                break
        examples = [self._status.examples[worker] for worker in self._expected_workers]
        fetching = " and ".join(f"dataset[{index}]" for index in examples if index >= 0)
        batch = [index for _, indices in self._segments for index in indices.tolist()]
        shown = ", ".join(map(str, batch[:20])) + (", ..." if len(batch) > 20 else "")
        self.failure = TimeoutError(
            f"iterator {self._name!r} waited {self._timeout:g} seconds for {fetching or 'a worker that has not begun'} "
            f"in the batch of the indices [{shown}]; "
            'raise dataset_timeout if an example may take longer, or try start_method="spawn" if a library that it uses '
            "hangs in forked processes"
        )
        raise self.failure

    def raise_if_dead(self, patience: float = 0.0) -> None:
        """Raise if a worker has died, or dies within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while True:
            for process, index, seen in zip(self.processes, self._status.examples, self._status.last_seen, strict=False):
                if (code := process.exitcode) is not None:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    where = f" while it was at dataset[{index}]" if index >= 0 else ""
                    remedy = (
                        "workers must live as long as the iterator. If the system kills for lack of memory, fewer "
                        "n_processes or n_prefetch need less"
                    )
                    if code > 0 and not seen:
                        where, remedy = " before it began", "what it has printed above says why"
                    self.failure = RuntimeError(
                        f"a worker process of iterator {self._name!r} (pid {process.pid}) {how}{where}; {remedy}"
                    )
                    raise self.failure
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)  # its files are closed a little before it has ended


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
