"""Launchers: the place of this process among those that were started together, as environment variables say it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

_TASK_COUNTS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""The variables in which launchers other than torchrun say how many tasks they have started."""


class Place(NamedTuple):
    """The place of a process among those that a launcher has started together.

    Attributes:
        rank: its number among all of them.
        size: how many there are.
        local_rank: its number among those on its machine.
        start: which start of the launcher this is, as it may start its processes again.
    """

    rank: int
    size: int
    local_rank: int
    start: str = "0"


def read_place(environment: Mapping[str, str]) -> Place:
    """Return the place of this process; without a launcher it is alone.

    Raises:
        RuntimeError: a variable is missing while others are there, or a launcher has started several tasks without them.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        _refuse_other_launchers(environment)
        return Place(0, 1, 0)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in environment]:
        raise RuntimeError(
            f"a launcher sets {', '.join(names)}, and {', '.join(missing)} is missing here; start with "
            "`torchrun --nproc-per-node N script.py`, or unset RANK and WORLD_SIZE to train in one process"
        )
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]), read_local_rank(environment), start)


def read_local_rank(environment: Mapping[str, str]) -> int:
    """Return the number of this process among those on its machine, where a process group is there already."""
    return int(environment.get("LOCAL_RANK", environment.get("RANK", "0")))


def meet(place: Place, timeout: timedelta) -> Any:
    """Wait for all processes of this start, and return the store through which they have met."""
    found, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    # A launcher that restarts the ranks keeps its store, with what they have published in it.
    store = PrefixStore(f"chainring/{place.start}", found)
    if store.add("arrived", 1) == place.size:
        store.set("met", "")
    store.wait(["met"], timeout)
    return store


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    for name, launcher in _TASK_COUNTS.items():
        count = environment.get(name, "1")
        if count not in ("0", "1"):
            raise RuntimeError(
                f"{launcher} has started {count} tasks, as {name} says, and each would train alone on all data, because "
                "RANK and WORLD_SIZE are not set: let it start one task a machine, and in it torchrun, such as "
                f"`{launcher} torchrun --nproc-per-node N script.py`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
                f"MASTER_PORT; unset {name} to train in one process"
            )
