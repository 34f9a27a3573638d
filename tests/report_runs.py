"""Directories of runs to be shown: one that was really trained and resumed, and logs written by hand."""

import json
import math
from pathlib import Path

import torch
from torch import nn

from chainring import iterators, serializers, training
from chainring.nn import Classifier
from chainring.training import extensions

EXAMPLES = [(torch.tensor([math.sin(i), math.cos(i), i % 3, 1.0]), i % 3) for i in range(30)]


def trained(out):
    """A run of three epochs, resumed with another learning rate for three more; returns its directory."""
    out = Path(out)
    part(out, 3, 0.1).run()
    resumed = part(out, 6, 0.5)
    serializers.load(out / "snapshot_iter_9", resumed)
    resumed.run()
    return out


def part(out, epochs, lr):
    """One start of it, with the same weights each time."""
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    updater = training.StandardUpdater(iterators.SerialIterator(EXAMPLES, 10, seed=0), optimizer, model)
    trainer = training.Trainer(updater, (epochs, "epoch"), str(out), config={"lr": lr, "note": "<b>bold</b>"})
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(EXAMPLES, 10, repeat=False, shuffle=False), model))
    trainer.extend(extensions.dump_graph("main/loss"))
    trainer.extend(extensions.Profiler())
    trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport())
    return trainer


def logged(out, rows, end=""):
    """A directory with nothing but a log of these rows, and ``end`` after the last of them."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return out


def recorded(out, **parts):
    """A directory with a record of a run, in which these parts are otherwise than empty."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    empty = {"format": 1, "config": {}, "versions": {}, "files": [], "starts": []}
    (out / "run.json").write_text(json.dumps({**empty, **parts}))
    return out


def falling(number, **more):
    """Rows of a loss that falls."""
    return [
        {"main/loss": 2 * math.exp(-i / number), "epoch": i // 10, "iteration": i, "elapsed_time": 0.01 * i, **more}
        for i in range(1, number + 1)
    ]
