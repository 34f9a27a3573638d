"""DictDataset: several datasets side by side, by name."""

from __future__ import annotations

from typing import Any

from chainring.datasets._columns import Gather, make_tuple_gather
from chainring.datasets.base import DatasetMixin, indexes_plainly, require_datasets


class DictDataset(DatasetMixin):
    """Example i is a dict of the i-th example of each dataset, such as ``{"x": image, "t": label}``.

    Args:
        **datasets: arrays, tensors, lists or datasets, all of the same length.

    Raises:
        ValueError: there is none, or their lengths differ.
        TypeError: one has no ``__len__`` or no ``__getitem__``.
    """

    def __init__(self, **datasets: Any) -> None:
        if not datasets:
            raise ValueError("a DictDataset needs at least one dataset, got none")
        require_datasets("a DictDataset", *datasets.values())
        lengths = {key: len(dataset) for key, dataset in datasets.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the datasets of a DictDataset must have the same length, got {lengths}")
        self.datasets = datasets

    def __len__(self) -> int:
        return len(next(iter(self.datasets.values())))

    def get_example(self, i: int) -> Any:
        return {key: dataset[i] for key, dataset in self.datasets.items()}

    def column_gather(self) -> Gather | None:
        """A function from indices to a dict of columns, where every dataset holds whole arrays."""
        gather = make_tuple_gather(self.datasets.values()) if indexes_plainly(self, DictDataset) else None
        if gather is None:
            return None
        keys = list(self.datasets)
        return lambda indices: dict(zip(keys, gather(indices), strict=True))
