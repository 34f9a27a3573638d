"""What is known of the sources of batches: of any iterable, of PyTorch's `DataLoader`, and of Hugging Face's streams."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from traceback import walk_tb
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data._utils import fetch as torch_fetch

from chainring.iterators._worker_main import exit_with_parent


class Source:
    """A source of batches: a list, a function that returns an iterable, or any other iterable.

    Attributes:
        loader: the source as the user gave it.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @property
    def length(self) -> int | None:
        return _length(self.loader)

    @property
    def n_examples(self) -> int | None:
        """The number of examples in a pass, if the source indexes its dataset."""
        return None

    @property
    def is_single_pass(self) -> bool:
        return hasattr(self.loader, "__next__")

    @cached_property
    def may_draw(self) -> bool:
        """True if it may draw in this process amid a pass; seeding and restoring takes 0.1 ms a batch."""
        return type(self.loader) not in (list, tuple)

    @property
    def has_end(self) -> bool:
        """True if it is known that a pass without a known length ends."""
        return False

    @property
    def samplers(self) -> list[Any]:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        samplers = getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        return [sampler for sampler in samplers if sampler is not None]

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of the loader and its samplers, which have another state at the start of each pass."""
        generators = [getattr(owner, "generator", None) for owner in (self.loader, *self.samplers)]
        return list({id(item): item for item in generators if isinstance(item, torch.Generator)}.values())

    def find_state_gap(self) -> str | None:
        """Return what the loader's own state lacks to continue a pass bit for bit, if it has a state."""
        return None

    def find_inexactness(self) -> str | None:
        """Return why batches do not come in the same order again, and the remedy."""
        return None

    def find_cut(self) -> str | None:
        """Return what has visibly given each rank its own share of the data, and the remedy."""
        for sampler in self.samplers:
            ranks = max(getattr(sampler, "num_replicas", 1) or 1, getattr(sampler, "num_processes", 1) or 1)
            if ranks > 1 or isinstance(sampler, DistributedSampler):
                return f"the {type(sampler).__name__} has already split the data: leave the sampler out"
        return None

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader, its samplers and its dataset, if they have it."""
        for target in (self.loader, *[getattr(self.loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]):
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(epoch)

    def get_generators(self) -> dict[str, Any]:
        return {str(i): generator.get_state() for i, generator in enumerate(self.generators)}

    def set_generators(self, states: Mapping[str, Any]) -> None:
        for i, generator in enumerate(self.generators):
            if str(i) in states:
                generator.set_state(states[str(i)])

    def begin(self, releases: list[Callable[[], Any]]) -> Any:
        """Begin a pass; to ``releases`` is added what is to be called before it is ended."""
        if callable(self.loader) and not isinstance(self.loader, Iterable):
            return source_of(self.loader()).begin(releases)
        return iter(self.loader)


class TorchLoader(Source):
    """A `DataLoader`, or a loader with its attributes, such as torchdata's."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._n_workers = loader.num_workers
        self._dataset = source_of(loader.dataset) if hasattr(loader, "dataset") else None

    @property
    def n_examples(self) -> int | None:
        is_indexed = isinstance(self.loader, DataLoader) and not isinstance(self.loader.dataset, IterableDataset)
        return _length(self.loader.dataset) if is_indexed else None

    @cached_property
    def may_draw(self) -> bool:
        # Beside workers only the samplers run in this process; torch's draw at the start of a pass alone.
        return not self._n_workers or not all(_is_of(sampler, "torch.utils.data") for sampler in self.samplers)

    @property
    def has_end(self) -> bool:
        return self._dataset is not None and self._dataset.has_end

    def find_state_gap(self) -> str | None:
        if self._n_workers and not self._is_free_of_draws():
            return "the random generators of its workers"
        return None if self._dataset is None else self._dataset.find_state_gap()

    def _is_free_of_draws(self) -> bool:
        """Return whether it is known that nothing draws in the workers."""
        dataset: Any = getattr(self.loader, "dataset", None)
        is_table = type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] != "custom"
        has_no_code = is_table or type(dataset) in (TensorDataset, list, tuple)
        return has_no_code and _is_of(getattr(self.loader, "collate_fn", None), "torch.utils.data")

    def find_inexactness(self) -> str | None:
        reason = None if self._dataset is None else self._dataset.find_inexactness()
        if reason is None and self._n_workers and not getattr(self.loader, "in_order", True):
            reason = "with in_order=False batches come in the order in which the workers finish; leave it True"
        return reason

    def find_cut(self) -> str | None:
        return super().find_cut() or (None if self._dataset is None else self._dataset.find_cut())

    def begin(self, releases: list[Callable[[], Any]]) -> Any:
        """Begin a pass, with workers that leave signals to the trainer and end with the pass."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or not self._n_workers:
            return iter(loader)
        init_fn, is_persistent = loader.worker_init_fn, loader.persistent_workers
        guard = _WorkerGuard(loader.multiprocessing_context or multiprocessing.get_context(), init_fn)
        # Called by multiprocessing before it waits for its processes: at exit, and in a Process, where atexit is not.
        releases.append(multiprocessing.util.Finalize(None, guard.released.set, exitpriority=20))
        loader.worker_init_fn = guard
        vars(loader)["persistent_workers"] = False  # torch refuses to set the attribute
        try:
            return iter(loader)
        finally:
            loader.worker_init_fn = init_fn
            vars(loader)["persistent_workers"] = is_persistent


class Stream(Source):
    """A Hugging Face ``IterableDataset``: a chain of steps, some of which keep what their state does not have."""

    @property
    def _steps(self) -> list[Any]:
        waiting, steps = [self.loader._ex_iterable], []
        while waiting:
            if (step := waiting.pop()) is not None:
                steps.append(step)
                waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]
        return steps

    @property
    def has_end(self) -> bool:
        return not any(getattr(step, "num_times", 0) is None for step in self._steps)  # repeated for ever

    def find_state_gap(self) -> str | None:
        for step in self._steps:
            if hasattr(step, "buffer_size"):
                return "the examples in its shuffle buffer"
            if getattr(step, "batched", False) and not _is_of(getattr(step, "function", None), "datasets."):
                return "the position in a batched map, which may draw for many examples at once"
        return None

    def find_inexactness(self) -> str | None:
        for step in self._steps:
            generator: Any = getattr(step, "generator", None)
            seeds: Any = generator.bit_generator.seed_seq if isinstance(generator, np.random.Generator) else None
            entropy = getattr(seeds, "entropy", None)
            if isinstance(entropy, int) and entropy.bit_length() > 64:  # that of the system
                return "its stream is shuffled without a seed, in another order each time; write shuffle(seed=...)"
        return None

    def find_cut(self) -> str | None:
        world_size = getattr(getattr(self.loader, "_distributed", None), "world_size", 1)
        cut = f"split_dataset_by_node has already split the data into {world_size} shares: leave it out"
        return cut if world_size > 1 else super().find_cut()


def source_of(loader: Any) -> Source:
    """Return what is known of a source of batches."""
    if hasattr(loader, "num_workers"):
        return TorchLoader(loader)
    return Stream(loader) if hasattr(loader, "_ex_iterable") else Source(loader)


def is_from_data(error: StopIteration, begun: Any) -> bool:
    """Return whether an error that has come out of ``next(begun)`` was raised by a function that makes data.

    That is the dataset or the ``collate_fn`` of a ``DataLoader``, here or in a worker, or a function that ``map`` calls.
    """
    names = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)][1:]
    if not isinstance(type(begun).__next__, FunctionType):  # as of map, through which the end of another iterator may come
        return bool(names) and names[0][1] != "__next__"
    if (torch._utils.__file__, "reraise") in names:  # of an error in a worker
        return True
    called = [name for (file, _), (_, name) in pairwise(names) if file == torch_fetch.__file__]
    return bool(called) and called[0] != "__next__"  # in which an iterable dataset may end


def _is_of(value: Any, package: str) -> bool:
    """Return whether a function, or the class of an object, was defined in a package."""
    module = getattr(value, "__module__", "") or ""
    return str(module).startswith(package)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


class _WorkerGuard:
    """A ``worker_init_fn`` for workers that ignore SIGINT, and SIGTERM until they are released.

    Released, they obey SIGTERM, by which torch ends workers that are stuck.
    """

    def __init__(self, context: Any, init_fn: Callable[[int], Any] | None) -> None:
        self.released = context.Event()
        self._init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=exit_with_parent, daemon=True).start()
        if self._init_fn is not None:
            self._init_fn(worker_id)

    def _terminate(self, *_: Any) -> None:
        if self.released.is_set() or os.getppid() == 1:
            os._exit(0)
