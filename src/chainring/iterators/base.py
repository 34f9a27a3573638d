"""Iterator: the base class of iterators over batches."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator as PythonIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from chainring.datasets._columns import Batch as Batch
from chainring.serializers.base import Stateful

if TYPE_CHECKING:
    from chainring._distributed.communicator import Communicator


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
        counts_epochs: False if it has no epochs, so that triggers in epochs are refused.
        step: the positions that a batch advances.
        name: its name in its updater.
        comm: the communicator of the ranks that share its batches; ``None`` as long as there is one rank.
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
    counts_epochs: bool = True
    step: int = 1
    name: str = "main"
    initial_seed: int | None = None
    comm: Communicator | None = None
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

    def use_converter(self, converter: Callable[..., Any]) -> None:
        """Learn which converter the batches go to, as an updater and an Evaluator say before the first."""

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


def not_the_end(what: str) -> RuntimeError:
    """Return the error to be raised in place of a ``StopIteration`` that does not mean the end of the data."""
    return RuntimeError(
        f"{what} raised StopIteration, which would look like the end of the data; write next(iterator, None) there, or "
        "raise another error"
    )


def share_among_ranks(iterator: Any, comm: Communicator) -> None:
    """Give an iterator its rank; a seed that is not given becomes that of rank 0 on all ranks.

    Raises:
        ValueError: ranks were given different seeds, so that they would take shares of different batches.
    """
    if hasattr(iterator, "share"):
        if comm.size > 1:
            iterator.initial_seed = comm.broadcast_object(torch.initial_seed())
            if isinstance(iterator, Iterator):
                iterator.comm = comm
        iterator.share(comm.rank, comm.size)
        seeds = comm.gather_object(getattr(iterator, "seed", None)) if comm.size > 1 else [None]
        if other := [(rank, seed) for rank, seed in enumerate(seeds) if seed != seeds[0]]:
            raise ValueError(
                f"all ranks take their shares of the same batches, and iterator {iterator.name!r} has the seed {seeds[0]} "
                f"on rank 0 and {other[0][1]} on rank {other[0][0]}; give all ranks the same, or none, which is rank 0's"
            )
