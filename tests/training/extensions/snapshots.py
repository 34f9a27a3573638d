"""A small run, a witness that copies its state by itself, and gates and faults before the calls that write."""

import io
import os
import threading
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from chainring import report, training
from chainring.iterators import SerialIterator
from chainring.serializers._loading import read_state

PER_EPOCH = 3  # iterations


class Net(nn.Module):
    """Has a buffer, dropout, and a body that a test may freeze."""

    def __init__(self, frozen=False):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        for part in (self.body, self.norm) if frozen else ():
            part.requires_grad_(False)

    def forward(self, x):
        loss = self.head(F.dropout(self.norm(self.body(x)), 0.2)).square().mean()
        report({"loss": loss}, self)
        return loss


def trainer_of(out, stop, *extensions, seed=0, model=None, kind=training.StandardUpdater):
    """A trainer over shuffled data; the seed decides where the parameters begin."""
    torch.manual_seed(seed)
    model = Net() if model is None else model
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.1)
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    updater = kind(SerialIterator(data, 4, seed=1), optimizer, model)
    trainer = training.Trainer(updater, (stop, "iteration"), str(out))
    for extension in extensions:
        if isinstance(extension, tuple):
            trainer.extend(extension[0], trigger=extension[1])
        else:
            trainer.extend(extension)
    return trainer


def run(out, stop, *extensions, **settings):
    """The same, run to its end."""
    trainer = trainer_of(out, stop, *extensions, **settings)
    trainer.run()
    return trainer


EVERY = (1, "iteration")


class Witness(training.Extension):
    """Copies the state of the trainer after each iteration, beside and independently of the snapshots."""

    is_snapshot = True  # at the boundary at which they are taken

    def __init__(self):
        self.states = {}

    def __call__(self, trainer):
        self.states[trainer.updater.iteration] = trainer.state_dict()


def differing(ours, theirs):
    """The keys at which two states differ; time does, and the names of files."""
    keys = (ours.keys() | theirs.keys()) - {"elapsed_time", "extension_identities"}
    return sorted(key for key in keys if not _equal(ours.get(key), theirs.get(key)))


def _equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def holds(path, state):
    """Whether a sound snapshot holds this state."""
    return differing(read_state(Path(path)), state) == []


def names(out):
    """What lies in ``out``, but for the record of the run and what is hidden."""
    return sorted(each.name for each in Path(out).iterdir() if not each.name.startswith(".") and each.name != "run.json")


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def only(*iterations):
    """A trigger that fires after these iterations."""
    return lambda trainer: trainer.updater.iteration in iterations


def at(iteration, call):
    """An extension that makes a call after one iteration."""

    def extension(trainer):
        if trainer.updater.iteration == iteration:
            call()

    return extension


class Gate:
    """Holds the first write of a snapshot, before its first byte, until it is opened or so many seconds have passed."""

    def __init__(self, monkeypatch, seconds=120.0):
        self.opened, self.passed = threading.Event(), threading.Event()
        self._seconds, self._open = seconds, io.open
        monkeypatch.setattr(io, "open", self)

    def __call__(self, path, mode="r", *arguments, **options):
        if "x" in mode and ".tmp" in str(path) and not self.passed.is_set():
            self.opened.wait(self._seconds)
            self.passed.set()
        return self._open(path, mode, *arguments, **options)


def fail_rename(monkeypatch, name, error, once=True):
    """Fails the rename that publishes ``name``, in the manner of a disk."""
    rename, failed = os.rename, []

    def renamed(source, target):
        if Path(target).name == name and not (once and failed):
            failed.append(name)
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)


def flip(path):
    """Flips a bit in the middle of a file."""
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 4
    Path(path).write_bytes(content)
