"""DevicePrefetcher: copies the next batch to the device while the model works on the current one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from chainring._distributed.communicator import Communicator
from chainring.converters import Converter, Device, as_device, concat_examples, to_device
from chainring.datasets._columns import Uncounted, batch_of_columns, count_examples
from chainring.iterators.base import Batch, Iterator, not_the_end
from chainring.iterators.loader import LoaderIterator, as_iterator
from chainring.iterators.serial import IndexedIterator
from chainring.serializers._objects import serialize_method
from chainring.serializers.protocol import AbstractSerializer, Serializer


class DevicePrefetcher(Iterator):
    """Returns the batches of another iterator on the device, while the next one is already being copied.

    On CUDA a batch is copied into pinned memory and from there to the device on a separate stream, in parallel with the
    kernels of the step for the previous batch; the stream that is current in ``next`` waits for it, the host does not. On
    other devices, including the CPU, a batch is only prepared ahead of time. Wrap the iterator of an updater or an
    Evaluator, and leave their converter as it is: ``StandardUpdater(DevicePrefetcher(iterator, device), ...,
    device=device)``.

    The batches are the same as without it. Counters, state and errors are also the same: those of the batch last
    returned, whatever was prefetched. A run may be resumed with or without it. There are two conditions. A batch that the
    iterator has returned must not be overwritten, as by a loader that fills the same array each time. And random numbers
    must come from a separate stream, as they do for examples unless ``example_rng=False``: a converter that draws from a
    global generator would do so one batch early.

    Args:
        iterator: the iterator that returns batches; a ``DataLoader`` or another iterable of batches is wrapped.
        device: a negative integer or ``"cpu"`` is the CPU, ``"auto"`` the accelerator if there is one; ``None`` leaves
            batches where they are.
        converter: ``converter(batch, None)`` turns a batch into tensors on the CPU. They become the columns of the
            returned batch, which `concat_examples` passes through.

    Raises:
        TypeError: ``iterator`` is not an iterator with a state, or the converter cannot be called.
        ValueError: this machine does not have the device.

    Example::

        iterator = DevicePrefetcher(SerialIterator(dataset, 100), device=0)
        updater = StandardUpdater(iterator, optimizer, model, device=0)
    """

    def __init__(self, iterator: Any, device: Device, *, converter: Converter = concat_examples) -> None:
        source = as_iterator(iterator)
        if not isinstance(source, Iterator) or serialize_method(source) is None:
            raise TypeError(
                f"a prefetched iterator is an Iterator whose state is declared in serialize(serializer), got "
                f"{type(source).__name__}; derive it from chainring.iterators.Iterator, or pass a loader"
            )
        if not callable(converter):
            raise TypeError(f"a converter is called with (batch, device), got {type(converter).__name__}")
        source.use_converter(converter)
        self.iterator: Any = source
        self._refetches = isinstance(source, LoaderIterator) and source.refetches
        self.converter = converter
        self.device = as_device(device)
        self.batch_size = getattr(source, "batch_size", 1)
        self.repeat = source.repeat
        self.step = source.step
        self.counts_epochs = source.counts_epochs
        self.rank, self.size, self.virtual_ranks = source.rank, source.size, source.virtual_ranks
        self._copier = _Copier(self.device)
        self._ready: deque[_Fetched] = deque()
        self._unsent: _Fetched | None = None  # fetched, but neither converted nor copied
        self._error: Exception | None = None
        self._since_mark: list[_Fetched] | None = None  # batches returned since the last `mark`
        self._start()

    @property
    def name(self) -> str:
        """The name in its updater, also of the iterator in it."""
        return str(self.iterator.name)

    @name.setter
    def name(self, name: str) -> None:
        self.iterator.name = name

    @property
    def initial_seed(self) -> int | None:
        """The number from which a seed of ``None`` is derived."""
        return self.iterator.initial_seed  # type: ignore[no-any-return]

    @initial_seed.setter
    def initial_seed(self, seed: int | None) -> None:
        self.iterator.initial_seed = seed

    @property
    def comm(self) -> Communicator | None:
        """The communicator of the ranks."""
        return self.iterator.comm  # type: ignore[no-any-return]

    @comm.setter
    def comm(self, comm: Communicator | None) -> None:
        self.iterator.comm = comm

    @property
    def progress(self) -> tuple[int, int, int | None] | None:
        return self._returned.counts[-1]  # type: ignore[no-any-return]

    @property
    def seed(self) -> int:
        """The seed of the iterator's order, if it has one."""
        return int(self.iterator.seed)

    def __next__(self) -> Batch:
        # The next batch is fetched before this one is returned, while the device works on the steps launched so far.
        # A thread could do it during the step, but must not: it would seed the global generators for the examples. If
        # fetching takes longer than a step, let a MultiprocessIterator do it, from which a batch is taken in no time.
        # More than one ahead would gain nothing: each call fetches one batch, however many are ready.
        self._fetch_until(1)
        if not self._ready:
            self._raise_error()
        self._copier.wait()  # before the next copy begins, which is not to be waited for
        self._fetch_until(2)
        fetched = self._ready.popleft()
        if self._since_mark is not None:
            self._since_mark.append(fetched)
        batch, state = fetched
        self._set_state(state)
        return batch

    def _fetch_until(self, count: int) -> None:
        """Fetch until ``count`` batches are ready. An error waits for the turn of its batch."""
        try:
            while len(self._ready) < count and self._error is None:
                self._fetch()
        except Exception as error:
            self._error = error

    def _fetch(self) -> None:
        if self._unsent is None:
            newest = self._ready[-1][1] if self._ready else self._returned
            newest.saved = self.iterator.state_dict()  # a few numbers; a loader's own state cannot be had afterwards
            newest.mark = self.iterator.mark() if self._refetches and newest.saved["taken"] else None
            batch = next(self.iterator)
            self._unsent = batch, _SourceState(_counts(self.iterator))
        batch, state = self._unsent  # after an error of the converter it is tried again, as the updater would
        try:
            converted = self.converter(batch, None)
        except StopIteration as error:
            raise not_the_end("the converter") from error
        examples = count_examples(batch)
        length = len(batch) if isinstance(batch, Batch) and not isinstance(examples, Uncounted) else examples
        copied = batch_of_columns(self._copier.copy(converted), length)
        copied.weight = examples
        self._ready.append((copied, state))
        self._unsent = None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if self._unsent is None:
            self._returned.saved = None  # the iterator is here, and may have learned that the data have ended
        assert error is not None
        try:
            raise error
        finally:
            del error  # which refers to this frame

    def _set_state(self, state: _SourceState) -> None:
        self._returned = state
        self.epoch, self.is_new_epoch, self.epoch_detail, self.previous_epoch_detail, _ = state.counts

    def _start(self) -> None:
        """Begin at the iterator's position, with no batch fetched ahead."""
        self._ready.clear()
        self._unsent = self._error = self._since_mark = None
        self._set_state(_SourceState(_counts(self.iterator)))

    def batch_place(self) -> Any:
        progress = self.progress
        return self.iterator.place_of(*progress[:2]) if isinstance(self.iterator, IndexedIterator) and progress else None

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        return self.iterator.batch_digest(start, stop) if isinstance(self.iterator, IndexedIterator) else None

    def reset(self) -> None:
        # An order or a pass of which nothing was returned must not count as used; nothing is fetched again for that.
        if self._is_ahead() and self._returned.mark is not None:
            self.iterator.return_to(self._returned.mark)
        elif self._is_ahead():
            self.iterator.load_state_dict(self._returned.saved)
        self.iterator.reset()
        self._start()

    def _is_ahead(self) -> bool:
        return bool(self._ready) or self._unsent is not None

    def rewind(self) -> None:
        self.iterator.rewind()
        self._start()

    def check_share(self, size: int) -> None:
        self.iterator.check_share(size)
        if size > 1 and self.iterator.virtual_ranks is not None and self.converter is not concat_examples:
            self.refuse_to_convert(self.converter)

    def use_virtual_ranks(self, count: int) -> None:
        self.iterator.use_virtual_ranks(count)

    def share(self, rank: int, size: int) -> None:
        self.check_share(size)
        self.iterator.share(rank, size)
        self.batch_size = self.iterator.batch_size
        share = rank, size, self.iterator.virtual_ranks
        if share != (self.rank, self.size, self.virtual_ranks) and self._is_ahead():  # the batches ahead are another rank's
            self.iterator.load_state_dict(self._returned.saved)  # a loader without a state warns that it fetches again
            self._start()
        self.rank, self.size, self.virtual_ranks = share

    def mark(self) -> Any:
        """Return this position, for `return_to` after a failed update."""
        self._since_mark = []
        return self._returned

    def return_to(self, mark: Any) -> None:
        """Return to a position of `mark`: the batches since then will be returned again."""
        self._ready.extendleft(reversed(self._since_mark or []))
        self._since_mark = []
        self._set_state(mark)

    def finalize(self) -> None:
        self.iterator.finalize()

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved = self._returned.saved
        if isinstance(serializer, Serializer) and saved is not None:
            for path, value in saved.items():
                serializer(path, value)
            return
        self.iterator.serialize(serializer)
        if not isinstance(serializer, Serializer):
            self._start()


@dataclass
class _SourceState:
    """The state of the wrapped iterator after it had returned a batch."""

    counts: tuple[Any, ...]  # epoch, is_new_epoch, epoch_detail, previous_epoch_detail and progress
    saved: dict[str, Any] | None = None  # None as long as it has not advanced from here
    mark: Any = None  # of the iterator, if from its saved state alone batches would be fetched again


_Fetched = tuple[Batch, _SourceState]


def _counts(iterator: Iterator) -> tuple[Any, ...]:
    epochs = iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail
    return *epochs, iterator.previous_epoch_detail, iterator.progress


class _Copier:
    """Copies as `to_device` does; to CUDA from pinned memory, on a separate stream.

    The memory of a copy belongs to that stream. So that it is not written to again while a kernel still reads it, each
    copy waits for the kernels that the caller has launched so far, of the step before the one beside which it runs. This
    replaces ``record_stream``: it also covers tensors inside of opaque objects, and only the batches that are referred to
    stay in memory, however far the host is ahead of the device.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device, self._stream = device, None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._device = self._stream.device  # with its index

    def copy(self, x: Any) -> Any:
        """Begin to copy. torch does not reuse pinned memory before the copies from it are over."""
        if self._stream is None:
            return to_device(self._device, x)
        pinned = tree_map_only(Tensor, _pin, to_device(None, x))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return to_device(self._device, pinned)

    def wait(self) -> None:
        """Make the current stream wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor
