"""FunctionIterator: an endless stream whose batches are made by a function of their index."""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Iterator as PythonIterator
from typing import Any

from chainring._checks import find_call_error, is_integer
from chainring._random import digest, preserve_rng, seed_all, stable_hash
from chainring.iterators.base import Batch, Iterator
from chainring.iterators.loader import make_batch
from chainring.serializers.base import AbstractSerializer, Serializer, announce_change


class FunctionIterator(Iterator):
    """Returns ``function(0)``, ``function(1)`` and so on: an endless stream, such as of data that are generated.

    Every generator (Python's, NumPy's, torch's, the accelerator's) is seeded from (seed, index) for the call, and restored
    after it. So batch ``index`` is the same in every run, and the state is the number of the next batch: a run that is
    resumed makes none again. The function must keep nothing between calls.

    What it returns is a batch as a loader gives it: an array, or a tuple, list or mapping of arrays whose first dimension
    is the example. (Examples one by one are returned in a `Batch`.) On several ranks each calls ``function(index)`` for
    the same index, with the same numbers drawn, and takes its rows of it, as of a loader's batch; what has no rows counts
    as one example, that of rank 0.

    Args:
        function: ``function(index)`` makes batch ``index``, counted from 0.
        epoch_length: batches in an epoch; with ``None`` there are no epochs, and triggers in epochs are refused.
        seed: an integer; ``None`` derives one from ``torch.initial_seed()`` and the iterator's name when it is first used.
            It is saved, and the saved one wins over ``None``.

    Raises:
        TypeError: the function cannot be called with an index, or the seed is not an integer.
        ValueError: ``epoch_length`` is not an integer of at least 1.

    Example::

        def make_batch(index):
            x = torch.randn(100, 2)
            return x, (x[:, 0] * x[:, 1] > 0).long()

        updater = StandardUpdater(FunctionIterator(make_batch, epoch_length=500), optimizer, model)
    """

    batch_size = 1
    serves_virtual_ranks = True
    _batch_size_is_known = False

    def __init__(self, function: Callable[[int], Any], epoch_length: int | None = None, *, seed: int | None = None) -> None:
        error = find_call_error(function, 0) if callable(function) else f"got {type(function).__name__}"
        if error is not None:
            raise TypeError(f"the function of a FunctionIterator is called with an index, function(0): {error}")
        if epoch_length is not None and (not is_integer(epoch_length) or epoch_length < 1):
            raise ValueError(f"epoch_length counts batches and is at least 1, got {epoch_length!r}")
        if seed is not None and not is_integer(seed):
            raise TypeError(f"a seed is an integer or None, got {seed!r}")
        self.function = function
        self.epoch_length = None if epoch_length is None else int(epoch_length)
        self.counts_epochs = epoch_length is not None
        self._seed = None if seed is None else int(seed)
        self._index = 0  # of the next batch
        self._first_index = 0  # of the batch with which epoch 0 begins
        self._epoch_position = 0

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self._epoch_position, self.epoch_length

    @property
    def seed(self) -> int:
        """The seed. ``None`` at construction becomes one derived from ``torch.initial_seed()``."""
        if self._seed is None:
            self._seed = stable_hash("function", self.base_seed(), self.name)
        return self._seed

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            RuntimeError: the function has raised ``StopIteration``.
            TypeError: the function has returned no batch.
        """
        batch = self.take_share(self._call(self._index))
        self._index += 1
        self.previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = False
        if self.epoch_length is not None:
            self._epoch_position += 1
            if self._epoch_position == self.epoch_length:
                self.epoch, self._epoch_position, self.is_new_epoch = self.epoch + 1, 0, True
            self.epoch_detail = self.epoch + self._epoch_position / self.epoch_length
        return batch

    def _call(self, index: int) -> Batch:
        try:
            with preserve_rng():
                seed_all("batch", self.seed, index)
                item = self.function(index)
        except StopIteration as error:
            raise RuntimeError(
                f"function({index}) of iterator {self.name!r} raised StopIteration; its stream is endless: end the run by "
                "the stop trigger, or give a loader whose data end"
            ) from error
        except Exception as error:
            error.add_note(f"raised by function({index}), asked by iterator {self.name!r}")
            raise
        if item is None or isinstance(item, PythonIterator):
            raise TypeError(
                f"function({index}) of iterator {self.name!r} returned {type(item).__name__}; it returns one batch, such as "
                "a tuple of arrays (a generator is a loader: give it to the updater, or to LoaderIterator)"
            )
        return make_batch(item)

    def reset(self) -> None:
        self._first_index = self._index + -self._epoch_position % (self.epoch_length or 1)
        self.rewind()

    def rewind(self) -> None:
        self._index, self._epoch_position = self._first_index, 0
        self.epoch, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = 0, 0.0, None, False

    def mark(self) -> Any:
        """Return this position, for `return_to` after a failed update."""
        counts = self.epoch, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch
        return self._index, self._epoch_position, counts

    def return_to(self, mark: Any) -> None:
        """Go back to a position that `mark` returned: the batches since then will be made again."""
        self._index, self._epoch_position, counts = mark
        self.epoch, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = counts

    def batch_place(self) -> Any:
        return self._index

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        return digest(struct.pack("<q2Q", self.seed, start, stop)) if start <= stop else None

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        length = serializer("epoch_length", self.epoch_length)
        position = serializer("position", self._epoch_position)
        if length != self.epoch_length and position > 0:
            raise ValueError(
                f"iterator {self.name!r} has epoch_length = {self.epoch_length}, the saved run had {length}; "
                "another length can begin at the end of an epoch only"
            )
        self._epoch_position = position
        self._index = serializer("index", self._index)
        self._first_index = serializer("first_index", self._first_index)
        self.epoch = serializer("epoch", self.epoch)
        self.epoch_detail = serializer("epoch_detail", self.epoch_detail)
        self.previous_epoch_detail = serializer("previous_epoch_detail", self.previous_epoch_detail)
        self.is_new_epoch = serializer("is_new_epoch", self.is_new_epoch)
        seed = serializer("seed", self.seed if saving else self._seed)
        if not saving and self._seed is not None and self._seed != seed:
            announce_change(f"seed of iterator {self.name!r}", seed, self._seed, "the next batch is made with the new one")
        elif not saving:
            self._seed = seed
