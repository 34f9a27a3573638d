"""An iterator walked through: what each of its batches holds, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chainring import generators
from chainring.testing._look import leaves, text
from chainring.testing._rules import require, required

Row = dict[str, str]
"""What a batch holds and what its iterator counts, by path."""

_COUNTS = ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")


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
    return {name: repr(getattr(iterator, name)) for name in _COUNTS}


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
        self._start = generators.get_state()
        self.has_ended = False

    @contextmanager
    def fresh(self) -> Iterator[Any]:
        """A new iterator, made while the generators stand where they were at first; it is finalized afterwards."""
        generators.set_state(self._start)
        iterator = self._make()
        missing = [name for name in (*_COUNTS, "__next__", "reset") if not hasattr(iterator, name)]
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
            counts = tuple(getattr(iterator, name) for name in _COUNTS)
            rule = "before its first batch an iterator counts 0, 0.0, None, False"
            require(counts == (0, 0.0, None, False), rule, counts, f"These are {', '.join(_COUNTS)}")
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
        found = f"{ ({name: row[name] for name in _COUNTS}) } in batch {number}, after {before}"
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
