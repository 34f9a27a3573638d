"""Iterator: the base class of iterators over batches."""

from __future__ import annotations

from collections.abc import Iterator as PythonIterator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from chainring._checks import is_integer
from chainring._distributed.virtual_ranks import Audits, Deal
from chainring._messages import warn
from chainring._random import Indices
from chainring.converters import Converter
from chainring.datasets._batches import Batch as Batch
from chainring.serializers.protocol import AbstractSerializer, Stateful

if TYPE_CHECKING:
    from chainring._distributed.communicator import Communicator

_COUNTERS = ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")
counters_of = attrgetter(*_COUNTERS)


class _CompletedEpochs:
    """The ``epoch_detail`` of an iterator that counts whole epochs alone; its class or the object may set another."""

    def __get__(self, iterator: Iterator | None, owner: type) -> float:
        return 0.0 if iterator is None else float(iterator.epoch)


class Iterator(Stateful):
    """The base class of iterators over batches. Its attributes describe the batch most recently returned.

    Attributes:
        batch_size: the number of examples in a batch, over all ranks.
        repeat: True if it continues with the next epoch; otherwise it ends after one.
        epoch: the number of completed epochs.
        is_new_epoch: True if the last batch reached the end of an epoch.
        epoch_detail: the number of epochs, including the fraction of the current one; by default ``epoch``.
        previous_epoch_detail: ``epoch_detail`` before the last batch; ``None`` before the first.
        progress: ``(epoch, position, size)``, the exact form of ``epoch_detail`` = epoch + position / size; ``size`` is
            ``None`` if the length of an epoch is unknown. ``None`` if only ``epoch_detail`` tells it.
        counts_epochs: False if it has no epochs, so that triggers in epochs are refused.
        step: the number of positions by which a batch advances.
        name: the name of the iterator in its updater.
        comm: the communicator of the ranks that share its batches; ``None`` while there is only one rank.
        virtual_ranks: the number of virtual ranks of which a rank serves a block, see `use_virtual_ranks`; or ``None``.
        serves_virtual_ranks: True in a class whose ``__next__`` returns what `take_share` does. A subclass that defines
            another ``__next__`` must set it again, or it is refused by several ranks with virtual ranks.
        initial_seed: a seed of ``None`` is derived from it and the name; by default it is ``torch.initial_seed()``.

    Example::

        class Ones(Iterator):  # 10 batches an epoch; its position is its state
            batch_size, at = 4, 0

            def __next__(self):
                self.at += 1
                self.epoch, self.is_new_epoch = self.at // 10, self.at % 10 == 0
                self.epoch_detail = self.at / 10  # for fractions of an epoch
                return Batch([1.0] * 4)

            def serialize(self, serializer):
                self.at = serializer("at", self.at)
                self.epoch, self.epoch_detail = self.at // 10, self.at / 10
    """

    batch_size: int
    repeat: bool = True
    epoch: int = 0
    is_new_epoch: bool = False
    epoch_detail: float = _CompletedEpochs()  # type: ignore[assignment]
    previous_epoch_detail: float | None = None
    counts_epochs: bool = True
    step: int = 1
    name: str = "main"
    initial_seed: int | None = None
    comm: Communicator | None = None
    rank: int = 0
    size: int = 1
    virtual_ranks: int | None = None
    serves_virtual_ranks: bool = False
    _batch_size_is_known: bool = True
    deal: Deal | None = None  # which an updater may set between two batches; None if the share is every size-th row
    audits: Audits | None = None  # by which an updater asks for the rows of further virtual ranks

    @property
    def progress(self) -> tuple[int, int, int | None] | None:
        return None

    @property
    def reported(self) -> Mapping[str, float]:
        """Values of the batch last returned, by key, which a `StandardUpdater` reports if a subclass defines them."""
        return {}

    def tells(self, counter: str) -> bool:
        """Return whether the object, or a class of it below `Iterator`, has an attribute of this name or code with it."""
        own: dict[str, Any] = {}
        for cls in reversed(type(self).__mro__[: type(self).__mro__.index(Iterator)]):
            own |= vars(cls)
        own |= vars(self)
        codes = [value.__code__ for value in own.values() if isinstance(value, FunctionType)]
        return counter in own or any(counter in code.co_names for code in codes)

    def check_counters(self) -> None:
        """Warn, for a trigger in epochs, of an iterator that does not count them."""
        if not (self.tells("epoch") or self.tells("epoch_detail")):
            warn(
                f"a trigger in epochs never fires: {type(self).__name__} sets neither epoch nor epoch_detail. Let its "
                '__next__ count epochs, or use "iteration"'
            )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: the data have run out.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __next__")

    def next(self) -> Batch:
        """Return the next batch, as ``next(iterator)`` does."""
        return self.__next__()

    def reset(self) -> None:
        """Start again with the order of the next unused epoch, and count epochs from 0."""
        raise NotImplementedError(f"{type(self).__name__} must define reset()")

    def rewind(self) -> None:
        """Start the same order again from its beginning, as an Evaluator does before each evaluation."""
        self.reset()

    def share(self, rank: int, size: int) -> None:
        """Return only the share of one rank from now on: ``batch[rank::size]``, or the rows of its block of virtual ranks.

        Raises:
            ValueError: the rank is not one of the world's, or a repeated batch has fewer examples than there are ranks.
        """
        if not 0 <= rank < size:
            raise ValueError(f"a rank is from 0 to size - 1, got rank {rank} of {size}")
        self.check_share(size)
        self.rank, self.size, count = rank, size, self.virtual_ranks
        self.deal = None if count is None else Deal.even(size, count)

    def use_virtual_ranks(self, count: int) -> None:
        """Let `share`, which is called next, give this rank the rows of a block of virtual ranks.

        Virtual rank v of ``count`` has ``batch[v::count]``. Rank r of n has those from ``r * count // n`` to
        ``(r + 1) * count // n - 1``, until the updater sets another ``deal``; a single rank has the whole batch.

        Raises:
            TypeError, ValueError: ``count`` is no integer of at least 1, or more than the examples of a repeated batch.
        """
        self.virtual_ranks = require_virtual_ranks(count)
        self.check_share(self.size)

    def rows_of_share(self, length: int, first: int = 0, ahead: int = 0) -> slice | Indices:
        """Return which of ``length`` rows of a batch from ``first`` on are those of this rank, counted from ``first``.

        The batch is the next one, or one that is so many batches ``ahead`` of it.
        """
        if self.deal is None or (self.deal.count == self.size and self.audits is None):
            return slice((self.rank - first) % self.size, None, self.size)
        virtual, block = np.arange(first, first + length) % self.deal.count, self.deal.block(self.rank)
        if self.audits is not None:
            return np.flatnonzero(np.isin(virtual, self.audits.share(self.deal, self.rank, ahead)[0]))
        return np.flatnonzero((virtual >= block.start) & (virtual < block.stop))

    def take_share(self, batch: Batch) -> Batch:
        """Return the rows of this rank; without any, an example with weight 0, which keeps the rank in step.

        Raises:
            ValueError: the batch has several examples, and cannot be cut.
        """
        if self.size == 1:
            return batch
        share = batch[self.rows_of_share(len(batch))]
        if not len(share):
            share = batch[:1]
            share.weight = 0
        return share

    def check_share(self, size: int) -> None:
        """Raise a `ValueError` for a world size that is too large for the batch, or that the virtual ranks do not allow."""
        rows = self.batch_size if self.repeat and self._batch_size_is_known else None  # of every batch
        if size > 1 and rows is not None and rows < size and self.virtual_ranks is None:
            raise ValueError(
                f"a batch of {rows} examples cannot be shared by {size} ranks; "
                "the batch size is that of all ranks together: raise it, or use fewer ranks"
            )
        if (count := self.virtual_ranks) is None:
            return
        if count < size:
            raise ValueError(
                f"every rank computes one virtual rank or more, and there are virtual_ranks={count} and {size} ranks; start "
                f"at most {count} ranks, or take virtual_ranks={size} or more in a new run"
            )
        if rows is not None and rows < count:
            raise ValueError(
                f"every virtual rank has rows of every full batch, and a batch of iterator {self.name!r} has "
                f"{rows} examples for virtual_ranks={count}; raise the batch size, or take fewer virtual ranks"
            )
        cls = next(cls for cls in type(self).__mro__ if {"__next__", "serves_virtual_ranks"} & vars(cls).keys())
        if size > 1 and not ("serves_virtual_ranks" in vars(cls) and self.serves_virtual_ranks):
            raise ValueError(
                f"each of {size} ranks takes the rows of its block of {count} virtual ranks, and it is not known whether "
                f"__next__ of {cls.__name__} does: let it return self.take_share(batch) of the whole batch, or what that of "
                "a class of Chainring does, and write serves_virtual_ranks = True in the class"
            )

    def _count_batch(self, epoch: int, epoch_detail: float) -> None:
        """Count a batch that is returned; with it, so many epochs are completed."""
        self.previous_epoch_detail, self.is_new_epoch = self.epoch_detail, epoch != self.epoch
        self.epoch, self.epoch_detail = epoch, epoch_detail

    def _restore_counters(self, counts: Sequence[Any] = (0, 0.0, None, False)) -> None:
        self.epoch, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = counts

    def _serialize_counters(self, serializer: AbstractSerializer) -> None:
        self._restore_counters([serializer(name, getattr(self, name)) for name in _COUNTERS])

    def batch_end(self) -> Any:
        """Return the position after the batch last returned, for `batch_digest`."""
        return None

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        """Return 64 bits that tell the batches between two ends from others, whichever rank this is.

        Of a dataset they depend on the indices of the examples, see ``IndexedIterator.indices_since``.
        """
        return None

    def use_converter(self, converter: Converter) -> None:
        """Learn which converter the batches go to, as an updater and an Evaluator say before the first."""

    def base_seed(self) -> int:
        """Return the number from which, with the name, a seed of ``None`` is derived."""
        return torch.initial_seed() if self.initial_seed is None else self.initial_seed

    def finalize(self) -> None:
        """Release resources, such as worker processes. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.finalize()


PythonIterator.register(Iterator)


def not_the_end(what: str) -> RuntimeError:
    """Return what is raised in place of a ``StopIteration`` that does not mean the end of the data."""
    return RuntimeError(
        f"{what} raised StopIteration, which would look like the end of the data; write next(iterator, None) there, or "
        "raise another error"
    )


def require_virtual_ranks(count: Any) -> int:
    """Return the number, or refuse it."""
    if not is_integer(count):
        raise TypeError(f"virtual_ranks is an integer of at least 1, or None, got {count!r}")
    if count < 1:
        raise ValueError(f"virtual_ranks is an integer of at least 1, got {count}")
    return int(count)


def check_epoch_period(updater: Any, period: Fraction) -> None:
    """Refuse a period in epochs if the updater cannot tell its progress through an epoch."""
    if not getattr(updater, "counts_epochs", True):
        raise ValueError(
            f'a period in "epoch" needs an updater that counts epochs; {type(updater).__name__} has no iterator "main". '
            'Give it one (get_iterator("main")), define epoch_detail, or use "iteration"'
        )
    iterator = find_main_iterator(updater)
    if not getattr(iterator, "counts_epochs", True):
        raise ValueError(
            f'a period in "epoch" needs an iterator that counts epochs, and {type(iterator).__name__} has none. '
            'Give it an epoch_length, or use "iteration"'
        )
    progress, tells = getattr(iterator, "progress", None), getattr(iterator, "tells", lambda counter: True)
    has_fractions = tells("epoch_detail") if progress is None else progress[2] is not None
    if not has_fractions and period.denominator != 1:
        remedy = "Set its epoch_detail" if progress is None else "Give LoaderIterator(loader, epoch_length=...)"
        raise ValueError(
            f"a fraction of an epoch ({float(period):g}) needs an epoch of known length, and the "
            f'{type(iterator).__name__} has none. {remedy}, or use whole epochs or "iteration"'
        )
    if progress is None and hasattr(iterator, "check_counters"):
        iterator.check_counters()


def find_main_iterator(updater: Any) -> Any:
    """Return the iterator by which epochs are counted, or ``None`` if the updater has none."""
    try:
        return updater.get_iterator("main")
    except (KeyError, AttributeError, NotImplementedError):
        return None


def share_among_ranks(iterator: Any, comm: Communicator, virtual_ranks: int | None = None) -> None:
    """Give an iterator its rank; a seed that is not given becomes that of rank 0 on all ranks."""
    if virtual_ranks is not None and hasattr(iterator, "use_virtual_ranks"):
        iterator.use_virtual_ranks(virtual_ranks)
    elif virtual_ranks is not None and comm.size > 1:
        raise ValueError(
            f"each of {comm.size} ranks takes the rows of its block of {virtual_ranks} virtual ranks, which the iterator "
            f"{type(iterator).__name__} cannot give; derive it from chainring.iterators.Iterator, or pass what it reads"
        )
    if not hasattr(iterator, "share"):
        return
    if comm.world.size > 1:
        iterator.initial_seed = comm.broadcast_object(torch.initial_seed())
        if isinstance(iterator, Iterator):
            iterator.comm = comm
    iterator.share(comm.rank, comm.size)
    seeds = comm.world.gather_object(getattr(iterator, "seed", None))
    for rank, seed in enumerate(seeds):
        if seed != seeds[0]:
            raise ValueError(
                f"all ranks take their shares of the same batches, and iterator {iterator.name!r} has the seed {seeds[0]} "
                f"on rank 0 and {seed} on rank {rank}; give all ranks the same, or none, which is rank 0's"
            )
