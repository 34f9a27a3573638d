"""SerialIterator: a dataset by index, in this process."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainring._random import example_seeder, preserve_host_rng
from chainring.datasets._columns import make_gather
from chainring.iterators._indexed import IndexedIterator, OrderSampler, Segment
from chainring.iterators.base import Batch


class SerialIterator(IndexedIterator):
    """Returns batches of a dataset, epoch after epoch, in this process.

    The order of an epoch is a pure function of (seed, epoch, position): no generator is drawn from, and a resumed run
    continues in the middle of an epoch without fetching anything twice. A dataset that holds whole arrays is gathered
    at once; any other is asked ``dataset[i]``, with ``random``, ``numpy.random`` and ``torch`` seeded for that example.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        batch_size: examples in a batch, over all ranks.
        repeat: True to continue with the next epoch. Then every batch is full: one that crosses the end of an epoch
            takes the rest from the next. Otherwise the last batch may be short, and after it there is none.
        shuffle: True if each epoch has its own order; otherwise it is that of the indices.
        seed: of the order; ``None`` derives one from ``torch.initial_seed()`` and the iterator's name when it is first
            used. It is saved, and the saved one wins over ``None``.
        order_sampler: ``order_sampler(seed, epoch, size)`` returns the indices of a whole epoch, a pure function of its
            arguments; it replaces shuffling.
        example_rng: True to seed the generators for each example (from seed, epoch and index) and restore them after
            each batch, so that augmentation is the same whatever ran before. ``False`` leaves them alone.

    Raises:
        TypeError: the dataset, the seed or the sampler is of another type.
        ValueError: the batch size is below 1, or an empty dataset is to be repeated.

    Example::

        iterator = SerialIterator(TupleDataset(images, labels), batch_size=100, seed=0)
        x, t = concat_examples(iterator.next())
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool = True,
        *,
        seed: int | None = None,
        order_sampler: OrderSampler | None = None,
        example_rng: bool = True,
    ) -> None:
        super().__init__(dataset, batch_size, repeat, shuffle, seed, order_sampler)
        self._gather = make_gather(dataset)
        # A plain list or tuple runs no code when it is indexed, so nothing can draw.
        self._seeds_examples = example_rng and type(dataset) not in (list, tuple)

    def _fetch(self, segments: list[Segment]) -> Batch:
        if self._gather is None:
            return Batch(self._examples(segments))
        indices = segments[0][1] if len(segments) == 1 else np.concatenate([indices for _, indices in segments])
        return Batch(columns=self._gather(indices), length=len(indices))

    def _examples(self, segments: list[Segment]) -> list[Any]:
        dataset = self.dataset
        if not self._seeds_examples:
            return [dataset[index] for _, indices in segments for index in indices.tolist()]
        examples = []
        with preserve_host_rng():
            for order_key, indices in segments:
                seed_example = example_seeder(*order_key)
                for index in indices.tolist():
                    seed_example(index)
                    try:
                        examples.append(dataset[index])
                    except Exception as error:
                        error.add_note(f"raised by dataset[{index}], asked by iterator {self.name!r}")
                        raise
        return examples
