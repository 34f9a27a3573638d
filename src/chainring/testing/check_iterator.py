"""check_iterator: what every iterator keeps to."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chainring import _random
from chainring.serializers._checkpoint import load, save
from chainring.serializers.base import AbstractSerializer
from chainring.testing._fingerprint import checksum, leaves, text
from chainring.testing._harness import require, require_same, required

Row = dict[str, str]
"""What a batch holds and what its iterator counts, by path."""

_COUNTER_NAMES = ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")


def row_of(iterator: Any) -> Row:
    """The next batch of an iterator, and what that counts then."""
    return _row(iterator, _examples(next(iterator)))


def _examples(batch: Any) -> list[Any]:
    remedy = "Return a chainring.iterators.Batch(examples)"
    require(isinstance(batch, Sequence), "a batch is a sequence of examples", type(batch).__name__, remedy)
    return [*batch]


def _row(iterator: Any, examples: list[Any]) -> Row:
    row = {path: text(leaf) for path, leaf in leaves("batch", examples)}
    return row | {"examples": str(len(examples))} | counts_of(iterator)


def counts_of(iterator: Any) -> Row:
    """The four attributes that tell how far it is."""
    return {name: repr(getattr(iterator, name)) for name in _COUNTER_NAMES}


class Walk:
    """Makes iterators that begin alike.

    Args:
        make: makes one.
        limit: at most so many batches are taken of one.

    Attributes:
        has_ended: whether it ends after an epoch.
    """

    def __init__(self, make: Callable[[], Any], limit: int) -> None:
        if not callable(make):
            raise TypeError(f"make is a function that makes a new iterator at each call, got {make!r}; write lambda: ...")
        self._make = make
        self._limit = limit
        self._start = _random.get_rng_state()
        self.has_ended = False

    @contextmanager
    def fresh(self) -> Iterator[Any]:
        """A new iterator, made while the generators stand where they were at first; it is finalized afterwards."""
        _random.set_rng_state(self._start)
        iterator = self._make()
        missing = [name for name in (*_COUNTER_NAMES, "__next__", "reset") if not hasattr(iterator, name)]
        remedy = "Derive it from chainring.iterators.Iterator; a loader is wrapped by LoaderIterator"
        require(not missing, "an iterator gives batches and counts epochs", f"it lacks {missing}", remedy)
        try:
            yield iterator
        finally:
            with required("finalize() may be called at any time", "Let it do nothing where nothing is held"):
                getattr(iterator, "finalize", lambda: None)()

    def take(self, number: int) -> list[Row]:
        """The first batches."""
        with self.fresh() as iterator:
            return [row_of(iterator) for _ in range(number)]

    def whole(self) -> list[Row]:
        """Two epochs, or one where it does not repeat."""
        rows = []
        with self.fresh() as iterator:
            counts = tuple(getattr(iterator, name) for name in _COUNTER_NAMES)
            rule = "before its first batch an iterator counts 0, 0.0, None, False"
            require(counts == (0, 0.0, None, False), rule, counts, f"These are {', '.join(_COUNTER_NAMES)}")
            while iterator.epoch < 2:
                try:
                    rows.append(row_of(iterator))
                except StopIteration:
                    self.has_ended = True
                    break
                remedy = "Count the epochs, or give fewer examples or batches="
                require(len(rows) < self._limit, f"two epochs have fewer than {self._limit} batches", "more", remedy)
        require(bool(rows), "an iterator that is tried has a batch", "StopIteration at once", "Give it some examples")
        return rows


def require_epochs(rows: list[Row], remedy: str) -> None:
    """The counts of each batch go on from those of the one before, evenly."""
    before, epoch = "0.0", 0
    for number, row in enumerate(rows):
        found = f"{ ({name: row[name] for name in _COUNTER_NAMES}) } in batch {number}, after {before}"
        rule = "previous_epoch_detail is epoch_detail before the batch"
        require(float(row["previous_epoch_detail"].replace("None", "nan")) == float(before), rule, found, remedy)
        rule = "epoch is epoch_detail without its fraction, and neither ever falls"
        require(
            float(before) <= float(row["epoch_detail"]) and int(float(row["epoch_detail"])) == int(row["epoch"]),
            rule,
            found,
            remedy,
        )
        rule = "is_new_epoch says that the batch has ended an epoch"
        require(row["is_new_epoch"] == str(int(row["epoch"]) > epoch), rule, found, remedy)
        before, epoch = row["epoch_detail"], int(row["epoch"])
    details = [float(row["epoch_detail"]) for row in rows]
    rule = "epoch_detail grows by the share of the epoch that the batch is, counted in examples or in batches"
    sizes = [int(row["examples"]) for row in rows]
    is_even = any(_are_even(details, counted) for counted in (sizes, [1] * len(rows)))
    require(is_even or all(detail.is_integer() for detail in details), rule, details, remedy)


def _are_even(details: list[float], sizes: list[int]) -> bool:
    """Whether the details are the running sum of the sizes over a constant, to the accuracy of floats."""
    total = sum(sizes)
    sums = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return all(abs(detail * total - done * details[-1]) <= 1e-9 * total for detail, done in zip(details, sums, strict=True))


def shared(walk: Walk, rank: int, size: int, number: int) -> Iterator[tuple[Row, Row]]:
    """Each batch of a rank, and what it should be."""
    with walk.fresh() as whole:
        wanted = []
        for _ in range(number):
            examples = _examples(next(whole))[rank::size]
            wanted.append(_row(whole, examples) | {"weight": str(len(examples))})
    with walk.fresh() as iterator:
        iterator.share(rank, size)
        for expected in wanted:
            batch = next(iterator)
            weight = getattr(batch, "weight", len(batch))
            # A batch of weight 0 holds an example that does not count.
            yield _row(iterator, _examples(batch) if weight else []) | {"weight": str(weight)}, expected


_ORDER = "Let the batches follow from (seed, epoch, position) alone, as chainring.iterators.epoch_order does"
_STATE = "Save in serialize(serializer) where the batch last returned stands, and all four epoch attributes"
_COUNTS = "Set epoch, epoch_detail, previous_epoch_detail and is_new_epoch in __next__ and in reset"


def check_iterator(make: Callable[[], Any], *, batches: int = 50) -> None:
    """Proves that an iterator can be resumed anywhere, and counts epochs.

    Over two epochs, or one where it does not repeat: a new iterator that loads the state of any position goes on with the
    same batches, whatever the seed is by then; saving changes nothing; epochs are counted as `Iterator` says; global random
    generators are neither disturbed nor used. At its end it raises `StopIteration` until ``reset``; ``finalize`` may be
    called at any time. With a ``share``, rank r of n gets ``batch[r::n]``; with a ``mark`` and ``return_to``, batches come
    again.

    Args:
        make: makes the iterator, over few examples. torch's seed is the same at each call.
        batches: at most so many are taken.

    Raises:
        AssertionError: a rule does not hold.
    """
    walk = Walk(make, batches)
    with _random.preserve_rng():
        whole = walk.whole()
        require_epochs(whole, _COUNTS)
        again = walk.take(len(whole))
        _require_rows(whole, again, "an iterator made anew returns the same batches", _ORDER)
        _require_apart(walk, whole)
        _require_saved(walk, whole)
        _require_reset(walk, whole)
        _require_finalized(walk)
        _require_shared(walk, len(whole))
        _require_returned(walk, whole)


def _require_rows(whole: list[Row], found: list[Row], rule: str, remedy: str) -> None:
    require(len(found) == len(whole), rule, f"{len(found)} batches are left instead of {len(whole)}", remedy)
    for number, (row, other) in enumerate(zip(whole, found, strict=True)):
        require_same(row, other, f"{rule}; in batch {number} of these", remedy)


def _require_apart(walk: Walk, whole: list[Row]) -> None:
    """What others draw from the global generators and what the iterator draws have nothing to do with each other."""
    rows = []
    with walk.fresh() as iterator:
        for _ in whole:
            random.random(), np.random.rand(), torch.rand(1)
            before = checksum(_random.get_rng_state())
            rows.append(row_of(iterator))
            after = checksum(_random.get_rng_state())
            rule = "global random generators stand after a batch where they stood before it"
            remedy = "Draw from a generator of its own, seeded for each epoch, or put them back"
            require(before == after, rule, f"batch {len(rows) - 1} moves them", remedy)
    _require_rows(whole, rows, "what others draw from global random generators does not change the batches", _ORDER)


def _require_saved(walk: Walk, whole: list[Row]) -> None:
    """A new iterator goes on at each position, also at the end."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as directory:
        places = [Path(directory) / str(number) for number in range(len(whole) + 1)]
        rows, counts = [], []
        with walk.fresh() as iterator:
            for number, place in enumerate(places):
                with required(f"the state after {number} batches can be saved", "See chainring.iterators.Iterator"):
                    save(place, _Holder(iterator))
                counts.append(counts_of(iterator))
                rows += [row_of(iterator)] if number < len(whole) else []
        _require_rows(whole, rows, "saving after every batch does not change the batches", _STATE)
        for number, place in enumerate(places):
            with walk.fresh() as iterator:
                torch.manual_seed(1 + torch.initial_seed() % 2**32)
                rule = f"a new iterator that loads the state after {number} batches goes on with the next"
                with required(rule, _STATE):
                    load(place, _Holder(iterator))
                    require_same(counts[number], counts_of(iterator), f"{rule}, and counts as before", _STATE)
                    rows = list(_rows(iterator, len(whole) - number))
                _require_rows(whole[number:], rows, rule, _STATE)
                if walk.has_ended and number == len(whole):
                    require(_is_at_its_end(iterator), "one saved at its end is there after loading", "a batch", _STATE)


def _rows(iterator: Any, number: int) -> Iterator[Row]:
    for _ in range(number):
        try:
            yield row_of(iterator)
        except StopIteration:
            return


class _Holder:
    """What is saved and loaded: an iterator."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def serialize(self, serializer: AbstractSerializer) -> None:
        serializer.visit("iterator", self.iterator)


def _is_at_its_end(iterator: Any) -> bool:
    with suppress(StopIteration):
        next(iterator)
        return False
    return True


def _require_reset(walk: Walk, whole: list[Row]) -> None:
    """It counts from 0 again; and without repetition, only then gives batches again."""
    with walk.fresh() as iterator:
        taken = len(list(_rows(iterator, len(whole))))
        if walk.has_ended:
            rule = "at its end an iterator raises StopIteration until reset()"
            for _ in range(2):
                require(_is_at_its_end(iterator), rule, "another batch", "Raise StopIteration as long as the epoch is over")
        iterator.reset()
        counts = (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail, iterator.is_new_epoch)
        require(counts == (0, 0.0, None, False), "reset() counts epochs from 0 again", counts, _COUNTS)
        rows = list(_rows(iterator, taken))
        found = f"{len(rows)} batches instead of {taken}"
        require(len(rows) == taken, "after reset() there are as many batches as before", found, _COUNTS)


def _require_finalized(walk: Walk) -> None:
    """Before the first batch, amid batches, and again."""
    for taken in (0, 1):
        with walk.fresh() as iterator:
            list(_rows(iterator, taken))
            with required("finalize() may be called at any time, and again", "Let it do nothing where nothing is held"):
                for _ in range(2):
                    getattr(iterator, "finalize", lambda: None)()


def _require_shared(walk: Walk, number: int) -> None:
    """Each rank has its part of every batch, and counts the epochs of the whole."""
    with walk.fresh() as iterator:
        if not hasattr(iterator, "share"):
            return
        sizes = [size for size in (2, 3) if size <= getattr(iterator, "batch_size", 1)]
    for size in sizes:
        for rank in range(size):
            rule = f"rank {rank} of {size} gets batch[{rank}::{size}], and the epochs of the whole"
            remedy = "Return batch[self.rank::self.size]; where that is empty, one example in a Batch of weight 0"
            for place, (mine, expected) in enumerate(shared(walk, rank, size, number)):
                require_same(expected, mine, f"{rule}; in batch {place}", remedy)


def _require_returned(walk: Walk, whole: list[Row]) -> None:
    """What a failed update has taken is returned again."""
    for number in range(len(whole)):
        with walk.fresh() as iterator:
            if not (hasattr(iterator, "mark") and hasattr(iterator, "return_to")):
                return
            list(_rows(iterator, number))
            mark = iterator.mark()
            list(_rows(iterator, 3))
            iterator.return_to(mark)
            rule = f"after return_to(mark) of a mark after {number} batches they come again"
            _require_rows(whole[number:], list(_rows(iterator, len(whole) - number)), rule, "See `mark` and `return_to`")
