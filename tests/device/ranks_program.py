"""Trainings on a device, also of three ranks, each of which is ``tests/device/ranks_program.py DEVICE OUT CASES``."""

import json
import sys
from pathlib import Path

import stand_in
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import chainring
from chainring import iterators, serializers, training
from chainring.datasets import TupleDataset
from chainring.nn import Classifier
from chainring.parallel import DataParallel, create_communicator
from chainring.serializers._loading import read_state
from chainring.training import extensions

LENGTH, SAVED = 6, 3


def make_net(draws):
    """Nothing that is drawn on the device unless it ``draws``: each device has numbers of its own."""
    torch.manual_seed(0)
    drawing = [nn.Dropout(0.3)] if draws else []
    return nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), *drawing, nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def make_trainer(comm, out, kind="plain", draws=False, device=None, devices=None, **settings):
    """A trainer; ``kind`` is how its model is on the ranks."""
    chainring.deterministic(0)
    device = comm.device if device is None else device
    net = make_net(draws).to(device)
    if kind == "DDP":
        net = DistributedDataParallel(net)
    elif kind == "FSDP2":
        mesh = init_device_mesh(comm.device.type, (comm.size,))
        for layer in (net[0], net[-1], net):
            fully_shard(layer, mesh=mesh)
    elif kind == "DataParallel":
        net = DataParallel(net, devices)
    generator = torch.Generator().manual_seed(2)
    data = TupleDataset(torch.randn(60, 8, generator=generator), torch.randint(3, (60,), generator=generator))
    model = Classifier(net)
    iterator, optimizer = iterators.SerialIterator(data, 12, seed=1), torch.optim.AdamW(model.parameters(), lr=0.01)
    if devices is None or kind == "DataParallel":
        updater = training.StandardUpdater(iterator, optimizer, model, device=device, comm=comm, **settings)
    else:
        updater = training.ParallelUpdater(iterator, optimizer, model, devices=devices, **settings)
    trainer = training.Trainer(updater, (LENGTH, "iteration"), out=str(out))
    held_out = iterators.SerialIterator(data, 20, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held_out, model, device=device), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(), trigger=(SAVED, "iteration"))
    return trainer


def end_of(out):
    """What a run has left: its rows without times, and of its last snapshot models and optimizers, as texts."""
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    state = read_state(Path(out) / f"snapshot_iter_{LENGTH}")
    told = {path: value for path, value in state.items() if path.startswith(("updater/model", "updater/optimizer"))}
    return repr([{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]), texts_of(told)


def texts_of(state):
    if isinstance(state, torch.Tensor):
        numbers = state.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{state.dtype} {list(state.shape)} {numbers.tobytes().hex()}"
    if isinstance(state, dict):
        return {str(key): texts_of(value) for key, value in state.items()}
    return [texts_of(each) for each in state] if isinstance(state, (list, tuple)) else repr(state)


def train_all(comm, out, cases):
    """Each of some trainings, and each continued from its snapshot, in directories named after them."""
    for name, settings in cases.items():
        make_trainer(comm, Path(out) / name, **settings).run()
        resumed = make_trainer(comm, Path(out) / f"{name}, resumed", **settings)
        serializers.load(Path(out) / name / f"snapshot_iter_{SAVED}", resumed)
        torch.rand(comm.rank + 3, device=comm.device)  # what is drawn before a run does not count
        resumed.run()
    comm.barrier()


if __name__ == "__main__":
    stand_in.native.set_device_count(3)
    comm = create_communicator("cpu" if sys.argv[1] == "cpu" else None)
    train_all(comm, sys.argv[2], json.loads(sys.argv[3]))
    comm.close()
