"""What runs in the worker processes of a `MultiprocessIterator`: examples are fetched, collated and sent."""

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
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from chainring._random import example_seeder
from chainring.converters import concat_examples
from chainring.iterators._indexed import Part

Task = tuple[int, list[Part]]
"""The round that a batch belongs to, and its indices."""

IGNORED = {signal.SIGINT, signal.SIGTERM}
"""Signals that go to a whole process group: it is the main process that acts on them."""

_BY_VALUE = 1 << 18  # bytes; handing over a file takes longer than copying so many (0.7 against 0.3 ms)


class Board:
    """A few numbers in memory that the main process and its workers share.

    Args:
        number: how many workers there are.
        context: of `multiprocessing`, with the start method of the workers.
    """

    def __init__(self, number: int, context: Any) -> None:
        self._round = context.RawValue("q", 0)
        self._at = context.RawArray("q", [-1] * number)
        self._seen = context.RawArray("d", number)

    def is_wanted(self, number: int) -> bool:
        """Whether the batches of that round are still waited for."""
        return bool(self._round.value == number)

    def want(self, number: int) -> None:
        """Tells the workers to leave whatever belongs to another round."""
        self._round.value = number

    def sign(self, worker: int, index: int = -1) -> None:
        """A worker says that it is alive, and which example it begins to fetch (-1: none)."""
        self._at[worker], self._seen[worker] = index, time.monotonic()

    def at(self, worker: int) -> int | None:
        """The example that a worker is fetching."""
        return None if self._at[worker] < 0 else int(self._at[worker])

    def seen(self, worker: int) -> float:
        """When a worker gave its last sign, in seconds of the monotonic clock, which all processes share."""
        return float(self._seen[worker])


class Failure(NamedTuple):
    """An exception of the dataset or the converter on its way to the main process."""

    error: bytes | None  # the exception, where it can be pickled
    summary: str
    traceback: str
    example: int | None  # its index, where it was one that raised
    order: int  # the number of its order
    pid: int


class Answer(NamedTuple):
    """A batch: as columns, or as examples where they cannot be collated; or why there is none."""

    columns: Any = None
    examples: list[Any] | None = None
    failure: Failure | None = None


class Work(Dataset[Any]):
    """Seen by torch as a dataset whose examples are whole batches.

    Args:
        dataset: the user's.
        seeds_examples: whether the generators are seeded before each example.
        converter: ``converter(examples, None)`` gives columns; ``None`` sends the examples.
        board: shared with the main process.
    """

    def __init__(self, dataset: Any, seeds_examples: bool, converter: Callable[..., Any] | None, board: Board) -> None:
        self._dataset = dataset
        self._seeds_examples = seeds_examples
        self._converter = converter
        self._board = board

    def __getitem__(self, task: Task) -> Sent:
        number, parts = task
        info = get_worker_info()
        assert info is not None
        index: int | None = None
        order = parts[0][0][1]
        try:
            examples = []
            for (seed, order), indices in parts:
                seed_for = example_seeder(seed, order)
                for index in indices.tolist():
                    if not self._board.is_wanted(number):
                        return Sent(Answer())
                    self._board.sign(info.id, index)
                    if self._seeds_examples:
                        seed_for(index)
                    examples.append(self._dataset[index])
            index = None
            return Sent(self._collated(examples))
        except Exception as error:
            return Sent(Answer(failure=_failure(error, index, order)))
        finally:
            self._board.sign(info.id)

    def _collated(self, examples: list[Any]) -> Answer:
        if self._converter is None:
            return Answer(examples=examples)
        if self._converter is not concat_examples:
            return Answer(columns=self._converter(examples, None))
        try:
            return Answer(columns=concat_examples(examples))
        except (ValueError, TypeError):  # ragged, or no numbers: for the updater's converter to deal with
            return Answer(examples=examples)


class Sent:
    """An answer in bytes. Pickled here and not by the queue, whose thread would drop what it cannot pickle."""

    def __init__(self, answer: Answer) -> None:
        stream = io.BytesIO()
        # Tensors among examples go by value too: one descriptor for each of them would soon be too many.
        _Pickler(stream, _BY_VALUE if answer.examples is None else None).dump(answer)
        self._bytes = stream.getvalue()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return pickle.loads, (self._bytes,)  # whoever takes it out of the queue has the answer, and closes its files


class _Pickler(ForkingPickler):
    """Large tensors go through shared memory, small ones by value."""

    def __init__(self, stream: io.BytesIO, limit: int | None) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._limit = limit

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg():
            return NotImplemented
        if self._limit is not None and value.nbytes > self._limit:
            return NotImplemented
        if value.dtype is torch.bfloat16:  # NumPy has none
            return _brain_floats, (value.view(torch.int16).numpy(),)
        try:
            return torch.from_numpy, (value.numpy(),)
        except TypeError:  # a dtype that NumPy lacks
            return NotImplemented


def _brain_floats(bits: NDArray[np.int16]) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


def _failure(error: Exception, index: int | None, order: int) -> Failure:
    text = "".join(traceback.format_exception(error))
    error = error.with_traceback(None)
    summary = f"{type(error).__name__}: {error}"
    data: bytes | None
    try:
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is not type(error):
            data = None
    except Exception:  # exceptions with a constructor or attributes of their own often cannot be pickled
        data = None
    return Failure(data, summary, text, index, order, os.getpid())


def begin(worker: int) -> None:
    """Is called in a worker before its first batch."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked while the processes were started
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the main process is gone, whatever the dataset or a full pipe keeps it at."""
    parent, starter = multiprocessing.parent_process(), os.getppid()
    while os.getppid() == starter and (parent is None or parent.is_alive()):
        time.sleep(1)
    os._exit(1)
