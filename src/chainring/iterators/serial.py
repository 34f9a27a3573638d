"""SerialIterator: a dataset by index, in this process; and IndexedIterator, on which MultiprocessIterator is built too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Mapping
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import IterableDataset

from chainring._checks import find_call_error, is_integer
from chainring._hints import BATCH_SIZE, hinting
from chainring._random import (
    Indices,
    Pass,
    digest,
    epoch_order,
    example_keys,
    preserve_host_rng,
    seed_host,
    set_seed,
    stable_hash,
)
from chainring.datasets._batches import COLUMNS, Batch
from chainring.datasets.base import Dataset, by_position, make_gather, size_of
from chainring.iterators._order import Epochs, members_of, refuse_labels
from chainring.iterators.base import Iterator, counters_of, not_the_end
from chainring.serializers.protocol import AbstractSerializer, Serializer, announce_change, visit_setting

OrderSampler = Callable[[int, int, int], ArrayLike]
"""``sampler(seed, epoch, dataset_size)`` returns the indices of a whole epoch.

A sampler whose batches vary in size also has ``batch_ends(seed, epoch, dataset_size)``, the position after each of them.
"""

_BLOCK_SIZE = 65_536  # positions of an order that are computed at once, or the whole order if it has at most twice as many
_MARKED = 64  # indices by which an order is known again
_SAMPLED = ("seed", "epoch", "size")

OrderKey = tuple[int, int]
"""The seed and the index of an order; orders are counted from 0 over the whole life of an iterator."""

Segment = tuple[OrderKey, Indices]
"""The examples of a batch that are in one epoch: the key of its order, and their indices."""


_NO_BLOCK: tuple[OrderKey, int, int, Indices] = (0, -1), 0, 0, np.empty(0, np.int64)


class IndexedIterator(Iterator):
    """Walks through the orders of the epochs; a subclass fetches the examples of the indices.

    Its state is a few numbers: the seed and a position in the stream of epochs. `reset` counts epochs from 0 again but
    continues to an order that has not been used.
    """

    current_position: int = 0  # examples of the current epoch that have been returned
    serves_virtual_ranks = True

    @hinting(BATCH_SIZE)
    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool | None = True,
        *,
        seed: int | None = None,
        order_sampler: OrderSampler | None = None,
        example_rng: bool = True,
    ) -> None:
        require_indices(
            dataset, "hand a DataLoader or another iterable to the updater as it is, or wrap it in LoaderIterator"
        )
        self.batch_size = self.step = require_integer("a batch size", batch_size, 1)
        if seed is not None and not is_integer(seed):
            raise TypeError(f"a seed is an integer or None, got {seed!r}")
        self.dataset: Any = by_position(dataset)
        self.repeat = require_flag("repeat", repeat)
        self.shuffle = shuffle is None or require_flag("shuffle", shuffle)
        self._batch_size_is_known = not hasattr(order_sampler, "batch_ends")
        self._orders = EpochOrders(self.dataset, self.shuffle, order_sampler, None if seed is None else int(seed))
        # What is to be told of each epoch is not gathered at once: a batch may cross the end of one.
        members = members_of(self.dataset)
        refuse_labels(members)
        self._epochs = Epochs(members)
        self._gather = None if self._epochs.members else make_gather(self.dataset)
        # A plain list or tuple runs no code when it is indexed, so nothing can draw.
        self._seeds_examples = require_flag("example_rng", example_rng) and type(dataset) not in (list, tuple)
        if repeat and self._orders.size == 0:
            raise ValueError(
                f"an iterator for training needs at least one example, and this {type(dataset).__name__} has length 0; "
                "check what fills it (for an evaluation, with repeat=False, it may be empty)"
            )

    @property
    def seed(self) -> int:
        """The seed of the current order. ``None`` at construction becomes one derived from ``torch.initial_seed()``."""
        return self._seeded_orders().key_of(self.epoch)[0]

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self.current_position, self._orders.size

    def __next__(self) -> Batch:
        orders, epoch, start = self._orders, self.epoch, self.current_position
        stop = start + self.batch_size
        # hot path: "an iteration with no extension" of benchmarks/overhead.py. Nearly always a batch is inside a block.
        key, first, last, block = orders.blocks[0]
        if key[1] == orders.first + epoch and first <= start and stop < last and self.size == 1:
            share, is_empty = [(key, block[start - first : stop - first])], False
        else:
            share, is_empty, epoch, stop = self._next_share()
            if not share:
                raise StopIteration
        try:
            if self._gather is None:
                batch = self._fetch_examples(share)
            else:
                indices = share[0][1] if len(share) == 1 else np.concatenate([indices for _, indices in share])
                batch = Batch(columns=self._gather(indices), length=len(indices), layout=COLUMNS)
        except StopIteration as error:
            raise not_the_end(f"the dataset {type(self.dataset).__name__} of iterator {self.name!r}") from error
        if is_empty:
            batch.weight = 0
        self.previous_epoch_detail, self.is_new_epoch = self.epoch_detail, epoch != self.epoch
        self.epoch, self.current_position, self.epoch_detail = epoch, stop, epoch + stop / orders.size
        return batch

    def _fetch_examples(self, segments: list[Segment]) -> Batch:
        """Return the examples of a dataset that is not gathered."""
        raise NotImplementedError

    def iterate_segments(self) -> Generator[list[Segment]]:
        """Yield the segments of each batch from here on, and advance without fetching them."""
        for ahead in count():
            share, _, self.epoch, self.current_position = self._next_share(ahead)
            if not share:
                return
            yield share

    def _next_share(self, ahead: int = 0) -> tuple[list[Segment], bool, int, int]:
        """Return the segments of this rank's next batch, whether it is empty, and the epoch and the position after it.

        There are none after the last batch. An empty share has one example, which keeps the rank in step with the others.
        """
        orders, epoch, position = self._seeded_orders(), self.epoch, self.current_position
        segments: list[Segment] = []
        missing = self.batch_size if orders.size else 0
        while missing and (self.repeat or epoch == 0):
            stop = min(orders.size, position + missing)
            if orders.has_ends:  # of batches, which are not filled up
                stop = min(stop, orders.end_of_batch(epoch, position))
                missing = stop - position
            segments.append(orders.segment(epoch, position, stop))
            missing -= stop - position
            epoch, position = (epoch + 1, 0) if stop == orders.size else (epoch, stop)
        if self.size == 1 or not segments:
            return segments, False, epoch, position
        return *self._share_of(segments, ahead), epoch, position

    def _share_of(self, segments: list[Segment], ahead: int = 0) -> tuple[list[Segment], bool]:
        """Return those of this rank of the segments of a batch; if it has none, an example and True."""
        share, offset = [], 0
        for key, indices in segments:
            share.append((key, indices[self.rows_of_share(len(indices), offset, ahead)]))
            offset += len(indices)
        if any(len(indices) for _, indices in share):
            return share, False
        key, indices = segments[0]
        return [(key, indices[:1])], True

    def _seeded_orders(self) -> EpochOrders:
        """Return the orders, with a seed that is derived when it is first used."""
        if self._orders.seed is None:
            self._orders.seed = stable_hash("order", self.base_seed(), self.name)
        return self._orders

    def reset(self) -> None:
        self._orders.first += self.epoch + (self.current_position > 0)
        self.rewind()

    def rewind(self) -> None:
        self._restore_counters()
        self.current_position = 0

    def mark(self) -> Any:
        """Return this position, for `return_to` after a failed update."""
        return counters_of(self), self.current_position

    def return_to(self, mark: Any) -> None:
        """Go back to a position that `mark` returned: the batches since then will be returned again."""
        counters, self.current_position = mark
        self._restore_counters(counters)

    def batch_end(self) -> Any:
        return self._orders.first + self.epoch, self.current_position

    def indices_since(self, start: Any, stop: Any = None) -> Indices | None:
        """Return the indices of the examples between two values of `batch_end`, of all ranks, as they came.

        The second one is by default the current. The result is ``None`` if the iterator was set back in between.
        """
        (order, position), stop = start, self.batch_end() if stop is None else stop
        orders, indices = self._seeded_orders(), [np.empty(0, np.int64)]
        if (order, position) > stop:
            return None
        while (order, position) < stop:
            end = stop[1] if order == stop[0] else orders.size
            indices.append(orders.segment(order - orders.first, position, end)[1])
            order, position = order + 1, 0
        return indices[1] if len(indices) == 2 else np.concatenate(indices)

    def names_of(self, indices: Indices) -> list[Any]:
        """Return how examples are shown to a person: by their indices in the dataset."""
        return list(indices.tolist())

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        indices = self.indices_since(start, stop)
        return None if indices is None else digest(np.ascontiguousarray(indices, "<i8"))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gather": None, "_orders": copy.copy(self._orders)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._gather = None if self._epochs.members else make_gather(self.dataset)

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        orders = self._seeded_orders() if saving else self._orders
        size = serializer("size", orders.size)
        if size != orders.size:
            raise ValueError(
                f"the dataset of iterator {self.name!r} has {orders.size} examples an epoch, "
                f"the saved run had {size}. A position in one means nothing in the other: "
                "resume with the same dataset, or start a new run"
            )
        visit_setting(serializer, "batch_size", self.batch_size, f"batch size of iterator {self.name!r}")
        seed = serializer("seed", orders.seed)
        earlier = serializer("earlier_seed", orders.earlier[0]), serializer("switch", orders.earlier[1])
        first = serializer("first_order", orders.first)
        epoch, position = serializer("epoch", self.epoch), serializer("position", self.current_position)
        is_new_epoch = serializer("is_new_epoch", self.is_new_epoch)
        previous = serializer("previous_epoch_detail", self.previous_epoch_detail)
        mark = serializer("order", orders.mark(epoch) if saving and position else None)
        if saving:
            return
        given = orders.seed
        orders.begin(seed, earlier, first)
        if mark is not None and mark != orders.mark(epoch):
            raise ValueError(
                f"iterator {self.name!r} has another order than in the saved run, which had taken {position} examples of "
                "this epoch: some would come twice, others never. Resume with the same shuffle and order_sampler, or from a "
                "snapshot of the end of an epoch"
            )
        self.epoch, self.current_position, self.is_new_epoch = epoch, position, is_new_epoch
        self.epoch_detail, self.previous_epoch_detail = epoch + position / size if size else 0.0, previous
        if given is not None and given != seed:
            current_seed, order = orders.key_of(epoch)
            orders.begin(given, (current_seed, order + (position > 0)), first)
            holds = "the current epoch keeps its order, the next has that of the new seed"
            announce_change(f"seed of iterator {self.name!r}", seed, given, holds)


class SerialIterator(IndexedIterator):
    """Returns batches of a dataset, epoch after epoch, in this process.

    The order of an epoch is a pure function of (seed, epoch, position): no generator is drawn from, and a resumed run
    continues in the middle of an epoch without fetching anything twice. A dataset that holds whole arrays is gathered
    at once; any other is asked ``dataset[i]``, with ``random``, ``numpy.random`` and ``torch`` seeded for that example.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        batch_size: examples in a batch, over all ranks; the most, with a sampler whose batches vary in size.
        repeat: True to continue with the next epoch. Then every batch is full: one that crosses the end of an epoch
            takes the rest from the next. Otherwise the last batch may be short, and after it there is none.
        shuffle: True if each epoch has its own order, ``None`` too, as in Chainer; ``False`` for that of the indices.
        seed: of the order; ``None`` derives one from ``torch.initial_seed()`` and the iterator's name when it is first
            used. It is saved, and the saved one wins over ``None``.
        order_sampler: ``order_sampler(seed, epoch, size)`` returns the indices of a whole epoch, a pure function of its
            arguments; it replaces shuffling. It is called twice at construction, with the generators in other states.
        example_rng: True to seed the generators for each example (from seed, epoch and index) and restore them after
            each batch, so that augmentation is the same whatever ran before. ``False`` leaves them alone.

    Raises:
        TypeError: the dataset, the seed or the sampler is of another type, or the sampler takes other arguments.
        ValueError: the batch size is below 1, or an empty dataset is to be repeated, or the sampler gives other indices
            when it is called again.

    Example::

        iterator = SerialIterator(TupleDataset(images, labels), batch_size=100, seed=0)
        x, t = concat_examples(iterator.next())
    """

    def _fetch_examples(self, segments: list[Segment]) -> Batch:
        dataset, examples = self.dataset, []
        if not self._seeds_examples:
            for (_, order), indices in segments:
                if self._epochs.members:
                    self._epochs.tell(order)
                examples += [dataset[index] for index in indices.tolist()]
            return Batch(examples)
        with preserve_host_rng():
            for order_key, indices in segments:
                if self._epochs.members:
                    self._epochs.tell(order_key[1])
                for index, key in zip(indices.tolist(), example_keys(*order_key, indices), strict=True):
                    set_seed(key)
                    try:
                        examples.append(dataset[index])
                    except Exception as error:
                        error.add_note(f"raised by dataset[{index}], asked by iterator {self.name!r}")
                        raise
        return Batch(examples)


class EpochOrders:
    """The orders of the epochs. They are computed in blocks, by a sampler in whole epochs, and the last ones are kept."""

    def __init__(self, dataset: Dataset, shuffle: bool, sampler: OrderSampler | None, seed: int | None) -> None:
        self._dataset, self._shuffle, self._sampler = dataset, shuffle, sampler
        self.has_ends = hasattr(sampler, "batch_ends")
        self.begin(seed, (seed, 0), 0)
        self.size = self._dataset_size = size_of(dataset)
        self._block_size = _BLOCK_SIZE if self.size > 2 * _BLOCK_SIZE else max(self.size, 1)
        if sampler is None:
            return
        _check_sampler(sampler)
        order, again = (self._sample(sampler, 0, 0, trial) for trial in range(2))
        if not np.array_equal(order, again):
            shown, shown_again = (
                ", ".join(map(str, indices[:8])) + ", ..." * (len(indices) > 8) for indices in (order, again)
            )
            raise ValueError(
                "an order sampler is a pure function of (seed, epoch, size), since workers and resumed runs call it again; "
                f"called twice with (0, 0, {self._dataset_size}), {_name_of(sampler)} gave [{shown}] and "
                f"[{shown_again}]. Draw from a generator made in it, such as np.random.default_rng((seed, epoch))"
            )
        self.size, self._block_size = len(order), max(len(order), 1)

    def mark(self, epoch: int) -> int:
        """Return a digest of the first indices of an epoch, by which a resumed run knows its order again."""
        return digest(np.ascontiguousarray(self.segment(epoch, 0, min(_MARKED, self.size))[1], "<i8"))

    def begin(self, seed: int | None, earlier: tuple[int | None, int], first: int) -> None:
        """Set the seed, the one that an order begun before a resume keeps and up to which order, and that of epoch 0."""
        self.seed, self.earlier, self.first = seed, earlier, first
        # Key, first position, end and indices of the newest block, and if it is not large of the one before, since a
        # Recorder asks for the epoch that has just ended.
        self.blocks = [_NO_BLOCK]

    def key_of(self, epoch: int) -> OrderKey:
        order, (earlier_seed, switch) = self.first + epoch, self.earlier
        seed = self.seed if earlier_seed is None or order >= switch else earlier_seed
        assert seed is not None
        return seed, order

    def lacking(self, epoch: int) -> list[Pass]:
        """Return the order of an epoch if it is not kept, and computed whole by `epoch_orders`."""
        is_kept = any(key[1] == self.first + epoch for key, *_ in self.blocks)
        is_whole = self._shuffle and self._sampler is None and self.size <= self._block_size
        return [(*self.key_of(epoch), self.size)] if is_whole and not is_kept else []

    def segment(self, epoch: int, start: int, stop: int, computed: Mapping[Pass, Indices] | None = None) -> Segment:
        """Return the examples at positions ``start`` to ``stop`` of an epoch, of which some orders are computed already."""
        order = self.first + epoch
        for key, first, last, block in self.blocks:
            if key[1] == order and first <= start and stop <= last:
                return key, block[start - first : stop - first]
        if (size := size_of(self._dataset)) != self._dataset_size:
            raise ValueError(
                f"the dataset had {self._dataset_size} examples when its iterator was made, and now has {size}: "
                "data that grow or shrink are for a DataLoader, whose passes are as long as the data are then"
            )
        key = self.key_of(epoch)
        first = start - start % self._block_size
        last = min(self.size, first + self._block_size)
        if stop > last:
            return key, np.concatenate([self.segment(epoch, start, last)[1], self.segment(epoch, last, stop)[1]])
        if self._sampler is not None:
            block = self._sample(self._sampler, *key)
            if len(block) != self.size:
                raise ValueError(
                    "an order sampler must return as many indices for every epoch; "
                    f"it gave {self.size} for the first and {len(block)} for epoch {order}"
                )
        elif self._shuffle:
            whole = (computed or {}).get((*key, self.size))
            block = epoch_order(*key, self.size, first, last) if whole is None else whole
        else:
            block = np.arange(first, last)
        newest = [(key, first, last, block), *[old for old in self.blocks[:1] if len(old[-1]) <= _BLOCK_SIZE]]
        self.blocks = [_NO_BLOCK, newest[0]] if self.has_ends else newest  # a batch of any size is inside of none
        return key, block[start - first : stop - first]

    def end_of_batch(self, epoch: int, position: int) -> int:
        """Return the position after the batch at a position of an epoch, by its sampler."""
        ends = np.asarray(self._sampler.batch_ends(*self.key_of(epoch), self._dataset_size))  # type: ignore[union-attr]
        after = int(ends.searchsorted(position, "right"))
        if after == len(ends):
            raise ValueError(
                f"batch_ends of {_name_of(self._sampler)} are the positions after the batches, up to {self.size} at the end "
                f"of the epoch; got none after {position}"
            )
        return int(ends[after])

    def _sample(self, sampler: OrderSampler, seed: int, epoch: int, trial: int = 0) -> Indices:
        with preserve_host_rng():
            seed_host("order sampler", seed, epoch, trial)
            try:
                order = np.asarray(sampler(seed, epoch, self._dataset_size))
            except StopIteration as error:
                raise not_the_end("the order sampler") from error
        if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu"):
            got = f"an array of shape {order.shape} and dtype {order.dtype}"
            raise ValueError(f"an order sampler returns one dimension of integer indices, got {got}")
        order = order.astype(np.int64)
        if len(order) and not 0 <= order.min() <= order.max() < self._dataset_size:
            got = f"some from {order.min()} to {order.max()}"
            raise ValueError(f"an order sampler returns indices from 0 to {self._dataset_size - 1}, got {got}")
        return order


def _check_sampler(sampler: Any) -> None:
    """Refuse what cannot be called with (seed, epoch, size), or takes these by other names or in another order."""
    if isinstance(sampler, type) or not callable(sampler):
        got = f"the class {sampler.__name__}: make one" if isinstance(sampler, type) else type(sampler).__name__
        raise TypeError(f"an order sampler is called with (seed, epoch, size), got {got}")
    error = find_call_error(sampler, 0, 0, 1)
    try:
        names = [*inspect.signature(sampler).parameters]
    except ValueError:  # some callables of C have no signature
        names = []
    is_chainers = "current_order" in names or "current_position" in names
    is_shuffled = any(name in _SAMPLED and name != right for name, right in zip(names, _SAMPLED, strict=False))
    if error is None and not is_chainers and not is_shuffled:
        return
    remedy = "write order_sampler(seed, epoch, size), which returns the indices of that epoch"
    if is_chainers:
        remedy = "that is Chainer's, whose order depends on the one before; " + remedy + " from these alone"
    raise TypeError(
        f"an order sampler is called with (seed, epoch, size), and {_name_of(sampler)} takes ({', '.join(names)}); {remedy}"
    )


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def require_indices(dataset: Any, remedy: str) -> None:
    """Refuse what has no examples by index, with what to do then."""
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_indexed or isinstance(dataset, (IterableDataset, str, Mapping)):
        raise TypeError(f"a dataset has __len__ and __getitem__(i), got {type(dataset).__name__}; {remedy}")


def require_integer(name: str, value: Any, least: int) -> int:
    """Return the number, or refuse it."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} is an integer of at least {least}, got {value!r}")
    return int(value)


def require_flag(name: str, value: Any) -> bool:
    """Return True or False, or refuse what only counts as one of them, such as ``"no"``."""
    if not isinstance(value, (bool, np.bool_, int)):
        raise TypeError(f"{name} is True or False, got {value!r}")
    return bool(value)
