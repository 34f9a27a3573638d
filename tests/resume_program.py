"""The program that the resume tests stop and continue: everything that draws, counts or remembers, in a few seconds."""

import json
import os
import pickle
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn

import chainring
from chainring import iterators, serializers, training
from chainring.datasets import DatasetMixin
from chainring.training import extensions, triggers

EXAMPLES, BATCH, EPOCHS = 23, 5, 2


class Noisy(DatasetMixin):
    """Points with noise from three generators; it takes down which were asked for."""

    def __init__(self):
        self.consumed = []

    def __len__(self):
        return EXAMPLES

    def get_example(self, i):
        self.consumed.append(i)
        x = np.full(4, i / EXAMPLES, np.float32) + np.random.normal(size=4).astype(np.float32) + random.random()
        return torch.from_numpy(x).float() + torch.rand(4), i % 3


class Net(nn.Module):
    """Dropout draws from the global generator, BatchNorm keeps statistics, and the loss is reported by hand."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x, t):
        loss = nn.functional.cross_entropy(self.body(x), t)
        chainring.report({"loss": loss, "draw": np.random.rand() + random.random()}, self)
        return loss


class StopsWhenWorse:
    """Stops when the validation loss has not improved twice; its state is the PyTorch pair."""

    def __init__(self):
        self.best, self.worse = float("inf"), 0

    def __call__(self, trainer):
        value = trainer.observation.get("validation/main/loss")
        if value is not None:
            self.best, self.worse = min(self.best, value), 0 if value < self.best else self.worse + 1
        return self.worse >= 3 or trainer.updater.epoch >= EPOCHS

    def state_dict(self):
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state):
        self.best, self.worse = state["best"], state["worse"]


def build(out, stop=None, seed=0, accumulate=1, device=None, **settings):
    """A trainer over fresh objects; the seed must not matter where state is loaded."""
    chainring.deterministic(seed)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    data = Noisy()
    train = iterators.SerialIterator(data, BATCH)
    updater = training.StandardUpdater(train, optimizer, net, accumulate=accumulate, device=device)
    trainer = training.Trainer(updater, StopsWhenWorse() if stop is None else stop, out=out, **settings)
    held_out = iterators.SerialIterator(Noisy(), 4, repeat=False)
    fired = []
    trainer.extend(extensions.Evaluator(held_out, net, device=device), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(3, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(0.5, "epoch"), filename="other"))
    for name, trigger in {
        "fraction": (0.3, "epoch"),
        "schedule": triggers.ManualScheduleTrigger([2, 5, 6], "iteration"),
        "once": triggers.OnceTrigger(),
    }.items():
        trainer.extend(lambda t, name=name: fired.append((name, t.updater.iteration)), name=name, trigger=trigger)
    return trainer, data, fired


def resumed(out):
    """A trainer that continues another in memory after four of eight iterations, made with another seed."""
    first, *_ = build(f"{out}/first", stop=(4, "iteration"))
    first.run()
    made = build(f"{out}/second", stop=(8, "iteration"), seed=5)
    made[0].load_state_dict(first.state_dict())
    return made


def outcome(trainer, data, fired):
    """All that an interrupted run must have in common with an uninterrupted one, as plain values."""
    updater = trainer.updater
    logs = [trainer.get_extension(name).log for name in ("LogReport", "LogReport_1")]
    return {
        "iteration": updater.iteration,
        "parameters": {k: v.tolist() for k, v in updater.get_model("main").state_dict().items()},
        "adam": {
            i: {k: v.tolist() for k, v in entries.items()}
            for i, entries in updater.get_optimizer("main").state_dict()["state"].items()
        },
        "log": [[{k: v for k, v in row.items() if k != "elapsed_time"} for row in log] for log in logs],
        "observation": {k: float(v) for k, v in trainer.observation.items()},
        "consumed": list(data.consumed),
        "fired": list(fired),
        "generators": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }


def uninterrupted(out, accumulate, device):
    """Runs from the beginning to the end."""
    made = build(out, accumulate=accumulate, device=device)
    made[0].run()
    return outcome(*made)


def first_part(out, k, accumulate, device):
    """Runs k iterations; returns the state and what happened so far."""
    trainer, data, fired = build(out, stop=_Either(k), accumulate=accumulate, device=device)
    trainer.run()
    # As bytes: between processes, torch would share the tensors' memory with a process that has ended.
    return pickle.dumps(trainer.state_dict()), list(data.consumed), list(fired)


class _Either(StopsWhenWorse):
    """The stop trigger of the run, and a stop after k iterations before it is asked."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def __call__(self, trainer):
        return trainer.updater.iteration >= self.k or super().__call__(trainer)


_Either.__name__ = StopsWhenWorse.__name__  # the state is for a trigger of the same class


def with_snapshots(made, autoload):
    """Takes a snapshot every iteration, and another whenever the validation is better than before."""
    trainer = made[0]
    trainer.extend(extensions.snapshot(autoload=autoload), trigger=(1, "iteration"))
    best = triggers.MinValueTrigger("validation/main/loss", (2, "iteration"))
    trainer.extend(extensions.snapshot("best"), trigger=best)
    return made


def killed_at(out, k, device):
    """Runs until k iterations are on the disk, and is gone at once; returns what happened so far through a file."""
    made = with_snapshots(build(out, device=device), autoload=False)
    trainer, data, fired = made

    def end(trainer):
        before[trainer.updater.iteration] = list(data.consumed), list(fired)
        if trainer.updater.iteration == k + 1:  # the snapshot of iteration k has been waited for by that of k + 1
            (Path(out) / "so far").write_bytes(pickle.dumps(before))
            os.kill(os.getpid(), signal.SIGKILL)

    before = {}
    end.is_snapshot = True
    trainer.extend(end, priority=-1000)
    trainer.run()


def resumed_from_disk(out, k, autoload, device):
    """Continues from the disk in fresh objects; returns where it began, and the outcome of this part."""
    made = with_snapshots(build(out, seed=12345, device=device), autoload)
    trainer = made[0]
    trainer.extend(lambda trainer: None, name="end")
    if not autoload:
        serializers.load(Path(out) / f"snapshot_iter_{k}", trainer)
    torch.rand(7), np.random.rand(3), random.random()
    trainer.run()
    return json.loads((Path(out) / "run.json").read_text())["starts"][-1]["iteration"], outcome(*made)


def second_part(out, state, accumulate, device):
    """Continues from a state in fresh objects, made with another seed, and returns the outcome of this part."""
    trainer, data, fired = build(out, seed=12345, accumulate=accumulate, device=device)
    trainer.load_state_dict(pickle.loads(state))
    torch.rand(7), np.random.rand(3), random.random()  # a script may draw between load and run
    trainer.run()
    return outcome(trainer, data, fired)
