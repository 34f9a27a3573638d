"""Snapshots of models in every layout of four ranks: each place of each tensor is written once, and none is missing."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.serializers._loading import read_state
from chainring.serializers._safetensors import read
from chainring.serializers._saving import Checkpoint, capture
from chainring.serializers._store import open_store
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
LAYOUTS = {"fsdp": ((4, 1), True), "tp": ((1, 4), False), "tp and ddp": ((2, 2), False), "tp and fsdp": ((2, 2), True)}


def a_net(width=8):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def placed(net, layout):
    """A model in a layout of four ranks, and their communicator."""
    if layout == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
        return create_communicator()
    shape, is_sharded = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if shape[1] > 1:
        parallelize_module(net, mesh["tp"], PLAN)
    if is_sharded:
        for module in (net[0], net[2], net):
            fully_shard(module, mesh=mesh["dp"])
    return create_communicator(mesh=mesh["dp"])


def snapshot_of(world, layout, width, out):
    """Take a snapshot after an update that changes no parameter."""
    net = a_net(width)
    comm = placed(net, layout)
    optimizer = torch.optim.AdamW(net.parameters(), 0.0)
    x, t = torch.linspace(-1, 1, 48).reshape(8, 6), torch.linspace(1, 2, 8).reshape(8, 1)
    iterator = SerialIterator(list(zip(x, t, strict=True)), 8)
    loss = lambda net, x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
    trainer = Trainer(StandardUpdater(iterator, optimizer, net, loss_func=loss, comm=comm), (1, "iteration"), out=out)
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    trainer.run()
    world.barrier()


@pytest.mark.parametrize(("layout", "width"), [*((layout, 8) for layout in LAYOUTS), ("fsdp", 7), ("hsdp", 7)])
def test_every_place_is_written_once_in_every_layout(tmp_path, layout, width):
    """Where dimensions divide evenly and where they do not; copies on several ranks are written by one of them."""
    assert on_ranks(4, snapshot_of, layout, width, str(tmp_path)) == [None] * 4
    snapshot = tmp_path / "snapshot_iter_1"
    state, wanted = read_state(snapshot), a_net(width).state_dict()
    for name, tensor in wanted.items():
        assert torch.equal(state[f"updater/model:main/{name.replace('.', '/')}"], tensor), name
    moments = [entry["exp_avg"] for entry in state["updater/optimizer:main/state"].values()]
    assert [moment.shape for moment in moments] == [tensor.shape for tensor in wanted.values()]
    written = {
        key: sum(
            tensor.numel() for path in snapshot.glob("*.safetensors") for name, tensor in read(path).items() if key in name
        )
        for key in ("model:main", "/exp_avg", "/step")
    }
    count = sum(tensor.numel() for tensor in wanted.values())
    assert written == {"model:main": count, "/exp_avg": 2 * count, "/step": len(wanted)}


class Tensors(nn.Module):
    """Sharded tensors as state of a module."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


SPLIT = torch.arange(72.0).reshape(12, 6)
STRIDED = {
    "alternate rows": [Shard(0), _StridedShard(0, split_factor=2)],
    "column blocks": [_StridedShard(1, split_factor=2), Shard(1)],
}
WHOLE = {
    "rows": SPLIT[:9],
    "columns": SPLIT[:, :5],
    "few": SPLIT[:3],
    "empty": SPLIT[:0],
    "copies": SPLIT,
    "number": SPLIT[1, 1],
}


def write_tensors(world, out):
    """Write a checkpoint of tensors in many placements over a mesh of 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {"rows": [Shard(0), Shard(0)], "columns": [Replicate(), Shard(1)], "few": [Shard(1), Shard(0)]}
    tensors = {
        name: distribute_tensor(value, mesh, placements.get(name, [Replicate(), Replicate()]))
        for name, value in WHOLE.items()
    }
    tensors["empty"] = distribute_tensor(WHOLE["empty"], mesh, [Shard(0), Replicate()])
    rank = world.rank
    blocks = SPLIT.chunk(2, 1)[rank % 2].chunk(2, 1)[rank // 2]
    first, second = SPLIT.chunk(2)[rank // 2].chunk(2)
    alternate = torch.cat([first.chunk(2)[rank % 2], second.chunk(2)[rank % 2]])
    locals_ = {"alternate rows": alternate, "column blocks": blocks}
    for name, local in locals_.items():
        strides = SPLIT.stride()
        tensors[name] = DTensor.from_local(local, mesh, STRIDED[name], run_check=False, shape=SPLIT.shape, stride=strides)
    module = Tensors({name.replace(" ", "_"): value for name, value in tensors.items()})
    Checkpoint(capture(module, comm=world)).commit(open_store(out), "state", 0, comm=world)
    problems = []
    summand = DTensor.from_local(SPLIT, mesh, [Partial(), Replicate()], run_check=False)
    halves = DTensor.from_local(
        SPLIT[world.rank % 2 : 6], mesh, [Shard(0), Shard(0)], run_check=False, shape=SPLIT.shape, stride=(6, 1)
    )
    for tensor in (summand, halves):
        try:
            Checkpoint(capture(Tensors({"strange": tensor}), comm=world))
        except ValueError as error:
            problems.append(str(error))
    return problems


def test_placements_of_all_kinds_are_written_whole_or_refused_on_all_ranks(tmp_path):
    """Uneven and empty shards, copies, rows that alternate between ranks; not summands, nor shards of another size."""
    ranks = on_ranks(4, write_tensors, str(tmp_path))
    state = read_state(tmp_path / "state")
    for name, tensor in (WHOLE | dict.fromkeys(STRIDED, SPLIT)).items():
        assert torch.equal(state[name.replace(" ", "_")], tensor), name
    for problems in ranks:
        assert len(problems) == 2, problems
        assert "before its summands are added" in problems[0]
        assert "'strange': of a tensor of shape [12, 6]" in problems[1]
