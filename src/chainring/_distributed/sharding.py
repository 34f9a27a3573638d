"""Tensors of which each rank holds a part, as `fully_shard` makes them, and plain tensors alike."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor, nn


class Shard(NamedTuple):
    """The part of a tensor that this rank holds.

    Attributes:
        tensor: the part, on its device.
        offsets: where it begins in each dimension.
        shape: of the whole.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which each rank holds a part, a ``DTensor``."""
    # Importing torch.distributed.tensor takes half a second. Who has made such a tensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The parts of a model to which `fully_shard` was applied."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [part for part in model.modules() if isinstance(part, module.FSDPModule)]


def to_local(tensor: Any) -> Tensor:
    """The part of a tensor that lies on this rank, in the same memory; a plain tensor is its own."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def to_full(tensor: Any) -> Tensor:
    """All of a tensor, from all ranks; a plain tensor is its own."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def local_shard(tensor: Any) -> Shard | None:
    """This rank's part of a sharded tensor; ``None`` where it has none, or another rank has the same.

    Raises:
        NotImplementedError: the part is several pieces, as in some layouts of tensor parallelism.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    place = mesh.get_coordinate()
    if place is None or any(at and placement.is_replicate() for at, placement in zip(place, placements, strict=True)):
        return None
    pieces = tensor.__create_chunk_list__()
    if len(pieces) > 1:
        raise NotImplementedError(f"a tensor of {len(pieces)} pieces a rank, laid out as {placements}, cannot be saved")
    if not pieces or not tensor.to_local().numel():
        return None
    return Shard(tensor.to_local(), tuple(pieces[0].offsets), tuple(tensor.shape))


def distribute_like(full: Tensor, sharded: Any) -> Any:
    """A whole tensor, which every rank has, as one of which each holds a part like that of ``sharded``."""
    module = sys.modules["torch.distributed.tensor"]
    on_device = full.to(sharded.device)
    return module.distribute_tensor(on_device, sharded.device_mesh, sharded.placements, src_data_rank=None)
