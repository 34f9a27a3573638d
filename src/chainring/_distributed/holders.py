"""The ranks that hold the parts of a model, as a communicator, for what has none of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from chainring._distributed.communicator import Communicator
from chainring._distributed.gathering import exchange_device, root_mesh
from chainring._distributed.group import GroupCommunicator
from chainring._distributed.sharding import is_sharded


def holders_of(values: Iterable[Any]) -> Communicator:
    """Return the ranks that hold parts of some of these values, where they are those of the process group; else this one."""
    mesh = next((root_mesh(value.device_mesh) for value in values if is_sharded(value)), None)
    return Communicator() if mesh is None or mesh.size() != dist.get_world_size() else _Holders()


class _Holders(GroupCommunicator):
    """All ranks of the process group, whoever has made it."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD, nullcontext)
        self.device = exchange_device()

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj)
        return gathered

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, src=root)
        return objects[0]
