"""The ranks that hold a sharded model, and its tensors brought whole to the one that writes them, one at a time."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._distributed.group import GroupCommunicator
from chainring._distributed.sharding import Region, Shard, is_partition, is_sharded, local_shards, region_of, to_local

_PIECE = 1 << 20  # bytes that are sent at once
_END = -1  # in place of the number of a tensor

Load = Callable[[Tensor], Tensor]
"""Returns the values that a tensor stands for."""
Write = Callable[[dict[str, Tensor], Load], None]


def write_on_one_rank(tensors: Mapping[str, Any], write: Write, place: str) -> None:
    """Call ``write(stand_ins, load)`` on one rank, the first; every rank calls this, and returns when that has ended.

    A stand-in has the shape and the dtype of a sharded tensor, and no memory; ``load`` returns the whole tensor, for which
    the ranks that hold parts of it send them. The rank that writes needs memory for one tensor at a time, the others for a
    piece of 1 MB. Tensors that share memory have one stand-in. Plain tensors are given to ``write`` as they are. All ranks
    have the same names of ``tensors``, and the same ``place`` to which they are written.

    Raises:
        ValueError: the ranks have other tensors or places, or do not hold the whole of one.
        OSError: the first rank could not write; there it is the error itself.
    """
    exchange = _Exchange(tensors, place)
    if exchange.is_writer:
        exchange.lead(write)
    else:
        exchange.follow()


class _Description(NamedTuple):
    """What a rank has of a model, and where it is to be written."""

    place: str
    tensors: list[tuple[str, str, tuple[int, ...]]]  # their names, dtypes and shapes
    regions: list[list[Region]]  # of each tensor


class _Exchange:
    """The sharded tensors of this rank, and the ranks among which they lie."""

    def __init__(self, tensors: Mapping[str, Any], place: str) -> None:
        self._tensors, self._place = tensors, place
        self._sharded = [(name, tensor) for name, tensor in tensors.items() if is_sharded(tensor)]
        meshes = {id(mesh): mesh for mesh in (root_mesh(tensor.device_mesh) for _, tensor in self._sharded)}
        ranks = {rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}
        self._writer, *self._others = sorted(ranks)
        self.is_writer = dist.get_rank() == self._writer
        self._shards: list[list[Shard]] = []
        self._buffer = torch.empty(_PIECE if self.is_writer else 0, dtype=torch.uint8, device=exchange_device())
        self._is_receiving = False  # True from a request to the end of what it asks for

    def lead(self, write: Write) -> None:
        """Learn what the others have, write, and tell them how it has ended."""
        descriptions = {self._writer: self._describe(), **{rank: _receive_object(rank) for rank in self._others}}
        refusal = _find_refusal(descriptions)
        for rank in self._others:
            dist.send_object_list([refusal], rank)
        if refusal is not None:
            raise ValueError(refusal)
        written = dict(self._tensors)
        stand_ins: dict[Any, Tensor] = {}
        numbers: dict[int, int] = {}  # of the tensor that a stand-in stands for
        for number, (name, tensor) in enumerate(self._sharded):
            local = to_local(tensor)
            key = (local.data_ptr(), tensor.shape, tensor.dtype) if local.numel() else name
            if key not in stand_ins:
                stand_ins[key] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
                numbers[id(stand_ins[key])] = number
            written[name] = stand_ins[key]

        def load(tensor: Tensor) -> Tensor:
            number = numbers.get(id(tensor))
            return tensor if number is None else self._gather(number, tensor, descriptions)

        failure: str | None = None
        try:
            write(written, load)
        except BaseException as error:  # whatever it is, the other ranks must not wait
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            for rank in self._others if not self._is_receiving else ():  # after a signal: then this process ends
                dist.send(torch.tensor([_END, _END], device=exchange_device()), rank)
                dist.send_object_list([failure], rank)

    def follow(self) -> None:
        """Send the parts that the writer asks for, until it has ended."""
        dist.send_object_list([self._describe()], self._writer)
        if (refusal := _receive_object(self._writer)) is not None:
            raise ValueError(refusal)
        request = torch.zeros(2, dtype=torch.int64, device=exchange_device())
        while True:
            dist.recv(request, self._writer)
            number, index = request.tolist()
            if number == _END:
                break
            for piece in _pieces(self._shards[number][index].tensor.detach()):
                dist.send(piece.to(exchange_device()).contiguous().reshape(-1).view(torch.uint8), self._writer)
        if (failure := _receive_object(self._writer)) is not None:
            raise OSError(errno.EIO, f"rank {self._writer}, which writes for all, has failed: {failure}")

    def _describe(self) -> _Description | str:
        """Return what this rank has, or as text why it cannot be written."""
        try:
            self._shards = [local_shards(tensor) for _, tensor in self._sharded]
        except ValueError as error:
            return str(error)
        about = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self._sharded]
        return _Description(self._place, about, [list(map(region_of, shards)) for shards in self._shards])

    def _gather(self, number: int, like: Tensor, descriptions: Mapping[int, Any]) -> Tensor:
        """Return the whole of a tensor, each region from the first rank that has it."""
        whole = torch.empty(like.shape, dtype=like.dtype)
        done: set[Region] = set()
        for rank, description in descriptions.items():
            for index, region in enumerate(description.regions[number]):
                if region in done:
                    continue
                done.add(region)
                target = whole[tuple(slice(start, start + size) for start, size in zip(*region, strict=True))]
                if rank == self._writer:
                    target.copy_(self._shards[number][index].tensor.detach())
                    continue
                self._is_receiving = True
                dist.send(torch.tensor([number, index], device=exchange_device()), rank)
                for piece in _pieces(target):
                    received = self._buffer[: piece.numel() * piece.itemsize]
                    dist.recv(received, rank)
                    piece.copy_(received.view(piece.dtype).view(piece.shape))
                self._is_receiving = False
        return whole


def root_mesh(mesh: Any) -> Any:
    """Return the mesh of which this one is a slice."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return attrgetter("_mesh_resources.get_root_mesh")(sys.modules["torch.distributed.device_mesh"])(mesh)  # to torch 2.9


def holders_of(values: Iterable[Any]) -> Communicator:
    """Return the ranks that hold parts of some of these values, where they are those of the process group; else this one."""
    mesh = next((root_mesh(value.device_mesh) for value in values if is_sharded(value)), None)
    if mesh is None or mesh.size() != dist.get_world_size():
        return Communicator()
    holders = GroupCommunicator(dist.group.WORLD, nullcontext)
    holders.device = exchange_device()
    return holders


def _find_refusal(descriptions: Mapping[int, Any]) -> str | None:
    """Return why the ranks cannot write what they have, ``None`` if they can."""
    problems = (f"rank {rank}: {problem}" for rank, problem in descriptions.items() if isinstance(problem, str))
    if (problem := next(problems, None)) is not None:
        return problem
    writer, first = next(iter(descriptions.items()))
    for rank, other in descriptions.items():
        if other.place != first.place:
            return (
                f"one rank writes for all, and rank {writer} would write to {first.place}, rank {rank} to {other.place}: "
                "give all ranks the same path"
            )
        if other.tensors != first.tensors:
            only_first = next((tensor for tensor in first.tensors if tensor not in other.tensors), None)
            only_other = next((tensor for tensor in other.tensors if tensor not in first.tensors), None)
            return (
                f"all ranks save the same model, and rank {writer} has {only_first}, rank {rank} has {only_other}, or "
                "another order"
            )
    for number, (name, _, shape) in enumerate(first.tensors):
        regions = list(dict.fromkeys(region for rank in descriptions.values() for region in rank.regions[number]))
        if not is_partition(shape, regions):
            return (
                f"{name!r} has the shape {list(shape)}, and the ranks {list(descriptions)} hold {regions} of it, which is "
                "not the whole: let every rank save, and place it by fully_shard and parallelize_module"
            )
    return None


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of at most 1 MB, which are the tensor; of the same shapes for the same shape."""
    size = tensor.numel() * tensor.itemsize
    if size <= _PIECE:
        yield tensor
        return
    rows = max(1, len(tensor) * _PIECE // size)
    for block in torch.split(tensor, rows):
        yield from _pieces(block[0]) if rows == 1 and tensor.ndim > 1 else [block]


def exchange_device() -> torch.device:
    """Return where the ranks exchange tensors: on the host, unless the process group cannot."""
    group: Any = dist.group.WORLD
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _receive_object(rank: int) -> Any:
    received = [None]
    dist.recv_object_list(received, rank)
    return received[0]
