"""Exchange of tensors among the ranks of one process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chainring._distributed.communicator import Communicator

# Descriptions of process groups: those whose waits the communicator notes, and those of exchanges in another thread.
MAIN_GROUP = "chainring"
BACKGROUND_GROUP = "chainring beside"
TIMEOUT = timedelta(minutes=30)  # for a rank that comes later than the others
_LATER = 10.0  # seconds for which a backend that ends the process lets this library say why before
_LEAVING = 1.0  # seconds for which a rank that has failed waits for the end of its groups
_BUCKET = 25 << 20  # bytes that are exchanged at once
_FIRST_BUCKET, _GRADIENT_BUCKET = 1 << 20, 8 << 20  # bytes of gradients, or more, that are sent while a backward runs


class GroupCommunicator(Communicator):
    """Exchanges tensors, and objects, through a process group of torch.distributed.

    ``waiting`` returns the context of an exchange, in which this thread waits for the other ranks, within those that
    ``watchers`` return. The communicators in ``within`` are those of some of its ranks, which leave with it.
    """

    def __init__(self, group: Any, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = self._objects = group
        self._waiting = waiting
        self.watchers: tuple[Callable[[], AbstractContextManager[None]], ...] = ()
        self.within: list[GroupCommunicator] = []
        self._under_way: dict[int, list[Any]] = {}  # by number: an exchange that was begun, and what it sends
        self._begun = 0

    def leave(self) -> None:
        """Close this end of the exchange, for those that wait for this rank; a snapshot under way has a group of its own."""
        for comm in self.within:
            comm.leave()
        for work in self._under_way.values():  # an exchange holds the connections of its group
            work.clear()
        groups = [[self._group]] if self._objects is self._group else [[self._group], [self._objects]]
        self._group = self._objects = None  # a connection is closed with the last reference
        for group in groups:
            end_groups(group)

    def waiting(self) -> AbstractContextManager[Any]:
        if not self.watchers:
            return self._waiting()
        stack = ExitStack()
        for context in (*self.watchers, self._waiting):
            stack.enter_context(context())
        return stack

    def all_reduce(self, tensors: Sequence[Tensor], average: bool = True) -> None:
        for flat in flattened(tensors):
            self._begin(partial(dist.all_reduce, flat), [flat])()
            if average:
                flat.div_(self.size)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        for flat in flattened(tensors):
            self._begin(partial(dist.broadcast, flat, group_src=root), [flat])()

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        with self.waiting():
            dist.all_gather_object(gathered, obj, group=self._objects)
        return gathered

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        objects = [obj]
        with self.waiting():
            dist.broadcast_object_list(objects, group=self._objects, group_src=root)
        return objects[0]

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        wait = self._begin(partial(dist.all_reduce, tensor), [tensor], gives=False)
        return lambda: wait()[0]

    def start_all_to_all(self, sent: Tensor | Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        flat = sent.reshape(-1) if isinstance(sent, Tensor) else torch.cat(list(sent))
        received = flat.new_empty(sum(sizes))
        start = partial(dist.all_to_all_single, received, flat, list(sizes), list(map(len, sent)))
        wait = self._begin(start, [received], flat, gives=False)
        return lambda: list(torch.split(wait()[0], list(sizes)))

    def start_all_gather(self, tensor: Tensor, gives: bool = True) -> Callable[[], Tensor]:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        wait = self._begin(partial(dist.all_gather, list(gathered), tensor), [gathered], tensor, gives=gives)
        return lambda: wait()[0]

    def start_max(self, number: int) -> Callable[[], int]:
        largest = torch.tensor(number)
        wait = self._begin(partial(dist.all_reduce, largest, dist.ReduceOp.MAX), [largest], on_host=True)
        return lambda: int(wait()[0])

    def _begin(
        self, start: Callable[..., Any], results: list[Tensor], sent: Tensor | None = None, *, on_host: bool = False,
        gives: bool = True, joins: bool = True,
    ) -> Callable[[], list[Tensor]]:  # fmt: skip
        """Begin an exchange; return what waits for it, and returns its results.

        Ranks that are left after a loss are given its results if it ``gives``; if it ``joins``, none completes it before
        all have begun it.
        """
        group = self._objects if on_host else self._group
        number, kept = self._begun, [start(group=group, async_op=True), sent]  # until it has ended, or `leave` lets go
        self._under_way[number], self._begun = kept, number + 1

        def wait() -> list[Tensor]:
            if kept:  # and was not waited for before
                with self.waiting():
                    kept[0].wait()
                self._under_way.pop(number, None)
                kept.clear()
            return results

        return wait


def connect_timeout(size: int) -> timedelta:
    """Return how long ranks that have just met wait for each other."""
    return timedelta(seconds=8 + size / 4)


def new_group(backend: str | None = None, ranks: Sequence[int] | None = None, description: str = MAIN_GROUP) -> Any:
    """Make a group of these ranks, or of all, at the same time on each rank; return it on those that belong to it."""
    timeout = connect_timeout(dist.get_world_size())
    group: Any = dist.new_group(ranks, backend=backend, timeout=timeout, group_desc=description)
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        set_timeout(group, TIMEOUT)
    return group


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let no exchange through a process group, or one of its backends, that begins from now on take longer."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    for backend in _backends_of(group) if isinstance(group, dist.ProcessGroup) else [group]:  # torch 2.6
        backend._set_default_timeout(timeout)


def lower_timeouts(seconds: float) -> None:
    """Let no exchange of any group that begins from now on take longer; backends that end the process get a little more."""
    for group in list_groups():
        with contextlib.suppress(Exception):  # destroyed meanwhile, or of a backend that knows no timeout
            for backend in _backends_of(group):
                limit = timedelta(seconds=seconds if backend.name() == "gloo" else seconds + _LATER)
                if attrgetter("options._timeout")(backend) > limit:
                    set_timeout(backend, limit)


def count_collectives() -> dict[str, tuple[int, list[int], str]]:
    """Return by the name of each process group how many collectives this rank has begun in it, its ranks and description."""
    counts: dict[str, tuple[int, list[int], str]] = {}
    for group in list_groups():
        with contextlib.suppress(Exception):  # destroyed meanwhile, or of a backend that does not count
            number = sum(backend._get_sequence_number_for_group() for backend in _backends_of(group))
            counts[group.group_name] = number, dist.get_process_group_ranks(group), group.group_desc
    return counts


def is_timeout(error: BaseException) -> bool:
    """Return whether an exchange took too long, or an earlier one in the same group, of which gloo then reports."""
    words = ("imed out", "timing out", "Application timeout")
    is_of_loader = str(error).startswith("DataLoader")  # its workers took too long: a failure of this rank
    return isinstance(error, RuntimeError) and not is_of_loader and any(word in str(error) for word in words)


def is_connection_error(error: BaseException) -> bool:
    """Return whether an exchange has failed because another rank has left it, or has not come."""
    words = ("Connection closed", "Connection reset", "Broken pipe", "gloo", "NCCL")  # gloo gives its source file
    return is_timeout(error) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def list_groups() -> list[Any]:
    """Return all process groups of torch.distributed that this rank belongs to."""
    return list(attrgetter("_world.pg_map")(dist.distributed_c10d)) if dist.is_initialized() else []


def _backends_of(group: Any) -> list[Any]:
    """Return the backends of a process group, each once."""
    return list({id(backend): backend for backend in map(group._get_backend, group._device_types)}.values())


def end_groups(groups: list[Any]) -> None:
    """End process groups that the list alone holds, of a rank that has failed.

    That waits for exchanges that were begun, and other ranks, which may wait for the end of this one, may never begin them.
    Then they end with the process.
    """

    def end() -> None:
        while groups:
            dist.destroy_process_group(groups.pop())

    ending = threading.Thread(target=end, name="chainring-leave", daemon=True)
    ending.start()
    ending.join(_LEAVING)


def flattened(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield neighbours of one dtype and device as one vector, which is copied back after it was exchanged."""
    for _, group in groupby(tensors, lambda tensor: (tensor.dtype, tensor.device)):
        buckets: list[list[Tensor]] = [[]]
        size = 0
        for tensor in group:
            if buckets[-1] and size + tensor.nbytes > _BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(tensor)
            size += tensor.nbytes
        for bucket in buckets:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            yield flat
            for tensor, values in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(values.view_as(tensor))


def gradient_buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield buckets of indices, from the last tensor on: neighbours of one dtype and device that are exchanged at once."""
    indices = range(len(tensors) - 1, -1, -1)
    for _, group in groupby(indices, lambda index: (tensors[index].dtype, tensors[index].device)):
        bucket: list[int] = []
        size = 0
        for index in group:
            bucket.append(index)
            size += tensors[index].nbytes
            if size >= (_FIRST_BUCKET if bucket[0] == indices[0] else _GRADIENT_BUCKET):
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
