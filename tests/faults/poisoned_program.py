"""A small job of very many iterations, one of whose examples may be wrong: its value is 10,000, or not a number.

python tests/faults/poisoned_program.py OUT EXAMPLE VALUE [--recorded]
"""

import argparse

import numpy as np
import torch
from torch import nn

import chainring
from chainring import iterators, training
from chainring.datasets import TupleDataset
from chainring.training import extensions

ITERATIONS, BATCH = 100_000, 2


def loss_of(model, x, t):
    loss = nn.functional.smooth_l1_loss(model(x), t)
    chainring.report({"main/loss": loss})
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("example", type=int)
    parser.add_argument("value", type=float)
    parser.add_argument("--recorded", action="store_true")
    arguments = parser.parse_args()
    chainring.deterministic(0)
    x = np.random.default_rng(0).normal(size=(ITERATIONS * BATCH, 3)).astype(np.float32)
    t = x.sum(1, keepdims=True)
    x[arguments.example] = arguments.value
    model = nn.Linear(3, 1)
    data = iterators.SerialIterator(TupleDataset(x, t), BATCH, seed=1)
    updater = training.StandardUpdater(data, torch.optim.SGD(model.parameters(), lr=1e-5), model, loss_func=loss_of)
    trainer = training.Trainer(updater, (ITERATIONS, "iteration"), out=arguments.out)
    trainer.extend(extensions.LogReport(trigger=(1000, "iteration")))
    trainer.extend(extensions.snapshot(), trigger=(5000, "iteration"))
    if arguments.recorded:
        trainer.extend(extensions.Recorder())
    trainer.run()
