"""DatasetMixin: the base class of datasets, where ``len(dataset)`` counts examples and ``dataset[i]`` is one of them."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.utils.data


class Indexed(Protocol):
    """The interface of a dataset: a length, and an example for each integer below it, as in a list, an array or a tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Dataset: TypeAlias = Indexed | torch.utils.data.Dataset[Any]
"""What a dataset is to type checkers. The class of PyTorch does not declare the length that its subclasses have."""


def size_of(dataset: Dataset) -> int:
    """Return the number of examples."""
    return len(dataset)  # type: ignore[arg-type]


class DatasetMixin:
    """Base class of datasets: a subclass defines ``__len__`` and ``get_example(i)``, and gets all kinds of indexing.

    ``dataset[3]`` and ``dataset[-1]`` return one example; a slice, or a list or array of integers or booleans, returns a
    list of examples.

    Example::

        class Squares(DatasetMixin):
            def __len__(self):
                return 10

            def get_example(self, i):
                return i**2

        Squares()[-1], Squares()[:3]  # (81, [0, 1, 4])
    """

    def __len__(self) -> int:
        """Return the number of examples."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def get_example(self, i: int) -> Any:
        """Return example ``i``, which is from 0 to ``len(self) - 1``."""
        raise NotImplementedError(f"{type(self).__name__} must define get_example(i)")

    def __getitem__(self, index: int | slice | list[int] | list[bool] | npt.NDArray[Any]) -> Any:
        if isinstance(index, slice):
            return [self.get_example(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (int, np.integer)):
            return self.get_example(self._normalize(int(index)))
        indices = np.asarray(index)
        if indices.ndim == 0 and indices.dtype.kind in "iu":
            return self.get_example(self._normalize(int(indices)))
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iub"):
            raise TypeError(f"an index is an integer, a slice, or a list or array of integers or booleans, got {index!r}")
        if indices.dtype.kind == "b":
            if len(indices) != len(self):
                raise IndexError(f"a mask has one boolean for each of the {len(self)} examples, got {len(indices)}")
            indices = np.flatnonzero(indices)
        return [self.get_example(self._normalize(int(i))) for i in indices]

    def _normalize(self, i: int) -> int:
        size = len(self)
        if not -size <= i < size:
            raise IndexError(f"the dataset has {size} examples, so no example {i}")
        return i % size


class _Rows:
    """A column of pandas by position: its own index has labels, which are other rows once it was sorted or filtered."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Any:
        return self.column.iloc[index]


def by_position(dataset: Any) -> Any:
    """Return a dataset whose indices are positions: a column of pandas is wrapped, and a table, which has none, refused."""
    if not hasattr(type(dataset), "iloc"):
        return dataset
    if getattr(dataset, "ndim", 1) > 1:
        raise TypeError(
            f"examples are asked by position, and dataset[i] of a {type(dataset).__name__} is a column; write "
            'dataset.to_numpy(), or TupleDataset(dataset["x"], dataset["y"]) of its columns'
        )
    return _Rows(dataset)


def require_datasets(name: str, *datasets: Any) -> tuple[Any, ...]:
    """Return the datasets, indexed by position; refuse objects without a length or examples now, and none at all."""
    if not datasets:
        raise ValueError(f"{name} needs at least one dataset, got none")
    for dataset in datasets:
        if isinstance(dataset, type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            got = f"the class {dataset.__name__}" if isinstance(dataset, type) else type(dataset).__name__
            raise TypeError(
                f"{name} combines datasets, which have __len__ and __getitem__(i); got {got}. "
                "Make a list of an iterable, or pass an iterable of batches to the updater directly"
            )
    return tuple(map(by_position, datasets))


def indexes_like(dataset: DatasetMixin, cls: type[DatasetMixin]) -> bool:
    """Return whether ``dataset`` indexes as ``cls`` does: a subclass has not overridden how an example is made."""
    return type(dataset).get_example is cls.get_example and type(dataset).__getitem__ is DatasetMixin.__getitem__
