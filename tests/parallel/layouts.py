"""Models in every layout of four ranks, with trainers that save and load them."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater, Trainer, extensions

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
LAYOUTS = {"fsdp": ((4, 1), True), "tp": ((1, 4), False), "tp and ddp": ((2, 2), False), "tp and fsdp": ((2, 2), True)}
EVERY = [*LAYOUTS, "ddp", "hsdp"]


def a_net(width=8, seed=3):
    """A small model, whose largest tensor has ``6 * width`` numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def placed(net, layout):
    """A model in a layout of four ranks, or of one process without a layout, and the communicator."""
    if layout is None:
        return net, None
    if layout == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
        return net, create_communicator()
    if layout == "ddp":
        return DistributedDataParallel(net), create_communicator()
    shape, is_sharded = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if shape[1] > 1:
        parallelize_module(net, mesh["tp"], PLAN)
    if is_sharded:
        for module in (net[0], net[2], net):
            fully_shard(module, mesh=mesh["dp"])
    return net, create_communicator(mesh=mesh["dp"])


def a_trainer(layout, out, width=8, seed=3, lr=0.0, autoload=False, stop=1, net=None):
    """A trainer of a model in a layout, which takes a snapshot at every iteration; by default nothing is learned."""
    net, comm = placed(net or a_net(width, seed), layout)
    optimizer = torch.optim.AdamW(net.parameters(), lr)
    x, t = torch.linspace(-1, 1, 48).reshape(8, 6), torch.linspace(1, 2, 8).reshape(8, 1)
    iterator = SerialIterator(list(zip(x, t, strict=True)), 8)
    loss = lambda net, x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
    updater = StandardUpdater(iterator, optimizer, net, loss_func=loss, comm=comm)
    trainer = Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(extensions.snapshot(autoload=autoload), trigger=(1, "iteration"))
    return trainer


def whole_state(trainer):
    """The parameters and the optimizer's state of a trainer, every tensor whole; all ranks call this."""
    optimizer = trainer.updater.get_optimizer("main")
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            tensors = {"value": parameter, **optimizer.state[parameter]}
            found |= {f"{number}/{key}": getattr(t, "full_tensor", lambda t=t: t)().detach() for key, t in tensors.items()}
    return found
