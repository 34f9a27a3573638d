"""`chainring average` of snapshots whose tensors lie in parts that several ranks have written."""

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from chainring import serializers
from chainring.cli import main
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_two_ranks


def a_net():
    """Of numbers of rows that two ranks do not share evenly, in two dtypes."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    net.register_buffer("steps", torch.tensor(0.5, dtype=torch.float64))
    return net


def train(comm, out):
    """Train a sharded model for three iterations; return all of its tensors after each."""
    net, states = a_net(), []
    fully_shard(net)
    x, t = torch.linspace(-1, 1, 48).reshape(8, 6), torch.linspace(1, 2, 8).reshape(8, 1)
    loss_func = lambda net, x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
    optimizer, iterator = torch.optim.SGD(net.parameters(), 0.1), SerialIterator(list(zip(x, t, strict=True)), 4, seed=1)
    trainer = Trainer(StandardUpdater(iterator, optimizer, net, loss_func=loss_func, comm=comm), (3, "iteration"), out=out)
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))

    def watch(trainer):
        net.steps.mul_(3)
        state = net.state_dict()
        states.append({key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()})
        states[-1] = {key: value.detach().clone().numpy() for key, value in states[-1].items()}

    trainer.extend(watch, trigger=(1, "iteration"))
    trainer.run()
    comm.barrier()
    return states


def test_the_mean_of_sharded_snapshots_is_that_of_the_whole_tensors(tmp_path):
    """To the last bit that of the three states, added in float64."""
    states, _ = on_two_ranks(train, str(tmp_path / "run"))
    snapshots = [str(tmp_path / "run" / f"snapshot_iter_{iteration}") for iteration in (1, 2, 3)]
    main(["average", *snapshots, str(tmp_path / "mean.safetensors")])
    net = a_net()
    serializers.load(str(tmp_path / "mean.safetensors"), net)
    for key, tensor in net.state_dict().items():
        first, second, third = (state[key].astype("float64") for state in states)
        mean = (first + second + third) / 3
        assert torch.equal(tensor, torch.from_numpy(np.asarray(mean.astype(states[0][key].dtype)))), key
    assert not torch.equal(net[0].weight, torch.from_numpy(states[0]["0.weight"]))
