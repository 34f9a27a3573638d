"""MixtureIterator: several datasets by weight, each with its exact share at every prefix of the stream."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import count
from numbers import Real
from typing import Any

import numpy as np
import torch

from chainring._random import Indices, epoch_orders, preserve_host_rng, seed_host, stable_hash
from chainring.datasets._batches import COLUMNS, Batch
from chainring.datasets.base import Dataset, JointGather, make_joint_gather, require_datasets
from chainring.datasets.combined import arrays_of
from chainring.iterators._order import Epochs, members_of, refuse_labels
from chainring.iterators.base import counters_of, not_the_end
from chainring.iterators.multiprocess import MultiprocessIterator
from chainring.iterators.serial import EpochOrders, Segment, SerialIterator, require_flag, require_indices, require_integer
from chainring.serializers.protocol import AbstractSerializer, Serializer, announce_change, visit_setting

Weights = Mapping[str, float]

_LONGEST_PERIOD = 1 << 16  # examples that are computed at once, at most about, if the sequence of sources repeats in them
_BLOCK = 1 << 14  # and otherwise


Arrangement = tuple[Indices, Indices, list[int]]
"""The sources of examples, their places among all if those of the first source come first, and how many each has."""


class Shares:
    """The sequence of sources in which each has its share of every prefix, within one example.

    It is the solution of the chairman assignment problem by R. Tijdeman (Discrete Mathematics 32, 1980): of the sources that
    are far enough behind, the one whose example is due first, and of several the first. Then no source of k is ever more
    than 1 - 1 / (2k - 2) examples before or behind its share. All numbers are integers, so that it is exact at any position.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        counts = [int(weight * scale) for weight in weights]
        divisor = math.gcd(*counts)
        self.per_period = [count // divisor for count in counts]
        self.period = sum(self.per_period)
        self._kept: tuple[tuple[int, int], Arrangement] | None = None

    def arrange(self, counts: Sequence[int], length: int) -> Arrangement:
        """Arrange the next examples, after each has given so many."""
        if self.period > length:
            return _arrange(np.fromiter(self._generate(counts), np.int64, length), len(counts))
        place = sum(counts) % self.period, length
        if self._kept is None or self._kept[0] != place:
            owners = np.tile(self._pattern, -(-sum(place) // self.period))[place[0] : sum(place)]
            self._kept = place, _arrange(owners, len(counts))
        return self._kept[1]

    @cached_property
    def _pattern(self) -> Indices:
        return np.fromiter(self._generate([0] * len(self.per_period)), np.int64, self.period)

    def _generate(self, counts: Sequence[int]) -> Iterator[int]:
        # An example of source i, of which n were given before, may come from position `release` on, and is due at `due`.
        period, margin = self.period, max(2 * sum(map(bool, self.per_period)) - 2, 1)
        given, position = list(counts), sum(counts)
        waiting: list[tuple[int, int]] = []
        ready: list[tuple[int, int]] = []

        def release(source: int) -> None:
            scaled = self.per_period[source] * margin
            heappush(waiting, (-(-period * (1 + given[source] * margin) // scaled), source))

        for source, share in enumerate(self.per_period):
            if share:
                release(source)
        while True:
            position += 1
            while waiting and waiting[0][0] <= position:
                _, source = heappop(waiting)
                due = period * (margin - 1 + given[source] * margin) // (self.per_period[source] * margin)
                heappush(ready, (due, source))
            _, source = heappop(ready)
            given[source] += 1
            release(source)
            yield source


_shares_of = lru_cache(maxsize=8)(Shares)


def _arrange(owners: Indices, count: int) -> Arrangement:
    narrow = owners.astype(np.min_scalar_type(count))  # which is compared in an eighth of the time
    rows, slots = [np.flatnonzero(narrow == source) for source in range(count)], np.empty_like(owners)
    slots[np.concatenate(rows)] = np.arange(len(owners))
    return owners, slots, [*map(len, rows)]


class Sources:
    """The datasets of a mixture as one, whose index ``n * number_of_sources + i`` is the n-th example of source i.

    Each source goes through its orders, pass after pass, as a `SerialIterator` does.
    """

    def __init__(self, names: Sequence[str], datasets: Sequence[Any], shuffle: bool) -> None:
        self.names, self.inner = list(names), list(datasets)
        self.orders = [EpochOrders(dataset, shuffle, None, None) for dataset in datasets]
        self.sizes = [orders.size for orders in self.orders]
        self._epochs = [Epochs(members_of(dataset)) for dataset in datasets]
        self._size = sum(self.sizes)

    def __len__(self) -> int:
        return self._size

    def ends(self, given: Sequence[int]) -> list[int]:
        """Return how many examples each source has given a pass after it has given so many."""
        return [count + size for count, size in zip(given, self.sizes, strict=True)]

    def __getitem__(self, number: int) -> Any:
        source, epoch, index = self.find(number)
        if self._epochs[source].members:
            self._epochs[source].tell(epoch)
        try:
            return self.inner[source][index]
        except Exception as error:  # whose number is none that the user knows
            error.add_note(f"raised by {self.names[source]}[{index}]")
            raise

    def find(self, number: int) -> tuple[int, int, int]:
        """Return the source of an example, its pass of it, and the index in its dataset."""
        place, source = divmod(number, len(self.inner))
        epoch, position = divmod(place, self.sizes[source])
        return source, epoch, int(self.orders[source].segment(epoch, position, position + 1)[1][0])

    def seed_with(self, seed: int | None, switches: Sequence[int] = ()) -> None:
        """Set the seed of the orders; with ``switches``, of each source from the pass of this number on."""
        for source, orders in enumerate(self.orders):
            orders.begin(seed, (orders.seed, switches[source]) if switches else (seed, 0), 0)

    def indices_between(self, given: Sequence[int], following: Sequence[int]) -> list[Indices]:
        """Return the indices, in its dataset, of what each source gives between two counts, pass by pass."""
        wanted: list[tuple[EpochOrders, int, int, int]] = []
        for orders, first, end in zip(self.orders, given, following, strict=True):
            size = orders.size or 1
            passes = range(first // size, -(-end // size))
            wanted += [(orders, n, max(first - n * size, 0), min(end - n * size, size)) for n in passes]
        computed = epoch_orders(dict.fromkeys(item for orders, n, *_ in wanted for item in orders.lacking(n)))
        return [orders.segment(n, first, end, computed)[1] for orders, n, first, end in wanted]

    def ratios(self, weights: Any, repeat: bool) -> tuple[Fraction, ...]:
        """Return weights in the order of the sources; decimal numbers are what they are written as."""
        names = self.names
        if not isinstance(weights, Mapping):
            got = type(weights).__name__
            raise TypeError(
                f'weights is a mapping of a number for each name, such as {{"web": 0.7, "code": 0.3}}; got {got}'
            )
        numbers = {str(name): _number_of(weight) for name, weight in weights.items()}
        if sorted(numbers) != sorted(names):
            raise ValueError(f"weights have the names of the datasets, {names}; got {list(weights)}")
        for (name, number), weight in zip(numbers.items(), weights.values(), strict=True):
            if number is None:
                raise ValueError(f"a weight is a finite number of at least 0; that of {name!r} is {weight!r}")
            if number and repeat and not self.sizes[names.index(name)]:
                raise ValueError(f"source {name!r} has no examples, and a weight of {weight!r}; give it 0, or leave it out")
        ratios = tuple(numbers[name] or Fraction(0) for name in names)
        if not any(ratios):
            raise ValueError(f"at least one weight is above 0, got {dict(weights)}")
        return tuple(ratio / sum(ratios) for ratio in ratios)

    def without_ended(self, ratios: Iterable[Fraction], given: Sequence[int], began: Sequence[int]) -> tuple[Fraction, ...]:
        """Return 0 for each source that has given all its examples since it began."""
        rows = zip(ratios, given, self.ends(began), strict=True)
        return tuple(ratio if count < end else Fraction(0) for ratio, count, end in rows)

    def column_gather(self) -> JointGather | None:
        """Return what gathers columns, if all datasets hold whole arrays of the same shapes and dtypes."""
        if any(epochs.members for epochs in self._epochs):
            return None
        return make_joint_gather(self.inner, list(map(arrays_of, self.inner)))


def _number_of(weight: Any) -> Fraction | None:
    """Return a weight, of Python, NumPy or torch, as the decimal number that it is written as; None if it is not one."""
    if isinstance(weight, (torch.Tensor, np.ndarray)) and weight.ndim == 0:
        weight = weight.item()
    is_weight = isinstance(weight, Real) and not isinstance(weight, bool) and not weight < 0 and weight < math.inf
    return Fraction(str(weight)) if is_weight else None


class WeightFunction:
    """A function of weights, whose answer is read again only where it changes.

    Raises:
        ValueError: it draws random numbers, or counts its calls.
    """

    def __init__(self, function: Callable[[int], Weights], sources: Sources, repeat: bool) -> None:
        self._function, self._sources, self._repeat = function, sources, repeat
        self._read: tuple[Weights, tuple[Fraction, ...]] = {}, ()  # what it gave last
        with preserve_host_rng():
            seed_host("weights", 0)
            ratios, (weights, _) = self(0), self._read
            seed_host("weights", 1)
            is_pure, (again, _) = self(0) == ratios, self._read
        if not is_pure:
            raise ValueError(
                "weights depend on nothing but the number of examples, since workers and resumed runs ask for them again; "
                f"called twice with 0, the function gave {weights} and {again}. To draw them, make a generator in it, such "
                "as np.random.default_rng((seed, count))"
            )

    def __call__(self, position: int) -> tuple[Fraction, ...]:
        """Return the weights at a position, as `Sources.ratios`."""
        try:
            weights = self._function(position)
        except StopIteration as error:
            raise not_the_end("the function of the weights") from error
        before, ratios = self._read
        # hot path: "the same, by a function" of benchmarks/data.py. Nearly always they are those of the batch before.
        if type(weights) is not dict or {*map(type, weights.values())} - {int, float} or weights != before:
            ratios = self._sources.ratios(weights, self._repeat)
            self._read = dict(weights), ratios
        return ratios


@dataclass(frozen=True)
class Anchor:
    """A position in the stream, and all that decides how it goes on."""

    position: int
    given: tuple[int, ...]  # how many examples each source has given before
    changed_at: tuple[int, ...]  # how many it had given at the last change of the weights
    weights: tuple[Fraction, ...]  # those of what has ended are 0; all are when the stream has


@dataclass(eq=False)
class Block:
    """The examples after an anchor that are computed at once."""

    anchor: Anchor
    owners: Indices  # the source of each
    slots: Indices  # as in an `Arrangement`
    following: Anchor
    columns: Sequence[Indices] = ()  # the places in what gathers the examples, once a batch is gathered
    ready: int = 0  # for how many examples they are there

    def interleave(self, parts: Iterable[Indices]) -> Indices:
        """Put values of all examples into their order, of which those of each source come one after the other."""
        return np.concatenate([*parts]).take(self.slots)

    @cached_property
    def numbers(self) -> Indices:
        """Those by which `Sources` knows the examples."""
        given, count = zip(self.anchor.given, self.following.given, strict=True), len(self.anchor.given)
        return self.interleave(np.arange(first, end) * count + source for source, (first, end) in enumerate(given))


Piece = tuple[Block, slice]

Place = tuple[Anchor, int]
"""An anchor, and a number of examples after it, fewer than are computed at once."""


class MixtureIterator(MultiprocessIterator):
    """Returns batches of several datasets, mixed by weight; each has its exact share of every prefix.

    Of the examples since the last change of the weights, each source has given its share within one example: 30 or 31 of
    the first 100 at a weight of 0.3. Inside a source the order is that of `SerialIterator`, each example once a pass, and a
    small source is in its tenth pass while a large one is in its first. Nothing is drawn at random but these orders, so the
    state is a count for each source. A change of the weights loses and repeats nothing, whether the function makes it or a
    script that is resumed with others.

    An epoch is as many examples as all sources have together; ``passes`` counts those of each. A `StandardUpdater` reports
    ``mixture/NAME``, the share of a source in a batch, of which a log has the mean since its last row.

    Example::

        texts = {"web": web, "code": code}
        MixtureIterator(texts, 32, weights={"web": 0.7, "code": 0.3})
        MixtureIterator(texts, 32, weights=lambda count: {"web": 0.7, "code": 0.3 if count < 1_000_000 else 0.5})

    Args:
        datasets: a dataset for each name, as for `SerialIterator`.
        batch_size: examples in a batch, over all ranks.
        weights: for each name a number of at least 0; only their ratios count. Or a function of the number of examples so
            far that returns them, asked before each batch, which must depend on nothing else.
        repeat: True to go on for ever. Otherwise the iterator ends with the first source that has given all its examples.
        shuffle: True if each pass of a source has its own order, False for that of the indices.
        seed: of these orders; see `SerialIterator`.
        drop_finished: with ``repeat=False``, True to go on without a source that has ended, in the ratios of the others,
            until all have.
        n_processes: the number of workers that load examples; with 0 this process does. See `MultiprocessIterator`.

    Raises:
        TypeError: ``datasets`` or ``weights`` is no mapping, or one of them has the wrong type.
        ValueError: the weights are not of the same names, below 0, not finite or all 0; a function gives others when it is
            asked again; a source with a weight is empty; or ``drop_finished`` is given with ``repeat``.
    """

    serves_virtual_ranks = True
    _gather: JointGather | None  # type: ignore[assignment]
    _at: Place
    _blocks: list[Block]  # the newest, and the one before
    _changes: dict[int, Place]  # by position, where the weights were changed in this process

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        batch_size: int,
        *,
        weights: Weights | Callable[[int], Weights],
        repeat: bool = True,
        shuffle: bool = True,
        seed: int | None = None,
        drop_finished: bool = False,
        n_processes: int = 0,
    ) -> None:
        if not isinstance(datasets, Mapping):
            raise TypeError(f'datasets is a mapping, such as {{"web": web, "code": code}}; got {type(datasets).__name__}')
        inner = require_datasets("a MixtureIterator", *datasets.values())
        for dataset in inner:
            require_indices(dataset, 'of a mapping take one of its values, such as splits["train"]')
        refuse_labels(member for dataset in inner for member in members_of(dataset))
        self.drop_finished = require_flag("drop_finished", drop_finished)
        if drop_finished and repeat:
            raise ValueError("no source ever ends with repeat=True; drop_finished=True is for repeat=False")
        workers = require_integer("n_processes", n_processes, 0)
        sources = Sources([str(name) for name in datasets], inner, require_flag("shuffle", shuffle))
        super().__init__(sources, batch_size, repeat, shuffle, max(workers, 1), seed=seed)
        self._seeds_examples = any(type(dataset) not in (list, tuple) for dataset in inner)
        self.n_processes, self.sources = workers, sources
        self._function = WeightFunction(weights, sources, self.repeat) if callable(weights) else None
        self._given = () if callable(weights) else sources.ratios(weights, self.repeat)
        self._start = (0,) * len(inner)  # what each source had given when epochs were counted from 0
        self._last = np.empty(0, np.int64), 0, 0  # sources, and where among them those of the last batch of all ranks are
        sources.seed_with(seed)
        self.rewind()

    @property
    def weights(self) -> dict[str, float]:
        """The weights that hold now, of all together 1; at the end each is 0."""
        weights = self._at[0].weights
        return {name: float(weight / (sum(weights) or 1)) for name, weight in zip(self.sources.names, weights, strict=True)}

    def change_weights(self, weights: Weights) -> None:
        """Let other weights hold from the next batch on; nothing is lost or repeated.

        Raises:
            ValueError: the weights are those of a function, which would overwrite these; or they are not as the constructor
                takes them, or only of sources that have ended.
        """
        if self._function is not None:
            raise ValueError("the weights are those of a function, which would overwrite these; change it in the script")
        anchor = self._anchor()
        ratios = self.sources.ratios(weights, self.repeat)
        if not self.repeat:
            ratios = self.sources.without_ended(ratios, anchor.given, self._start)
        if not any(ratios) or not any(anchor.weights):
            raise ValueError("every source with a weight has ended; give one above 0 to a source that has not")
        self._at = _changed(anchor, ratios), 0
        self._changes = {**self._changes, anchor.position: self._at}

    @property
    def reported(self) -> dict[str, float]:
        """The share of each source in the batch last returned, which an updater reports."""
        owners, begin, end = self._last
        counts = np.bincount(owners[begin:end], minlength=len(self.sources.names)).tolist()
        return {f"mixture/{name}": n / max(sum(counts), 1) for name, n in zip(self.sources.names, counts, strict=True)}

    @property
    def passes(self) -> dict[str, int]:
        """How many passes of each source are completed."""
        given = self._anchor().given
        return {
            name: count // max(size, 1)
            for name, count, size in zip(self.sources.names, given, self.sources.sizes, strict=True)
        }

    @property
    def seed(self) -> int:
        """The seed of the orders. ``None`` at construction becomes one derived from ``torch.initial_seed()``."""
        if (seed := self.sources.orders[0].seed) is None:
            seed = stable_hash("order", self.base_seed(), self.name)
            self.sources.seed_with(seed)
        return seed

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self.current_position, len(self.sources)

    def __next__(self) -> Batch:
        (anchor, offset), is_empty = self._at if self._function is None else self._ask(self._at), False
        stop = offset + self.batch_size
        # hot path: "the same, beside one array" of benchmarks/data.py. Nearly always a batch is inside a block.
        if self._blocks and (block := self._blocks[0]).anchor is anchor and stop < block.ready:
            at, last = (anchor, stop), (block.owners, offset, stop)
            places = [column[offset:stop] for column in block.columns]
        else:
            owners, places, at = self._next_examples((anchor, offset))
            last = owners, 0, len(owners)
        if self.size > 1:
            rows = self.rows_of_share(len(places[0]))
            is_empty = not len(places[0][rows])
            places = [column[slice(1) if is_empty else rows] for column in places]
        try:
            if self._gather is None:
                batch = self._fetch_examples([((self.seed, 0), places[0])])
            else:
                batch = Batch(columns=self._gather.take(places), length=len(places[0]), layout=COLUMNS)
        except StopIteration as error:
            raise not_the_end(f"a dataset of iterator {self.name!r}") from error
        if is_empty:
            batch.weight = 0
        self._at, self._last, size = at, last, self._orders.size
        epoch, self.current_position = divmod(at[0].position + at[1], size)
        self._count_batch(epoch, epoch + self.current_position / size)
        return batch

    def _next_examples(self, at: Place) -> tuple[Indices, list[Indices], Place]:
        """Return the sources of a batch of all ranks, its places in what gathers it, and the place after it."""
        pieces, at = self._next_pieces(at)
        if not pieces:
            raise StopIteration
        found = [[block.owners[rows], *(column[rows] for column in self._columns_of(block))] for block, rows in pieces]
        owners, *places = map(np.concatenate, zip(*found, strict=True))
        return owners, places, at

    def _columns_of(self, block: Block) -> Sequence[Indices]:
        if (gather := self._gather) is None:
            return [block.numbers]
        if not block.columns:
            _ = self.seed
            indices = block.interleave(self.sources.indices_between(block.anchor.given, block.following.given))
            block.columns = gather.find(block.owners, indices)
            block.ready = len(indices)
        return block.columns

    def _fetch_examples(self, segments: list[Segment]) -> Batch:
        return (MultiprocessIterator if self.n_processes else SerialIterator)._fetch_examples(self, segments)  # type: ignore

    def iterate_segments(self) -> Generator[list[Segment]]:
        """Yield the segments of each batch from here on, and advance without fetching them."""
        for ahead in count():
            pieces, self._at = self._next_pieces(self._ask(self._at))
            if not pieces:
                return
            segments: list[Segment] = [((self.seed, 0), _numbers_of(pieces))]
            yield segments if self.size == 1 else self._share_of(segments, ahead)[0]

    def _next_pieces(self, at: Place, length: int | None = None) -> tuple[list[Piece], Place]:
        """Return the examples of the batch of all ranks after a place, none at the end, and the place after them."""
        pieces, missing, (anchor, offset) = [], self.batch_size if length is None else length, at
        while missing and any(anchor.weights):
            block = self._block_after(anchor, offset)
            rows = slice(offset, min(offset + missing, len(block.owners)))
            if rows.stop > offset:
                pieces.append((block, rows))
                missing -= rows.stop - offset
            anchor, offset = (block.following, 0) if rows.stop == len(block.owners) else (anchor, rows.stop)
        return pieces, (anchor, offset)

    def _ask(self, at: Place) -> Place:
        """Return a place, from which other weights hold if a function gives others there."""
        anchor, offset = at
        if self._function is None or not (self.drop_finished or any(anchor.weights)):
            return at
        weights = self._function(anchor.position + offset)
        if self.drop_finished:
            weights = self.sources.without_ended(weights, self._anchor(at).given, self._start)
        return at if weights == anchor.weights else (_changed(self._anchor(at), weights), 0)

    def _block_after(self, anchor: Anchor, offset: int) -> Block:
        """Return a block of more than ``offset`` examples after an anchor, if there are as many."""
        for block in self._blocks:
            if (block.anchor is anchor or block.anchor == anchor) and offset < max(len(block.owners), 1):
                return block
        shares, given = _shares_of(anchor.weights), anchor.given
        since = [count - before for count, before in zip(given, anchor.changed_at, strict=True)]
        # As many as these weights have had, which may change soon; a copy, which has no blocks yet, may be asked for few.
        most = _BLOCK if shares.period > _LONGEST_PERIOD else _LONGEST_PERIOD
        wanted = max(min(sum(since), most) if self._blocks else 0, self.batch_size, offset + 1)
        step = math.lcm(self.batch_size, shares.period)  # after which the arrangement is the same
        step = step if step <= wanted else self.batch_size
        longest = -(-wanted // step) * step
        owners, slots, counts = shares.arrange(since, longest + (not self.repeat))  # one more, which may be missing
        ends, length, missing = self.sources.ends(self._start), longest, []
        if not self.repeat:  # up to the first example that is not there
            left = [end - count for end, count in zip(ends, given, strict=True)]
            missing = [int(np.flatnonzero(owners == n)[left[n]]) for n, count in enumerate(counts) if count > left[n]]
            length = min([longest, *missing])
            owners, slots, counts = _arrange(owners[:length], len(counts))
        given = tuple(map(operator.add, given, counts))
        following = Anchor(anchor.position + length, given, anchor.changed_at, anchor.weights)
        if missing:
            stays = [self.drop_finished and count < end for count, end in zip(given, ends, strict=True)]
            weights = tuple(weight * goes_on for weight, goes_on in zip(anchor.weights, stays, strict=True))
            following = _changed(following, weights)
        block = Block(anchor, owners, slots, following)
        self._blocks = [block, *self._blocks[:1]]
        return block

    def _anchor(self, at: Place | None = None) -> Anchor:
        """Return an anchor at a place, by default at this one."""
        anchor, offset = self._at if at is None else at
        if not offset:
            return anchor
        more = np.bincount(self._block_after(anchor, offset).owners[:offset], minlength=len(anchor.given)).tolist()
        return replace(anchor, position=anchor.position + offset, given=tuple(map(operator.add, anchor.given, more)))

    def reset(self) -> None:
        sizes = self.sources.sizes
        given = zip(self._anchor().given, sizes, strict=True)
        self._start = tuple(-(-count // max(size, 1)) * size for count, size in given)
        self.rewind()

    def rewind(self) -> None:
        weights = self._given if self._function is None else self._function(0)
        self._at, self.current_position = (Anchor(0, self._start, self._start, weights), 0), 0
        self._blocks, self._changes = [], {}
        self._restore_counters()

    def mark(self) -> Any:
        return counters_of(self), self.current_position, self._at

    def return_to(self, mark: Any) -> None:
        counters, self.current_position, self._at = mark
        self._restore_counters(counters)

    def batch_end(self) -> Any:
        return self._at

    def indices_since(self, start: Any, stop: Any = None) -> Indices | None:
        """Return the numbers of the examples between two values of `batch_end`, as `Sources` counts them."""
        stop = self._at if stop is None else stop
        start = self._changes.get(start[0].position + start[1], start)
        end, numbers = stop[0].position + stop[1], [np.empty(0, np.int64)]
        while (left := end - start[0].position - start[1]) > 0:
            pieces, start = self._next_pieces(self._ask(start), min(left, self.batch_size))
            if not pieces:
                return None
            numbers.append(_numbers_of(pieces))
        return np.concatenate(numbers) if left == 0 else None

    def names_of(self, indices: Indices) -> list[Any]:
        found = map(self.sources.find, indices.tolist())
        return [f"{self.sources.names[source]}[{index}]" for source, _, index in found]

    def __getstate__(self) -> dict[str, Any]:
        owners, begin, end = self._last
        return {**super().__getstate__(), "_blocks": [], "_last": (owners[begin:end], 0, end - begin)}

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        sizes = dict(zip(self.sources.names, self.sources.sizes, strict=True))
        if list((saved := dict(serializer("sizes", sizes))).items()) != list(sizes.items()):
            raise ValueError(
                f"the sources of iterator {self.name!r} have {sizes} examples, and those of the saved run had {saved}. A "
                "position in one means nothing in the other: resume with the same datasets in the same order, give one that "
                "is not wanted any more the weight 0, or start a new run"
            )
        visit_setting(serializer, "batch_size", self.batch_size, f"batch size of iterator {self.name!r}")
        given_seed, seed = self.sources.orders[0].seed, serializer("seed", self.seed if saving else None)
        anchor = self._anchor()
        position = serializer("position", anchor.position)
        if serializer("shuffle", self.shuffle) != self.shuffle and position:
            raise ValueError(
                f"the saved run had shuffle={not self.shuffle} of iterator {self.name!r}, and took {position} examples: "
                "some would come twice in a pass, others never. Resume with the same shuffle, or start a new run"
            )
        given, changed_at, began = (
            tuple(serializer(key, list(counts)))
            for key, counts in (("given", anchor.given), ("changed_at", anchor.changed_at), ("start", self._start))
        )
        texts = serializer("weights", list(map(str, anchor.weights)))
        of_script = serializer("given_weights", list(map(str, self._given)))
        self._serialize_counters(serializer)
        if saving:
            return
        weights = tuple(map(Fraction, texts))
        self._start = began
        anchor = Anchor(position, given, changed_at, weights)
        # A script has none with a function; weights that were commanded since hold on if those of the script are the same.
        if self._given and self._given not in (weights, tuple(map(Fraction, of_script))):
            old, new = ([round(float(weight), 6) for weight in values] for values in (weights, self._given))
            holds = "nothing is lost or repeated; the next shares are counted from here"
            announce_change(f"weights of iterator {self.name!r}", old, new, holds)
            anchor = _changed(anchor, self._given)
        self._at, self._blocks, self._changes = (anchor, 0), [], {}
        self.current_position = position % max(len(self.sources), 1)
        self.sources.seed_with(seed)
        if given_seed is not None and given_seed != seed:
            passes = [-(-count // max(size, 1)) for count, size in zip(given, self.sources.sizes, strict=True)]
            self.sources.seed_with(given_seed, passes)
            holds = "each source ends its pass in the order that it has, and the next has that of the new seed"
            announce_change(f"seed of iterator {self.name!r}", seed, given_seed, holds)


def fetch_numbers(mixture: MixtureIterator, numbers: Indices) -> list[Any]:
    """Return the examples of these numbers, as `Sources` counts them; they are fetched in this process."""
    return list(SerialIterator._fetch_examples(mixture, [((mixture.seed, 0), numbers)]))  # type: ignore


def _changed(anchor: Anchor, weights: tuple[Fraction, ...]) -> Anchor:
    """Return an anchor at the same position from which other weights hold, and shares are counted anew."""
    return anchor if weights == anchor.weights else replace(anchor, changed_at=anchor.given, weights=weights)


def _numbers_of(pieces: Iterable[Piece]) -> Indices:
    return np.concatenate([block.numbers[piece] for block, piece in pieces])
