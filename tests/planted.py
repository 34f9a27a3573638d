"""A small run in which one thing may be another, for the tests of what finds the difference."""

import random

import numpy as np
import torch
from torch import nn

import chainring
from chainring import iterators, training
from chainring.datasets import DatasetMixin
from chainring.training import extensions

LENGTH, DIGESTS, SNAPSHOTS, ROWS = 24, 4, 8, 6  # iterations, and how often each is taken
EXAMPLES, BATCH, WIDTH = 40, 4, 5


class Data(DatasetMixin):
    """Points with noise from torch's generator."""

    def __init__(self, changes):
        self.changes = changes
        self.points = torch.linspace(-1, 1, EXAMPLES * WIDTH).reshape(EXAMPLES, WIDTH)
        if "example" in changes:
            self.points[changes["example"]] = 0.3
        if "pixel" in changes:
            self.points[changes["pixel"], 2] += 1 / 255
        if "label" in changes:
            self.label = changes["label"]

    def __len__(self):
        return self.changes.get("examples", EXAMPLES)

    def get_example(self, i):
        if "draws" in self.changes and i == 7:
            {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "python": random.random}[self.changes["draws"]]()
        x = self.points[i] + self.changes.get("noise", 0.1) * torch.randn(WIDTH)
        return x, (i + (i == self.changes.get("label"))) % 3


class Swish(nn.Module):
    """An activation, by one of two kernels that round otherwise."""

    def __init__(self, by_hand):
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x):
        return x * torch.sigmoid(x) if self.by_hand else nn.functional.silu(x)


class Net(nn.Module):
    """Dropout, running statistics, and what a change asks for."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes
        width = changes.get("width", 8)
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width, momentum=changes.get("momentum", 0.1), eps=changes.get("norm_eps", 1e-5))
        self.act = changes.get("activation", Swish)(bool(changes.get("kernel")))
        self.drop = nn.Dropout(changes.get("dropout", 0.3))
        self.last = nn.Linear(width, 3, bias=changes.get("bias", True))

    def forward(self, x, t):
        h = self.last(self.drop(self.act(self.norm(self.first(x)))))
        loss = nn.functional.cross_entropy(h, t, label_smoothing=self.changes.get("smoothing", 0.0))
        if "penalty" in self.changes:
            loss = loss + self.changes["penalty"] * self.first.weight.square().sum()
        chainring.report({"loss": loss, "accuracy": (h.argmax(1) == t).float().mean()}, self)
        return loss


def optimizer_of(model, changes):
    """AdamW, unless another one is asked for."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if changes.get("optimizer") == "sgd":
        return torch.optim.SGD(parameters, lr=0.02)
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return torch.optim.AdamW(parameters, **{"lr": 0.02, **{name: changes[name] for name in names if name in changes}})


def ulp(tensor, place):
    """Change one number by one unit in the last place."""
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[place] = torch.nextafter(flat[place], torch.tensor(9.0))


def at(iteration, change):
    """An extension that does something once."""

    @training.make_extension(trigger=(iteration, "iteration"))
    def once(trainer):
        if trainer.updater.iteration == iteration:
            change(trainer)

    return once


def make_trainer(out, recorded=True, length=LENGTH, comm=None, wrap=None, **changes):
    """A trainer that has not run; the changes are those of the keys of this file."""
    chainring.deterministic(changes.get("seed", 0))
    torch.set_num_threads(changes.get("threads", 1))
    model = Net(changes)
    if changes.get("init"):
        nn.init.zeros_(model.last.weight)
    if "ulp" in changes:
        ulp(model.get_parameter(changes["ulp"]), 1)
    if "frozen" in changes:
        getattr(model, changes["frozen"]).requires_grad_(False)
    net = model if wrap is None else wrap(model)
    optimizer = optimizer_of(model, changes)
    batches = iterators.SerialIterator(
        Data(changes), changes.get("batch", BATCH), seed=changes.get("order", 1), shuffle=changes.get("shuffle", True)
    )
    names = ("converter", "accumulate", "precision", "virtual_ranks")
    given = {name: changes[name] for name in names if name in changes}
    updater = training.StandardUpdater(batches, optimizer, net, comm=comm, **given)
    trainer = training.Trainer(updater, (length, "iteration"), out=out, config=changes.get("config"))
    add_extensions(trainer, net, optimizer, recorded, changes)
    return trainer


def add_extensions(trainer, model, optimizer, recorded, changes):
    """A schedule, an average, a log, snapshots, and a recorder."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, changes.get("step", 10), changes.get("gamma", 0.8))
    trainer.extend(extensions.LRScheduler(schedule), trigger=(1, "iteration"))
    trainer.extend(extensions.ExponentialMovingAverage(model, changes.get("decay", 0.9)))
    if "evaluated" in changes:
        trainer.extend(at(changes["evaluated"], lambda trainer: chainring.report({"score": changes["score"]})))
    if "later" in changes:
        trainer.extend(at(*changes["later"]))
    trainer.extend(extensions.LogReport(trigger=(ROWS, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(SNAPSHOTS, "iteration"))
    if recorded:
        trainer.extend(extensions.Recorder((DIGESTS, "iteration")))
