"""DictDataset: several datasets side by side, by name."""

from __future__ import annotations

from typing import Any

from chainring.datasets._columns import Gather, make_tuple_gather
from chainring.datasets.base import Dataset, DatasetMixin, indexes_like, require_datasets, require_same_length, size_of


class DictDataset(DatasetMixin):
    """Example i is a dict of the i-th example of each dataset, such as ``{"x": image, "t": label}``.

    Args:
        **datasets: arrays, tensors, lists or datasets, all of the same length.

    Raises:
        ValueError: there are no datasets, or their lengths differ.
        TypeError: one has no ``__len__`` or no ``__getitem__``.

    Example::

        DictDataset(x=[10, 20], t=[0, 1])[1]  # {"x": 20, "t": 1}
    """

    def __init__(self, **datasets: Dataset) -> None:
        require_datasets("a DictDataset", *datasets.values())
        require_same_length("a DictDataset", {key: size_of(dataset) for key, dataset in datasets.items()})
        self.datasets: dict[str, Any] = datasets

    def __len__(self) -> int:
        return len(next(iter(self.datasets.values())))

    def get_example(self, i: int) -> Any:
        return {key: dataset[i] for key, dataset in self.datasets.items()}

    def column_gather(self) -> Gather | None:
        """Return a function from indices to a dict of columns, if every dataset holds whole arrays."""
        gather = make_tuple_gather(self.datasets.values()) if indexes_like(self, DictDataset) else None
        return None if gather is None else lambda indices: dict(zip(self.datasets, gather(indices), strict=True))
