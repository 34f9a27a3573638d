"""LoaderIterator: whatever already makes batches, such as a torch DataLoader, seen as an iterator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from collections.abc import Iterator as PythonIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from chainring.columns import count_rows
from chainring.generators import host_preserved, seed_host
from chainring.iterators.base import Batch, Iterator
from chainring.order import stable_hash
from chainring.serializers.base import AbstractSerializer, Serializer, has_state


class LoaderIterator(Iterator):
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
        repeat: whether to begin another pass after one.

    Raises:
        TypeError: the loader is nothing that gives batches.
        ValueError: ``epoch_length`` is below 1.
    """

    def __init__(self, loader: Any, *, epoch_length: int | None = None, repeat: bool = True) -> None:
        _check(loader, epoch_length)
        self.loader = loader
        self.epoch_length = epoch_length
        self.repeat = repeat
        self.batch_size = getattr(loader, "batch_size", None) or 1
        self._length = _length_of(loader) if epoch_length is None else epoch_length
        self._seed: int | None = None
        self._pass: PythonIterator[Any] | None = None
        self._passes = 0  # begun so far, so the next one's number
        self._taken = 0  # batches of the current pass that were returned
        self._epoch_position = 0
        self._start_state: dict[str, Any] = {}  # the loader's generators as the current pass began
        self._since_mark: list[Any] | None = None  # batches, from the first `mark` on
        self._again: list[Any] = []
        self._generators = _generators_of(loader)

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self._epoch_position, self._length

    def __next__(self) -> Batch:
        ended_pass = False
        while True:
            try:
                item = self._take()
                break
            except StopIteration:
                if not self.repeat or (ended_pass and self._taken == 0) or self._is_one_pass():
                    raise
                ended_pass = True
                self._pass, self._taken = None, 0
        if self._since_mark is not None:
            self._since_mark.append(item)
        self._move(ended_pass)
        return self._batch(item)

    def _take(self) -> Any:
        if self._again:
            return self._again.pop(0)
        if not self.repeat and self.epoch:
            raise StopIteration
        if self._pass is None:
            self._begin()
        assert self._pass is not None
        with self._stream(self._taken):
            item = next(self._pass)
        self._taken += 1
        return item

    def _begin(self) -> None:
        """Begins a pass: a new epoch for what shuffles by epoch, a stream of its own for what draws."""
        parts = ("sampler", "batch_sampler", "dataset")
        for part in (self.loader, *[getattr(self.loader, name, None) for name in parts]):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self._passes)
        self._start_state = {str(number): generator.get_state() for number, generator in enumerate(self._generators)}
        with self._stream(-1, begins=True):
            self._pass = iter(self.loader() if _is_function(self.loader) else self.loader)
        self._passes += 1
        self._taken = 0

    def _stream(self, batch: int, begins: bool = False) -> AbstractContextManager[None]:
        """Generators seeded for one batch of one pass, put back afterwards. Workers have their own; a list draws nothing."""
        if type(self.loader) in (list, tuple) or (not begins and getattr(self.loader, "num_workers", 0) > 0):
            return nullcontext()
        return _seeded(self._known_seed(), self._passes - (not begins), batch)

    def _known_seed(self) -> int:
        if self._seed is None:
            self._seed = stable_hash("loader", torch.initial_seed(), self.name)
        return self._seed

    def _is_one_pass(self) -> bool:
        return hasattr(self.loader, "__next__")

    def _move(self, ended_pass: bool) -> None:
        self.previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = False
        self._epoch_position += 1
        if self._length is None:
            if ended_pass:
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
            number = len(columns) if hasattr(columns, "__len__") else 1
        batch = Batch(columns=columns, length=number)
        if self.size == 1:
            return batch
        share = batch[self.rank :: self.size]
        if not len(share):
            share = batch[:1]
            share.weight = 0
        return share

    def reset(self) -> None:
        self._restart()

    def rewind(self) -> None:
        self._restart()
        self._passes = 0

    def _restart(self) -> None:
        self._pass, self._taken, self._epoch_position, self._again, self._since_mark = None, 0, 0, [], None
        self.epoch, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = 0, 0.0, None, False

    def mark(self) -> Any:
        """This place, to `return_to` when what the next batches were fetched for has failed."""
        self._since_mark = []
        return self.epoch, self._epoch_position, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch

    def return_to(self, mark: Any) -> None:
        """Goes back to a place that `mark` returned: the batches since then are kept and will be returned again."""
        self._again = (self._since_mark or []) + self._again
        self._since_mark = []
        self.epoch, self._epoch_position, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = mark

    def finalize(self) -> None:
        self._pass = None  # a DataLoader's workers end with its iterator

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        self._seed = serializer("seed", self._known_seed() if saving else self._seed)
        self.epoch = serializer("epoch", self.epoch)
        self._epoch_position = serializer("position", self._epoch_position)
        self.epoch_detail = serializer("epoch_detail", self.epoch_detail)
        self.previous_epoch_detail = serializer("previous_epoch_detail", self.previous_epoch_detail)
        self.is_new_epoch = serializer("is_new_epoch", self.is_new_epoch)
        passes = serializer("passes", self._passes)
        taken = serializer("taken", self._taken - len(self._again))
        start = serializer("pass_start", self._start_state)
        own = serializer("loader", self.loader.state_dict() if saving and has_state(self.loader) else None)
        if not saving:
            self._resume(passes, taken, start, own)

    def _resume(self, passes: int, taken: int, start: dict[str, Any], own: Any) -> None:
        self._pass, self._passes, self._taken = None, passes, 0
        if own is not None and has_state(self.loader):
            self.loader.load_state_dict(own)
            if taken:
                self._passes -= 1
                self._begin()
                self._taken = taken
            return
        for number, generator in enumerate(self._generators):
            if str(number) in start:
                generator.set_state(start[str(number)])
        if taken:
            self._passes -= 1
            self._skip(taken)

    def _skip(self, taken: int) -> None:
        if type(self.loader) not in (list, tuple):
            warnings.warn(
                f"iterator {self.name!r} fetches {taken} batches again and skips them, to continue in the middle of an "
                f"epoch: {type(self.loader).__name__} has no state_dict. SerialIterator and loaders with a state need not",
                stacklevel=2,
            )
        for _ in range(taken):
            try:
                self._take()
            except StopIteration:
                raise ValueError(
                    f"the saved run had taken {taken} batches of this pass, and the loader of iterator {self.name!r} "
                    f"gives only {self._taken}: resume with the same data and batch size"
                ) from None


@contextmanager
def _seeded(*parts: int) -> PythonIterator[None]:
    with host_preserved():
        seed_host(*parts)
        yield


def _is_function(loader: Any) -> bool:
    return callable(loader) and not isinstance(loader, Iterable)


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader) or None
    except TypeError:
        return None


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader was given: they stand elsewhere at the start of each pass."""
    parts = (loader, getattr(loader, "sampler", None))
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _check(loader: Any, epoch_length: int | None) -> None:
    iterates = isinstance(loader, Iterable) or callable(loader) or hasattr(loader, "__getitem__")
    if isinstance(loader, (str, bytes)) or not iterates:
        raise TypeError(f"a loader is an iterable of batches, or a function that returns one; got {type(loader).__name__}")
    if epoch_length is not None and (not isinstance(epoch_length, int) or epoch_length < 1):
        raise ValueError(f"epoch_length counts batches and is at least 1, got {epoch_length!r}")


def as_iterator(source: Any, repeat: bool = True) -> Any:
    """An iterator as it is; anything else that gives batches in a `LoaderIterator`.

    Raises:
        TypeError: the source is a dataset, which gives examples and not batches, or nothing that can be iterated.
    """
    if isinstance(source, Iterator) or (hasattr(source, "__next__") and hasattr(source, "epoch_detail")):
        return source
    is_dataset = isinstance(source, Dataset) and not isinstance(source, (IterableDataset, DataLoader))
    if is_dataset or hasattr(source, "get_example"):
        raise TypeError(
            f"an iterator of batches is needed, got the dataset {type(source).__name__}, which gives single examples; "
            "wrap it: SerialIterator(dataset, batch_size)"
        )
    if isinstance(source, (torch.nn.Module, torch.optim.Optimizer)):
        raise TypeError(f"an iterator of batches is needed, got {type(source).__name__}")
    return LoaderIterator(source, repeat=repeat)
