"""The indices of the examples that an update has taken from its iterators."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from numbers import Integral
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader

from chainring.iterators.loader import LoaderIterator
from chainring.iterators.serial import IndexedIterator


class BatchIndices:
    """Tells which examples an update has taken, from where the iterators stood before it and where they stand now.

    An order is a function of seed, epoch and position, so nothing is fetched again, and the iterators are left alone. Of a
    `DataLoader` over a dataset with indices, what its sampler of batches draws is noted; of other loaders the places in
    the pass are told.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._accumulate = int(getattr(updater, "accumulate", 1) or 1)
        self._passes = {
            id(iterator): _LoaderPasses(iterator) for iterator in self._iterators().values() if _has_plain_sampler(iterator)
        }
        self._marks: dict[str, tuple[Any, Any, Any]] = {}  # iterator, where its last batch ended, epoch and position

    def _iterators(self) -> dict[str, Any]:
        return self._updater.get_all_iterators() if hasattr(self._updater, "get_all_iterators") else {}

    def mark(self) -> None:
        """Note where the iterators stand, before an update."""
        self._marks = {
            name: (iterator, iterator.batch_end() if isinstance(iterator, IndexedIterator) else None, _position(iterator))
            for name, iterator in self._iterators().items()
        }
        for passes in self._passes.values():
            passes.begin()

    def taken(self, *, is_undone: bool = False) -> dict[str, Any]:
        """Return what was taken since the mark, by the name of the iterator.

        It is the list of the indices; or a mapping of ``"from"`` and ``"to"``, positions in the data as (epoch, position),
        where the indices are not known; or ``None`` where nothing is known. With ``is_undone`` the update has failed, and
        the iterators stand again where they stood before it.
        """
        taken: dict[str, Any] = {}
        for name, (iterator, batch_end, before) in self._marks.items():
            after, indices = _position(iterator), None
            if id(iterator) in self._passes:
                indices = self._passes[id(iterator)].between(before, after)
            elif isinstance(iterator, IndexedIterator) and is_undone:
                batches = islice(copy.copy(iterator).iterate_segments(), self._accumulate)
                indices = [index for batch in batches for _, segment in batch for index in segment.tolist()]
            elif isinstance(iterator, IndexedIterator):
                since = iterator.indices_since(batch_end)
                indices = None if since is None else [int(index) for index in since]
            if indices:
                taken[name] = indices
            elif before is None or after is None:
                taken[name] = None
            else:
                taken[name] = [] if before == after else {"from": list(before), "to": list(after)}
        return taken


class _LoaderPasses:
    """Notes the indices that the sampler of batches of a DataLoader draws, pass by pass."""

    def __init__(self, iterator: LoaderIterator) -> None:
        self._iterator = iterator
        self._passes: list[list[Any]] = []
        self._first_epoch: int | None = None  # of the first pass that was noted
        sampler, cls = iterator.loader.batch_sampler, type(iterator.loader.batch_sampler)

        def iterate(sampler: Any) -> Iterator[Any]:
            drawn: list[Any] = []
            self._passes.append(drawn)
            for earlier in self._passes[-3:-2]:  # an update takes from two of them at most
                earlier.clear()
            for batch in cls.__iter__(sampler):
                drawn.append(batch)
                yield batch

        # A DataLoader takes no other sampler later, so that the class of the one that it has is replaced.
        sampler.__class__ = type(cls.__name__, (cls,), {"__iter__": iterate, "__module__": cls.__module__})

    def begin(self) -> None:
        if self._first_epoch is None:
            self._first_epoch = self._iterator.epoch

    def between(self, before: tuple[int, int], after: tuple[int, int]) -> list[int] | None:
        """Return the indices between two positions; ``None`` where it is not certain which pass they were drawn for."""
        size, indices = self._iterator.progress[2], list[int]()
        epoch, position = before
        last = after[0] if after[1] else after[0] - 1
        if self._first_epoch is None or size is None or len(self._passes) != last - self._first_epoch + 1:
            return None
        while (epoch, position) < after:
            end = after[1] if epoch == after[0] else size
            for batch in self._passes[epoch - self._first_epoch][position:end]:
                if not all(isinstance(index, Integral) for index in batch):
                    return None
                indices += map(int, batch)
            epoch, position = epoch + 1, 0
        return indices


def _has_plain_sampler(iterator: Any) -> bool:
    """Return whether a loader's sampler of batches tells the indices, and an epoch is one pass."""
    if not isinstance(iterator, LoaderIterator) or type(iterator.loader) is not DataLoader:
        return False
    sampler = iterator.loader.batch_sampler
    is_plain = sampler is not None and isinstance(getattr(type(sampler), "__iter__", None), FunctionType)
    return is_plain and iterator.epoch_length is None and not iterator.per_rank


def _position(iterator: Any) -> Any:
    """Return the epoch of an iterator and the position in it, ``None`` if it does not tell them."""
    progress = getattr(iterator, "progress", None)
    return progress[:2] if isinstance(progress, tuple) and len(progress) == 3 else None
