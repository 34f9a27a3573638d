"""TupleDataset: several datasets side by side."""

from __future__ import annotations

from typing import Any

from chainring.datasets._columns import Gather, make_tuple_gather
from chainring.datasets.base import DatasetMixin, indexes_plainly, require_datasets


class TupleDataset(DatasetMixin):
    """Example i is the tuple of the i-th example of each dataset, such as an image and its label.

    Args:
        *datasets: arrays, tensors, lists or datasets, all of the same length.

    Raises:
        ValueError: there is none, or their lengths differ.
        TypeError: one has no ``__len__`` or no ``__getitem__``.
    """

    def __init__(self, *datasets: Any) -> None:
        if not datasets:
            raise ValueError("a TupleDataset needs at least one dataset, got none")
        require_datasets("a TupleDataset", *datasets)
        lengths = [len(dataset) for dataset in datasets]
        if len(set(lengths)) > 1:
            raise ValueError(f"the datasets of a TupleDataset must have the same length, got {lengths}")
        self.datasets = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def get_example(self, i: int) -> Any:
        return tuple([dataset[i] for dataset in self.datasets])

    def column_gather(self) -> Gather | None:
        """A function from indices to columns, where every dataset holds whole arrays."""
        return make_tuple_gather(self.datasets) if indexes_plainly(self, TupleDataset) else None
