"""Iterator, the base class of iterators, and Batch, which they return."""

from __future__ import annotations

from collections.abc import Iterator as PythonIterator
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import torch

from chainring.datasets._columns import select_rows
from chainring.serializers.base import Stateful

if TYPE_CHECKING:
    from chainring._distributed.communicator import Communicator


class Batch(Sequence[Any]):
    """Examples, as a sequence. It may hold them as columns, which a converter then takes over without stacking.

    Attributes:
        columns: the batch as whole arrays (an array, or a tuple or mapping of arrays whose first dimension is the
            example), or ``None`` if the examples are held one by one.
        weight: the number of examples that count; 0 for a batch that only keeps a rank in step with the others.

    Example::

        batch = Batch(columns=(np.zeros((3, 2)), np.arange(3)), length=3)
        x, t = batch[2]  # the last example
    """

    __slots__ = ("_examples", "_length", "columns", "weight")

    def __init__(self, examples: Sequence[Any] | None = None, *, columns: Any = None, length: int | None = None) -> None:
        self._examples = examples
        self.columns = columns
        self._length: int = len(examples) if length is None else length  # type: ignore[arg-type]
        self.weight: int = self._length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            if self._examples is not None:
                batch = Batch(self._examples[index])
            else:
                batch = Batch(columns=select_rows(self.columns, index), length=len(range(*index.indices(self._length))))
            batch.weight = min(self.weight, batch.weight)  # no example of a batch of weight 0 counts
            return batch
        if not -self._length <= index < self._length:
            raise IndexError(f"a batch of {self._length} examples has no example {index}")
        return self._examples[index] if self._examples is not None else select_rows(self.columns, index)

    def __repr__(self) -> str:
        return f"Batch of {self._length} examples"


class Iterator(Stateful):
    """The base class of iterators over batches. Its attributes describe the batch most recently returned.

    Attributes:
        batch_size: examples in a batch, over all ranks.
        repeat: True if it continues with the next epoch; otherwise it ends after one.
        epoch: epochs completed.
        is_new_epoch: True if the last batch reached the end of an epoch.
        epoch_detail: epochs completed, with the fraction of the current one.
        previous_epoch_detail: ``epoch_detail`` before the last batch; ``None`` before the first.
        progress: ``(epoch, position, size)``, the exact form of ``epoch_detail`` = epoch + position / size; ``size`` is
            ``None`` if the length of an epoch is unknown.
        step: the positions that a batch advances.
        name: its name in its updater.
        initial_seed: a seed of ``None`` is derived from it and the name; by default it is ``torch.initial_seed()``.

    Example::

        class Ones(Iterator):
            batch_size = 4

            def __next__(self):
                return Batch([1.0] * 4)
    """

    batch_size: int
    repeat: bool = True
    epoch: int = 0
    is_new_epoch: bool = False
    epoch_detail: float = 0.0
    previous_epoch_detail: float | None = None
    step: int = 1
    name: str = "main"
    initial_seed: int | None = None
    rank: int = 0
    size: int = 1
    _batch_size_is_known: bool = True

    @property
    def progress(self) -> tuple[int, int, int | None] | None:
        return None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: the data has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __next__")

    def next(self) -> Batch:
        """Return the next batch, as ``next(iterator)`` does."""
        return self.__next__()

    def reset(self) -> None:
        """Begin the next unused epoch's order, and count epochs from 0 again."""
        raise NotImplementedError(f"{type(self).__name__} must define reset()")

    def rewind(self) -> None:
        """Begin the same order again from its start, as an Evaluator does before each evaluation."""
        self.reset()

    def share(self, rank: int, size: int) -> None:
        """Serve rank ``rank`` of ``size``: from now on return ``batch[rank::size]`` of each batch.

        Raises:
            ValueError: the rank is not one of the world's, or a repeated batch has fewer examples than there are ranks.
        """
        if not 0 <= rank < size:
            raise ValueError(f"a rank is from 0 to size - 1, got rank {rank} of {size}")
        self.check_share(size)
        self.rank, self.size = rank, size

    def check_share(self, size: int) -> None:
        """Refuse a world size that is too large for the batch.

        Raises:
            ValueError: a repeated batch has fewer examples than there are ranks.
        """
        if size > 1 and self.repeat and self._batch_size_is_known and self.batch_size < size:
            raise ValueError(
                f"a batch of {self.batch_size} examples cannot be shared by {size} ranks; "
                "the batch size is that of all ranks together: raise it, or use fewer ranks"
            )

    def base_seed(self) -> int:
        """Return the number from which, with the name, a seed of ``None`` is derived."""
        return torch.initial_seed() if self.initial_seed is None else self.initial_seed

    def finalize(self) -> None:
        """Release what the iterator holds, such as worker processes. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finalize()


PythonIterator.register(Iterator)


def share_among_ranks(iterator: Any, comm: Communicator) -> None:
    """Give an iterator its rank; a seed that is not given becomes that of rank 0 on all ranks."""
    if hasattr(iterator, "share"):
        if comm.size > 1:
            iterator.initial_seed = comm.broadcast_object(torch.initial_seed())
        iterator.share(comm.rank, comm.size)
