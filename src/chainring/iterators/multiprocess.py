"""MultiprocessIterator: a dataset by index, in worker processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from chainring._random import stable_hash
from chainring.converters import concat_examples
from chainring.datasets._columns import make_gather
from chainring.iterators._indexed import IndexedIterator, OrderSampler, Part
from chainring.iterators._worker_main import Board, Failure, Work
from chainring.iterators._worker_pool import Workers
from chainring.iterators.base import Batch


class MultiprocessIterator(IndexedIterator):
    """Returns the batches that `SerialIterator` returns, made ahead of time in worker processes.

    The batches are the same for any number of workers, and so is the state, which is that of the batch last returned,
    whatever has been fetched ahead: one may load the other's. A worker makes a whole batch, collates it by
    ``converter`` and hands it over in shared memory; what cannot be collated (examples of unequal shapes, or that are no
    numbers) comes as examples. A dataset that holds whole arrays is gathered in this process and starts no worker: a
    gather takes microseconds, which is less than handing it over.

    Workers start with the first batch. They ignore SIGINT and SIGTERM, which the trainer acts on, and end with this
    process in whatever way it ends. An exception of the dataset is raised here when the turn of its batch comes, with
    the worker's traceback and the example's index; after any error the next call tries that batch again.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        batch_size: examples in a batch, over all ranks.
        repeat: whether to go on into the next epoch, as for `SerialIterator`.
        shuffle: whether each epoch has an order of its own.
        n_processes: how many workers; by default as many as this process may use processors.
        n_prefetch: batches that each worker keeps ready beyond the one that it is making.
        seed: of the order; ``None`` derives one when it is first used.
        order_sampler: ``order_sampler(seed, epoch, size)`` returns the indices of a whole epoch.
        example_rng: whether the generators are seeded for each example. ``False`` leaves each worker a stream of its own.
        dataset_timeout: seconds that an example may take (and a worker to start).
        converter: ``converter(examples, None)`` runs in the worker, and what it returns are the batch's columns, which
            `concat_examples` passes on; a converter of the updater's own sees their rows as the examples. ``None`` sends
            the examples as the dataset gives them.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``. ``None`` is fork on Linux: it starts in milliseconds
            and needs neither a dataset that can be pickled nor a main module that can be imported again. A library that
            hangs in forked processes (OpenCV's threads, say) needs one of the others. Elsewhere it is spawn, since the
            system's own libraries may not survive a fork there.

    Raises:
        TypeError: the dataset, the seed, the sampler or the converter is of another kind.
        ValueError: a number is out of range, or an empty dataset is to be repeated.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool = True,
        n_processes: int | None = None,
        n_prefetch: int = 1,
        *,
        seed: int | None = None,
        order_sampler: OrderSampler | None = None,
        example_rng: bool = True,
        dataset_timeout: float = 30.0,
        converter: Callable[..., Any] | None = concat_examples,
        start_method: str | None = None,
    ) -> None:
        super().__init__(dataset, batch_size, repeat, shuffle, seed, order_sampler)
        _require_number("n_processes", 1 if n_processes is None else n_processes, 1)
        _require_number("n_prefetch", n_prefetch, 0)
        if isinstance(dataset_timeout, bool) or not isinstance(dataset_timeout, (int, float)) or not dataset_timeout > 0:
            raise ValueError(f"dataset_timeout is a positive number of seconds (math.inf waits), got {dataset_timeout!r}")
        if converter is not None and not callable(converter):
            raise TypeError(f"a converter is called with (examples, device), got {type(converter).__name__}")
        known = multiprocessing.get_all_start_methods()
        if start_method is not None and start_method not in known:
            raise ValueError(f"start_method is None or one of {known} on this system, got {start_method!r}")
        self.n_processes = _usable_processors() if n_processes is None else int(n_processes)
        self.n_prefetch = int(n_prefetch)
        self.dataset_timeout = dataset_timeout
        self._converter = converter
        self._start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        self._gather = make_gather(dataset)
        # A plain list or tuple runs no code when it is indexed, so nothing can draw.
        self._seeds_examples = example_rng and type(dataset) not in (list, tuple)
        self._workers: Workers | None = None

    def _fetch(self, parts: list[Part]) -> Batch:
        length = sum(len(indices) for _, indices in parts)
        if self._gather is not None:
            return Batch(columns=self._gather(np.concatenate([indices for _, indices in parts])), length=length)
        if self._workers is None or not self._workers.is_open:
            self._workers = self._make_workers(parts[0][0])
        answer = self._workers.take(parts, lambda: _Plan(self))
        if answer.failure is not None:
            raise self._error(answer.failure)
        return Batch(answer.examples) if answer.examples is not None else Batch(columns=answer.columns, length=length)

    def _make_workers(self, key: tuple[int, int]) -> Workers:
        def make(board: Board) -> Work:
            return Work(self.dataset, self._seeds_examples, self._converter, board)

        return Workers(
            make,
            self.name,
            self.n_processes,
            self.n_prefetch + 1,
            self.dataset_timeout,
            self._start_method,
            stable_hash("workers", *key, self.current_position),
        )

    def _error(self, failure: Failure) -> BaseException:
        """The worker's exception, with what is known about it as notes."""
        error: Any = None
        if failure.error is not None:
            error = pickle.loads(failure.error)
        if error is None or isinstance(error, StopIteration):  # which would look like the end of the data
            error = RuntimeError(f"a worker raised {failure.summary}")
        where = "the converter" if failure.example is None else f"dataset[{failure.example}]"
        error.add_note(f"in a worker process (pid {failure.pid}):\n{failure.traceback}")
        error.add_note(f"raised by {where}, epoch {failure.order - self._first}, in iterator {self.name!r}")
        assert isinstance(error, BaseException)
        return error

    def finalize(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has workers of its own, when it needs them."""
        return {**vars(self), "_workers": None, "_gather": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._gather = make_gather(self.dataset)


class _Plan(IndexedIterator):
    """The walk of an iterator from its place on, without fetching: its batches hold the indices."""

    def __init__(self, walker: IndexedIterator) -> None:
        self.__dict__.update(vars(walker), _workers=None)  # which hold the plan
        self._orders = copy.copy(walker._orders)  # the block that is kept there is of the place there

    def _fetch(self, parts: list[Part]) -> Batch:
        return Batch(parts)


def _require_number(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{what} is an integer of at least {least}, got {value!r}")


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
