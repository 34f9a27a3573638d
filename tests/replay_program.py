"""The program of which any iteration is replayed: everything that draws, counts or remembers, a NaN, and kills.

    python tests/replay_program.py OUT KEPT [KILL_AT [LENGTH [DEVICE]]]

It writes down in the file KEPT, one line an iteration, what its state is after it, and ends by SIGKILL after one of them.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import chainring
from chainring import iterators, training
from chainring.datasets import DatasetMixin
from chainring.training import extensions, triggers
from chainring.training._digests import describe_leaves
from chainring.training._entry import Observer

EXAMPLES, BATCH, ITERATIONS, POISON = 37, 4, 60, 13  # of the examples one is not a number


class Noisy(DatasetMixin):
    """Points with noise from three generators; one of them is not a number."""

    def __len__(self):
        return EXAMPLES

    def get_example(self, i):
        x = np.full(4, i / EXAMPLES, np.float32) + np.random.normal(size=4).astype(np.float32) + random.random()
        return torch.from_numpy(x).float() + torch.rand(4) + (float("nan") if i == POISON else 0.0), i % 3


class Net(nn.Module):
    """Dropout draws from the global generator, and BatchNorm keeps statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x, t):
        loss = nn.functional.cross_entropy(self.body(x), t)
        chainring.report({"loss": loss, "draw": np.random.rand() + random.random()}, self)
        return loss


class Keeping(Observer):
    """Writes down the state of a trainer where a snapshot would be taken of it."""

    def __init__(self, kept, kill_at):
        self.kept, self.kill_at = kept, kill_at

    def ends(self, trainer, ends):
        with open(self.kept, "a") as file:
            file.write(json.dumps([trainer.updater.iteration, state_of(trainer)]) + "\n")
        if trainer.updater.iteration == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return ends()


def state_of(trainer):
    """All of the state of a trainer, without times, as texts by path."""
    texts = describe_leaves("", trainer.state_dict())
    return {path: text for path, text in texts.items() if "elapsed_time" not in path}


def make_trainer(out="result", workers=2, length=ITERATIONS, device=None):
    """The trainer, which has not run."""
    chainring.deterministic(4)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = iterators.SerialIterator(Noisy(), BATCH)
    if workers:
        data = iterators.MultiprocessIterator(Noisy(), BATCH, n_processes=workers)
    updater = training.StandardUpdater(data, optimizer, model, device=device)
    trainer = training.Trainer(updater, (length, "iteration"), out=out)
    trainer.extend(extensions.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)), trigger=(9, "iteration"))
    trainer.extend(extensions.LinearShift("weight_decay", (0.0, 0.1), (5, 50)))
    trainer.extend(extensions.ExponentialMovingAverage(model, 0.9))
    trainer.extend(extensions.FailOnNonNumber("rollback"))
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    trainer.extend(extensions.Recorder((10, "iteration")))
    trainer.extend(extensions.snapshot(n_retains=3, autoload=True), trigger=(7, "iteration"))
    best = triggers.MinValueTrigger("main/loss", trigger=(5, "iteration"))
    trainer.extend(extensions.snapshot("best"), trigger=best)
    return trainer


def read_kept(path):
    """What was written down, by iteration; of one that was computed again the last."""
    return dict(map(json.loads, Path(path).read_text().splitlines()))


if __name__ == "__main__":
    out, kept, kill_at, length, device = [*sys.argv[1:], *(None, ITERATIONS, None)[len(sys.argv) - 3 :]]
    trainer = make_trainer(out, length=int(length), device=device)
    trainer.watch(Keeping(kept, kill_at and int(kill_at)))
    trainer.run()
