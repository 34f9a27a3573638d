"""LoaderIterator: whatever already makes batches, such as a torch DataLoader, seen as an iterator."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Iterator as PythonIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from chainring._random import preserve_host_rng, seed_host, stable_hash
from chainring.datasets._columns import count_rows
from chainring.iterators.base import Batch, Iterator
from chainring.serializers.base import AbstractSerializer, Serializer, has_state, visit_setting


class Closing:
    """Whether the workers may end: then SIGTERM, by which torch ends those that are stuck, is obeyed again."""

    def __init__(self, context: Any) -> None:
        self._event = context.Event()
        atexit.register(self.set)  # before multiprocessing, which began earlier, waits for its processes

    def set(self) -> None:
        """Lets the workers end."""
        self._event.set()
        atexit.unregister(self.set)

    def receive(self, *_: Any) -> None:
        """The handler of SIGTERM in a worker."""
        if self._event.is_set() or os.getppid() == 1:
            os._exit(0)


class Begin:
    """What a worker does first, and then what the user's ``worker_init_fn`` does."""

    def __init__(self, closing: Closing, own: Callable[[int], Any] | None) -> None:
        self._closing = closing
        self._own = own

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._closing.receive)
        if self._own is not None:
            self._own(worker)


@contextmanager
def guarded(loader: Any) -> Generator[Closing | None]:
    """While a pass over a loader is begun, its workers are told to leave signals to the trainer."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield None
        return
    context = loader.multiprocessing_context or multiprocessing.get_context()
    closing, own = Closing(context), loader.worker_init_fn
    loader.worker_init_fn = Begin(closing, own)
    try:
        yield closing
    finally:
        loader.worker_init_fn = own


_PARTS = ("sampler", "batch_sampler", "dataset")


def is_function(loader: Any) -> bool:
    """Whether a call of the loader begins a pass."""
    return callable(loader) and not isinstance(loader, Iterable)


def is_one_pass(loader: Any) -> bool:
    """Whether the loader is itself an iterator, such as a generator, and cannot be begun anew."""
    return hasattr(loader, "__next__")


def length_of(loader: Any) -> int | None:
    """Batches in a pass, where the loader tells."""
    try:
        return len(loader)
    except TypeError:
        return None


def examples_of(loader: Any) -> int | None:
    """Examples in a pass, where a ``DataLoader`` indexes its dataset."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    return None if dataset is None or isinstance(dataset, IterableDataset) else length_of(dataset)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of the loader and of its parts, where they have it."""
    for part in (loader, *[getattr(loader, name, None) for name in _PARTS]):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader or its samplers were given: they stand elsewhere at the start of each pass."""
    sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def draws_between(loader: Any) -> bool:
    """Whether a loader may draw in this process after a pass has begun: lists do not, nor torch's samplers with workers."""
    if type(loader) in (list, tuple):
        return False
    if getattr(loader, "num_workers", 0) == 0:
        return True
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return not all(type(one).__module__.startswith("torch.utils.data") for one in samplers if one is not None)


def is_distributed(loader: Any) -> bool:
    """Whether a loader already gives each rank a part of its own."""
    sampler = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
    return any(isinstance(part, DistributedSampler) for part in parts)


def check(loader: Any, epoch_length: int | None) -> None:
    """Refuses what gives no batches.

    Raises:
        TypeError: the loader cannot be iterated.
        ValueError: ``epoch_length`` is below 1.
    """
    iterates = isinstance(loader, Iterable) or callable(loader) or hasattr(loader, "__getitem__")
    if isinstance(loader, (str, bytes, dict)) or not iterates:
        raise TypeError(f"a loader is an iterable of batches, or a function that returns one; got {type(loader).__name__}")
    if epoch_length is None:
        return
    if isinstance(epoch_length, bool) or not isinstance(epoch_length, int) or epoch_length < 1:
        raise ValueError(f"epoch_length counts batches and is at least 1, got {epoch_length!r}")


class Place(NamedTuple):
    """Between two batches: ``passes`` were begun, ``taken`` batches of the last came (0: it is over)."""

    passes: int
    taken: int
    generators: dict[str, Any]  # the states of the loader's own generators as that pass began


class PassIterator(Iterator):
    """Fetches from a loader, begins its passes anew and finds a place in them again; a subclass counts the epochs."""

    def __init__(self, loader: Any, epoch_length: int | None, repeat: bool) -> None:
        check(loader, epoch_length)
        self.loader = loader
        self.epoch_length = epoch_length
        self.repeat = repeat
        self._count = length_of(loader)  # batches in a pass, where the loader tells
        if repeat and self._count == 0:
            raise ValueError(f"repeat=True needs at least one batch, and {type(loader).__name__} has none")
        self._seed: int | None = None
        self._draws_between = draws_between(loader)
        self._generators = generators_of(loader)
        self._first_state = self._outer_state = self._generator_state()
        self._pass: PythonIterator[Any] | None = None
        self._closing: Closing | None = None
        self._fetched = Place(0, 0, self._first_state)
        self._again: list[tuple[Any, Place]] = []  # what was fetched and is not returned yet
        self._has_ended = False  # there is no other pass
        self._is_spent = False  # a loader of one pass was begun
        self._after_open: dict[str, Any] = {}  # the generators of a resumed run, once the loader has found its place

    def _fetch(self) -> tuple[Any, Place]:
        """The loader's next batch, from another pass where one has ended, and the place after it."""
        if not self.repeat and self.epoch:  # epoch_length batches have come
            self._end_pass()
        begins = self._pass is None
        while not self._has_ended:
            if self._pass is None:
                self._begin()
            try:
                return self._take()
            except StopIteration:
                is_empty = begins and self._fetched.taken == 0
                self._end_pass()
                if self.repeat and not is_one_pass(self.loader):
                    if is_empty:
                        raise ValueError(self._says_empty()) from None
                    begins = True
        raise StopIteration

    def _says_empty(self) -> str:
        return (
            f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) gave no batch in a whole pass; "
            "a function must return a fresh iterable each time that it is called"
        )

    def _take(self) -> tuple[Any, Place]:
        item, place = self._next_of_pass()
        self._fetched = place
        if place.taken == self._count and not has_state(self.loader):
            place = self._look_for_end()
        return item, place

    def _next_of_pass(self) -> tuple[Any, Place]:
        assert self._pass is not None
        passes, taken, state = self._fetched
        with self._stream(passes - 1, taken):
            item = next(self._pass)
        return item, Place(passes, taken + 1, state)

    def _look_for_end(self) -> Place:
        """Ends the pass with its last batch, so that a run saved there need not fetch it again to find that out."""
        place = self._fetched
        try:
            item, self._fetched = self._next_of_pass()
        except StopIteration:
            self._end_pass()
            return self._fetched
        self._again.append((item, self._fetched))  # the loader's length was too small
        return place

    def _begin(self) -> None:
        """Begins a pass: a new epoch for what shuffles by epoch, a stream of its own for what draws."""
        number = self._fetched.passes
        if not self.repeat:
            self._outer_state = self._generator_state()
            self._put_generators(self._first_state)
        tell_epoch(self.loader, number)
        self._open(number)

    def _open(self, number: int) -> None:
        state = self._generator_state()
        with _seeded(self._known_seed(), number, -1), guarded(self.loader) as closing:
            self._closing = closing
            self._pass = iter(self.loader() if is_function(self.loader) else self.loader)
        self._put_generators(self._after_open)
        self._after_open = {}
        self._is_spent = is_one_pass(self.loader)
        self._fetched = Place(number + 1, 0, state)

    def _end_pass(self) -> None:
        self._drop_pass()
        self._has_ended = not self.repeat or is_one_pass(self.loader)
        self._fetched = Place(self._fetched.passes, 0, self._generator_state())

    def _drop_pass(self) -> None:
        if self._pass is not None and not self.repeat:
            self._put_generators(self._outer_state)
        if self._closing is not None and not self.loader.persistent_workers:
            self._closing.set()
        self._pass = None  # a DataLoader's workers end with its iterator

    def _stream(self, number: int, batch: int) -> AbstractContextManager[None]:
        """Generators seeded for one batch of one pass, put back afterwards; workers have their own."""
        return _seeded(self._known_seed(), number, batch) if self._draws_between else nullcontext()

    def _known_seed(self) -> int:
        if self._seed is None:
            self._seed = stable_hash("loader", self.derived_from(), self.name)
        return self._seed

    def _generator_state(self) -> dict[str, Any]:
        return {str(number): generator.get_state() for number, generator in enumerate(self._generators)}

    def _put_generators(self, state: Mapping[str, Any]) -> None:
        for number, generator in enumerate(self._generators):
            if str(number) in state:
                generator.set_state(state[str(number)])

    def _loader_state(self) -> Any:
        """The loader's own state, where it has one and it is that of the batch last returned."""
        if self._again or not has_state(self.loader):
            return None
        with _seeded(self._known_seed(), self._fetched.passes, -1):  # some begin a pass to tell
            return self.loader.state_dict()

    def _resume_own(self, place: Place, own: Any, generators: dict[str, Any]) -> None:
        passes, taken, state = place
        # A loader finds its place again with other draws than it took the first time (torchdata's does without the seed of
        # its workers), and the next pass would be another one.
        self._after_open = generators if self.repeat else {}
        if taken:
            tell_epoch(self.loader, passes - 1)
        with preserve_host_rng():
            self.loader.load_state_dict(own)
        if taken:
            self._open(passes - 1)
        self._fetched = Place(passes, taken, state)

    def _skip(self, taken: int) -> None:
        if type(self.loader) not in (list, tuple):
            warnings.warn(
                f"iterator {self.name!r} fetches {taken} batches again and skips them, to continue in the middle of an "
                f"epoch: {type(self.loader).__name__} has no state_dict. SerialIterator and loaders with a state need not",
                stacklevel=2,
            )
        self._begin()
        for number in range(taken):
            try:
                self._take()
            except StopIteration:
                raise ValueError(
                    f"the saved run had taken {taken} batches of this pass, and the loader of iterator {self.name!r} "
                    f"gives only {number}: resume with the same data and batch size"
                ) from None

    def finalize(self) -> None:
        self._drop_pass()


@contextmanager
def _seeded(*parts: int) -> PythonIterator[None]:
    with preserve_host_rng():
        seed_host(*parts)
        yield


class LoaderIterator(PassIterator):
    """Takes batches as they come from a loader: a ``DataLoader``, a list of batches, a generator, or a function.

    A list (which ``default_collate`` makes) counts as a tuple; nothing else is changed and nothing concatenated again.
    The number of examples in a batch is the first dimension of its first array. What the loader draws from Python's,
    NumPy's or torch's global generator in this process comes from a stream of its own, a function of the seed (derived
    from ``torch.initial_seed()`` and saved), the pass and the batch.

    A run resumes in the middle of an epoch through the loader's own ``state_dict`` where it has one; otherwise its
    batches are fetched again and skipped, with a warning that gives their number.

    Args:
        loader: an iterable of batches, begun anew for every pass, or a function that returns one. An iterator (a
            generator, say) gives one pass, and the data end with it.
        epoch_length: batches in an epoch; by default ``len(loader)``, and where it has none an epoch is one pass, whose
            end is known only when it is there.
        repeat: whether to begin another pass after one. Without, the loader's own generators are put back after each
            pass, so that an evaluation changes nothing and sees the same each time.

    Raises:
        TypeError: the loader is nothing that gives batches.
        ValueError: ``epoch_length`` is below 1, or an empty loader is to be repeated.
    """

    def __init__(self, loader: Any, *, epoch_length: int | None = None, repeat: bool = True) -> None:
        super().__init__(loader, epoch_length, repeat)
        self.batch_size = getattr(loader, "batch_size", None) or 1
        self._batch_size_is_known = getattr(loader, "batch_size", None) is not None
        self._examples = examples_of(loader)
        self._length = (self._count or None) if epoch_length is None else epoch_length
        self._epoch_position = 0
        self._returned = self._fetched
        self._since_mark: list[tuple[Any, Place]] | None = None  # what was returned, from the first `mark` on

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self._epoch_position, self._length

    def __next__(self) -> Batch:
        item, place = taken = self._again.pop(0) if self._again else self._fetch()
        if self._since_mark is not None:
            self._since_mark.append(taken)
        self._move(place)
        return self._batch(item)

    def _move(self, place: Place) -> None:
        is_of_new_pass = self._returned.taken > 0 and place.passes > self._returned.passes
        self._returned = place
        self.previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = False
        self._epoch_position += 1
        if self._length is None:
            if is_of_new_pass:
                self.epoch, self._epoch_position, self.is_new_epoch = self.epoch + 1, 1, True
            self.epoch_detail = float(self.epoch)
            return
        if self._epoch_position == self._length:
            self.epoch, self._epoch_position, self.is_new_epoch = self.epoch + 1, 0, True
        self.epoch_detail = self.epoch + self._epoch_position / self._length

    def _batch(self, item: Any) -> Batch:
        columns = tuple(item) if type(item) is list else item
        number = count_rows(columns)
        if number is None:
            column = next(iter(columns.values()), ()) if isinstance(columns, Mapping) else columns
            number = len(column) if hasattr(column, "__len__") else 1
        batch = Batch(columns=columns, length=number)
        if self.size == 1:
            return batch
        share = batch[self.rank :: self.size]
        if not len(share):
            share = batch[:1]
            share.weight = 0
        return share

    def share(self, rank: int, size: int) -> None:
        if size > 1 and is_distributed(self.loader):
            raise ValueError(
                f"iterator {self.name!r} gives each of {size} ranks its part of every batch, and the DistributedSampler "
                "has already split the data: leave the sampler out; the batch size is that of all ranks together"
            )
        super().share(rank, size)

    def reset(self) -> None:
        self._restart(self._returned.passes)

    def rewind(self) -> None:
        self._restart(0)
        if self.repeat:
            self._put_generators(self._first_state)

    def _restart(self, passes: int) -> None:
        if self._is_spent:
            raise ValueError(
                f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) gives one pass, which was begun, "
                "and cannot begin again: hand over a function that returns a fresh one"
            )
        self._drop_pass()
        self._fetched = self._returned = Place(passes, 0, self._generator_state())
        self._epoch_position, self._again, self._since_mark, self._has_ended = 0, [], None, False
        self.epoch, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = 0, 0.0, None, False

    def mark(self) -> Any:
        """This place, to `return_to` when what the next batches were fetched for has failed."""
        self._since_mark = []
        counts = self.epoch, self._epoch_position, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch
        return counts, self._returned

    def return_to(self, mark: Any) -> None:
        """Goes back to a place that `mark` returned: the batches since then are kept and will be returned again."""
        self._again = (self._since_mark or []) + self._again
        self._since_mark = []
        counts, self._returned = mark
        self.epoch, self._epoch_position, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = counts

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        sizes = [serializer(key, value) for key, value in self._sizes().items()]
        if self._batch_size_is_known:
            visit_setting(serializer, "batch_size", self.batch_size, f"batch size of iterator {self.name!r}")
        self._seed = serializer("seed", self._known_seed() if saving else self._seed)
        self.epoch = serializer("epoch", self.epoch)
        self._epoch_position = serializer("position", self._epoch_position)
        self.epoch_detail = serializer("epoch_detail", self.epoch_detail)
        self.previous_epoch_detail = serializer("previous_epoch_detail", self.previous_epoch_detail)
        self.is_new_epoch = serializer("is_new_epoch", self.is_new_epoch)
        ended = serializer("has_ended", self._has_ended and not self._again)
        passes, taken, state = self._returned if self._again else self._fetched
        if self._pass is None and taken == 0 and not self._again:
            state = self._generator_state()
        place = Place(serializer("passes", passes), serializer("taken", taken), serializer("generators", state))
        own = serializer("loader", self._loader_state() if saving else None)
        generators = serializer("generators_now", self._generator_state())  # after the loader's, which may draw
        if not saving:
            self._check_sizes(sizes, place.taken)
            self._resume(place, own, generators)
            self._has_ended = ended

    def _sizes(self) -> dict[str, int | None]:
        return {"examples": self._examples, "batches": length_of(self.loader), "epoch_length": self._length}

    def _check_sizes(self, saved: list[int | None], taken: int) -> None:
        (examples, batches, length), now = saved, self._sizes()
        rules = (
            ("examples", examples, "resume with the same dataset, or start a new run", True),
            ("batches", batches, "another batch size can begin at the end of an epoch only", taken > 0),
            ("epoch_length", length, "another length can begin at the end of an epoch only", self._epoch_position > 0),
        )
        for what, before, remedy, counts in rules:
            if counts and before != now[what]:
                raise ValueError(f"iterator {self.name!r} has {what} = {now[what]}, the saved run had {before}; {remedy}")

    def _resume(self, place: Place, own: Any, generators: dict[str, Any]) -> None:
        passes, taken, state = place
        self._drop_pass()
        self._again, self._since_mark = [], None
        if own is not None and has_state(self.loader):
            self._resume_own(place, own, generators)
        else:
            if self.repeat or not taken:
                self._put_generators(state)
            self._fetched = Place(passes - (taken > 0), 0, state)
            if taken:
                self._skip(taken)
        self._returned = self._fetched


def as_iterator(source: Any, repeat: bool = True) -> Any:
    """An iterator as it is; anything else that gives batches in a `LoaderIterator`.

    Raises:
        TypeError: the source is a dataset, which gives examples and not batches, or nothing that can be iterated.
    """
    if isinstance(source, Iterator) or (hasattr(source, "__next__") and hasattr(source, "epoch_detail")):
        return source
    if _is_dataset(source):
        raise TypeError(
            f"an iterator of batches is needed, got the dataset {type(source).__name__}, which gives single examples; "
            "wrap it: SerialIterator(dataset, batch_size), or LoaderIterator(dataset) if its items are batches"
        )
    if isinstance(source, (torch.nn.Module, torch.optim.Optimizer, Mapping)):
        raise TypeError(f"an iterator of batches is needed, got {type(source).__name__}")
    return LoaderIterator(source, repeat=repeat)


def _is_dataset(source: Any) -> bool:
    """Whether a source gives single examples: it is indexed, and nothing says that it is to be iterated."""
    if isinstance(source, (IterableDataset, DataLoader)):
        return False
    if isinstance(source, (Dataset, np.ndarray, torch.Tensor)) or hasattr(source, "get_example"):
        return True
    if hasattr(source, "__getitems__"):  # by which torch's DataLoader asks for several examples at once
        return True
    return hasattr(source, "__getitem__") and not hasattr(source, "__iter__") and not hasattr(source, "__next__")
