"""Ranks that are processes, under torchrun or another launcher: a communicator over torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from chainring._distributed.communicator import Communicator, RankFailed
from chainring._messages import mute
from chainring.converters import Device, as_device

_WORDS, _HEARD = "chainring/last words", "chainring/heard"
_PERIOD = 0.25  # seconds from one look to the next
_PATIENCE = 3.0  # seconds for the others to hear


class FailureBroadcast:
    """Goes by the store through which the ranks have met, which ends with the process of rank 0 where that has made it.

    A thread listens, because a rank may be waiting in an exchange that only the end of the failed process ends.

    Args:
        store: of torch.distributed.
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._first: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="chainring-last-words", daemon=True)
        self._thread.start()

    def say(self, text: str) -> str:
        """Says why this rank fails, and returns what was said first, which may be another's."""
        with self._lock, contextlib.suppress(RuntimeError):  # the store is gone
            if self._first is None:
                self._hear(self._store.compare_set(_WORDS, "", text))
        return self._first or text

    def said(self) -> str | None:
        """What was said first, ``None`` if nothing was: a rank speaks before it leaves, so there is nothing to wait for."""
        with contextlib.suppress(RuntimeError):
            self._look()
        return self._first

    def wait_for_others(self) -> None:
        """Lets rank 0 stay until all have heard what was said, a few seconds at most."""
        until = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            while self._rank == 0 and self._store.add(_HEARD, 0) < self._size and time.monotonic() < until:
                time.sleep(_PERIOD / 10)

    def close(self) -> None:
        """Ends the listening."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):
            while self._first is None and not self._closed.wait(_PERIOD):
                self._look()

    def _look(self) -> None:
        with self._lock:
            if self._first is None and self._store.check([_WORDS]):
                self._hear(self._store.get(_WORDS))

    def _hear(self, words: bytes) -> None:
        self._first = str(words, "utf-8")
        self._store.add(_HEARD, 1)


_BUCKET = 25 << 20  # bytes that are exchanged at once
_SLOWEST = timedelta(minutes=30)  # that a rank may come later than the others


def create_communicator(device: Device = None) -> Communicator:
    """The communicator of this process, as the environment says that torchrun sets; without a launcher a world of one.

    The same script runs under ``python train.py`` and under ``torchrun --nproc-per-node 2 train.py``. Tensors on the host
    are exchanged by gloo, those on an NVIDIA accelerator by NCCL. A process group that is there already is used.

    Args:
        device: where this rank computes; by default the accelerator of its number on this machine, or the host where
            there is none. The updater and the extensions take it from ``comm.device``.

    Raises:
        RuntimeError: a variable of the environment is missing while others are there.
        ValueError: there is no such device.
    """
    started = dist.is_available() and dist.is_initialized()
    rank, size, local_rank = _place() if not started else (dist.get_rank(), dist.get_world_size(), _local_rank())
    own = _own_device(device, local_rank)
    if size == 1 and not started:
        alone = Communicator()
        alone.device = own
        return alone
    if own.type != "cpu":
        torch.accelerator.set_device_index(own)
    store = None if started else _start(rank, size, own)
    return ProcessGroupCommunicator(own, local_rank, store)


def _place() -> tuple[int, int, int]:
    """Rank, size and local rank, as the launcher says."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1, 0
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise RuntimeError(
            f"a launcher sets {', '.join(names)}, and {', '.join(missing)} is missing here; start with "
            "`torchrun --nproc-per-node N script.py`, or unset RANK and WORLD_SIZE to train in one process"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _local_rank()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def _own_device(device: Device, local_rank: int) -> torch.device:
    if device is not None:
        return as_device(device) or torch.device("cpu")
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    if local_rank >= torch.accelerator.device_count():
        raise ValueError(
            f"local rank {local_rank} has no accelerator of its own, there are {torch.accelerator.device_count()}: start "
            'fewer processes on this machine, or give device="cpu"'
        )
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, local_rank)


def _start(rank: int, size: int, device: torch.device) -> Any:
    """Starts the process group, and returns the store by which the ranks have met."""
    found, _, _ = next(rendezvous("env://", rank, size, timeout=_SLOWEST))
    # When a launcher restarts the ranks, what they had said before lies in its store still.
    store = PrefixStore(f"chainring/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    if store.add("arrived", 1) == size:
        store.set("met", "")
    store.wait(["met"], _SLOWEST)
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=size, timeout=_connecting(size),
        device_id=device if is_cuda else None,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(_SLOWEST)
    return store


class ProcessGroupCommunicator(Communicator):
    """The ranks of torch.distributed's process group.

    Tensors go through a group of its backend, everything else through one of gloo's on the host, which does not wait for
    the device. The default group is left to DDP and FSDP.

    Args:
        device: where this rank computes.
        local_rank: its number on this machine.
        store: by which the ranks have met, if this communicator has started the process group, which it then also ends.
    """

    def __init__(self, device: torch.device, local_rank: int, store: Any) -> None:
        self.rank, self.size, self.local_rank, self.device = dist.get_rank(), dist.get_world_size(), local_rank, device
        self._words = None if store is None else FailureBroadcast(store, self.rank, self.size)
        self._tensors, self._objects = _new_group(), _new_group("gloo")
        self._is_open = True
        if self.rank != 0:
            mute()
        atexit.register(self.close)

    def all_reduce(self, tensors: Sequence[Tensor], average: bool = True) -> None:
        for bucket in _buckets(tensors):
            flat = _flat(bucket)
            dist.all_reduce(flat, group=self._tensors)
            _put(bucket, flat.div_(self.size) if average else flat)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        for bucket in _buckets(tensors):
            flat = _flat(bucket)
            dist.broadcast(flat, root, group=self._tensors)
            _put(bucket, flat)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._objects)
        return gathered

    def start_max(self, number: int) -> Callable[[], int]:
        held = torch.tensor(number)
        work: Any = dist.all_reduce(held, dist.ReduceOp.MAX, group=self._objects, async_op=True)

        def wait() -> int:
            work.wait()
            return int(held)

        return wait

    def barrier(self) -> None:
        self.gather_object(None)

    def beside(self) -> Communicator:
        self.barrier()  # so that they connect at the same time
        return ProcessGroupCommunicator(self.device, self.local_rank, None)

    def failed(self, error: BaseException) -> BaseException:
        words = self._words
        if words is None or not self._is_open or isinstance(error, RankFailed):
            return error
        own = f"rank {self.rank} has failed, and all stop with it:\n\n{''.join(traceback.format_exception(error))}"
        first = words.said() if _is_of_connection(error) else words.say(own)
        self._leave()
        if first is None:
            error.add_note("another rank is gone without a word: it was killed, or ended outside of the training")
            return error
        words.wait_for_others()
        if first == own:
            return error
        failure = RankFailed(first)
        failure.__cause__ = error
        return failure

    def _leave(self) -> None:
        """Ends the exchange for those that wait for this rank, by closing this end of it.

        Those of DDP and FSDP end with the process; a snapshot under way, which goes through a group of its own, is finished.
        """
        self._is_open = False
        for group in (self._tensors, self._objects):
            dist.destroy_process_group(group)
        del self._tensors, self._objects, group  # it is closed when nobody holds it any more

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._words is not None:
            self._words.close()
            if dist.is_initialized():
                dist.destroy_process_group()
        self._words, self._is_open = None, False


def _connecting(size: int) -> timedelta:
    """For ranks that have just met: one that has not answered by then is gone."""
    return timedelta(seconds=8 + size / 4)


def _new_group(backend: str | None = None) -> Any:
    """A group of all ranks, which are to make it at the same time."""
    group: Any = dist.new_group(backend=backend, timeout=_connecting(dist.get_world_size()))
    group.set_timeout(_SLOWEST)
    return group


def _is_of_connection(error: BaseException) -> bool:
    """Whether an exchange has failed because another rank has left it."""
    words = ("Connection closed", "Connection reset", "Broken pipe", "gloo", "NCCL", "Timed out", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, as many as are exchanged at once."""
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


def _flat(bucket: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


def _put(bucket: list[Tensor], flat: Tensor) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.detach().copy_(part.view_as(tensor))
