"""A run to which commands are given while it trains, and the same run without them."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

import chainring
from chainring.datasets import TupleDataset
from chainring.iterators import MixtureIterator
from chainring.nn import Classifier
from chainring.training import StandardUpdater, Trainer, extensions

MOST = 400_000  # iterations, in which a command is carried out on any machine


class Count:
    """An extension with state, which no trigger calls."""

    default_name, calls = "count", 0

    def __call__(self, trainer):
        self.calls += 1
        chainring.report({"calls": self.calls})

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


def nothing(trainer):
    """What a run does after an iteration, or a trigger answers, where a test gives nothing else."""


def build(out, stop, extension=nothing, *, comm=None, scheduled=False, saves=nothing, loads="later", **settings):
    """The trainer, with snapshots of two names: ``early`` after iteration 2, and ``later`` when ``saves`` says so."""
    torch.manual_seed(0)
    drawn = np.random.default_rng(0)
    data = {name: TupleDataset(drawn.normal(size=(24, 4)).astype(np.float32), np.arange(24) % 3) for name in ("web", "code")}
    iterator = MixtureIterator(data, 8, weights={"web": 1, "code": 1}, seed=0)
    model = Classifier(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop = stop if callable(stop) else (stop, "iteration")
    trainer = Trainer(StandardUpdater(iterator, optimizer, model, comm=comm, **settings), stop, out=str(out))
    trainer.extend(Count(), trigger=(10**9, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(50, "iteration")))
    trainer.extend(extensions.Recorder((50, "iteration")))
    trainer.extend(lambda trainer: extension(trainer), name="extension")  # which a run with another one recognizes
    if scheduled:
        trainer.extend(extensions.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 10**6)), trigger=(1, "iteration"))
    for name, trigger in (("early", is_second), ("later", saves)):
        trainer.extend(extensions.snapshot(name, autoload=name == loads), name=name, trigger=trigger)
    return trainer


def is_second(trainer):
    """The trigger of the early snapshot."""
    return trainer.updater.iteration == 2


def recorded(out):
    """The commands in the record of a run."""
    return json.loads((Path(out) / "run.json").read_text()).get("commands", [])


class Commands:
    """An extension that gives commands after an iteration, and a stop trigger that ends the run some iterations later."""

    def __init__(self, out, *commands, after=3, rest=20):
        self.out, self.commands, self.after, self.rest = str(out), commands, after, rest
        self.done_at = None

    def __call__(self, trainer):
        if trainer.updater.iteration == self.after and trainer.comm.is_main:
            try:
                chainring.control(self.out, *self.commands)
            except FileNotFoundError:  # the record is not in the store yet
                self.after += 50

    def ends(self, trainer):
        """True when the run has gone on for a while after all were carried out or refused."""
        iteration = trainer.updater.iteration
        if self.done_at is None and iteration > self.after and (iteration % 50 == 0 or trainer.comm.size > 1):
            done = recorded(trainer.out) if trainer.comm.is_main else None
            done = trainer.comm.broadcast_object(done)
            if len(done) == len(self.commands):
                self.done_at = done[-1]["iteration"]
        return iteration >= MOST or (self.done_at is not None and iteration >= self.done_at + self.rest + 50)


def commanded_at_its_end(out, ends, *commands):
    """A stop trigger that gives commands to a run when another one ends it, so that it does not read them any more."""

    def fires(trainer):
        if not ends(trainer):
            return False
        chainring.control(str(out), *commands)
        return True

    return fires


def bits(trainer):
    """What a command may change, to the last bit."""
    updater = trainer.updater
    iterator = updater.get_iterator("main")
    state = [parameter.tolist() for parameter in updater.get_model("main").parameters()]
    rates = [group["lr"] for group in updater.get_optimizer("main").param_groups]
    return updater.iteration, state, rates, iterator.weights, trainer.get_extension("count").calls
