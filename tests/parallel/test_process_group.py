"""create_communicator: the place of a process as the environment says it, and the exchange of two processes."""

import os

import pytest
import torch
import torch.distributed as dist
from exchanges import broadcast_one, count_groups, exchange, exchange_in_a_group
from torch import nn

import forked
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater
from rank_pair import on_two_ranks

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch):
    for name in (*LAUNCHED, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def ranks():
    return on_two_ranks(exchange)


def test_without_a_launcher_it_is_a_world_of_one():
    """No process group is started, and what is exchanged is one's own."""
    comm = create_communicator("cpu")
    tensor = torch.ones(2)
    comm.all_reduce([tensor])
    assert (comm.rank, comm.size, comm.local_rank, comm.device) == (0, 1, 0, torch.device("cpu"))
    assert (comm.gather_object("a"), comm.broadcast_object("b"), comm.start_max(3)()) == (["a"], "b", 3)
    assert tensor.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_a_launched_world_of_one_starts_no_process_group(monkeypatch):
    """``torchrun --nproc-per-node 1`` is the same as no launcher."""
    for name, value in (LAUNCHED | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert create_communicator("cpu").size == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("missing", list(LAUNCHED))
def test_a_missing_variable_is_named_with_what_to_do(monkeypatch, missing):
    """Half of a launcher's environment is an error, and not a world of one."""
    for name, value in LAUNCHED.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"and {missing} is missing here; start with `torchrun"):
        create_communicator("cpu")


@pytest.mark.parametrize(("count", "local_rank", "device"), [(1, "3", "cuda:0"), (8, "3", "cuda:3"), (8, "8", None)])
def test_a_rank_takes_the_accelerator_of_its_number_or_the_only_one_that_it_sees(monkeypatch, count, local_rank, device):
    """With ``srun --gpus-per-task=1`` each task sees its own as the first. Of several, there must be one for each rank."""
    for name, value in (LAUNCHED | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": local_rank}).items():
        monkeypatch.setenv(name, value)
    for name, value in {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": count}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    if device is not None:
        assert create_communicator().device == torch.device(device)
    else:
        with pytest.raises(ValueError, match="local rank 8 has no accelerator of its own, there are 8"):
            create_communicator()


def test_a_device_that_is_none_is_refused():
    """By name, before anything is started."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match="nowhere"):
        create_communicator("nowhere")


def test_each_rank_knows_its_place(ranks):
    """As the launcher says it."""
    assert [found["place"] for found in ranks] == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]


def test_all_reduce_gives_each_rank_the_mean_or_the_sum(ranks):
    """In place, of several dtypes at once."""
    for found in ranks:
        assert found["reduced"] == [[[0.5] * 3] * 2, [1], [1.0, 1.0]]


def test_broadcast_gives_each_rank_the_tensor_of_the_root(ranks):
    """Also one whose memory is not in the order of its rows."""
    for found in ranks:
        assert found["broadcast"] == [[1, 2, 3], [4, 5, 6]]


def test_objects_come_in_the_order_of_the_ranks(ranks):
    """And those of the root to all."""
    for found in ranks:
        assert found["objects"] == ([{"rank": 0}, {"rank": 1}], "from 1")


def test_only_the_root_sends_what_is_broadcast():
    """And not every rank its own, of which all but one would be thrown away."""
    assert on_two_ranks(broadcast_one) == [("content", 0), ("content", 1)]


def test_a_run_makes_two_process_groups_however_many_snapshots_it_takes():
    """One for the training, and one for what is written beside it."""
    assert on_two_ranks(count_groups) == [2, 2]


def test_a_maximum_under_way_is_not_mixed_with_what_comes_between(ranks):
    """It is begun, other things are exchanged, and then it is read."""
    assert [found["largest"] for found in ranks] == [15, 15]


def test_a_communicator_beside_has_the_same_ranks(ranks):
    """For another thread."""
    assert [found["beside"] for found in ranks] == [[0, 1], [0, 1]]


def test_a_rank_that_waits_for_one_that_fails_is_told_its_traceback(ranks):
    """The one that fails raises its own error."""
    (name, is_told, text), (own_name, own_is_told, own_text) = (found["failure"] for found in ranks)
    assert (name, is_told, own_name, own_is_told, own_text) == ("RankFailed", True, "ValueError", False, "broken")
    assert text.startswith("rank 1 has failed, and all stop with it")
    assert "in _fail" in text
    assert "ValueError: broken" in text


@pytest.mark.parametrize(("name", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")])
def test_several_tasks_that_cannot_join_are_refused(monkeypatch, name, launcher):
    """And do not become so many runs of one; a single task is a world of one."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(RuntimeError, match=f"{launcher} has started 4 tasks.*torchrun"):
        create_communicator("cpu")
    monkeypatch.setenv(name, "1")
    assert create_communicator("cpu").size == 1


def test_an_error_reaches_all_in_a_process_group_that_the_script_has_made():
    """With its traceback; the group is the script's, and stays."""
    found = on_two_ranks(exchange_in_a_group)
    assert [(ranks, is_left, after) for ranks, _, is_left, after in found] == [([0, 1], True, [0, 1])] * 2
    (name, is_told, text), failed = (failure for _, failure, _, _ in found)
    assert (name, is_told) == ("RankFailed", True)
    assert "rank 1 has failed" in text
    assert failed[0] == "ValueError"


def update_of_ddp(comm, has_ids):
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    if has_ids:
        net.device_ids = [0]  # which a model on the CPU may not be given, and on "cuda" is; the forward is the same
    data = TupleDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    updater = StandardUpdater(
        SerialIterator(data, 8, seed=1),
        torch.optim.SGD(net.parameters(), 0.1),
        net,
        loss_func=lambda net, x, t: nn.functional.cross_entropy(net(x), t),
        comm=comm,
    )
    updater.start()
    updater.update()
    return [parameter.tolist() for parameter in net.parameters()]


def test_ddp_with_the_ids_of_a_device_trains_as_without():
    """``DistributedDataParallel(model, device_ids=[rank])`` moves the first input of a forward, which so needs one."""
    assert on_two_ranks(update_of_ddp, True) == on_two_ranks(update_of_ddp, False)


def test_an_accelerator_for_which_pytorch_has_no_backend_is_refused():
    """A group of gloo alone would start, and fail in the first exchange. In a process of its own, which has that device."""
    program = """
import torch
from chainring.parallel import create_communicator
torch.distributed.Backend.default_device_backend_map = {"cpu": "gloo"}
torch.accelerator.set_device_index = lambda device: None
create_communicator("meta")
"""
    done = forked.run(["-c", program], env={**os.environ, **LAUNCHED})
    assert "ValueError: no backend of torch.distributed exchanges tensors on 'meta'" in done.stderr
