"""The copy of the state that is kept while the training goes on, and the thread that writes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from chainring.serializers._restoring import find_aliases

K = TypeVar("K")
T = TypeVar("T")


class StagingBuffers:
    """Memory of the host for a copy of tensors, kept from one copy to the next; pinned where there is an accelerator."""

    # hot path: "chainring, asynchronous" in benchmarks/snapshot.py, "stop for a snapshot" in benchmarks/growth.py
    # Fresh memory costs a page fault every 4 kB, which takes longer than the copy itself.

    def __init__(self) -> None:
        self._last = _Description([], [], [])
        self._devices: set[torch.device] = set()  # the accelerators that hold some of the tensors
        self._buffers: list[Tensor] = []  # one for each that is distinct
        self._copies: list[Tensor] = []  # the buffer of each

    def copy(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return copies on the host, which the next call overwrites; tensors that share memory share it there too."""
        originals = list(tensors.values())
        if (found := _describe(originals)) != self._last:
            self._buffers = [self._buffer(place, originals[i]) for place, i in enumerate(found.distinct)]
            buffers = dict(zip(found.distinct, self._buffers, strict=True))
            self._copies, self._last = [buffers[first] for first in found.first], found
            self._devices = {tensor.device for tensor in originals if not tensor.is_cpu}
        self._fill(originals)
        for device in self._devices:
            torch.accelerator.synchronize(device)
        return dict(zip(tensors, self._copies, strict=True))

    def copy_beside(
        self, tensors: Mapping[K, Tensor], call: Callable[[], T], thread: BackgroundWriter
    ) -> tuple[dict[K, Tensor], T]:
        """Do as `copy` does while ``call``, which must change nothing, runs in an idle thread; return what both return.

        The copy begins before it is known that the tensors have the layouts of those that were copied last, which is found
        out beside it. Where they have others, it is repeated.
        """
        originals = list(tensors.values())

        def call_and_compare() -> tuple[T, bool]:
            return call(), _describe(originals) == self._last  # which may be of tensors that the call refuses

        may_fit = len(originals) == len(self._copies) and not self._devices
        answer = thread.submit(call_and_compare) if may_fit else None
        if answer is None:
            result = call()
            return self.copy(tensors), result
        with suppress(RuntimeError):  # of shapes that differ, as will be found
            self._fill(originals)
        result, is_same = answer.result()
        return dict(zip(tensors, self._copies, strict=True)) if is_same else self.copy(tensors), result

    def _fill(self, originals: Sequence[Tensor]) -> None:
        """Copy tensors into the buffers."""
        if self._buffers:
            with torch.no_grad():  # one call for all, since a call for each takes longer than to copy a small one
                torch._foreach_copy_(self._buffers, [originals[i] for i in self._last.distinct], non_blocking=True)

    def _buffer(self, place: int, tensor: Tensor) -> Tensor:
        like = torch.empty_like(tensor, device="meta")  # for its strides, which clone() would choose
        if place < len(self._buffers) and _layout(buffer := self._buffers[place]) == _layout(like):
            return buffer
        return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


class _Description(NamedTuple):
    """What must be the same of tensors for them to be copied to where the last were.

    Attributes:
        first: by position, that of the first tensor that is the same view of the same memory.
        distinct: those positions, each once.
        layouts: the devices, dtypes and shapes of all, and then their strides.
    """

    first: list[int]
    distinct: list[int]
    layouts: list[Any]


def _describe(tensors: Sequence[Tensor]) -> _Description:
    first = list(find_aliases(dict(enumerate(tensors))).values())
    return _Description(first, list(dict.fromkeys(first)), [*map(_form, tensors), *map(Tensor.stride, tensors)])


_form = operator.attrgetter("device", "dtype", "shape")


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class BackgroundWriter:
    """Runs one call at a time in a thread of its own. A failure is raised by the next call, or at the end."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, call: Callable[[], None], after: Iterable[BackgroundWriter] = ()) -> None:
        """Do as `wait` does, and start a call, which begins when those under way in ``after`` have ended."""
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="chainring-snapshot")
        earlier = _running(after)

        def begin() -> None:
            futures.wait(earlier)
            call()

        self._running = self._thread.submit(begin)

    def submit(self, call: Callable[[], T]) -> Future[T] | None:
        """Start a call of which the result is needed at once; ``None`` if there is no thread yet, or it is not idle."""
        return self._thread.submit(call) if self._thread is not None and self._running is None else None

    @staticmethod
    def wait_for(others: Iterable[BackgroundWriter]) -> None:
        """Wait until the current call of another writer has ended; that writer raises its error, if it has failed."""
        futures.wait(_running(others))

    def wait(self) -> None:
        """Wait until nothing is running.

        Raises:
            Exception: what the last call has raised; once.
        """
        if (running := self._running) is not None:
            try:
                running.result()
            finally:
                if running.done():  # and not interrupted while it waited
                    self._running = None

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.shutdown()


def _running(others: Iterable[BackgroundWriter]) -> list[Future[None]]:
    return [other._running for other in others if other._running is not None]
