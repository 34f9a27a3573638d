"""Runs on a mesh, along one dimension of which the data are shared, while the other ranks compute one model together."""

import tempfile

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater, Trainer
from rank_pair import on_ranks

X = torch.linspace(-1, 1, 96).reshape(16, 6) ** 3
T = torch.linspace(1, 2, 16).reshape(16, 1)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
UPDATES = 20


def a_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def an_updater(net, comm=None, **settings):
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    iterator = SerialIterator(list(zip(X, T, strict=True)), 8, seed=1)
    return StandardUpdater(
        iterator, optimizer, net, loss_func=lambda net, x, t: ((net(x) - t) ** 2).mean(), comm=comm, **settings
    )


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().tolist()


def a_mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def on_mesh(net, shape, is_sharded):
    """The communicator of the data, of a model made parallel along the second dimension, and sharded along the first."""
    mesh = a_mesh(shape)
    if shape[1] > 1:
        parallelize_module(net, mesh["tp"], PLAN)
    if is_sharded:
        for module in (net[0], net[2], net):
            fully_shard(module, mesh=mesh["dp"])
    return create_communicator(mesh=mesh["dp"])


def trained(world, shape=None, is_sharded=False):
    """The gradients of the first update, and the parameters after all, of one process or of a mesh of ranks."""
    net, gradients = a_net(), []
    comm = None if world is None else on_mesh(net, shape, is_sharded)
    updater = an_updater(net, comm)
    keep_first = lambda _: gradients or gradients.extend(whole(p.grad) for p in net.parameters())  # noqa: E731
    updater.callbacks.add("update_on_start", keep_first)
    with tempfile.TemporaryDirectory() as out:
        out = out if world is None else world.broadcast_object(out)
        Trainer(updater, (UPDATES, "iteration"), out=out).run()
        if world is not None:
            world.barrier()
    return gradients, [whole(parameter) for parameter in net.parameters()]


@pytest.mark.parametrize(("shape", "is_sharded"), [((1, 2), False), ((2, 1), True), ((2, 2), False), ((2, 2), True)])
def test_a_mesh_of_ranks_follows_the_path_of_one_process(shape, is_sharded):
    """Gradients of the first update within 1e-6 or two roundings, parameters after twenty within 1e-5, on every rank.

    A gradient of 15, rounded once, is 1e-6 off, and how many of its sums are rounded apart depends on the processor.
    """
    gradients, parameters = trained(None)
    for rank in on_ranks(shape[0] * shape[1], trained, shape, is_sharded):
        assert isinstance(rank, tuple), rank
        for found, expected, (atol, rtol) in zip(rank, (gradients, parameters), ((1e-6, 2**-22), (1e-5, 0)), strict=True):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=atol)


def places(world):
    comm = create_communicator(mesh=a_mesh((2, 2))["dp"])
    summed = torch.tensor([float(world.rank)])
    comm.all_reduce([summed], average=False)
    sent = torch.tensor([10.0 + world.rank])
    comm.broadcast([sent], root=1)
    gathered = comm.gather_object(world.rank)
    largest = comm.start_max(world.rank)()
    return (
        (comm.rank, comm.size, comm.is_main, comm.world.rank, comm.world.size),
        summed.item(),
        sent.item(),
        gathered,
        largest,
    )


def test_ranks_count_along_the_mesh_and_one_of_the_world_writes():
    """Tensors go along the data, what is gathered is the same on all ranks, and the maximum is that of the world."""
    found = on_ranks(4, places)
    assert [rank[0] for rank in found] == [(0, 2, True, 0, 4), (0, 2, False, 1, 4), (1, 2, False, 2, 4), (1, 2, False, 3, 4)]
    assert [rank[1] for rank in found] == [2.0, 4.0, 2.0, 4.0]  # of ranks 0 and 2, and of 1 and 3
    assert [rank[2] for rank in found] == [12.0, 13.0, 12.0, 13.0]
    assert [rank[3] for rank in found] == [[0, 2]] * 4
    assert [rank[4] for rank in found] == [3] * 4


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def refusals(world):
    """The words with which each layout is refused that would train something else than one process does."""
    mesh = a_mesh((2, 2))
    ddp = DistributedDataParallel(a_net())
    parallel = parallelize_module(a_net(), mesh["tp"], PLAN)
    over_model = fully_shard(a_net(), mesh=mesh["tp"])
    data, every = create_communicator(mesh=mesh["dp"]), create_communicator()
    calls = {
        "no mesh": lambda: create_communicator(mesh=4),
        "half of the ranks": lambda: create_communicator(mesh=DeviceMesh("cpu", [0, 1])),
        "ddp over all": lambda: an_updater(ddp, data),
        "tp without mesh": lambda: an_updater(parallel, every),
        "fsdp over model ranks": lambda: an_updater(over_model, data),
        "batch norm over all": lambda: an_updater(nn.SyncBatchNorm.convert_sync_batchnorm(with_batch_norm()), data),
        "virtual ranks": lambda: an_updater(a_net(), data, virtual_ranks=4),
    }
    words = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            words[name] = f"{type(error).__name__}: {error}"
    return words


def test_a_layout_that_is_not_understood_is_refused_with_the_line_to_write():
    for words in on_ranks(4, refusals):
        assert "TypeError: mesh is a DeviceMesh" in words["no mesh"]
        assert "give all ranks the same slice of one mesh over all ranks" in words["half of the ranks"]
        assert 'process_group=mesh["dp"].get_group()' in words["ddp over all"]
        assert 'comm=create_communicator(mesh=mesh["dp"])' in words["tp without mesh"]
        assert 'fully_shard mesh["dp"]' in words["fsdp over model ranks"]
        assert "SyncBatchNorm counts the rows of all 4 ranks, of which 2 share the data" in words["batch norm over all"]
        assert "leave virtual_ranks out" in words["virtual ranks"]
