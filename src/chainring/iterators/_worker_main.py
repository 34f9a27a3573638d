"""The code of the worker processes of a `MultiprocessIterator`: examples are fetched, collated and sent."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from chainring._random import example_keys, set_seed
from chainring.converters import concat_examples
from chainring.iterators.serial import Segment

Task = tuple[int, list[Segment]]
"""The generation that a batch belongs to, and its segments."""

IGNORED_SIGNALS = {signal.SIGINT, signal.SIGTERM}
"""Signals that are sent to a whole process group: the main process acts on them."""

_MAX_BYTES_BY_VALUE = 1 << 18  # handing over a file takes longer than copying so many (0.7 against 0.3 ms)


def init_worker(worker: int) -> None:
    """Prepare a worker process before its first batch."""
    for ignored in IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)  # blocked while the processes were started
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """End this process when the main process is gone, even if the dataset or a full pipe blocks it."""
    parent, parent_pid = multiprocessing.parent_process(), os.getppid()
    while os.getppid() == parent_pid and (parent is None or parent.is_alive()):
        time.sleep(1)
    os._exit(1)


class BatchDataset(Dataset[Any]):
    """A dataset for torch whose examples are whole batches; without a converter the user's examples are sent."""

    def __init__(
        self, dataset: Any, seeds_examples: bool, converter: Callable[..., Any] | None, status: SharedStatus
    ) -> None:
        self._dataset = dataset
        self._seeds_examples = seeds_examples
        self._converter = converter
        self._status = status

    def __getitem__(self, task: Task) -> _PickledResult:
        generation, segments = task
        info = get_worker_info()
        assert info is not None
        index: int | None = None
        order = segments[0][0][1]
        try:
            examples = []
            for (seed, order), indices in segments:
                keys = example_keys(seed, order, indices) if self._seeds_examples else repeat(None)
                for index, key in zip(indices.tolist(), keys, strict=False):
                    if not self._status.is_current(generation):
                        return _PickledResult(WorkerResult())
                    if key is not None:
                        set_seed(key)
                    self._status.report(info.id, index)
                    examples.append(self._dataset[index])
            index = None
            return _PickledResult(self._collate(examples))
        except Exception as error:
            return _PickledResult(WorkerResult(failure=_make_failure(error, index, order)))
        finally:
            self._status.report(info.id, None)

    def _collate(self, examples: list[Any]) -> WorkerResult:
        if self._converter is None:
            return WorkerResult(examples=examples)
        if self._converter is not concat_examples:
            return WorkerResult(columns=self._converter(examples, None))
        try:
            return WorkerResult(columns=concat_examples(examples))
        except (ValueError, TypeError):  # ragged, or not of numbers: left to the updater's converter
            return WorkerResult(examples=examples)


class SharedStatus:
    """The progress of the workers, in memory that they share with the main process."""

    def __init__(self, n_workers: int, context: Any) -> None:
        self._generation = context.RawValue("q", 0)
        self._examples = context.RawArray("q", [-1] * n_workers)
        self._last_seen = context.RawArray("d", n_workers)

    def is_current(self, generation: int) -> bool:
        return bool(self._generation.value == generation)

    def set_generation(self, generation: int) -> None:
        """Tell the workers to skip the batches of any other generation."""
        self._generation.value = generation

    def report(self, worker: int, example: int | None) -> None:
        """Record that a worker is alive, and the example that it begins to fetch."""
        self._examples[worker], self._last_seen[worker] = -1 if example is None else example, time.monotonic()

    def example_of(self, worker: int) -> int | None:
        return None if self._examples[worker] < 0 else int(self._examples[worker])

    def last_seen(self, worker: int) -> float:
        """Return the time of a worker's last report on the monotonic clock, which all processes share."""
        return float(self._last_seen[worker])


class Failure(NamedTuple):
    """An exception of the dataset or the converter on its way to the main process."""

    error: bytes | None  # the pickled exception, if it can be pickled
    summary: str
    traceback: str
    example: int | None  # the index of the example that raised
    order: int  # the index of its order
    pid: int


def _make_failure(error: Exception, example: int | None, order: int) -> Failure:
    text = "".join(traceback.format_exception(error))
    pickled: bytes | None = None
    with suppress(Exception):  # exceptions with their own constructor or attributes often cannot be pickled
        content = pickle.dumps(error.with_traceback(None))
        pickled = content if type(pickle.loads(content)) is type(error) else None
    return Failure(pickled, f"{type(error).__name__}: {error}", text, example, order, os.getpid())


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
