"""DevicePrefetcher: the next batch is on its way to the device while the model works on this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from chainring.converters import Device, as_device, concat_examples, to_device
from chainring.iterators.base import Batch, Iterator
from chainring.iterators.loader import LoaderIterator, as_iterator
from chainring.serializers.base import AbstractSerializer, Serializer, has_state, serialize_method


@dataclass
class _Place:
    """What the wrapped iterator was when it had returned a batch.

    Attributes:
        counts: epoch, is_new_epoch, epoch_detail, previous_epoch_detail and progress.
        state: its state; ``None`` as long as it has not gone on from here.
        mark: what its ``mark`` returned with that state, where its state alone would have batches fetched again.
    """

    counts: tuple[Any, ...]
    state: dict[str, Any] | None = None
    mark: Any = None


_Fetched = tuple[Any, _Place]  # a batch, and where the iterator was then


class DevicePrefetcher(Iterator):
    """Returns the batches of another iterator, converted, on the device, with the next one already on its way there.

    On CUDA a batch is copied into pinned memory and from there to the device on a stream of its own, beside the kernels
    of the step for the batch before it; the stream that is current in ``next`` waits for it, the host does not. On other
    devices, the host among them, a batch is only made ahead. Wrap what an updater or an Evaluator is given, and
    leave their converter as it is: ``StandardUpdater(DevicePrefetcher(iterator, device), ..., device=device)``.

    The batches are the same as without it, and so are counters, state and errors: they are those of the batch last
    returned, whatever was fetched ahead. A run may be resumed with it or without. Two things are asked for. What the
    iterator has returned must not be written into again, as by a loader that fills the same array each time. And what
    draws random numbers must have a stream of its own, as examples have unless ``example_rng=False``: a converter that
    draws from a global generator would do so one batch early.

    Args:
        iterator: gives the batches; a ``DataLoader`` or another iterable of batches is wrapped.
        device: where they go; a negative integer or ``"cpu"`` is the host, ``None`` leaves them where they are.
        converter: ``converter(batch, None)`` makes tensors of a batch, on the host. They are the columns of the batch
            that is returned, which `concat_examples` passes on.

    Raises:
        TypeError: something of another kind stands where an iterator or a converter belongs.
        ValueError: this machine lacks the device.
    """

    def __init__(self, iterator: Any, device: Device, *, converter: Callable[..., Any] = concat_examples) -> None:
        source = as_iterator(iterator)
        if not isinstance(source, Iterator) or serialize_method(source) is None:
            raise TypeError(
                f"what is fetched ahead comes from an Iterator whose state is declared in serialize(serializer), got "
                f"{type(source).__name__}; derive it from chainring.iterators.Iterator, or hand over a loader"
            )
        if not callable(converter):
            raise TypeError(f"a converter is called with (batch, device), got {type(converter).__name__}")
        self.iterator: Any = source
        self._refetches = isinstance(source, LoaderIterator) and not has_state(source.loader)
        self.converter = converter
        self.device = as_device(device)
        self.batch_size, self.repeat, self.step = getattr(source, "batch_size", 1), source.repeat, source.step
        self.rank, self.size = source.rank, source.size
        is_cuda = self.device is not None and self.device.type == "cuda"
        self._copies = _SideStream(self.device) if is_cuda else _InOrder(self.device)
        self._ahead: deque[_Fetched] = deque()
        self._unsent: _Fetched | None = None  # fetched, but neither converted nor sent
        self._error: Exception | None = None
        self._since_mark: list[_Fetched] | None = None  # what was returned, from the first `mark` on
        self._start()

    @property
    def name(self) -> str:
        """What its updater calls it, and the iterator in it."""
        name: str = self.iterator.name
        return name

    @name.setter
    def name(self, name: str) -> None:
        self.iterator.name = name

    @property
    def initial_seed(self) -> int | None:
        """From which a seed of ``None`` is derived."""
        found: int | None = self.iterator.initial_seed
        return found

    @initial_seed.setter
    def initial_seed(self, seed: int | None) -> None:
        self.iterator.initial_seed = seed

    @property
    def progress(self) -> tuple[int, int, int | None] | None:
        progress: tuple[int, int, int | None] | None = self._returned.counts[-1]
        return progress

    @property
    def seed(self) -> int:
        """The seed of the iterator's order, where it has one."""
        return int(self.iterator.seed)

    def __next__(self) -> Batch:
        # The next batch is fetched before this one is handed over, while the device works on the steps launched so far.
        # A thread could do it during the step, but must not: it would seed the global generators for the examples. Where
        # fetching takes longer than a step, let a MultiprocessIterator do it, from which a batch is taken in no time.
        # More than one ahead would gain nothing: each call fetches one batch, however many are ready.
        self._fetch_until(1)
        if not self._ahead:
            self._raise_error()
        self._copies.wait()  # before the next copy begins, which is not to be waited for
        self._fetch_until(2)
        taken = self._ahead.popleft()
        if self._since_mark is not None:
            self._since_mark.append(taken)
        batch, place = taken
        self._stand_at(place)
        assert isinstance(batch, Batch)
        return batch

    def _fetch_until(self, number: int) -> None:
        """Fetches until so many batches are ready. An error waits for the turn of the batch that it belongs to."""
        try:
            while len(self._ahead) < number and self._error is None:
                self._fetch()
        except Exception as error:
            self._error = error

    def _fetch(self) -> None:
        if self._unsent is None:
            newest = self._ahead[-1][1] if self._ahead else self._returned
            newest.state = self.iterator.state_dict()  # a few numbers; a loader's own state cannot be had afterwards
            newest.mark = self.iterator.mark() if self._refetches and newest.state["taken"] else None
            batch = next(self.iterator)
            self._unsent = batch, _Place(_counts(self.iterator))
        batch, place = self._unsent  # when the converter fails it is tried again, as the updater would
        sent = Batch(columns=self._copies.send(self.converter(batch, None)), length=len(batch))
        sent.weight = getattr(batch, "weight", len(batch))
        self._ahead.append((sent, place))
        self._unsent = None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if self._unsent is None:
            self._returned.state = None  # the iterator stands here, and may have come to know that the data have ended
        assert error is not None
        try:
            raise error
        finally:
            del error  # which holds this frame

    def _stand_at(self, place: _Place) -> None:
        self._returned = place
        self.epoch, self.is_new_epoch, self.epoch_detail, self.previous_epoch_detail, _ = place.counts

    def _start(self) -> None:
        """Nothing is ahead: this is where the iterator is."""
        self._ahead.clear()
        self._unsent = self._error = self._since_mark = None
        self._stand_at(_Place(_counts(self.iterator)))

    def reset(self) -> None:
        # An order or a pass of which nothing was returned must not count as used; nothing is fetched again for that.
        if self._is_ahead and self._returned.mark is not None:
            self.iterator.return_to(self._returned.mark)
        elif self._is_ahead:
            self._go_back()
        self.iterator.reset()
        self._start()

    @property
    def _is_ahead(self) -> bool:
        return bool(self._ahead) or self._unsent is not None

    def _go_back(self) -> None:
        """Puts the iterator where it was. A loader without a state fetches its batches again for that, and says so."""
        assert self._returned.state is not None
        self.iterator.load_state_dict(self._returned.state)

    def rewind(self) -> None:
        self.iterator.rewind()
        self._start()

    def share(self, rank: int, size: int) -> None:
        self.iterator.share(rank, size)
        if (rank, size) != (self.rank, self.size) and self._is_ahead:  # what is ahead is another rank's
            self._go_back()
            self._start()
        self.rank, self.size = rank, size

    def mark(self) -> Any:
        """This place, to `return_to` when what the next batches were fetched for has failed."""
        self._since_mark = []
        return self._returned

    def return_to(self, mark: Any) -> None:
        """Goes back to a place that `mark` returned: the batches since then are kept and will be returned again."""
        self._ahead.extendleft(reversed(self._since_mark or []))
        self._since_mark = []
        self._stand_at(mark)

    def finalize(self) -> None:
        self.iterator.finalize()

    def serialize(self, serializer: AbstractSerializer) -> None:
        state = self._returned.state
        if isinstance(serializer, Serializer) and state is not None:
            for path, value in state.items():
                serializer(path, value)
            return
        self.iterator.serialize(serializer)
        if not isinstance(serializer, Serializer):
            self._start()


def _counts(iterator: Iterator) -> tuple[Any, ...]:
    epochs = iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail
    return *epochs, iterator.previous_epoch_detail, iterator.progress


class _InOrder:
    """Copies as `to_device` makes them."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def send(self, x: Any) -> Any:
        return to_device(self._device, x)

    def wait(self) -> None:
        """What was sent can be used: nothing to wait for."""


class _SideStream(_InOrder):
    """Copies from pinned memory, on a stream of their own.

    The memory of a copy belongs to that stream. So that none is written to again while a kernel still reads it, each
    copy waits for what the caller has launched so far; that is the step before the one that it runs beside. This takes
    the place of ``record_stream``: it also covers tensors inside of objects that nobody can look into, and as many
    batches are held as are referred to, however far the host is ahead of the device.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        super().__init__(self._stream.device)  # with its number

    def send(self, x: Any) -> Any:
        """Begins to copy. Pinned memory is not used again before the copies from it are over: torch sees to that."""
        pinned = tree_map_only(Tensor, _pinned, to_device(None, x))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return super().send(pinned)

    def wait(self) -> None:
        """The current stream goes on when all that was sent is there."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor
