"""LoaderIterator: whatever already makes batches, such as a torch DataLoader, seen as an iterator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from chainring.columns import count_rows
from chainring.iterators import _loaders
from chainring.iterators._passes import PassIterator, Place
from chainring.iterators.base import Batch, Iterator
from chainring.serializers.base import AbstractSerializer, Serializer, has_state, visit_setting


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
        self._examples = _loaders.examples_of(loader)
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
        if size > 1 and _loaders.is_distributed(self.loader):
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
        return {"examples": self._examples, "batches": _loaders.length_of(self.loader), "epoch_length": self._length}

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
