"""Iterators over a dataset by index: everything but the fetching of examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from chainring._messages import announce_change
from chainring._random import Indices, epoch_order, stable_hash
from chainring.iterators.base import Batch, Iterator
from chainring.serializers.base import AbstractSerializer, Serializer, visit_setting

OrderSampler = Callable[[int, int, int], Any]

_BLOCK = 65_536


class Orders:
    """Which indices an epoch has at which positions; a block of the last order asked for is kept.

    Args:
        dataset_size: the number of examples.
        shuffle: whether epochs are shuffled, where there is no sampler.
        sampler: ``sampler(seed, epoch, dataset_size)`` returns the indices of a whole epoch, a pure function of its
            arguments. Its length is the epoch's size.
    """

    def __init__(self, dataset_size: int, shuffle: bool, sampler: OrderSampler | None) -> None:
        self._dataset_size = dataset_size
        self._shuffle = shuffle
        self._sampler = sampler
        self._kept: tuple[int, int, int, int] = (0, -1, 0, 0)  # seed, epoch, and the positions that _block holds
        self._block: Indices = np.empty(0, np.int64)
        self.size = dataset_size if sampler is None else len(self._sampled(0, 0))
        self._stretch = _BLOCK if sampler is None else max(self.size, 1)  # a sampler makes whole epochs, so one is kept

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> Indices:
        """The indices at positions ``start`` to ``stop`` of an epoch's order."""
        kept_seed, kept_epoch, first, last = self._kept
        if epoch == kept_epoch and seed == kept_seed and first <= start and stop <= last:
            return self._block[start - first : stop - first]
        if self._sampler is None and not self._shuffle:
            return np.arange(start, stop)
        middle = start - start % self._stretch + self._stretch
        if stop > middle:
            return np.concatenate([self.indices(seed, epoch, start, middle), self.indices(seed, epoch, middle, stop)])
        first, last = middle - self._stretch, min(self.size, middle)
        self._block = self._make_block(seed, epoch, first, last)
        self._kept = seed, epoch, first, last
        return self._block[start - first : stop - first]

    def _make_block(self, seed: int, epoch: int, first: int, last: int) -> Indices:
        if self._sampler is None:
            return epoch_order(seed, epoch, self._dataset_size, first, last)
        order = self._sampled(seed, epoch)
        if len(order) != self.size:
            raise ValueError(
                f"an order sampler must return as many indices for every epoch; "
                f"it gave {self.size} for the first and {len(order)} for epoch {epoch}"
            )
        return order[first:last]

    def _sampled(self, seed: int, epoch: int) -> Indices:
        assert self._sampler is not None
        order = np.asarray(self._sampler(seed, epoch, self._dataset_size))
        if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu"):
            raise ValueError(
                "an order sampler returns one dimension of integer indices, "
                f"got an array of shape {order.shape} and dtype {order.dtype}"
            )
        order = order.astype(np.int64)
        if len(order) and not 0 <= order.min() <= order.max() < self._dataset_size:
            raise ValueError(
                f"an order sampler returns indices from 0 to {self._dataset_size - 1}, "
                f"got some from {order.min()} to {order.max()}"
            )
        return order


class Position(NamedTuple):
    """A place between two batches: ``position`` examples of epoch ``epoch`` have been returned."""

    epoch: int
    position: int


class Stretch(NamedTuple):
    """The part of a batch that lies in one epoch: positions ``start`` to ``stop`` of its order."""

    epoch: int
    start: int
    stop: int


def advance(at: Position, size: int, batch_size: int, repeat: bool) -> tuple[list[Stretch], Position]:
    """The stretches that make up the next batch, and the place after it.

    With ``repeat`` a batch is always full: one that crosses the end of an epoch is completed from the next, as often
    as it takes. Without, the batch at the end may be short, and after it there is none (no stretches).
    """
    epoch, position = at
    stretches: list[Stretch] = []
    missing = batch_size
    while missing and (repeat or epoch == 0):
        stop = min(size, position + missing)
        stretches.append(Stretch(epoch, position, stop))
        missing -= stop - position
        epoch, position = (epoch + 1, 0) if stop == size else (epoch, stop)
    return stretches, Position(epoch, position)


Part = tuple[tuple[int, int], Indices]
"""Indices of one order, with that order's key: its seed and its number."""


class IndexedIterator(Iterator):
    """Walks through the orders of the epochs; a subclass fetches the examples of the indices.

    Its state is a few numbers: the seed and a position in the stream of epochs. Orders are numbered from 0 for the
    whole life of an iterator; `reset` counts epochs from 0 again but goes on to an order that has not been used.

    Attributes:
        current_position: examples of the current epoch that have been returned.
    """

    current_position: int = 0

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        repeat: bool,
        shuffle: bool,
        seed: int | None,
        order_sampler: OrderSampler | None,
    ) -> None:
        _check(dataset, batch_size, seed, order_sampler)
        self.dataset = dataset
        self.batch_size = self.step = int(batch_size)
        self.repeat = repeat
        self._seed = seed = (
            None if seed is None else int(seed)
        )  # of the orders from number _switch on; those before it, begun before a resume, keep theirs
        self._earlier_seed = seed
        self._switch = 0
        self._orders = Orders(len(dataset), shuffle, order_sampler)
        self._first = 0  # the number of the order that epoch 0 has
        self._key_now: tuple[int, int] | None = None  # the key of the current epoch's order, while it is known
        if repeat and self._orders.size == 0:
            raise ValueError("repeat=True needs at least one example, got an empty dataset; repeat=False ends at once")

    @property
    def seed(self) -> int:
        """The seed of the current order. ``None`` at construction becomes one derived from ``torch.initial_seed()``."""
        return self._key(self.epoch)[0]

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self.current_position, self._orders.size

    def __next__(self) -> Batch:
        start, size = self.current_position, self._orders.size
        stop = start + self.batch_size
        if stop < size and self.size == 1 and self._key_now is not None:  # inside an epoch, as nearly always
            batch = self._fetch([(self._key_now, self._orders.indices(*self._key_now, start, stop))])
            self.previous_epoch_detail, self.is_new_epoch = self.epoch_detail, False
            self.current_position = stop
            self.epoch_detail = self.epoch + stop / size
            return batch
        return self._next_across()

    def _next_across(self) -> Batch:
        """The next batch wherever it lies: at the end of an epoch, across several, for one of many ranks."""
        at = Position(self.epoch, self.current_position)
        stretches, after = advance(at, self._orders.size, self.batch_size, self.repeat)
        if not stretches or self._orders.size == 0:
            raise StopIteration
        parts = [(key, self._orders.indices(*key, start, stop)) for key, start, stop in self._keyed(stretches)]
        batch = self._fetch(parts) if self.size == 1 else self._fetch_share(parts)
        self._move(after)
        return batch

    def _move(self, after: Position) -> None:
        self.previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = after.epoch != self.epoch
        self._stand_at(after)

    def _stand_at(self, at: Position) -> None:
        self.epoch, self.current_position = at
        self.epoch_detail = self.epoch + self.current_position / self._orders.size if self._orders.size else 0.0
        has_ended = self.epoch > 0 and not self.repeat
        self._key_now = None if self._seed is None or has_ended else self._key(self.epoch)

    def _known_seed(self) -> int:
        if self._seed is None:
            self._seed = stable_hash("order", self.base_seed(), self.name)
        return self._seed

    def _key(self, epoch: int) -> tuple[int, int]:
        """The seed and the number of the order that an epoch has."""
        number = self._first + epoch
        if number < self._switch and self._earlier_seed is not None:
            return self._earlier_seed, number
        return self._known_seed(), number

    def _keyed(self, stretches: list[Stretch]) -> list[tuple[tuple[int, int], int, int]]:
        return [(self._key(epoch), start, stop) for epoch, start, stop in stretches]

    def _fetch_share(self, parts: list[Part]) -> Batch:
        """This rank's part of a batch: every size-th example of the whole, from this rank's number on.

        Where that is empty, one example of weight 0 keeps the rank in step with the others.
        """
        shared, before = [], 0
        for key, indices in parts:
            shared.append((key, indices[(self.rank - before) % self.size :: self.size]))
            before += len(indices)
        if any(len(indices) for _, indices in shared):
            return self._fetch(shared)
        batch = self._fetch([(parts[0][0], parts[0][1][:1])])
        batch.weight = 0
        return batch

    def _fetch(self, parts: list[Part]) -> Batch:
        """The examples of each part."""
        raise NotImplementedError

    def reset(self) -> None:
        self._first += self.epoch + (self.current_position > 0)
        self._start()

    def rewind(self) -> None:
        self._start()

    def _start(self) -> None:
        self._stand_at(Position(0, 0))
        self.previous_epoch_detail, self.is_new_epoch = None, False

    def mark(self) -> Any:
        """This place, to `return_to` when what the next batches were fetched for has failed."""
        return self.epoch, self.current_position, self.previous_epoch_detail, self.is_new_epoch

    def return_to(self, mark: Any) -> None:
        """Goes back to a place that `mark` returned: the batches since then will be returned again."""
        epoch, position, self.previous_epoch_detail, self.is_new_epoch = mark
        self._stand_at(Position(epoch, position))

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        size = serializer("size", self._orders.size)
        if size != self._orders.size:
            raise ValueError(
                f"the dataset of iterator {self.name!r} has {self._orders.size} examples an epoch, "
                f"the saved run had {size}. "
                "A position in one means nothing in the other: resume with the same dataset, or start a new run"
            )
        visit_setting(serializer, "batch_size", self.batch_size, f"batch size of iterator {self.name!r}")
        seed = serializer("seed", self._known_seed() if saving else self._seed)
        earlier = serializer("earlier_seed", self._earlier_seed)
        switch = serializer("switch", self._switch)
        self._first = serializer("first_order", self._first)
        epoch, position = serializer("epoch", self.epoch), serializer("position", self.current_position)
        is_new = serializer("is_new_epoch", self.is_new_epoch)
        previous = serializer("previous_epoch_detail", self.previous_epoch_detail)
        if not saving:
            self.epoch, self.current_position = epoch, position
            self._adopt_seed(seed, earlier, switch)
            self._stand_at(Position(epoch, position))
            self.is_new_epoch, self.previous_epoch_detail = is_new, previous

    def _adopt_seed(self, seed: int | None, earlier: int | None, switch: int) -> None:
        """The saved seed wins over none; another one that the script gives holds from the next order on."""
        given, self._seed, self._earlier_seed, self._switch = self._seed, seed, earlier, switch
        if given is None or given == seed:
            return
        current, number = self._key(self.epoch)
        self._seed, self._earlier_seed, self._switch = given, current, number + (self.current_position > 0)
        holds = "the epoch under way keeps its order, the next has that of the new seed"
        announce_change(f"seed of iterator {self.name!r}", seed, given, holds)


def _check(dataset: Any, batch_size: int, seed: int | None, sampler: OrderSampler | None) -> None:
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_indexed or isinstance(dataset, (IterableDataset, str, Mapping)):
        raise TypeError(
            f"a dataset has __len__ and __getitem__(i), got {type(dataset).__name__}; "
            "hand a DataLoader or another iterable to the updater as it is, or wrap it in LoaderIterator"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ValueError(f"a batch size is an integer of at least 1, got {batch_size!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"a seed is an integer or None, got {seed!r}")
    if sampler is not None and (isinstance(sampler, type) or not callable(sampler)):
        kind = f"the class {sampler.__name__}: make one" if isinstance(sampler, type) else type(sampler).__name__
        raise TypeError(f"an order sampler is called with (seed, epoch, size), got {kind}")
