"""MultiprocessIterator: batches of a dataset, loaded in worker processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
from typing import Any

from chainring._checks import is_number, plain
from chainring._hints import BATCH_SIZE, hinting
from chainring._random import stable_hash
from chainring.converters import Converter, concat_examples
from chainring.datasets._batches import COLUMNS
from chainring.datasets.base import Dataset
from chainring.iterators._workers import BatchDataset, WorkerPool
from chainring.iterators.base import Batch
from chainring.iterators.serial import IndexedIterator, OrderSampler, Segment, require_integer


class MultiprocessIterator(IndexedIterator):
    """Returns the same batches as `SerialIterator`, loaded ahead of time in worker processes.

    The batches are the same for any number of workers. So is the state, which is that of the batch last returned,
    whatever was prefetched; each of the two iterators can load the other's state. A worker loads a whole batch, collates
    it with ``converter`` and sends it through shared memory. Examples that cannot be collated (with different shapes, or
    without numbers) are sent one by one, and so are all if the updater or Evaluator has another converter than
    `concat_examples`. If a dataset consists of whole arrays, batches are gathered in this process and no worker is
    started: a gather takes microseconds, less than sending it.

    Workers start with the first batch. They ignore SIGINT, SIGTERM and what else the trainer handles, and end with this
    process, however it ends. An exception of the dataset is raised in this process when its batch is due, with the
    worker's traceback and the example's index; after any error, the next call tries that batch again.

    Args:
        dataset, batch_size, repeat, shuffle, seed, order_sampler: as for `SerialIterator`.
        n_processes: the number of workers; by default the number of CPUs that this process may use.
        n_prefetch: the number of batches that each worker keeps ready in addition to the one that it is loading.
        example_rng: True to seed the generators for each example. ``False`` gives each worker its own stream.
        dataset_timeout: the seconds that an example may take to load (and a worker to start).
        converter: ``converter(examples, None)`` runs in the worker and returns the batch's columns, which
            `concat_examples` passes through; if it is your own, another converter of the updater gets their rows as the
            examples. ``None`` sends the examples as the dataset returns them.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``. ``None`` is fork on Linux: it starts in milliseconds, and
            needs neither a dataset that can be pickled nor a main module that can be imported. A library that hangs in
            forked processes (such as OpenCV with threads) needs another; elsewhere system libraries may, and it is spawn.

    Raises:
        TypeError: the dataset, the seed, the sampler or the converter has the wrong type.
        ValueError: a number is out of range, or the dataset is empty and ``repeat`` is true.

    Example::

        with MultiprocessIterator(ImageDataset("train.txt"), batch_size=100, n_processes=4) as iterator:
            x = concat_examples(iterator.next())
    """

    @hinting(BATCH_SIZE)
    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool | None = True,
        n_processes: int | None = None,
        n_prefetch: int = 1,
        *,
        seed: int | None = None,
        order_sampler: OrderSampler | None = None,
        example_rng: bool = True,
        dataset_timeout: float = 30.0,
        converter: Converter | None = concat_examples,
        start_method: str | None = None,
    ) -> None:
        super().__init__(
            dataset, batch_size, repeat, shuffle, seed=seed, order_sampler=order_sampler, example_rng=example_rng
        )
        if not is_number(dataset_timeout) or not dataset_timeout > 0:
            raise ValueError(f"dataset_timeout is a positive number of seconds (math.inf waits), got {dataset_timeout!r}")
        if converter is not None and not callable(converter):
            raise TypeError(f"a converter is called with (examples, device), got {type(converter).__name__}")
        methods = multiprocessing.get_all_start_methods()
        if start_method is not None and start_method not in methods:
            raise ValueError(f"start_method is None or one of {methods} on this system, got {start_method!r}")
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.n_processes = require_integer("n_processes", cpus if n_processes is None else n_processes, 1)
        self.n_prefetch = require_integer("n_prefetch", n_prefetch, 0)
        self.dataset_timeout = plain(dataset_timeout)
        self._converter = converter
        self._start_method = start_method or ("fork" if sys.platform == "linux" else "spawn")
        self._pool: WorkerPool | None = None

    def check_share(self, size: int) -> None:
        super().check_share(size)
        is_own = self._converter not in (None, concat_examples)
        if size > 1 and self.virtual_ranks is not None and is_own and self._gather is None:
            name = getattr(self._converter, "__name__", self._converter)
            raise ValueError(
                f"the rows of each virtual rank are converted apart, and {name} of iterator {self.name!r} would see those "
                "of a whole block, to which it may pad; leave it out there, and give it to the updater or the Evaluator"
            )

    def use_converter(self, converter: Converter) -> None:
        if self._converter is concat_examples and converter is not concat_examples:
            self._converter = None
            self.finalize()  # workers that were started collate

    def _fetch_examples(self, segments: list[Segment]) -> Batch:
        if self._pool is None or not self._pool.is_open:
            self._pool = WorkerPool(
                BatchDataset(self.dataset, self._seeds_examples, self._converter),
                self.name,
                self.n_processes,
                self.n_prefetch + 1,
                self.dataset_timeout,
                self._start_method,
                stable_hash("workers", *segments[0][0], self.current_position),
            )
        # A copy makes the plan: one that held this iterator, which holds the pool, would keep the workers alive.
        result = self._pool.take(segments, lambda: copy.copy(self).iterate_segments())
        if (failure := result.failure) is not None:
            error: Any = None if failure.error is None else pickle.loads(failure.error)
            if error is None or isinstance(error, StopIteration):  # which would look like the end of the data
                error = RuntimeError(f"a worker raised {failure.summary}")
            origin = "the converter" if failure.example is None else f"dataset[{failure.example}]"
            error.add_note(f"in a worker process (pid {failure.pid}):\n{failure.traceback}")
            error.add_note(f"raised by {origin}, epoch {failure.order - self._orders.first}, in iterator {self.name!r}")
            raise error
        length = sum(len(indices) for _, indices in segments)
        if result.examples is not None:
            return Batch(result.examples)
        return Batch(columns=result.columns, length=length, layout=COLUMNS if self._converter is concat_examples else None)

    def finalize(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts workers of its own when it needs them.
        return {**super().__getstate__(), "_pool": None}
