"""Sharded tensors, as `fully_shard` makes them, and plain tensors alike."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Shard(NamedTuple):
    """A shard of a tensor."""

    tensor: Tensor
    offsets: Sequence[int]  # where it begins in each dimension
    shape: Sequence[int]  # of the whole tensor


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor of which each rank holds a shard, a ``DTensor``."""
    # Importing torch.distributed.tensor takes half a second. Who has made such a tensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model to which `fully_shard` was applied."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [child for child in model.modules() if isinstance(child, module.FSDPModule)]


def to_local(tensor: Any) -> Tensor:
    """Return the shard of a tensor that lies on this rank, in the same memory; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def to_full(tensor: Any) -> Tensor:
    """Return the whole tensor, gathered from all ranks; a plain tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def total_norm(tensors: Sequence[Any], norm_type: float) -> Tensor:
    """Return the norm of tensors as one vector; they are all plain, or all sharded over one mesh."""
    if norm_type != math.inf or not tensors or not is_sharded(tensors[0]):
        return to_full(torch.nn.utils.get_total_norm(tensors, norm_type))
    # PyTorch refuses the largest magnitude of a shard without elements, as a rank may have.
    module, mesh = sys.modules["torch.distributed.tensor"], tensors[0].device_mesh
    largest = [local.abs().max() for local in map(to_local, tensors) if local.numel()]
    norm = torch.stack(largest).max() if largest else torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
    return to_full(module.DTensor.from_local(norm, mesh, [module.Partial("max")] * mesh.ndim))


def local_shard(tensor: Any) -> Shard | None:
    """Return this rank's shard of a sharded tensor; ``None`` if it has none, or another rank has the same one.

    Raises:
        NotImplementedError: the rank holds several shards, as in some layouts of tensor parallelism.
    """
    placements, coordinates = tensor.placements, tensor.device_mesh.get_coordinate()
    if coordinates is None or any(
        coordinate and placement.is_replicate() for coordinate, placement in zip(coordinates, placements, strict=True)
    ):
        return None
    chunks = tensor.__create_chunk_list__()
    if len(chunks) > 1:
        raise NotImplementedError(f"a tensor of {len(chunks)} shards a rank, placed as {placements}, cannot be saved")
    if not chunks or not tensor.to_local().numel():
        return None
    return Shard(tensor.to_local(), tuple(chunks[0].offsets), tuple(tensor.shape))


def shard_like(value: Any, like: Any) -> Any:
    """Return a tensor that every rank has whole, sharded as ``like`` is; as it is where ``like`` is not sharded."""
    if not is_sharded(like) or value is None or is_sharded(value):
        return value
    module = sys.modules["torch.distributed.tensor"]
    return module.distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
