"""A dataset: ``len(dataset)`` examples, and ``dataset[i]`` is one of them."""

from __future__ import annotations

from typing import Any

import numpy as np


class DatasetMixin:
    """Gives a dataset that defines ``__len__`` and ``get_example(i)`` every way of indexing.

    ``dataset[3]`` and ``dataset[-1]`` are an example; a slice, or a list or array of integers or booleans, gives a list
    of examples.
    """

    def __len__(self) -> int:
        """The number of examples."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def get_example(self, i: int) -> Any:
        """Example number ``i``, which is from 0 to ``len(self) - 1``."""
        raise NotImplementedError(f"{type(self).__name__} must define get_example(i)")

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.get_example(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (int, np.integer)):
            return self.get_example(self._checked(int(index)))
        indices = np.asarray(index)
        if indices.ndim == 0 and indices.dtype.kind in "iu":
            return self.get_example(self._checked(int(indices)))
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iub"):
            raise TypeError(f"an index is an integer, a slice, or a list or array of integers or booleans, got {index!r}")
        if indices.dtype.kind == "b":
            if len(indices) != len(self):
                raise IndexError(f"a mask has one boolean for each of the {len(self)} examples, got {len(indices)}")
            indices = np.flatnonzero(indices)
        return [self.get_example(self._checked(int(i))) for i in indices]

    def _checked(self, i: int) -> int:
        size = len(self)
        if not -size <= i < size:
            raise IndexError(f"the dataset has {size} examples, so no number {i}")
        return i % size


def require_datasets(where: str, *datasets: Any) -> None:
    """Refuses now what would fail when its length or an example is asked for.

    Raises:
        TypeError: one has no ``__len__`` or no ``__getitem__``.
    """
    for dataset in datasets:
        if isinstance(dataset, type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            kind = f"the class {dataset.__name__}" if isinstance(dataset, type) else type(dataset).__name__
            raise TypeError(
                f"{where} is made of datasets, which have __len__ and __getitem__(i); got {kind}. "
                "Make a list of what can only be iterated, or hand an iterable of batches to the updater as it is"
            )


def indexes_plainly(dataset: DatasetMixin, kind: type[DatasetMixin]) -> bool:
    """Whether ``dataset`` indexes as ``kind`` does: nobody has overridden how an example comes about."""
    own = type(dataset)
    return own.get_example is kind.get_example and own.__getitem__ is DatasetMixin.__getitem__
