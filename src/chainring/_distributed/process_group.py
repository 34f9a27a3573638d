"""Ranks that are processes, under torchrun or another launcher: a communicator over torch.distributed."""

from __future__ import annotations

import atexit
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from chainring._distributed.communicator import Communicator, RankFailed
from chainring._distributed.failures import FailureBroadcast
from chainring._distributed.launchers import Place, meet, read_local_rank, read_place
from chainring._messages import mute
from chainring.converters import Device, as_device

T = TypeVar("T")
_groups_joined = 0
_BUCKET = 25 << 20  # bytes that are exchanged at once
_TIMEOUT = timedelta(minutes=30)  # for a rank that comes later than the others


def create_communicator(device: Device = None) -> Communicator:
    """Return the communicator of this process, as torchrun's environment variables say; without a launcher a world of one.

    The same script runs under ``python train.py`` and under ``torchrun --nproc-per-node 2 train.py``. Tensors on the host
    are exchanged by gloo, those on an NVIDIA accelerator by NCCL. A process group that is there already is used.

    Example::

        comm = create_communicator()
        updater = StandardUpdater(iterator, optimizer, comm=comm)

    Args:
        device: where this rank computes; by default the accelerator of its number on this machine, or the host where
            there is none. The updater and the extensions take it from ``comm.device``.

    Raises:
        RuntimeError: a variable of the environment is missing while others are there, or another launcher, such as
            ``srun``, has started several tasks without them.
        ValueError: there is no such device.
    """
    started = dist.is_available() and dist.is_initialized()
    place = Place(dist.get_rank(), dist.get_world_size(), read_local_rank(os.environ)) if started else read_place(os.environ)
    rank_device = _device_of_rank(device, place.local_rank)
    if place.size == 1 and not started:
        alone = Communicator()
        alone.device = rank_device
        return alone
    if rank_device.type != "cpu":
        torch.accelerator.set_device_index(rank_device)
    store = _store_of_group() if started else _start(place, rank_device)
    return ProcessGroupCommunicator(rank_device, place.local_rank, store, ends_group=not started)


def _device_of_rank(device: Device, local_rank: int) -> torch.device:
    if device is not None:
        return as_device(device) or torch.device("cpu")
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    if local_rank >= torch.accelerator.device_count():
        raise ValueError(
            f"local rank {local_rank} has no accelerator of its own, there are {torch.accelerator.device_count()}: start "
            'fewer processes on this machine, or give device="cpu"'
        )
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, local_rank)


def _start(place: Place, device: torch.device) -> Any:
    """Start the process group, and return the store through which the ranks have met."""
    rank, size = place.rank, place.size
    store = meet(place, _TIMEOUT)
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=size, timeout=_connect_timeout(size),
        device_id=device if is_cuda else None,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(_TIMEOUT)
    return store


def _store_of_group() -> Any:
    """Return the store of a process group that the script, or a launcher such as Ray, has made; ``None`` without one."""
    global _groups_joined
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    if find is None:
        return None
    _groups_joined += 1  # the same number on all ranks, for keys that no earlier communicator has used
    return PrefixStore(f"chainring/joined/{_groups_joined}", find())


class ProcessGroupCommunicator(Communicator):
    """The ranks of torch.distributed's process group.

    Tensors go through a group of its backend, everything else through one of gloo's on the host, which does not wait for
    the device. The default group is left to DDP and FSDP. Errors reach the other ranks by the ``store`` through which they
    have met. With ``ends_group`` this communicator has started the process group, and also ends it.
    """

    def __init__(
        self, device: torch.device, local_rank: int, store: Any, ends_group: bool = False, exchange: Any = nullcontext
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.local_rank = local_rank
        self.device = device
        self._failures = None if store is None else FailureBroadcast(store, self.rank, self.size)
        self._exchange = exchange if self._failures is None else self._failures.exchange
        self._tensors, self._objects = _new_group(), _new_group("gloo")
        self._is_open, self._ends_group = True, ends_group
        if self.rank != 0:
            mute()
        atexit.register(self.close)

    def all_reduce(self, tensors: Sequence[Tensor], average: bool = True) -> None:
        for flat in _flattened(tensors):
            with self._exchange():
                dist.all_reduce(flat, group=self._tensors)
            if average:
                flat.div_(self.size)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        for flat in _flattened(tensors):
            with self._exchange():
                dist.broadcast(flat, root, group=self._tensors)

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._waiting(dist.all_reduce(tensor, group=self._tensors, async_op=True), tensor, tensor)

    def start_all_to_all(self, sent: Tensor, sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        received = sent.new_empty(sum(sizes))
        own = [sent.shape[1]] * self.size
        work = dist.all_to_all_single(received, sent.reshape(-1), list(sizes), own, group=self._tensors, async_op=True)
        return self._waiting(work, list(torch.split(received, list(sizes))), sent)

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        work = dist.all_gather(list(gathered), tensor, group=self._tensors, async_op=True)
        return self._waiting(work, gathered, tensor)

    def _waiting(self, work: Any, result: T, sent: Tensor) -> Callable[[], T]:
        """Return a function that waits for an exchange, and until then holds what is sent."""
        held = [sent]

        def wait() -> T:
            with self._exchange():
                work.wait()
            held.clear()
            return result

        return wait

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        with self._exchange():
            dist.all_gather_object(gathered, obj, group=self._objects)
        return gathered

    def start_max(self, number: int) -> Callable[[], int]:
        largest = torch.tensor(number)
        work: Any = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._objects, async_op=True)

        def wait() -> int:
            with self._exchange():
                work.wait()
            return int(largest)

        return wait

    def barrier(self) -> None:
        self.gather_object(None)

    def beside(self) -> Communicator:
        self.barrier()  # so that they connect at the same time
        return ProcessGroupCommunicator(self.device, self.local_rank, None, exchange=self._exchange)

    def failed(self, error: BaseException) -> BaseException:
        failures = self._failures
        if failures is None or not self._is_open or isinstance(error, RankFailed):
            return error
        text = f"rank {self.rank} has failed, and all stop with it:\n\n{''.join(traceback.format_exception(error))}"
        first = failures.poll() if _is_connection_error(error) else failures.publish(text)
        self._leave()
        if first is None:
            error.add_note("another rank ended without publishing an error: it was killed, or ended outside of the training")
            return error
        failures.wait_for_others()
        if first == text:
            return error
        failure = RankFailed(first)
        failure.__cause__ = error
        return failure

    def _leave(self) -> None:
        """Close this end of the exchange, for those that wait for this rank; a snapshot under way has a group of its own."""
        self._is_open = False
        dist.destroy_process_group(self._tensors)
        dist.destroy_process_group(self._objects)
        del self._tensors, self._objects  # a connection is closed with the last reference

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._failures is not None:
            self._failures.close()
        if self._ends_group and dist.is_initialized():
            dist.destroy_process_group()
        self._failures, self._is_open, self._ends_group = None, False, False


def _connect_timeout(size: int) -> timedelta:
    return timedelta(seconds=8 + size / 4)  # of ranks that have just met


def _new_group(backend: str | None = None) -> Any:
    """Make a group of all ranks, at the same time on each."""
    group: Any = dist.new_group(backend=backend, timeout=_connect_timeout(dist.get_world_size()))
    group.set_timeout(_TIMEOUT)
    return group


def _is_connection_error(error: BaseException) -> bool:
    """Return whether an exchange has failed because another rank has left it."""
    words = ("Connection closed", "Connection reset", "Broken pipe", "gloo", "NCCL", "Timed out", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield copies in one dimension, which are copied back after they were exchanged."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        yield flat
        for tensor, values in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.detach().copy_(values.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours of one dtype and device, as many as are exchanged at once."""
    for _, group in groupby(tensors, lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
