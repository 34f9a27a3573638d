"""The indices of the examples that an update has taken from its iterators."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

from chainring.iterators.serial import IndexedIterator


class BatchIndices:
    """Tells which examples an update has taken, from where the iterators stood before it and where they stand now.

    An order is a function of seed, epoch and position, so nothing is fetched again, and the iterators are left alone. It is
    not known of a loader which examples its batches hold; then their places in its pass are told.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._before: dict[str, tuple[Any, Any, Any]] = {}
        self._accumulate = int(getattr(updater, "accumulate", 1) or 1)

    def mark(self) -> None:
        """Note where the iterators stand, before an update."""
        iterators = self._updater.get_all_iterators() if hasattr(self._updater, "get_all_iterators") else {}
        self._before = {name: (each, _place(each), _progress(each)) for name, each in iterators.items()}

    def taken(self, *, is_undone: bool = False) -> dict[str, Any]:
        """Return what was taken since the mark, by the name of the iterator.

        It is the list of the indices; or a mapping of ``"from"`` and ``"to"``, places in the data as (epoch, position),
        where the indices are not known; or ``None`` where nothing is known. With ``is_undone`` the update has failed, and
        the iterators stand again where they stood before it.
        """
        return {
            name: (_following(each, self._accumulate) if is_undone else _indices(each, place)) or _between(each, progress)
            for name, (each, place, progress) in self._before.items()
        }


def _place(iterator: Any) -> Any:
    return iterator.batch_place() if hasattr(iterator, "batch_place") else None


def _progress(iterator: Any) -> Any:
    """Return the epoch and the position of an iterator, ``None`` if it does not tell them."""
    progress = getattr(iterator, "progress", None)
    return progress[:2] if isinstance(progress, tuple) and len(progress) == 3 else None


def _indices(iterator: Any, place: Any) -> list[int] | None:
    """Return the indices since a place, ``None`` if they are not known."""
    source = iterator if isinstance(iterator, IndexedIterator) else getattr(iterator, "iterator", None)
    if place is None or not isinstance(source, IndexedIterator):
        return None
    found = source.indices_since(place, iterator.batch_place())
    return None if found is None else [int(index) for index in found]


def _following(iterator: Any, count: int) -> list[int] | None:
    """Return the indices of the next batches."""
    if not isinstance(iterator, IndexedIterator):
        return None
    batches = islice(copy.copy(iterator).iterate_segments(), count)
    return [index for batch in batches for _, indices in batch for index in indices.tolist()]


def _between(iterator: Any, before: Any) -> Any:
    after = _progress(iterator)
    if before is None or after is None:
        return None
    return [] if before == after else {"from": list(before), "to": list(after)}
