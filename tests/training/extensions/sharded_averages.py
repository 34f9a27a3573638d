"""Averages of a model that `fully_shard` has cut over two ranks, for test_exponential_moving_average.py."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.training import extensions

KINDS = ("average first", "sharding first", "both by hand")


class Net(nn.Module):
    """Its parameters do not divide by two, two of them are one, and it has buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5, bias=False)
        self.third, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 1)
        self.third.weight = self.second.weight

    def forward(self, x, t):
        hidden = self.third(torch.tanh(self.second(self.norm(self.first(x)))))
        return (self.head(hidden) - t).square().mean()


def shard(model, mesh):
    fully_shard(model.first, mesh=mesh)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def find(comm, place):
    """What `check` finds of each kind."""
    found = {kind: check(kind, comm, place) for kind in KINDS}
    found["by tensor"] = check_by_tensor(init_device_mesh("cpu", (2,)))
    found["16 bits"] = [check_16_bits(kind, init_device_mesh("cpu", (2,))) for kind in KINDS]
    return found


def whole(model):
    """The parameters and buffers as they are on one rank; every rank calls it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone() for tensor in tensors]


def lerp(old, new):
    return torch.lerp(old, new, 0.25)


def made(kind, comm, mesh):
    torch.manual_seed(3)
    model = Net()
    if kind == "sharding first":
        shard(model, mesh)
    average = extensions.ExponentialMovingAverage(model, 0.75)
    if kind != "sharding first":
        shard(model, mesh)
    if kind == "both by hand":
        shard(average.model, mesh)
    draw = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(*(torch.randn(12, n, generator=draw) for n in (3, 1)))
    updater = training.StandardUpdater(
        SerialIterator(data, 4, shuffle=False), torch.optim.SGD(model.parameters(), lr=0.1), model, comm=comm
    )
    return updater, average, SerialIterator(data, 4, repeat=False, shuffle=False)


def trainer_of(updater, average, held_out, stop, out):
    trainer = training.Trainer(updater, (stop, "iteration"), out=out)
    trainer.extend(average)
    trainer.extend(extensions.Evaluator(held_out, average.model), name="average", trigger=(1, "iteration"))
    return trainer


def check(kind, comm, place):
    """Train with an average that is evaluated in each iteration, follow it by hand, and resume it from a file."""
    mesh, expected, differences = init_device_mesh("cpu", (2,)), [], []
    updater, average, held_out = made(kind, comm, mesh)
    trainer = trainer_of(updater, average, held_out, 6, f"{place}/{kind}")
    trainer.extend(extensions.snapshot(asynchronous=False), trigger=(3, "iteration"))

    def follow(trainer):
        now, count = whole(updater.get_model("main")), len(list(average.model.parameters()))
        expected[:] = [*map(lerp, expected or now, now[:count]), *now[count:]]
        found = whole(average.model)
        differences.append(max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)))

    trainer.extend(follow, name="follow", priority=0)
    trainer.run()
    resumed = made(kind, comm, mesh)
    later = trainer_of(*resumed, 6, f"{place}/{kind} resumed")
    serializers.load(f"{place}/{kind}/snapshot_iter_3", later)
    later.run()
    sharded = [isinstance(parameter, DTensor) for parameter in average.model.parameters()]
    names = [name for name, module in average.model.named_modules() if isinstance(module, FSDPModule)]
    return {
        "differences": differences,
        "sharded": all(sharded) and len(sharded) == 7,
        "modules": names,
        "tied": average.model.third.weight is average.model.second.weight,
        "own memory": average.model.first.weight is not updater.get_model("main").first.weight,
        "resumed": all(map(torch.equal, whole(average.model), whole(resumed[1].model))),
    }


def check_by_tensor(mesh):
    """Averages of a model of which one tensor is distributed, before it is copied and after."""
    model, other = Net(), Net()
    after = extensions.ExponentialMovingAverage(other, lambda updates: 0.5)
    for net in (model, other):
        net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), mesh, [Shard(1)]))
    average = extensions.ExponentialMovingAverage(model, lambda updates: 0.5)
    model.head.weight.data += 1.0
    average.update()
    try:
        after.update()
    except ValueError as error:
        refusal = str(error)
    difference = (model.head.weight - average.model.head.weight).full_tensor()
    return {"difference": difference.flatten().tolist(), "refusal": refusal}


def check_16_bits(kind, mesh):
    """The average of weights that go from 1 to 2 in bfloat16 and stay there, before and after it was saved and loaded."""

    def averaged():
        model = nn.Sequential(nn.Linear(3, 5)).bfloat16()
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        if kind == "sharding first":
            fully_shard(model, mesh=mesh)
        average = extensions.ExponentialMovingAverage(model, 0.999)
        if kind != "sharding first":
            fully_shard(model, mesh=mesh)
        if kind == "both by hand":
            fully_shard(average.model, mesh=mesh)
        average.update()
        with torch.no_grad():
            model[0].weight.fill_(2.0)
        return average

    average, loaded = averaged(), averaged()
    for _ in range(1600):
        average.update()
    loaded.load_state_dict(average.state_dict())
    found = []
    for each in (average, loaded):
        each.update()
        found.append(whole(each.model)[0].flatten().tolist())
    return found
