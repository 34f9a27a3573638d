"""Launchers: the rank of this process among those that were started together, by environment variables; its communicator."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from chainring._checks import is_number, plain
from chainring._distributed.communicator import Communicator, store_of_group
from chainring._distributed.group import TIMEOUT, connect_timeout, set_timeout
from chainring._distributed.process_group import MeshCommunicator, ProcessGroupCommunicator
from chainring._messages import warn
from chainring.converters import Device, as_device, is_auto, set_device_of_rank

_DEFAULT_PORT = 29500  # as in torchrun, of a launcher that has no name for a start
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BY_HAND = "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each task"


class RankInfo(NamedTuple):
    """Which of the processes that a launcher has started together this one is, and where they meet."""

    rank: int
    size: int
    local_rank: int
    start: str = ""  # the name of this start: the same on all ranks, and another one when they are started again
    address: str = ""  # the machine of rank 0, where the ranks meet; empty if torchrun has a store for them
    port: int = 0
    is_apart: bool = False  # True if the store at this address is not in the process of rank 0


class _Launcher(NamedTuple):
    """The variables in which a launcher tells each of its tasks where it is."""

    name: str  # the command, or whatever starts the tasks
    rank: str
    size: str
    local_rank: str
    if_one_machine: tuple[str, str]  # two variables, or a variable and a value, that are equal if all tasks are on one
    start: tuple[str, ...] = ()  # those that together name this start, if there are any
    machines: tuple[str, ...] = ()  # those that may have the machines in Slurm's notation, of which the first has rank 0


_groups_joined = 0
_meetings: Counter[RankInfo] = Counter()  # in this process

_SLURM = _Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
)  # fmt: skip
_MPICH = _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS", "PMI_SIZE"), ("PMI_JOBID",))
_LAUNCHERS = [  # a launcher comes before those that may have started it
    _Launcher(
        "submitit", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID",
        ("SUBMITIT_LOCAL_JOB_NUM_NODES", "1"), ("SUBMITIT_LOCAL_JOB_ID",),
    ),
    _Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("PMIX_NAMESPACE",),
    ),
    _Launcher(
        "MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        ("MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"),
    ),
    _MPICH,
    _Launcher(
        "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ("FLUX_JOB_NNODES", "1"), ("FLUX_JOB_ID",)
    ),
    _SLURM,
]  # fmt: skip


def create_communicator(
    device: Device = None, *, mesh: Any = None, timeout: float | None = None, survive: bool = False
) -> Communicator:
    """Return the communicator of this process, from its launcher's environment variables; without one, a world of one.

    The same script runs under ``python train.py`` and under ``torchrun --nproc-per-node 2 train.py``, ``srun``,
    ``mpirun``, ``accelerate launch``, Ray Train and submitit. Tensors on the CPU are exchanged by gloo, those on an
    NVIDIA GPU by NCCL, those on another accelerator by the backend that PyTorch has for it. An existing process group is
    used.

    With a ``mesh``, the ranks along it share the data, and ``rank`` and ``size`` are those of the data. All other ranks
    get the same rows and compute the model together, as in tensor parallelism.

    Example::

        comm = create_communicator()
        updater = StandardUpdater(iterator, optimizer, model, comm=comm)

        mesh = init_device_mesh(comm.device.type, (4, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        updater = StandardUpdater(iterator, optimizer, model, comm=create_communicator(mesh=mesh["dp"]))

    Args:
        device: the device on which this rank computes; by default, and for ``"auto"``, the accelerator with the number of
            the rank on this machine, or the only visible one, or the CPU if there is none. The updater and the extensions
            take it from ``comm.device``.
        mesh: a ``DeviceMesh`` over all ranks, or the slice of one along which the data are shared; it has several
            dimensions for ``fully_shard`` with replicas. By default all ranks share the data.
        timeout: the seconds that a rank waits in an exchange for another that does not arrive; then all ranks end with an
            error that names the late rank, its last iteration and its stack. The default is 30 minutes; process groups
            created by the script keep their own timeout.
        survive: True to go on without ranks that are lost: the others keep their processes, models and state, and do again
            what was interrupted. It needs a store that outlives every rank: that of ``torchrun``, on a machine that stays if
            the variable ``PET_RDZV_ENDPOINT`` names it.

    Raises:
        RuntimeError: several processes were started, and an environment variable that they need is missing or wrong, or
            some of them do not connect.
        TypeError: ``mesh`` is not a ``DeviceMesh``.
        ValueError: there is no such device, another rank uses it, PyTorch has no backend for it, the mesh does not contain
            every rank exactly once, ``timeout`` is not above 0, or ranks could not ``survive`` the loss of another.
    """
    global _groups_joined
    timeout = plain(timeout)
    if timeout is not None and not is_number(timeout):
        raise TypeError(f"timeout is a number of seconds, or None for {TIMEOUT.total_seconds():g}; got {timeout!r}")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(
            f"timeout is a number of seconds above 0 in which a late rank has to arrive; got {timeout!r}: give more than "
            f"the longest work of one rank takes, or None for {TIMEOUT.total_seconds():g}"
        )
    if not isinstance(survive, bool):
        raise TypeError(f"survive is True or False, got {survive!r}")
    started = dist.is_available() and dist.is_initialized()
    info = (
        RankInfo(dist.get_rank(), dist.get_world_size(), read_local_rank(os.environ))
        if started
        else read_rank_info(os.environ)
    )
    rank_device = _device_of_rank(device, info.local_rank)
    set_device_of_rank(rank_device, info.size > 1)
    if info.size == 1 and not started:
        alone = Communicator()
        alone.device = rank_device
        return alone
    if rank_device.type != "cpu":
        torch.accelerator.set_device_index(rank_device)
    limit = TIMEOUT if timeout is None else timedelta(seconds=timeout)
    if survive:
        _check_survival(info, rank_device, mesh, started)
        from chainring._distributed.survival import SurvivingCommunicator, describe_process  # which few programs need

        store = meet(_where_torchruns_meet(info, os.environ), limit, about=describe_process())
        return SurvivingCommunicator(rank_device, info.local_rank, info.rank, info.size, store, timeout)
    _groups_joined += int(started)  # the same number on all ranks, for keys that no earlier communicator has used
    store = store_of_group(f"joined/{_groups_joined}") if started else _start(info, rank_device, limit)
    world = ProcessGroupCommunicator(rank_device, info.local_rank, store, ends_group=not started, timeout=timeout)
    if mesh is None:
        return world
    if not hasattr(mesh, "get_coordinate") or not hasattr(mesh, "device_type"):
        raise TypeError(
            "mesh is a DeviceMesh whose ranks share the data, or a slice of one, such as "
            f'init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))["dp"]; got {type(mesh).__name__}'
        )
    if mesh.device_type != rank_device.type:
        raise ValueError(
            f"the mesh is one of {mesh.device_type!r}, and this rank computes on {str(rank_device)!r}: make it by "
            f"init_device_mesh({rank_device.type!r}, ...), or give create_communicator(device={mesh.device_type!r})"
        )
    return MeshCommunicator(world, mesh.mesh.flatten().tolist())


def _check_survival(info: RankInfo, device: torch.device, mesh: Any, started: bool) -> None:
    """Refuse ranks that could not go on without others."""
    if started:
        reason = "the script has started its process groups itself, which end with a rank: let create_communicator() do that"
    elif mesh is not None:
        reason = "on a mesh ranks may have a part of the model or of its state, which is lost with them: leave mesh out"
    elif info.address:
        reason = (
            "the store through which the ranks meet is that of rank 0, and ends with it: start each rank by a torchrun, as "
            "`PET_RDZV_ENDPOINT=HOST:PORT torchrun --nnodes 1:N --nproc-per-node 1 --max-restarts 0 --rdzv-backend c10d "
            "script.py`, where HOST is a machine that stays"
        )
    elif device.type != "cpu":
        reason = (
            f'ranks go on without others by gloo alone so far, and this one computes on {device.type!r}: give device="cpu"'
        )
    else:
        return
    raise ValueError(f"survive=True lets ranks go on when others are lost, and {reason}; or leave survive out")


def _where_torchruns_meet(info: RankInfo, environment: Mapping[str, str]) -> RankInfo:
    """Return that ranks meet where their torchruns do, if a variable says where; else the torchrun of rank 0 has a store."""
    if (endpoint := environment.get("PET_RDZV_ENDPOINT")) is None:
        return info
    host, separator, port = endpoint.rpartition(":")
    if not (separator and port.isdecimal()):
        raise RuntimeError(f"PET_RDZV_ENDPOINT is {endpoint!r}, where a store is: give it as HOST:PORT to each torchrun")
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")  # the store may have what earlier runs have published
    start = "-".join([info.start, *(environment[name] for name in names if name in environment)])
    return RankInfo(info.rank, info.size, info.local_rank, start, host, int(port), is_apart=True)


def _device_of_rank(device: Device, local_rank: int) -> torch.device:
    if device is not None and not is_auto(device):
        return as_device(device) or torch.device("cpu")
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    assert accelerator is not None
    if count == 1 and accelerator.type == "cuda":  # that of this task, or that of the machine, which `meet` tells apart
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no accelerator of its own, there are {count}: start fewer processes on this "
            'machine, or give device="cpu"'
        )
    return torch.device(accelerator.type, local_rank)


def _start(info: RankInfo, device: torch.device, limit: timedelta) -> Any:
    """Start the process group, and return the store through which the ranks have met."""
    rank, size = info.rank, info.size
    is_cuda, backend = device.type == "cuda", dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise ValueError(
            f"no backend of torch.distributed exchanges tensors on {device.type!r}, the accelerator of this machine: import "
            f'the package that registers one before create_communicator(), or give device="cpu"'
        )
    store = meet(info, limit, str(torch.cuda.get_device_properties(device).uuid) if is_cuda else "")
    dist.init_process_group(
        "gloo" if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}", store=store, rank=rank, world_size=size,
        timeout=connect_timeout(size), device_id=device if is_cuda else None,
    )  # fmt: skip
    assert dist.group.WORLD is not None
    set_timeout(dist.group.WORLD, TIMEOUT)
    return store


def read_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Return the rank of this process and where it meets the others; without a launcher it is alone.

    The variables of torchrun count first, then those of the launcher nearest to this process that has started several
    tasks. MASTER_ADDR and MASTER_PORT count before what follows from the variables of that launcher.

    Raises:
        RuntimeError: several tasks were started, and a variable without which they cannot meet is missing or wrong.
    """
    environment = _with_step(environment)
    launcher = _launcher_of(environment)
    if launcher is not None and not all(name in environment for name in _TORCHRUN):
        info = _rank_info_by(launcher, environment)
    elif "RANK" in environment or "WORLD_SIZE" in environment:
        if missing := [name for name in _TORCHRUN if name not in environment]:
            raise RuntimeError(
                f"a launcher sets {', '.join(_TORCHRUN)}, and {', '.join(missing)} is missing here; start with "
                "`torchrun --nproc-per-node N script.py`, or unset RANK and WORLD_SIZE to train in one process"
            )
        size = _number(environment, "WORLD_SIZE")
        start = f"{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}-{size}"
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = ("", 0) if has_store else (environment["MASTER_ADDR"], _number(environment, "MASTER_PORT"))
        info = RankInfo(_number(environment, "RANK"), size, read_local_rank(environment), start, address, port)
    else:
        count = environment.get("SLURM_NTASKS", "1")
        if count not in ("0", "1") and "SLURM_STEP_ID" not in environment:
            warn(
                f"this job of Slurm has {count} tasks, as SLURM_NTASKS says, and this process, which srun has not started, "
                f"trains alone: start the script with `srun`, or ask for --ntasks=1 --cpus-per-task={count}",
            )
        return RankInfo(0, 1, 0)
    if info.rank >= info.size:
        raise RuntimeError(f"the environment says that this is rank {info.rank} of {info.size}, counted from 0; {_BY_HAND}")
    return info


def read_local_rank(environment: Mapping[str, str]) -> int:
    """Return the number of this process among those on its machine, where a process group is there already."""
    launcher = _launcher_of(_with_step(environment))
    names = ["LOCAL_RANK", *([] if launcher is None else [launcher.local_rank]), "RANK"]
    return next((_number(environment, name) for name in names if name in environment), 0)


def meet(info: RankInfo, timeout: timedelta, accelerator: str = "", about: str = "") -> Any:
    """Wait for all processes of this start, and return the store through which they have met.

    No other process may use the ``accelerator`` of this name. In the store is what each tells ``about`` itself.

    Raises:
        RuntimeError: some have not come, there are two of one rank, or the port is taken.
        ValueError: two processes use one accelerator; all raise it.
    """
    # The store has what was published in it before: by the ranks that a launcher has restarted, and by these.
    _meetings[info] += 1
    store = PrefixStore(f"chainring/{info.start}/{_meetings[info]}", _open_store(info, timeout))
    if store.add(f"arrived/{info.rank}", 1) > 1:
        raise RuntimeError(
            f"two processes say that they are rank {info.rank} of {info.size}: RANK has one value in several tasks, or "
            "two runs have one MASTER_ADDR and MASTER_PORT; give each task a RANK, and each run a port of its own"
        )
    if accelerator and store.add(f"accelerator/{accelerator}", 1) > 1:
        store.set("conflict", f"rank {info.rank} has no accelerator of its own: another rank uses the one that it has")
    if about:
        store.set(f"about/{info.rank}", about)
    if store.add("arrived", 1) == info.size:
        store.set("met", "")
    try:
        store.wait(["met"], timeout)
    except DistStoreError as error:
        missing = [str(rank) for rank in range(info.size) if not store.check([f"arrived/{rank}"])]
        raise RuntimeError(
            f"of {info.size} ranks these have not come within {timeout.total_seconds():g} s: {', '.join(missing)}; check "
            "that they were started, and what they have printed; create_communicator(timeout=) says how long to wait"
        ) from error
    if store.check(["conflict"]):
        if store.add("told", 1) == info.size:
            store.set("all told", "")
        if info.rank == 0:  # with its process the store ends
            store.wait(["all told"], timeout)
        raise ValueError(
            f"{store.get('conflict').decode()}; start as many processes on a machine as it has accelerators, let each see "
            'all of them or its own, or give device="cpu"'
        )
    return store


def first_machine(machines: str) -> str:
    """Return the first machine of a list in Slurm's notation, such as ``node07`` of ``node[07-09,12],gpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", machines)
    return "" if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _with_step(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with the number of tasks of Slurm's step, where only that of its job is there.

    The script of ``sbatch`` and the shell of ``salloc`` have the number of tasks of their job too, and are none of them.
    """
    is_task = "SLURM_PROCID" in environment and environment.get("ENVIRONMENT") != "BATCH"
    if _SLURM.size in environment or not is_task or "SLURM_NTASKS" not in environment:
        return environment
    return {**environment, _SLURM.size: environment["SLURM_NTASKS"]}


def _launcher_of(environment: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher nearest to this process that has started several tasks."""
    found = [launcher for launcher in _LAUNCHERS if launcher.size in environment and _number(environment, launcher.size) > 1]
    # With --mpi=pmi2, srun sets variables of MPICH too.
    same = ((_MPICH.rank, _SLURM.rank), (_MPICH.size, _SLURM.size))
    if _SLURM in found and all(environment.get(one) == environment.get(other) for one, other in same):
        found = [launcher for launcher in found if launcher is not _MPICH]
    return found[0] if found else None


def _rank_info_by(launcher: _Launcher, environment: Mapping[str, str]) -> RankInfo:
    """Return the rank of one of several tasks of a launcher other than torchrun."""
    if launcher.rank not in environment:
        raise _cannot_meet(launcher, environment, f"{launcher.rank} is not set")
    for name, own in (("RANK", launcher.rank), ("WORLD_SIZE", launcher.size)):
        if environment.get(name, environment[own]) != environment[own]:
            raise _cannot_meet(launcher, environment, f"{name} is {environment[name]}, and {own} is {environment[own]}")
    first, second = launcher.if_one_machine
    machines = next((environment[name] for name in launcher.machines if name in environment), "")
    is_one_machine = environment.get(first) == environment.get(second, second) or first_machine(machines) == machines != ""
    if not (address := environment.get("MASTER_ADDR")):
        if not (is_one_machine or machines):
            reason = "nothing says on which machine rank 0 is; set MASTER_ADDR to it on all"
            raise _cannot_meet(launcher, environment, reason)
        if not is_one_machine and environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
            reason = "SLURM_DISTRIBUTION=arbitrary; set MASTER_ADDR to the machine of rank 0 on all"
            raise _cannot_meet(launcher, environment, reason)
        address = "127.0.0.1" if is_one_machine else first_machine(machines)
    rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
    if launcher.local_rank not in environment and not is_one_machine:
        raise _cannot_meet(launcher, environment, f"{launcher.local_rank} is not set")
    local_rank = _number(environment, launcher.local_rank) if launcher.local_rank in environment else rank
    names = [environment[name] for name in launcher.start if name in environment]
    start = "-".join([launcher.size, str(size), *names])
    # Below the ports that systems give to connections, and the same for all tasks of a start.
    port = 10_000 + zlib.crc32(start.encode()) % 20_000 if names else _DEFAULT_PORT
    return RankInfo(
        rank, size, local_rank, start, address, _number({"MASTER_PORT": str(port), **environment}, "MASTER_PORT")
    )


def _cannot_meet(launcher: _Launcher, environment: Mapping[str, str], reason: str) -> RuntimeError:
    return RuntimeError(
        f"{launcher.name} has started {environment[launcher.size]} tasks, as {launcher.size} says, and they cannot meet: "
        f"{reason}. Each would train alone on all data. Either {_BY_HAND}, or let {launcher.name} start one task a machine, "
        f"and in it torchrun, such as `{launcher.name} torchrun --nproc-per-node N script.py`; to train in one process, "
        f"unset {launcher.size}"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise RuntimeError(f"{name} is {environment[name]!r}, where a launcher puts a whole number; {_BY_HAND}")
    return int(environment[name])


@cache  # as long as this process lives, in which the ranks may meet again
def _open_store(info: RankInfo, timeout: timedelta) -> Any:
    """Return torchrun's store, or that of rank 0."""
    if not info.address:
        return next(rendezvous("env://", info.rank, info.size, timeout=timeout))[0]
    try:
        has_store = info.rank == 0 and not info.is_apart
        return TCPStore(info.address, info.port, info.size, has_store, timeout, wait_for_workers=False)
    except DistNetworkError as error:
        remedy = (
            "let PET_RDZV_ENDPOINT say where the torchruns meet, which then need no --rdzv-endpoint"
            if info.is_apart
            else "set MASTER_ADDR to the machine of rank 0, and MASTER_PORT to a port that is free there and can be reached "
            "from the others, the same for all"
        )
        raise RuntimeError(f"the ranks cannot meet at {info.address}, port {info.port}: {remedy}: {error}") from error
