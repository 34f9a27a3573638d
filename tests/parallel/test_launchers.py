"""Launchers: each starts tasks with variables of its own, and the same call finds the place of a task among them.

Here stand-ins set the variables, as the launchers do: as they were read under Slurm 22.05, Open MPI 4.1, MPICH 4.0, and
submitit 1.5; MVAPICH and Flux as others read them. `tests/distributed/launched.py` runs the launchers themselves.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from chainring._distributed.launchers import RankInfo, first_machine, meet, read_local_rank, read_rank_info
from chainring.parallel import create_communicator
from ports import free_port
from rank_pair import in_environments

SBATCH = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def srun(rank, size, machines="localhost", local_rank=None, step=0):
    """The variables of a task of `srun`, in a script of `sbatch`."""
    count = machines.count(",") + 1  # at least
    return {
        **SBATCH, "SLURM_STEP_ID": str(step), "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank if local_rank is None else local_rank),
        "SLURM_STEP_NODELIST": machines, "SLURM_STEP_NUM_NODES": str(count), "SLURM_JOB_NODELIST": f"login,{machines}",
    }  # fmt: skip


def open_mpi(rank, size, local_size=None):
    """The variables of a task of Open MPI's `mpirun`."""
    name = "OMPI_COMM_WORLD"
    return {
        f"{name}_RANK": str(rank), f"{name}_SIZE": str(size), f"{name}_LOCAL_RANK": str(rank % (local_size or size)),
        f"{name}_LOCAL_SIZE": str(local_size or size), "PMIX_NAMESPACE": "2000945153", "PMIX_RANK": str(rank),
    }  # fmt: skip


def mpich(rank, size):
    """The variables of a task of MPICH's `mpiexec`, or of Intel's."""
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: str(value) for name, value in names.items()}


def submitit(rank, size):
    """The variables of a task of submitit's LocalExecutor."""
    name = "SUBMITIT_LOCAL"
    return {
        f"{name}_GLOBALID": str(rank), f"{name}_NTASKS": str(size), f"{name}_LOCALID": str(rank), f"{name}_JOB_ID": "4711",
        f"{name}_JOB_NUM_NODES": "1", "SUBMITIT_EXECUTOR": "local",
    }  # fmt: skip


def mvapich(rank, size):
    """The variables of a task of MVAPICH's `mpirun_rsh`."""
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"MV2_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def flux(rank, size):
    """The variables of a task of `flux run`."""
    names = {"TASK_RANK": rank, "JOB_SIZE": size, "TASK_LOCAL_ID": rank, "JOB_NNODES": 1, "JOB_ID": "ƒ2"}
    return {f"FLUX_{name}": str(value) for name, value in names.items()}


def where(comm):
    """The place that a rank has found, and the sum over all ranks of 1 and of their numbers."""
    numbers = torch.tensor([1.0, comm.rank])
    comm.all_reduce([numbers], average=False)
    return comm.rank, comm.size, comm.local_rank, numbers.tolist()


@pytest.mark.parametrize(
    "task",
    [
        lambda rank: srun(rank, 3),
        lambda rank: {**srun(rank, 3), "PMI_RANK": str(rank), "PMI_SIZE": "3", "PMI_JOBID": "71.0"},  # --mpi=pmi2
        lambda rank: {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "localhost"},
        lambda rank: open_mpi(rank, 3),
        lambda rank: {**srun(0, 2, "a,b", 0), **open_mpi(rank, 3)},  # mpirun has started a process a machine by srun
        lambda rank: {**srun(0, 1), **mpich(rank, 3)},
        lambda rank: mvapich(rank, 3),
        lambda rank: flux(rank, 3),
        lambda rank: {**srun(0, 2, "a,b", 0), **submitit(rank, 3)},
        lambda rank: {**submitit(0, 1), **srun(rank, 3)},
    ],
    ids=["srun", "pmi2", "job", "mpirun", "mpirun by srun", "mpiexec", "mvapich", "flux", "submitit", "srun by submitit"],
)
def test_the_tasks_of_a_launcher_are_the_ranks_of_one_world(task):
    """Each knows its place, and what they exchange is what all have."""
    port = {"MASTER_PORT": free_port()} if {"MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE"} & set(task(0)) else {}
    found = in_environments([{**task(rank), **port} for rank in range(3)], where)
    assert found == [(rank, 3, rank, [3.0, 3.0]) for rank in range(3)]


def test_tasks_of_several_machines_meet_on_the_first():
    """As Slurm lists them; each is the first of its machine."""
    found = in_environments([srun(rank, 3, "localhost,node[2-3]", local_rank=0) for rank in range(3)], where)
    assert found == [(rank, 3, 0, [3.0, 3.0]) for rank in range(3)]


@pytest.mark.parametrize(
    ("machines", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,07],gpu5", "node01"),
        ("gpu5,node[01-03,07]", "gpu5"),
        ("node[7]", "node7"),
        ("rack[2-3]n[005,009-011]-ib", "rack2n005-ib"),
        ("a-b[3,5-9].cluster,c", "a-b3.cluster"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_first_machine_of_slurms_list_has_the_first_rank(machines, first):
    """With its zeros; commas in brackets do not end a name."""
    assert first_machine(machines) == first
    assert read_rank_info(srun(1, 2, f"{machines},z[1-2]", 0)).address == first


def test_each_start_has_a_port_of_its_own():
    """By the job, its step and its restarts, the same on all ranks; below those that a system gives to connections."""
    places = [
        read_rank_info(srun(rank, 2, step=step) | {"SLURM_RESTART_COUNT": restart})
        for step in (0, 1) for restart in ("0", "1") for rank in (0, 1)
    ]  # fmt: skip
    assert [info.port for info in places[::2]] == [info.port for info in places[1::2]]
    assert len({info.port for info in places}) == len({info.start for info in places}) == 4
    assert all(10_000 <= info.port < 30_000 for info in places)


def test_master_addr_and_port_count_before_what_is_derived():
    """With any launcher; with them, tasks of mpirun on several machines meet."""
    given = {"MASTER_ADDR": "node9", "MASTER_PORT": "4444"}
    for task in (srun(1, 4), open_mpi(5, 8, local_size=4), mpich(1, 4), submitit(1, 4)):
        info = read_rank_info({**task, **given})
        assert (info.address, info.port) == ("node9", 4444)
    assert read_rank_info({**open_mpi(5, 8, local_size=4), **given}).local_rank == 1


def test_torchrun_counts_before_what_has_started_it():
    """``srun torchrun``, one task a machine: the ranks are torchrun's, also where the numbers are different."""
    for outer in (srun(1, 2, "a,b", 0), open_mpi(0, 4), SBATCH, {"SLURM_NTASKS": "2"}):
        assert read_rank_info({**outer, **TORCHRUN}) == RankInfo(3, 8, 1, "0-8")
    assert read_local_rank({**srun(1, 2, "a,b", 0), **TORCHRUN}) == 1


def test_variables_that_a_script_exports_for_all_tasks_do_no_harm():
    """WORLD_SIZE, MASTER_ADDR and MASTER_PORT before ``srun``, and RANK by Slurm's number, as many recipes have it."""
    exported = {"WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    assert read_rank_info({**srun(1, 2), **exported})[:3] == (1, 2, 1)
    assert read_rank_info({**srun(1, 2), **exported, "RANK": "1"})[:3] == (1, 2, 1)
    assert read_rank_info({**srun(1, 2), "WORLD_SIZE": "2", "RANK": "1"})[:3] == (1, 2, 1)


@pytest.mark.parametrize("environment", [SBATCH, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "71"}])
def test_a_script_that_srun_has_not_started_trains_alone_and_says_so(monkeypatch, environment):
    """In the script of ``sbatch`` and in the shell of ``salloc`` one process runs, whatever number of tasks the job has."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="4 tasks, as SLURM_NTASKS says.*srun.*--ntasks=1 --cpus-per-task=4") as given:
        assert create_communicator("cpu").size == 1
    assert given[0].filename == __file__


def test_one_task_is_a_world_of_one():
    """Of any launcher, and without a word."""
    for task in (srun(0, 1), open_mpi(0, 1), mpich(0, 1), submitit(0, 1), {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {}):
        assert read_rank_info(task) == RankInfo(0, 1, 0)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 tasks, as SLURM_STEP_NUM_TASKS says.*SLURM_PROCID is not set"),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}, "srun .*on which machine.* set MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 tasks.*OMPI_COMM_WORLD_RANK is not set"),
        (open_mpi(5, 8, local_size=4), "mpirun has started 8 tasks.*on which machine.* set MASTER_ADDR"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1", "MASTER_ADDR": "node1"}, "mpiexec has .*MPI_LOCALRANKID is not set"),
        ({**srun(1, 4, "a,b"), "SLURM_DISTRIBUTION": "arbitrary,NoPack"}, "arbitrary; set MASTER_ADDR"),
        ({**srun(1, 4), "WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and SLURM_STEP_NUM_TASKS is 4"),
        ({**srun(1, 4), "RANK": "0"}, "RANK is 0, and SLURM_PROCID is 1"),
        ({**srun(1, 4), "SLURM_PROCID": "one"}, "SLURM_PROCID is 'one', where a launcher puts a whole number"),
        ({**srun(1, 4), "MASTER_PORT": ""}, "MASTER_PORT is '', where a launcher puts a whole number"),
        (srun(4, 4), "rank 4 of 4, counted from 0"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8, counted from 0"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1', where a launcher puts a whole number"),
    ],
)
def test_tasks_that_cannot_meet_are_an_error_with_a_remedy(environment, reason):
    """And never as many runs of one."""
    with pytest.raises(RuntimeError, match=rf"(?s){reason}.*set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"):
        read_rank_info(environment)


def test_ranks_that_have_parted_may_meet_again():
    """As often as they like, under any launcher: torchrun and a job keep what they have published."""
    found = in_environments([srun(rank, 2) for rank in range(2)], again)
    assert found == [(rank, 2, rank, [2.0, 1.0]) for rank in range(2)]


def again(comm):
    """The place of a rank in its third world."""
    for _ in range(2):
        comm.close()
        comm = create_communicator("cpu")
    return where(comm)


def test_two_tasks_with_one_rank_are_an_error():
    """Where a script has exported RANK for all of them; the second is told, and nobody waits for it."""
    port = free_port()
    assert meeting("A", "B", port=port) == ["met", "met"]
    message = "two processes say that they are rank 1 of 2: RANK has one value in several tasks"
    with pytest.raises(RuntimeError, match=message):
        meet(RankInfo(1, 2, 0, "start", "127.0.0.1", port), timedelta(seconds=120))


def test_ranks_that_do_not_come_are_named():
    """By those that have waited for them."""
    info = RankInfo(0, 4, 0, "start", "127.0.0.1", free_port())
    with pytest.raises(RuntimeError, match=r"of 4 ranks these have not come within 0\.2 s: 1, 2, 3; check"):
        meet(info, timedelta(seconds=0.2))


def test_a_port_that_is_taken_is_named_with_what_to_set():
    """Two runs on a machine may derive one port."""
    port = free_port()
    held = torch.distributed.TCPStore("127.0.0.1", port, 1, True)
    with pytest.raises(RuntimeError, match=f"cannot meet at 127.0.0.1, port {port}: .*MASTER_PORT to a port that is free"):
        meet(RankInfo(0, 2, 0, "start", "127.0.0.1", port), timedelta(seconds=1))
    del held


def test_ranks_that_would_share_an_accelerator_are_told_before_they_begin():
    """All raise, and none waits; an accelerator is known by its serial number, as a task may see its own as the first."""
    (same, other), (own, others) = meeting("A", "A"), meeting("A", "B")
    assert str(same) == str(other)
    assert "has no accelerator of its own: another rank uses the one that it has; start as many" in str(same)
    assert own == others == "met"


def meeting(*accelerators, port=None):
    """What ranks with these accelerators are told."""
    port = port or free_port()

    def tell(rank):
        try:
            meet(RankInfo(rank, 2, rank, "start", "127.0.0.1", port), timedelta(seconds=120), accelerators[rank])
        except ValueError as error:
            return error
        return "met"

    with ThreadPoolExecutor(2) as both:
        return list(both.map(tell, range(2)))
