"""TupleDataset: several datasets side by side."""

from __future__ import annotations

from typing import Any

from chainring.datasets._columns import Gather, make_tuple_gather
from chainring.datasets.base import Dataset, DatasetMixin, indexes_like, require_datasets, require_same_length, size_of


class TupleDataset(DatasetMixin):
    """Example i is the tuple of the i-th example of each dataset, such as an image and its label.

    Args:
        *datasets: arrays, tensors, lists or datasets, all of the same length.

    Raises:
        ValueError: there are no datasets, or their lengths differ.
        TypeError: one has no ``__len__`` or no ``__getitem__``.

    Example::

        TupleDataset([10, 20], ["a", "b"])[1]  # (20, "b")
    """

    def __init__(self, *datasets: Dataset) -> None:
        require_datasets("a TupleDataset", *datasets)
        require_same_length("a TupleDataset", [size_of(dataset) for dataset in datasets])
        self.datasets: tuple[Any, ...] = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def get_example(self, i: int) -> Any:
        return tuple([dataset[i] for dataset in self.datasets])

    def column_gather(self) -> Gather | None:
        """Return a function from indices to a tuple of columns, if every dataset holds whole arrays."""
        return make_tuple_gather(self.datasets) if indexes_like(self, TupleDataset) else None
