"""TransformDataset: a function over the examples of another dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainring.datasets.base import Dataset, DatasetMixin, require_datasets


class TransformDataset(DatasetMixin):
    """Example i is ``transform(dataset[i])``, computed on demand.

    Args:
        dataset: the underlying dataset.
        transform: a function of one example. In an iterator, the numbers that it draws from ``random``, ``numpy.random``
            and ``torch`` are a function of seed, epoch and index.

    Raises:
        TypeError: ``transform`` cannot be called, or ``dataset`` is not a dataset.

    Example::

        TransformDataset(range(10), lambda x: x**2)[3]  # 9
    """

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Any]) -> None:
        if not callable(transform):
            raise TypeError(f"transform is a function of one example, got {type(transform).__name__}")
        require_datasets("a TransformDataset", dataset)
        self.dataset: Any = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def get_example(self, i: int) -> Any:
        return self.transform(self.dataset[i])
