"""Ranks on a mesh, of which some share the data and others compute one model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chainring._distributed.communicator import Communicator
from chainring._distributed.group import GroupCommunicator, new_group


class MeshCommunicator(GroupCommunicator):
    """The ranks that share the data, among those of a world in which others see the same rows, as for tensor parallelism.

    Tensors are exchanged with the ranks that share the data and have the same place otherwise, a column of the mesh. What
    is gathered is that of one column, the first, so that all ranks of the world have the same.

    Args:
        world: the communicator of all ranks.
        ranks: the numbers in the world of the ranks of this column, in the order of their data.

    Raises:
        ValueError: the columns are not disjoint, or not all of one size, or rank 0 of the world is not the first of its own.
    """

    def __init__(self, world: GroupCommunicator, ranks: Sequence[int]) -> None:
        self._world = world
        columns = sorted(set(map(tuple, world.gather_object(list(ranks)))))
        _check(columns, world)
        groups = [new_group(ranks=column) for column in columns]
        own = next(index for index, column in enumerate(columns) if world.rank in column)
        super().__init__(groups[own], world.waiting)
        self.local_rank, self.device = world.local_rank, world.device
        self._columns, self._own = columns, own
        self._first = next(column for column in columns if column[0] == 0)
        world.leave_with(self)

    @property
    def is_main(self) -> bool:
        return self._world.is_main

    @property
    def world(self) -> Communicator:
        return self._world

    @property
    def data_ranks(self) -> Sequence[int]:
        return self._columns[self._own]

    @property
    def model_ranks(self) -> Sequence[int]:
        return [column[self.rank] for column in self._columns]

    def begin(self) -> None:
        self._world.begin()

    def gather_object(self, obj: Any) -> list[Any]:
        gathered = self._world.gather_object(obj)
        return [gathered[rank] for rank in self._first]

    def start_max(self, number: int) -> Callable[[], int]:
        return self._world.start_max(number)

    def barrier(self) -> None:
        self._world.barrier()

    def beside(self) -> Communicator:
        beside: Any = self._world.beside()
        return MeshCommunicator(beside, self.data_ranks)

    def failed(self, error: BaseException) -> BaseException:
        return self._world.failed(error)

    def close(self) -> None:
        self._world.close()


def ranks_along(mesh: Any, world: Communicator) -> list[int]:
    """Return the numbers in the world of the ranks of a mesh, or of the slice of one that this rank belongs to.

    Raises:
        TypeError: it is not a ``DeviceMesh``.
        ValueError: it is of another kind of device.
    """
    if not hasattr(mesh, "get_coordinate") or not hasattr(mesh, "device_type"):
        raise TypeError(
            "mesh is a DeviceMesh whose ranks share the data, or a slice of one, such as "
            f'init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))["dp"]; got {type(mesh).__name__}'
        )
    if mesh.device_type != world.device.type:
        raise ValueError(
            f"the mesh is one of {mesh.device_type!r}, and this rank computes on {str(world.device)!r}: make it by "
            f"init_device_mesh({world.device.type!r}, ...), or give create_communicator(device={mesh.device_type!r})"
        )
    return mesh.mesh.flatten().tolist()  # type: ignore[no-any-return]


def _check(columns: list[tuple[int, ...]], world: Communicator) -> None:
    """Refuse columns that are no mesh of the whole world; all ranks have the same ones, and refuse alike."""
    members = sorted(rank for column in columns for rank in column)
    if members != list(range(world.size)) or len(set(map(len, columns))) > 1:
        raise ValueError(
            f"every rank shares the data with as many others as any, and of {world.size} ranks the mesh has those that "
            f"share it as {[list(column) for column in columns]}: give all ranks the same slice of one mesh over all ranks, "
            'such as mesh["dp"]'
        )
    if all(column[0] != 0 for column in columns):
        raise ValueError(
            f"rank 0 of the world writes, and is the first of those that share the data; the mesh has "
            f"{[list(column) for column in columns]}: make it by init_device_mesh, which numbers the ranks in order"
        )
