"""check_iterator: the rules for every iterator."""

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
from chainring._distributed.virtual_ranks import Deal
from chainring.serializers._loading import load
from chainring.serializers._saving import save
from chainring.testing.checks import require, require_epochs, require_equal, require_no_error
from chainring.training._digests import checksum, describe_leaves

_COUNTERS = ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")

_ORDER = "Let the batches follow from (seed, epoch, position) alone, as chainring.iterators.epoch_order does"
_STATE = "Save in serialize(serializer) the position of the batch last returned, and all four epoch attributes"
_COUNT = "Set epoch, epoch_detail, previous_epoch_detail and is_new_epoch in __next__ and in reset"
_FINALIZE = "Let finalize() do nothing where nothing is to be released"

Record = dict[str, str]  # the examples of a batch and the counters of its iterator, by path


def check_iterator(make: Callable[[], Any], *, batches: int = 50) -> None:
    """Check that an iterator can be resumed at any position, and counts epochs correctly.

    Over two epochs, or one if it does not repeat: a new iterator that loads the state of any position continues with the
    same batches, whatever its seed; saving changes nothing; epochs are counted as documented in `Iterator`; global random
    generators are neither changed nor used. At its end it raises `StopIteration` until ``reset``; ``finalize`` may be
    called at any time. If it has ``share``, rank r of n gets ``batch[r::n]`` or, if it serves virtual ranks, the rows of
    its block of them; if it has ``mark`` and ``return_to``, batches are returned again.

    Args:
        make: a function that creates the iterator, over few examples. PyTorch's seed is the same at each call.
        batches: the largest number of batches to fetch.

    Raises:
        AssertionError: a rule is violated.
        TypeError: ``make`` is not a function.
    """
    trial = _Trial(make, batches)
    with _random.preserve_rng():
        expected = trial.take_all()
        _require_epochs(expected)
        with trial.new_iterator() as iterator:
            again = _take(iterator, len(expected))
        _require_batches(expected, again, "an iterator created again returns the same batches", _ORDER)
        _require_own_generators(trial, expected)
        _require_resumable(trial, expected)
        _require_reset(trial, expected)
        _require_shares(trial, len(expected))
        _require_marks(trial, expected)


class _Trial:
    """Makes iterators that begin alike, and takes at most ``limit`` batches of one."""

    def __init__(self, make: Callable[[], Any], limit: int) -> None:
        if not callable(make):
            raise TypeError(f"make is a function that makes a new iterator at each call, got {make!r}; write lambda: ...")
        self._make = make
        self._limit = limit
        self._generators = _random.get_rng_state()
        self.has_ended = False  # after an epoch; known once all batches were taken

    @contextmanager
    def new_iterator(self) -> Iterator[Any]:
        """Give a new iterator, made with the random generators as they were at first, and finalize it twice afterwards."""
        _random.set_rng_state(self._generators)
        iterator = self._make()
        missing = [name for name in (*_COUNTERS, "__next__", "reset") if not hasattr(iterator, name)]
        remedy = "Derive it from chainring.iterators.Iterator; a loader is wrapped by LoaderIterator"
        require(not missing, "an iterator gives batches and counts epochs", f"it lacks {missing}", remedy)
        try:
            yield iterator
        finally:
            with require_no_error("finalize() may be called at any time, and again", _FINALIZE):
                for _ in range(2):
                    getattr(iterator, "finalize", lambda: None)()

    def take_all(self) -> list[Record]:
        """Return the batches of two epochs, or of one where it does not repeat."""
        records: list[Record] = []
        with self.new_iterator() as iterator:
            _require_start(iterator, "before its first batch an iterator counts 0, 0.0, None, False")
            while iterator.epoch < 2 and not self.has_ended:
                found = _take(iterator, 1)
                records += found
                self.has_ended = not found
                remedy = "Count the epochs, or give fewer examples or batches="
                require(len(records) < self._limit, f"two epochs have fewer than {self._limit} batches", "more", remedy)
        require(bool(records), "an iterator that is tried has a batch", "StopIteration at once", "Give it some examples")
        return records


def _take(iterator: Any, count: int) -> list[Record]:
    """Return the records of the next batches, of fewer where the iterator ends."""
    records: list[Record] = []
    with suppress(StopIteration):
        while len(records) < count:
            records.append(_record(iterator, _examples(next(iterator))))
    return records


def _examples(batch: Any) -> list[Any]:
    remedy = "Return a chainring.iterators.Batch(examples)"
    require(isinstance(batch, Sequence), "a batch is a sequence of examples", type(batch).__name__, remedy)
    return [*batch]


def _record(iterator: Any, examples: list[Any]) -> Record:
    return describe_leaves("batch", examples) | {"examples": str(len(examples))} | _counters(iterator)


def _counters(iterator: Any) -> Record:
    return {name: repr(getattr(iterator, name)) for name in _COUNTERS}


def _require_start(iterator: Any, rule: str) -> None:
    counters = tuple(getattr(iterator, name) for name in _COUNTERS)
    require(counters == (0, 0.0, None, False), rule, counters, _COUNT)


def _require_batches(expected: list[Record], found: list[Record], rule: str, remedy: str) -> None:
    require(len(found) == len(expected), rule, f"{len(found)} batches are left instead of {len(expected)}", remedy)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        require_equal(one, other, f"{rule}; in batch {index} of these", remedy)


def _require_epochs(records: list[Record]) -> None:
    """Require the counters of each batch to continue evenly from those of the one before."""
    before, details = (0.0, 0), []
    for index, record in enumerate(records):
        detail, epoch, previous = float(record["epoch_detail"]), int(record["epoch"]), record["previous_epoch_detail"]
        counters = detail, epoch, None if previous == "None" else float(previous), record["is_new_epoch"] == "True"
        require_epochs(counters, before, "batch", f"batch {index}", _COUNT)
        before = detail, epoch
        details.append(detail)
    is_even = all(detail.is_integer() for detail in details)
    for steps in ([int(record["examples"]) for record in records], [1] * len(records)):
        total = sum(steps)  # the details are the running sum of the steps over a constant, to the accuracy of floats
        sums = np.cumsum(steps) * details[-1]
        is_even |= np.allclose(np.multiply(details, total), sums, rtol=0, atol=1e-9 * total)
    rule = "epoch_detail grows by the share of the epoch that the batch is, counted in examples or in batches"
    require(is_even, rule, details, _COUNT)


def _require_own_generators(trial: _Trial, expected: list[Record]) -> None:
    """Require the iterator to draw nothing from the global generators, and nothing of it to depend on them."""
    records = []
    with trial.new_iterator() as iterator:
        for index in range(len(expected)):
            random.random(), np.random.rand(), torch.rand(1)
            before = checksum(_random.get_rng_state())
            records.append(_record(iterator, _examples(next(iterator))))
            rule = "global random generators are in the same state after a batch as before it"
            remedy = "Draw from a generator of its own, seeded for each epoch, or put them back"
            require(checksum(_random.get_rng_state()) == before, rule, f"batch {index} moves them", remedy)
    _require_batches(expected, records, "numbers drawn elsewhere from global generators do not change the batches", _ORDER)


def _require_resumable(trial: _Trial, expected: list[Record]) -> None:
    """Require a new iterator to continue at each position, also at the end."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as directory:
        paths = [Path(directory) / str(position) for position in range(len(expected) + 1)]
        records, counters = [], []
        with trial.new_iterator() as iterator:
            for position, path in enumerate(paths):
                with require_no_error(f"the state after {position} batches can be saved", _STATE):
                    save(path, iterator)
                counters.append(_counters(iterator))
                records += _take(iterator, 1) if position < len(expected) else []
        _require_batches(expected, records, "saving after every batch does not change the batches", _STATE)
        for position, path in enumerate(paths):
            with trial.new_iterator() as iterator:
                torch.manual_seed(1 + torch.initial_seed() % 2**32)
                rule = f"a new iterator that loads the state after {position} batches continues with the next"
                with require_no_error(rule, _STATE):
                    load(path, iterator)
                    require_equal(counters[position], _counters(iterator), f"{rule}, and counts as before", _STATE)
                    records = _take(iterator, len(expected) - position)
                _require_batches(expected[position:], records, rule, _STATE)
                if trial.has_ended and position == len(expected):
                    rule = "an iterator saved at its end is at its end after loading"
                    require(not _take(iterator, 1), rule, "another batch", _STATE)


def _require_reset(trial: _Trial, expected: list[Record]) -> None:
    """Require it to count from 0 again after a reset, and without repetition to give batches only then."""
    with trial.new_iterator() as iterator:
        taken = len(_take(iterator, len(expected)))
        if trial.has_ended:
            rule = "at its end an iterator raises StopIteration until reset()"
            more = _take(iterator, 1) + _take(iterator, 1)
            require(not more, rule, "another batch", "Raise StopIteration as long as the epoch is over")
        iterator.reset()
        _require_start(iterator, "reset() counts epochs from 0 again")
        again = len(_take(iterator, taken))
        found = f"{again} batches instead of {taken}"
        require(again == taken, "after reset() there are as many batches as before", found, _COUNT)


def _require_shares(trial: _Trial, count: int) -> None:
    """Require each rank to have its rows of every batch, and to count the epochs as the iterator does alone."""
    with trial.new_iterator() as iterator:
        if not hasattr(iterator, "share"):
            return
        most = getattr(iterator, "batch_size", 1)
        worlds: list[tuple[int | None, int]] = [(None, size) for size in (2, 3) if size <= most]
        if getattr(iterator, "serves_virtual_ranks", False):
            worlds += [(count, size) for count, size in ((3, 2), (4, 2), (4, 3)) if count <= most]
        batches = [(_examples(next(iterator)), _counters(iterator)) for _ in range(count)]
    for (virtual_ranks, size), rank in ((world, rank) for world in worlds for rank in range(world[1])):
        block = range(rank, rank + 1)
        rule = f"rank {rank} of {size} gets batch[{rank}::{size}], and the epochs of the whole"
        remedy = "Return batch[self.rank::self.size]; where that is empty, one example in a Batch of weight 0"
        with trial.new_iterator() as iterator:
            if virtual_ranks is not None:
                block = Deal.even(size, virtual_ranks).block(rank)
                rows = f"the rows of virtual ranks {[*block]} of {virtual_ranks}"
                rule = f"rank {rank} of {size} gets {rows}, and the same epochs"
                remedy = "Return self.take_share(batch)"
                iterator.use_virtual_ranks(virtual_ranks)
            iterator.share(rank, size)
            for index, (examples, counters) in enumerate(batches):
                batch = next(iterator)
                weight = getattr(batch, "weight", len(batch))
                # A batch of weight 0 holds an example that does not count.
                found = _record(iterator, _examples(batch) if weight else []) | {"weight": str(weight)}
                share = [example for row, example in enumerate(examples) if row % (virtual_ranks or size) in block]
                expected = _record(iterator, share) | counters | {"weight": str(len(share))}
                require_equal(expected, found, f"{rule}; in batch {index}", remedy)


def _require_marks(trial: _Trial, expected: list[Record]) -> None:
    """Require the batches that a failed update has taken to come again."""
    for position in range(len(expected)):
        with trial.new_iterator() as iterator:
            if not (hasattr(iterator, "mark") and hasattr(iterator, "return_to")):
                return
            _take(iterator, position)
            mark = iterator.mark()
            _take(iterator, 3)
            iterator.return_to(mark)
            rule = f"after return_to(mark) of a mark after {position} batches they come again"
            records = _take(iterator, len(expected) - position)
            _require_batches(expected[position:], records, rule, "See `mark` and `return_to`")
