"""Digests of 64 bits: of the batches of an update, and of every tensor of models and optimizers, however it is sharded.

The digest of a tensor is the sum over its elements, of element i the product of its bits and a fixed odd number K(i), modulo
2**64, to which its dtype and shape are then mixed. As a sum it does not depend on which rank holds which shard. One changed
element always changes it, since an odd factor has an inverse modulo 2**64; two exchanged elements change it unless the
difference of their bits times that of their factors is 0. ``K(i)`` is the product of a factor of the row i // 4096 and one
of the column i % 4096. The bits of an element count as an integer, so that NaNs and -0.0 count as well; those of 64 bits and
complex ones as two or four.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import Shard, assign_writers, is_sharded
from chainring._naming import unwrap
from chainring._random import digest, stable_hash
from chainring.serializers._models import OptimizerState
from chainring.serializers.protocol import StateCollector
from chainring.training.updaters.base import Updater

_ROW = 4096  # elements that share the factor of their row
_CHUNK = 1 << 20  # elements that are multiplied at once: they take 8 bytes each
_UINT64 = 2**64


class Batches:
    """Tells the batches that the iterators of an updater return from others."""

    def __init__(self, updater: Updater) -> None:
        self._named = updater.get_all_iterators()
        self._iterators = [iterator for iterator in self._named.values() if hasattr(iterator, "batch_end")]
        self._is_known = len(self._iterators) == len(self._named)

    def take(self) -> list[Any]:
        """Return the positions of the iterators after the batches last taken."""
        return [iterator.batch_end() for iterator in self._iterators]

    def digest(self, start: list[Any], stop: list[Any]) -> int:
        """Return 64 bits of the batches between two ends; 0 where an iterator does not tell, or there is none."""
        if not self._is_known or None in start or None in stop:
            return 0
        digests = [iterator.batch_digest(*ends) for iterator, *ends in zip(self._iterators, start, stop, strict=True)]
        if not digests or None in digests:
            return 0
        return int(digests[0]) if len(digests) == 1 else digest(repr(list(zip(self._named, digests, strict=True))).encode())


class StateDigests:
    """The digests of the tensors of models and optimizers at one moment; those on a device stay there until they are read.

    All ranks make one together, where parameters are sharded; the digests are complete on the main rank.

    Attributes:
        names: the paths of the tensors in a snapshot.
        sums: integers on the devices, to be read by `read_together`, from which `finish` makes the digests.
    """

    def __init__(self, updater: Updater, comm: Communicator) -> None:
        collected, models = StateCollector(), updater.get_all_models()
        state = collected["updater"]
        for name, model in models.items():
            state.visit(f"model:{name}", unwrap(model))
        for name, optimizer in updater.get_all_optimizers().items():
            state.visit(f"optimizer:{name}", OptimizerState(optimizer, models, name))
        tensors: dict[str, Tensor] = {}  # by their paths in a snapshot
        for path, value in collected.target.items():
            _add_tensors(path, value, tensors)
        sharded = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
        shards = assign_writers(sharded, comm.world) if sharded else {}
        self.names = list(tensors)
        self._salts = [_salt(tensor.dtype, tensor.shape) for tensor in tensors.values()]
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for index, (name, tensor) in enumerate(tensors.items() if comm.is_main else ()):
            if name not in sharded:
                by_device.setdefault(tensor.device, {})[index] = _sum_whole(tensor)
        self._indices = [list(totals) for totals in by_device.values()]
        self.sums = [torch.stack(list(totals.values())) for totals in by_device.values()]
        if sharded:
            self._indices.append([index for index, name in enumerate(tensors) if name in sharded])
            self.sums.append(torch.stack([_sum_shards(shards[name], comm.world.device) for name in sharded]))
            comm.world.all_reduce([self.sums[-1]], average=False)

    def finish(self, sums: Sequence[NDArray[np.int64]]) -> NDArray[np.uint64]:
        """Return the digests in the order of the names."""
        totals = np.zeros(len(self.names), np.uint64)
        for indices, values in zip(self._indices, sums, strict=True):
            totals[indices] = values.view(np.uint64)
        return _mix(totals + np.array(self._salts, np.uint64))

    def read(self) -> NDArray[np.uint64]:
        """Return the digests in the order of the names, which waits for the devices."""
        return self.finish(read_together(self.sums))


def read_together(tensors: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Return vectors of integers as they are on the host: those of one device by one read."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    read: dict[int, NDArray[np.int64]] = {}
    for indices in by_device.values():
        vectors = [tensors[index].to(torch.int64) for index in indices]
        values, end = (vectors[0] if len(vectors) == 1 else torch.cat(vectors)).cpu().numpy(), 0
        for index in indices:
            start, end = end, end + len(tensors[index])
            read[index] = values[start:end]
    return [read[index] for index in range(len(tensors))]


def _add_tensors(path: str, value: Any, tensors: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        if not is_lazy(value) and not value.is_meta:
            tensors[path] = value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_tensors(f"{path}/{key}", item, tensors)
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            _add_tensors(f"{path}/{index}", item, tensors)


def digest_tensor(tensor: Tensor) -> int:
    """Return the digest of a tensor that is whole."""
    total = int(_sum_whole(tensor)) + _salt(tensor.dtype, tensor.shape)
    return int(_mix(np.array([total % _UINT64], np.uint64))[0])


@lru_cache(1024)
def _salt(dtype: torch.dtype, shape: torch.Size) -> int:
    return stable_hash(str(dtype), *shape)


def _sum_whole(tensor: Tensor) -> Tensor:
    """Return the sum over all elements of a tensor, as a tensor without dimensions."""
    return _sum_run(_as_integers(tensor).reshape(-1), 0)


def _sum_shards(shards: Sequence[Shard], device: torch.device) -> Tensor:
    """Return the sum over the elements in some shards of a tensor, as a tensor without dimensions."""
    sums = []
    for shard in shards:
        bits = _as_integers(shard.tensor)
        shape = (*shard.shape, *bits.shape[len(shard.shape) :])
        offsets = (*shard.offsets, *[0] * (bits.ndim - len(shard.offsets)))
        sums.append(_sum_region(bits, offsets, shape).to(device))
    return _add_up(sums, device)


def _add_up(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    return sums[0] if len(sums) == 1 else sum(sums, torch.zeros((), dtype=torch.int64, device=device))


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of at most 32 bits, those of an element in dimensions added at the end."""
    dense = tensor.detach()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).resolve_conj().resolve_neg()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    dense = dense.contiguous().unsqueeze(-1)
    return dense.view({1: torch.uint8, 2: torch.int16}.get(dense.element_size(), torch.int32))


def _sum_region(bits: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    first = next((d for d, size in enumerate(bits.shape) if size != 1), bits.ndim)
    if tuple(bits.shape[first + 1 :]) == tuple(shape[first + 1 :]):  # its elements follow one another in the whole tensor
        return _sum_run(bits.reshape(-1), sum(map(int.__mul__, map(int, offsets), strides)))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    rows = max(1, _CHUNK // max(1, bits[0].numel()))
    for start in range(0, len(bits), rows):
        chunk = bits[start : start + rows]
        positions = torch.zeros((), dtype=torch.int64, device=bits.device)
        for dimension, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
            begin = offset + (start if dimension == 0 else 0)
            along = torch.arange(begin, begin + chunk.shape[dimension], device=bits.device).mul_(stride)
            positions = positions + along.view(-1, *[1] * (bits.ndim - 1 - dimension))
        of_rows = torch.as_tensor(_row_factors(math.prod(shape), bits.device))
        of_columns = torch.as_tensor(_factors(_ROW, 0, bits.device))
        total += (chunk * of_columns[positions % _ROW] * of_rows[positions // _ROW]).sum()
    return total


def _sum_run(bits: Tensor, start: int) -> Tensor:
    """Return the sum over elements that follow one another, the first of which is element ``start``."""
    # hot path: "recorder" of benchmarks/gate.py: on the host NumPy passes over the memory once, and takes each tensor once
    is_on_host = bits.device.type == "cpu"
    row_factors, column_factors = _row_factors(start + len(bits), bits.device), _factors(_ROW, 0, bits.device)
    elements: Any = np.from_dlpack(bits) if is_on_host else bits
    sums: list[Any] = []
    at = 0
    while at < len(bits):
        row, column = divmod(start + at, _ROW)
        rows = 0 if column else min(len(bits) - at, _CHUNK) // _ROW  # whole ones; 0: the chunk is a part of one
        length = rows * _ROW or min(_ROW - column, len(bits) - at)
        chunk = elements[at : at + length].reshape(rows or 1, -1)
        of_columns, of_rows = column_factors[column : column + chunk.shape[1]], row_factors[row : row + len(chunk)]
        if is_on_host:  # the same result on any number of threads
            sums.append(int(np.einsum("i,i->", np.einsum("ij,j->i", chunk, of_columns), of_rows)))
        else:
            sums.append(chunk.to(torch.int64).mul_(of_columns).sum(1).mul_(of_rows).sum())
        at += length
    if is_on_host:
        return torch.from_numpy(np.array(sum(sums) % _UINT64, np.uint64).view(np.int64))
    return _add_up(sums, bits.device)


def _row_factors(elements: int, device: torch.device) -> Any:
    """Return the factors of the rows of so many elements, or of more: powers of two, so that the cache has few of them."""
    return _factors(1 << (elements // _ROW).bit_length(), _ROW, device)


@lru_cache(64)
def _factors(count: int, first: int, device: torch.device) -> Any:
    """Return odd factors as a tensor, on the host as an array."""
    # FROZEN: another result would make every ledger of an earlier run differ from one of now.
    numbers = _mix((np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    odd = (numbers | np.uint64(1)).view(np.int64)
    return odd if device.type == "cpu" else torch.from_numpy(odd).to(device)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits each of which depends on all bits of a value: the last steps of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
