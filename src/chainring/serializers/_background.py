"""Writing while the training goes on: one copy of the state, and a thread that writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from chainring.serializers._safetensors import find_aliases


class StagingBuffers:
    """Memory of the host for a copy of tensors, kept from one copy to the next.

    Fresh memory costs a page fault every 4 kB, which takes longer than the copy itself. Where there is an accelerator the
    memory is pinned, and the copies from there overlap.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host, which are overwritten by the next call; tensors that share memory share it here too."""
        copies: dict[str, Tensor] = {}
        owners = find_aliases(tensors)
        devices = set()
        for name, tensor in tensors.items():
            owner = owners[name]
            if owner == name:
                copies[name] = self._buffer(name, tensor).copy_(tensor.detach(), non_blocking=True)
                devices.add(tensor.device)
            else:
                copies[name] = copies[owner]
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._buffers = {name: copies[name] for name in set(owners.values())}
        return copies

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and _layout(kept) == _layout(tensor):
            return kept
        fresh = torch.empty_like(tensor, device="meta")  # for its strides, which clone() would choose
        if kept is not None and _layout(kept) == _layout(fresh):
            return kept
        pinned = tensor.device.type != "cpu"
        return torch.empty_strided(fresh.shape, fresh.stride(), dtype=tensor.dtype, pin_memory=pinned)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class BackgroundWriter:
    """Runs one call at a time in a thread of its own. A failure is raised by the next call, or at the end."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, call: Callable[[], None], after: Iterable[BackgroundWriter] = ()) -> None:
        """Waits for the call before, and starts this one, which begins when those under way in ``after`` have ended.

        Raises:
            Exception: what the call before has raised.
        """
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="chainring-snapshot")
        earlier = _running(after)

        def begin() -> None:
            futures.wait(earlier)
            call()

        self._running = self._thread.submit(begin)

    @staticmethod
    def wait_for(others: Iterable[BackgroundWriter]) -> None:
        """Waits until what is under way there has ended; if it has failed, it is raised there."""
        futures.wait(_running(others))

    def wait(self) -> None:
        """Waits until nothing is running.

        Raises:
            Exception: what the last call has raised; once.
        """
        running = self._running
        if running is not None:
            try:
                running.result()
            finally:
                if running.done():  # and not interrupted while it waited
                    self._running = None

    def close(self) -> None:
        """Waits, and ends the thread.

        Raises:
            Exception: what the last call has raised.
        """
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.shutdown()


def _running(others: Iterable[BackgroundWriter]) -> list[Future[None]]:
    return [other._running for other in others if other._running is not None]
