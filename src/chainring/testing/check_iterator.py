"""check_iterator: what every iterator keeps to."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chainring import generators
from chainring.serializers.base import AbstractSerializer
from chainring.serializers.saving import load, save
from chainring.testing._look import checksum
from chainring.testing._passes import Row, Walk, counts_of, require_epochs, row_of, shared
from chainring.testing._rules import require, require_same, required

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
    with generators.preserved():
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
            before = checksum(generators.get_state())
            rows.append(row_of(iterator))
            after = checksum(generators.get_state())
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
