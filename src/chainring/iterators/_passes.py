"""What is known of a source of batches, and passes over it: how they begin, end, and are taken up again."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Iterator as PythonIterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from traceback import walk_tb
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils import fetch as torch_fetch

from chainring._messages import warn
from chainring._random import (
    digest,
    generator_state,
    preserve_host_rng,
    seed_host,
    set_generator_state,
    stable_hash,
)
from chainring.datasets._batches import COLUMNS, Batch, Layout, make_batch
from chainring.iterators import _order
from chainring.iterators._order import counts_elsewhere, is_defined_in, split_state, state_after, state_methods
from chainring.iterators._workers import END_SIGNALS, exit_with_parent
from chainring.iterators.base import not_the_end
from chainring.serializers._values import copy_value, is_same_value


class Source:
    """A source of batches: a list, a function that returns an iterable, or any other iterable, as the user gave it.

    Attributes:
        is_single_pass: True if it cannot be iterated again.
        may_draw: True if it may draw in this process amid a pass; seeding and restoring takes 0.1 ms a batch.
        has_end: True if it is known that a pass without a known length ends.
        state_gap: what its own state lacks to continue a pass bit for bit, if it has a state.
        inexactness: why batches do not come in the same order again, and the remedy.
        layout: what is known of the structure of its batches.
        workers_of_pass: how many workers the next pass has, where a resumed one ends as it began; otherwise ``None``.
        first_marks: the number of a pass, and the marks of its first batch, with which an evaluation begins each time.
        has_warned: True once another one was warned about.
    """

    has_end = False
    workers_of_pass: int | None = None
    first_marks: tuple[int, _order.Marks] | None = None
    has_warned = False
    state_gap: str | None = None
    inexactness: str | None = None

    n_workers = 0
    is_spent = False  # it gives a single pass, which was begun

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._look()
        _order.refuse_labels(self._members)
        self.is_single_pass = hasattr(loader, "__next__")
        self.may_draw = type(loader) not in (list, tuple)
        if counts_elsewhere(getattr(loader, "dataset", loader)) and state_methods(loader) is None:
            self.inexactness = (
                "the position in a dataset of Streaming is counted by a streaming.StreamingDataLoader alone; use that"
            )
        self.layout: Layout = COLUMNS if getattr(loader, "collate_fn", None) is default_collate else {}

    @property
    def length(self) -> int | None:
        return _length(self.loader)

    @property
    def n_examples(self) -> int | None:
        """The number of examples in a pass, if it indexes its dataset."""
        return None

    @property
    def is_stream(self) -> bool:
        """True if it is not known where its passes begin: it has no indices, and may be iterated again."""
        is_known = self.n_examples is not None or type(self.loader) in (list, tuple) or callable(self.loader)
        return not (is_known or self.is_single_pass or self.inexactness)

    @property
    def samplers(self) -> list[Any]:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        samplers = getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        return [sampler for sampler in samplers if sampler is not None]

    def find_split(self) -> str | None:
        """Return what has visibly given each rank its own share of the data, and the remedy."""
        for sampler in self.samplers:
            ranks = max(getattr(sampler, "num_replicas", 1) or 1, getattr(sampler, "num_processes", 1) or 1)
            if ranks > 1 or isinstance(sampler, DistributedSampler):
                return f"the {type(sampler).__name__} has already split the data: leave the sampler out"
        return None

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader and of all in it that has it."""
        self._look()
        self.epochs.tell(epoch)

    def _look(self) -> None:
        self._members = _order.members_of(self.loader, is_loader=True)
        self.epochs = _order.Epochs(self._members)

    @property
    def _generators(self) -> dict[str, Any]:
        """The generators of the loader and of what is in it, each by its number and kind."""
        generators = enumerate(_order.generators_of(self._members))
        return {f"{i} {type(getattr(item, 'bit_generator', item)).__name__}": item for i, item in generators}

    def get_generators(self) -> dict[str, Any]:
        return {name: generator_state(generator) for name, generator in self._generators.items()}

    def set_generators(self, states: Mapping[str, Any]) -> None:
        for name, generator in self._generators.items():
            if name in states:  # otherwise the loader is another
                set_generator_state(generator, states[name])

    def begin(self, releases: list[Callable[[], Any]]) -> Any:
        """Begin a pass; what is to be called before it ends is appended to ``releases``."""
        if callable(self.loader) and not isinstance(self.loader, Iterable):
            return source_of(self.loader()).begin(releases)
        return iter(self.loader)


class TorchLoader(Source):
    """A `DataLoader`, or a loader with its attributes, such as torchdata's."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.n_workers = loader.num_workers
        dataset: Any = getattr(loader, "dataset", None)
        is_plain = isinstance(dataset, IterableDataset) and not hasattr(dataset, "_ex_iterable")
        self._dataset = Source(dataset) if is_plain else source_of(dataset)  # litData's has num_workers too
        # Beside workers only the samplers run in this process; torch's draw at the start of a pass alone.
        self._samplers_draw = not all(is_defined_in(sampler, "torch.utils.data") for sampler in self.samplers)
        self.may_draw = not self.n_workers or self._samplers_draw
        self.has_end = self._dataset.has_end
        self.state_gap = self._dataset.state_gap or _order.sampler_gap(loader)
        self.inexactness = self.inexactness or self._dataset.inexactness
        if self.n_workers:
            is_table = type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] != "custom"
            has_no_code = is_table or type(dataset) in (TensorDataset, list, tuple) or _order.is_streamed(dataset)
            collate, methods = getattr(loader, "collate_fn", None), state_methods(loader)
            collate = getattr(collate, "collate_fn", collate)  # that in litData's
            calls_code = not has_no_code or not is_defined_in(collate, ("torch.utils.data", "litdata."))
            if calls_code and not (methods is not None and methods.holds_generators):
                self.state_gap = "the random generators of its workers"
            if not getattr(loader, "in_order", True) and self.inexactness is None:
                self.inexactness = "with in_order=False batches come in the order in which the workers finish; leave it True"

    @property
    def n_examples(self) -> int | None:
        is_indexed = isinstance(self.loader, DataLoader) and not isinstance(self.loader.dataset, IterableDataset)
        return _length(self.loader.dataset) if is_indexed else None

    def find_split(self) -> str | None:
        return super().find_split() or self._dataset.find_split()

    def begin(self, releases: list[Callable[[], Any]]) -> Any:
        """Begin a pass, with workers that leave signals to the trainer and end with the pass.

        A ``collate_fn`` of the user's says how many examples it was given, from which its batch can be told.
        """
        loader: Any = self.loader
        n_workers = self.n_workers if self.workers_of_pass is None else self.workers_of_pass
        self.workers_of_pass, self.may_draw = None, not n_workers or self._samplers_draw
        if not isinstance(loader, DataLoader):
            return iter(loader)
        names = ("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "persistent_workers", "collate_fn")
        settings = {name: getattr(loader, name) for name in names}
        used: dict[str, Any] = {}
        if n_workers or self.n_workers:
            used = {"num_workers": n_workers, "prefetch_factor": None, "timeout": 0, "persistent_workers": False}
        if n_workers:
            guard = _WorkerGuard(loader.multiprocessing_context or multiprocessing.get_context(), loader.worker_init_fn)
            # Called by multiprocessing before it waits for its processes: at exit, and in a Process, where atexit is not.
            releases.append(multiprocessing.util.Finalize(None, guard.released.set, exitpriority=20))
            used |= {"prefetch_factor": loader.prefetch_factor or 2, "timeout": loader.timeout, "worker_init_fn": guard}
        collate = loader.collate_fn
        if loader.batch_sampler is not None and self.layout is not COLUMNS and not is_defined_in(collate, "chainring."):
            used["collate_fn"] = _CountingCollate(collate)
        vars(loader).update(used)  # torch refuses to set some of these attributes
        try:
            return iter(loader)
        finally:
            vars(loader).update(settings)


class Stream(Source):
    """A Hugging Face ``IterableDataset``: a chain of steps, some of which keep what their state does not have."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.has_end = True
        waiting = [loader._ex_iterable]
        while waiting:
            if (step := waiting.pop()) is None:
                continue
            waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]
            if getattr(step, "num_times", 0) is None:  # repeated for ever
                self.has_end = False
            if hasattr(step, "buffer_size"):
                self.state_gap = self.state_gap or "the examples in its shuffle buffer"
            elif getattr(step, "batched", False) and not is_defined_in(getattr(step, "function", None), "datasets."):
                gap = "the position in a batched map, which may draw for many examples at once"
                self.state_gap = self.state_gap or gap
            generator: Any = getattr(step, "generator", None)
            seeds: Any = generator.bit_generator.seed_seq if isinstance(generator, np.random.Generator) else None
            entropy = getattr(seeds, "entropy", None)
            if isinstance(entropy, int) and entropy.bit_length() > 64:  # that of the system
                remedy = "write shuffle(seed=...)"
                self.inexactness = f"its stream is shuffled without a seed, in another order each time; {remedy}"

    def find_split(self) -> str | None:
        world_size = getattr(getattr(self.loader, "_distributed", None), "world_size", 1)
        cut = f"split_dataset_by_node has already split the data into {world_size} shares: leave it out"
        return cut if world_size > 1 else super().find_split()


def source_of(loader: Any) -> Source:
    """Wrap a source in the class that knows its kind."""
    if hasattr(loader, "num_workers"):
        return TorchLoader(loader)
    return Stream(loader) if hasattr(loader, "_ex_iterable") else Source(loader)


def is_from_data(error: StopIteration, begun: Any) -> bool:
    """Return whether an error of ``next(begun)`` is that of a dataset, a ``collate_fn`` or a function that ``map`` calls."""
    names = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)][1:]
    if not isinstance(type(begun).__next__, FunctionType):  # as of map, through which the end of another iterator may come
        return bool(names) and names[0][1] != "__next__"
    if (torch._utils.__file__, "reraise") in names:  # of an error in a worker
        return True
    called = [name for (file, _), (_, name) in pairwise(names) if file == torch_fetch.__file__]
    return bool(called) and called[0] != "__next__"  # in which an iterable dataset may end


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


class _Collated(NamedTuple):  # whose items torch pins
    batch: Any
    examples: int


class _CountingCollate:
    """A ``collate_fn`` that returns beside the batch how many examples it was given."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: Any) -> Any:
        batch = self._collate(examples)
        return _Collated(batch, len(examples)) if isinstance(examples, (list, tuple)) else batch


class _WorkerGuard:
    """A ``worker_init_fn`` for workers that ignore `END_SIGNALS`, SIGTERM, by which torch ends them, until released."""

    def __init__(self, context: Any, init_fn: Callable[[int], Any] | None) -> None:
        self.released = context.Event()
        self._init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        for ignored in END_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if self.released.is_set() or os.getppid() == 1 else None)
        threading.Thread(target=exit_with_parent, daemon=True).start()
        if self._init_fn is not None:
            self._init_fn(worker_id)


class Position(NamedTuple):
    """A position between two batches."""

    passes: int  # how many were begun
    taken: int  # how many batches of the last pass were fetched; 0 if it is over
    generators: dict[str, Any]  # the states of the loader's own generators at the beginning of that pass
    loader_state: Any = None  # the loader's own, and that of its generators: kept if a batch beyond it was fetched
    current_generators: dict[str, Any] | None = None


class Passes:
    """The passes over a source, one after the other.

    Random numbers that the source draws in this process come from a stream that follows from the seed, the pass and the
    batch, and from the rank where each has its own share. Without ``owner.repeat`` the source's own generators are restored
    after each pass.
    """

    def __init__(self, source: Source, owner: Any) -> None:  # a LoaderIterator
        self.source, self._owner = source, owner
        self._state = state_methods(source.loader)  # or of the iterator over it, once a pass has begun
        self._other_state: Any = None  # of the beginning of this pass if it is fetched again, or after its first batch
        self.length = source.length  # of this pass in batches, if it is known
        self.is_length_wrong = False  # a pass has had another number of batches
        self.seed: int | None = None
        self.has_ended = False  # there is no other pass
        self._pass: PythonIterator[Any] | None = None
        self._last_batch: Batch | None = None  # of this rank in the pass, where each has its own share
        self._releases: list[Callable[[], Any]] = []  # to be called when the pass ends
        self.initial_generators = source.get_generators()
        self._is_at_end = False  # of a pass whose state was loaded, or at the beginning of the next
        self._resumed_generators: dict[str, Any] = {}  # for the end of `_open`, which may draw from them
        self.position = Position(0, 0, self.initial_generators)  # behind the batch fetched last

    @property
    def _state_lacks(self) -> str | None:
        if self._owner.per_rank:
            return "the last batch of a rank whose share has ended"
        return None if self._state is None else self.source.state_gap

    @property
    def uses_state(self) -> bool:
        """True if a pass is taken up again by the own state of the source, and nothing is fetched again."""
        return self._state is not None and self._state_lacks is None

    @property
    def _fetches_again(self) -> bool:
        """True if the state of the source is of use between passes alone."""
        is_of_source = self._state is not None and self._state.owner is self.source.loader
        return is_of_source and self._is_checked and self._state_lacks is not None

    @property
    def _is_checked(self) -> bool:
        """True if it has a state of which it is not known whether it holds the position."""
        return self._state is not None and not is_defined_in(self.source.loader, ("torchdata.", "datasets.", "grain."))

    @property
    def is_open(self) -> bool:
        return self._pass is not None

    @property
    def has_shares(self) -> bool:
        """True if ranks each have a share of their own, and end a pass together."""
        has_shares: bool = self._owner.per_rank and self._owner.size > 1
        return has_shares

    def begin(self) -> None:
        owner, comm = self._owner, self._owner.comm
        if owner.per_rank and owner.size == 1 and comm is not None and comm.size > 1:
            raise ValueError(
                f"a loop over an iterator of an Evaluator, beside that of Evaluator.evaluate(), has all examples on each of "
                f"{comm.size} ranks, and {owner.name!r} gives each its own share (per_rank=True): leave that out, with what "
                "cuts the data, or return the values of a batch from eval_func, whose means are over all ranks"
            )
        if not owner.repeat:
            self._releases.append(partial(self.source.set_generators, self.source.get_generators()))
            self.source.set_generators(self.initial_generators)
        if self._fetches_again and self._other_state is None:
            self._other_state = self._get_state()
        self.source.set_epoch(self.position.passes)
        self._open(self.position.passes)

    def _open(self, number: int, state: Any = None) -> None:
        """Begin a pass; with a state, that of the iterator over the source, go on where it stood."""
        generators, loader = self.source.get_generators(), self.source.loader
        with self._seeded(number, -1):
            self._pass = self.source.begin(self._releases)
            if self._state is None or self._state.owner is not loader:
                self._state = state_methods(self._pass)
            if state is not None and self._state is not None:
                self._state.set(state)
        if not self._fetches_again:
            self._other_state = None
        self.source.set_generators(self._resumed_generators)
        self._resumed_generators = {}
        self.source.is_spent = self.source.is_single_pass
        self._last_batch = None
        if not self.has_shares:  # of which the longest counts
            self.is_length_wrong = self.is_length_wrong or (number > 0 and self.length != self.source.length)
            self.length = self.source.length
        self.position = Position(number + 1, 0, generators)

    def end(self) -> None:
        self.close()
        self.has_ended = not self._owner.repeat or self.source.is_single_pass
        self._other_state = self._get_state() if self._fetches_again else None
        self.position = Position(self.position.passes, 0, self.source.get_generators())

    def close(self) -> None:
        """Release what the pass holds, such as worker processes."""
        while self._releases:
            self._releases.pop()()
        # A DataLoader's workers end with its iterator, to which the traceback of an error may still refer.
        getattr(self._pass, "_shutdown_workers", lambda: None)()
        self._pass = None

    def take(self) -> Batch:
        """Return the next batch of the pass, or raise ``StopIteration`` at its end."""
        was_at_end = self._is_at_end
        try:
            batch = self._take_together() if self.has_shares else self._fetch()
        finally:
            self._is_at_end = False
        if was_at_end:  # so that it has gone on with the next pass by itself
            self.source.epochs.know(self.position.passes)
            self.position = Position(self.position.passes + 1, 0, self.source.get_generators())
        comm, per_rank = self._owner.comm, self._owner.per_rank
        if self.position.taken == 0 and comm is not None and (not per_rank or comm.world.size > comm.size):
            sums = comm.world.gather_object((comm.rank, digest(*[content for _, content in _order.contents(batch)])))
            name, kind = self._owner.name, type(self.source.loader).__name__
            # Otherwise ranks would take rows of different batches, or compute parts of the model on different examples.
            if not per_rank and len({checksum for _, checksum in sums}) > 1:
                raise ValueError(
                    f"the {len(sums)} ranks share every batch of iterator {name!r} by its rows, and its loader "
                    f"({kind}) gives them different ones. If it gives each rank its own share, "
                    "write LoaderIterator(loader, per_rank=True); otherwise seed what it draws alike on all ranks"
                )
            if len(set(sums)) > comm.size:
                raise ValueError(
                    f"ranks that compute one model together see the same rows, and the loader of iterator {name!r} "
                    f"({kind}) gives them different ones: cut its data by the rank of the communicator, "
                    "which is that of the data, and seed what it draws alike on all ranks"
                )
        if self.position.taken == 0 and not self._owner.repeat and not self.source.has_warned:
            _warn_of_other_data(self, _order.marks_of(batch))
        passes, taken, generators = self.position[:3]
        start = self.loader_state() if self._fetches_again else None
        self.position = Position(passes, taken + 1, generators, start)
        if taken == 0 and self._is_checked and self.uses_state:
            self._other_state = self._get_state()
        return batch

    def _take_together(self) -> Batch:
        """Return this rank's next batch; if it has none and others have, its last one again with weight 0."""
        name, rank, size, comm = self._owner.name, self._owner.rank, self._owner.size, self._owner.comm
        if comm is None:
            raise ValueError(
                f"with per_rank=True the {size} ranks of iterator {name!r} agree on the end of a pass, for which "
                "they need a communicator: StandardUpdater(..., comm=create_communicator())"
            )
        try:
            batch: Batch | None = self._fetch()
        except StopIteration:
            batch = None
        if not comm.start_max(int(batch is not None))():
            raise StopIteration
        if batch is not None:
            self._last_batch = batch
            return batch
        if self._last_batch is None:
            raise ValueError(
                f"the loader of iterator {name!r} gave rank {rank} of {size} no batch in a whole pass, and "
                "others have some: give every rank a share, for example by more shards or a smaller batch size"
            )
        batch = self._last_batch[:]
        batch.weight = 0
        return batch

    def _fetch(self) -> Batch:
        assert self._pass is not None
        if self.source.epochs.members:
            self.source.epochs.tell(self.position.passes - 1)
        passes, taken = (self.position.passes, 0) if self._is_at_end else (self.position.passes - 1, self.position.taken)
        seeded = self._seeded(passes, taken) if self.source.may_draw else nullcontext()
        with seeded:
            try:
                item = next(self._pass)
            except StopIteration as error:
                if is_from_data(error, self._pass):
                    raise not_the_end(f"the dataset or a function of the loader of iterator {self._owner.name!r}") from error
                raise
        source, examples = self.source, None
        if type(item) is _Collated:
            item, examples = item
        return make_batch(item, examples, source.layout, getattr(source.loader, "batch_size", None))

    def _fetch_first(self) -> Batch:
        """Return the first batch of a pass from the state of its beginning, which may be the end of the one before."""
        passes, _, generators, *_ = self.position
        try:
            return self._fetch()
        except StopIteration:
            self.close()
            self.position = Position(passes - 1, 0, generators)
            self.begin()
            return self._fetch()

    @contextmanager
    def _seeded(self, *keys: int) -> Generator[None]:
        with preserve_host_rng():
            seed_host(self.get_seed(), *keys, *([self._owner.rank] if self.has_shares else ()))
            yield

    def get_seed(self) -> int:
        """Return the seed, which is derived when it is first used."""
        if self.seed is None:
            self.seed = stable_hash("loader", self._owner.base_seed(), self._owner.name)
        return self.seed

    # --- going elsewhere ---

    def restart(self, passes: int, generators: dict[str, Any] | None) -> None:
        """Let pass number ``passes`` be the next, with the source's own generators in these states, if they are given."""
        if self.source.is_spent:
            raise ValueError(
                f"the loader of iterator {self._owner.name!r} ({type(self.source.loader).__name__}) gives one pass, which "
                "was begun, and cannot start again: pass a function that returns a new iterable"
            )
        self.close()
        self.source.set_generators(generators or {})
        self.position = Position(passes, 0, self.source.get_generators())
        self.has_ended = False

    def describe(self) -> Position:
        """Return the position with all that is to be saved of it."""
        passes, taken, generators = self.position[:3]
        if self._pass is None and taken == 0:
            generators = self.source.get_generators()
        state = self.loader_state()
        return Position(passes, taken, generators, state, self.source.get_generators())  # after the state, which may draw

    def loader_state(self) -> Any:
        """Return the state of the source or of the iterator over it; of the beginning of a pass that is fetched again."""
        has_begun = self._pass is not None or self.position.taken > 0
        if self._fetches_again:
            if self._other_state is None and not has_begun:
                self._other_state = self._get_state()
            return None if self._other_state is None else state_after(0, self._other_state)
        starts_workers = not has_begun and not self._is_checked and getattr(self.source.loader, "num_workers", 0) > 0
        if self._state is None or not self.uses_state or starts_workers:
            return None
        if self._state.owner is not self.source.loader and self._pass is None:
            return None
        state = self._get_state()
        if self.position.taken > 1 and self._other_state is not None and is_same_value(state, self._other_state):
            return state_after(0, state)  # it does not tell the position
        return state

    def _get_state(self) -> Any:
        assert self._state is not None
        with self._seeded(self.position.passes, -1):  # some begin a pass for it
            return copy_value(self._state.get())

    def resume(self, saved: Position, workers: int, marks: _order.Marks | None, *, is_at_end: bool) -> None:
        """Go to a saved position: by the source's own state, or by fetching the batches of the pass again.

        The pass ends with as many workers as it began with; ``marks`` are those of its last batch.
        """
        passes, taken, generators, state, current_generators = saved
        self.close()
        state, state_taken = split_state(state)
        is_of_start = state_taken == 0
        if self.source.n_workers != workers:
            if taken:
                self.source.workers_of_pass = workers
                if state is None:
                    self.source.state_gap = "the workers with which this pass began"
            elif self.source.n_examples is not None:
                state = None  # which tells of workers that the next pass does not have
        is_of_pass = self._state is None or self._state.owner is not self.source.loader
        if state is not None and not is_of_start and (self.uses_state or is_of_pass):
            # A loader restores its position with other draws than in the saved run (torchdata's draws no seed for its
            # workers), and the next pass would be another one.
            self._resumed_generators = current_generators or {} if self._owner.repeat else {}
            if taken:
                self.source.set_epoch(passes - 1)
            if not is_of_pass:
                self._set_state(state)
            if taken:
                self._open(passes - 1, state if is_of_pass else None)
            if self._state is not None:
                self.position, self._is_at_end = Position(passes, state_taken or taken, generators), is_at_end
                if state_taken:
                    _take_last(self, marks)
                return
            self.close()  # the iterator over this loader has no state
        elif is_of_start and not is_of_pass:
            self._set_state(state)
        if self._owner.repeat or not taken:
            self.source.set_generators(generators)
        self._other_state = state if is_of_start else None
        self.position = Position(passes - (taken > 0), 0, generators)
        if taken:
            self._fetch_again(taken, marks, is_of_start)
        elif passes and state is None:
            self.check_beginning()

    def check_beginning(self) -> None:
        """Refuse a stream without a state whose next pass does not begin twice with one batch, as a resumed run needs."""
        if not self.source.is_stream or self._state is not None or not self._owner.repeat:
            return
        (passes, _, generators, *_), marks = self.position, []
        with suppress(StopIteration):
            for _ in range(2):
                self.restart(passes, generators)
                self.begin()
                marks.append(_order.marks_of(self._fetch()))
        self.restart(passes, generators)
        if len(marks) == 2:
            which = "the first batch of an epoch, which was begun twice,"
            compare(self, marks[0], marks[1], which)

    def _set_state(self, state: Any) -> None:
        assert self._state is not None
        with preserve_host_rng():
            self._state.set(state)

    def _fetch_again(self, taken: int, marks: _order.Marks | None, from_state: bool) -> None:
        """Begin the pass again and skip the batches that the saved run had taken; the last one must be the same."""
        kind, name = type(self.source.loader).__name__, self._owner.name
        if type(self.source.loader) not in (list, tuple):
            lacks = self._state_lacks
            if lacks is None and from_state:
                lacks = "its position: it is the same after a batch and after several"
            why = f"{kind} has no state_dict" if lacks is None else f"the state of {kind} lacks {lacks}"
            is_short = self._owner.epoch_length is not None or not self._owner.may_have_no_end
            remedy = (
                "" if is_short else "; of one without an end, LoaderIterator(loader, epoch_length=) fetches an epoch at most"
            )
            warn(
                f"iterator {name!r} fetches {taken} batches again and skips them, to resume in the middle of an "
                f"epoch: {why}. SerialIterator and loaders with a state do not need this{remedy}",
            )
        self.begin()
        batch = None
        for skipped in range(taken):
            try:
                batch = self._fetch_first() if from_state and skipped == 0 else self._fetch()
                self._last_batch = batch if self.has_shares else None
            except StopIteration:
                if self._last_batch is None:  # otherwise other ranks had one; they are not asked
                    raise ValueError(
                        f"the saved run had taken {taken} batches of this pass, and the loader of iterator {name!r} "
                        f"gives only {skipped}: resume with the same data and batch size"
                    ) from None
            start = self.loader_state() if self._fetches_again else None
            self.position = Position(self.position.passes, skipped + 1, self.position.generators, start)
        if from_state and not self._fetches_again:
            self._other_state = self._get_state()  # which the next to be saved will be compared with
        if batch is not None:
            compare(self, marks, _order.marks_of(batch), f"the last of the {taken} batches of this epoch")


def _warn_of_other_data(passes: Passes, marks: _order.Marks) -> None:
    """Warn once if an evaluation begins the same pass with another batch than the first one."""
    source, begun = passes.source, passes.position.passes
    number, first = source.first_marks = source.first_marks or (begun, marks)
    if begun == number and _order.find_difference(first, marks) is not None:
        source.has_warned = True
        warn(
            f"the loader of iterator {passes._owner.name!r} ({type(source.loader).__name__}) begins this evaluation with "
            "another batch than the first one, as a resumed run would not, whose loader is new. Let it return the same "
            "batches each time, or give a function that makes a new one: LoaderIterator(make_loader, repeat=False)"
        )


def _take_last(passes: Passes, marks: _order.Marks | None) -> None:
    """Take the last batch of a pass again, which must be the one that it was, and the last."""
    passes._is_at_end = False
    found: list[_order.Marks] = []
    with suppress(StopIteration):
        while len(found) < 2:
            found.append(_order.marks_of(passes.take()))
    compare(passes, marks, found[0] if found else None, "the last batch of this pass")
    if len(found) == 2:
        raise refusal(passes, "the end of this pass")
    passes.end()


def compare(passes: Passes, marks: _order.Marks | None, again: _order.Marks | None, which: str) -> None:
    """Refuse, or warn of, a batch that is another one than it was, if its marks are known; or no batch at all."""
    difference = None if marks is None else "examples" if again is None else _order.find_difference(marks, again)
    if difference == "numbers":
        warn(
            f"iterator {passes._owner.name!r} does not continue bit for bit: {which} has the examples that it had, and "
            "other numbers in them. Let datasets and collate functions draw from the global generators, which are seeded "
            "for each batch, or from a generator that is an attribute of theirs"
        )
    elif difference is not None:
        raise refusal(passes, which)


def refusal(passes: Passes, which: str) -> ValueError:
    """Return the error of a loader that gives another batch than it gave, with the remedy."""
    remedy = (
        "Resume with the same data, shuffle, sampler and batch size, or from a snapshot of the end of an epoch. Let "
        "a sampler draw from the global generators or from one that is an attribute of it, and prepare data that "
        "change by epoch in its set_epoch"
    )
    if passes.uses_state:
        remedy = (
            "Resume with the same data and settings. If they are, the state of the loader does not lead to where it was "
            "saved: let it hold the whole position, or hide it, so that batches are fetched again and skipped: "
            "LoaderIterator(lambda: loader)"
        )
    elif passes.source.is_stream:
        remedy = (
            "A stream that reads on from pass to pass needs a state: give the dataset state_dict() and "
            "load_state_dict(state), and use torchdata's StatefulDataLoader. Let others draw from the global "
            "generators, or accept other batches at the end of an epoch: LoaderIterator(lambda: loader)"
        )
    return ValueError(
        f"the loader of iterator {passes._owner.name!r} ({type(passes.source.loader).__name__}) gives other batches than "
        f"before: {which} differs, and examples would come twice or never. {remedy}"
    )
