"""Digests of batches and of the tensors of a state, however it is sharded; texts that differ where the bits of values do."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from chainring._distributed.communicator import Communicator
from chainring._distributed.digests import mix, read_together, salt, sum_shards, sum_whole
from chainring._distributed.sharding import assign_writers, is_sharded, to_local
from chainring._random import digest
from chainring.serializers._models import OptimizerState
from chainring.serializers._saving import StateCollector
from chainring.serializers.protocol import unwrap
from chainring.training.updaters.base import Updater

_MAX_WRITTEN = 4  # elements up to which the text of a tensor has them


class Batches:
    """Tells the batches that the iterators of an updater return from others."""

    def __init__(self, updater: Updater) -> None:
        self.updater, self._named = updater, updater.get_all_iterators()
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

    All ranks make one together, where parameters are sharded; the digests are complete on the main rank, and on each where
    any may be lost.
    """

    def __init__(self, updater: Updater, comm: Communicator) -> None:
        collected, models = StateCollector(), updater.get_all_models()
        state = collected["updater"]
        for name, model in models.items():
            state.visit(f"model:{name}", unwrap(model))
        for name, optimizer in updater.get_all_optimizers().items():
            state.visit(f"optimizer:{name}", OptimizerState(optimizer, models, name))
        found = (leaf for path, value in collected.target.items() for leaf in leaves(path, value))
        tensors = {path: value for path, value in found if isinstance(value, Tensor)}  # by their paths in a snapshot
        tensors = {path: value.detach() for path, value in tensors.items() if not (is_lazy(value) or value.is_meta)}
        sharded = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
        shards = assign_writers(sharded, comm.world) if sharded else {}
        self.names = list(tensors)  # their paths in a snapshot
        self._salts = [salt(tensor.dtype, tensor.shape) for tensor in tensors.values()]
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for index, (name, tensor) in enumerate(tensors.items() if comm.is_main or comm.survives else ()):
            if name not in sharded:
                by_device.setdefault(tensor.device, {})[index] = sum_whole(tensor)
        self._indices = [list(totals) for totals in by_device.values()]
        # Integers on the devices, to be read by `read_together`, from which `finish` makes the digests.
        self.sums = [torch.stack(list(totals.values())) for totals in by_device.values()]
        if sharded:
            self._indices.append([index for index, name in enumerate(tensors) if name in sharded])
            self.sums.append(torch.stack([sum_shards(shards[name], comm.world.device) for name in sharded]))
            comm.world.all_reduce([self.sums[-1]], average=False)

    def finish(self, sums: Sequence[NDArray[np.int64]]) -> NDArray[np.uint64]:
        """Return the digests in the order of the names."""
        totals = np.zeros(len(self.names), np.uint64)
        for indices, values in zip(self._indices, sums, strict=True):
            totals[indices] = values.view(np.uint64)
        return mix(totals + np.array(self._salts, np.uint64))

    def read(self) -> NDArray[np.uint64]:
        """Return the digests in the order of the names, which waits for the devices."""
        return self.finish(read_together(self.sums))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested containers that is not a container itself, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield from leaves(f"{path}/{index}", item)
    elif isinstance(value, (set, frozenset)):
        yield from leaves(path, sorted(value, key=repr))
    else:
        yield path, value


def describe_leaves(path: str, value: Any) -> dict[str, str]:
    return {leaf_path: describe(leaf) for leaf_path, leaf in leaves(path, value)}


def describe(value: Any) -> str:
    """Return a plain value as Python writes it, a large array as dtype, shape and CRC-32, anything else as its class.

    Of a sharded tensor it is the shard of this rank.
    """
    value = to_local(as_tensor(value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.tolist()
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{dtype} {tuple(value.shape)} without data"
        if value.numel() <= _MAX_WRITTEN and not value.is_complex():
            return f"{dtype} {value.tolist()}"
        return f"{dtype} {tuple(value.shape)} of CRC {zlib.crc32(bytes_of(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Return one CRC-32 of everything in nested containers."""
    return f"{zlib.crc32(repr(describe_leaves('', value)).encode()):08x}"


def as_tensor(value: Any) -> Any:
    """Return a numeric array as a tensor, and anything else as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value.copy()) if is_numeric else value


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 in one dimension."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
