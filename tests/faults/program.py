"""The run to which it is done: everything that draws, counts or remembers, in a fraction of a second."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

import chainring
from chainring import _random, iterators, serializers, training
from chainring._files import is_url
from chainring.datasets import DatasetMixin
from chainring.serializers._store import open_store
from chainring.training import extensions, triggers

EXAMPLES, BATCH, ITERATIONS, PERIOD = 37, 6, 30, 3


class Noisy(DatasetMixin):
    """Points with noise from three generators; `fault` is called with each index, and may do what data do at times."""

    def __init__(self, fault=None):
        self.fault = fault

    def __len__(self):
        return EXAMPLES

    def get_example(self, i):
        if self.fault is not None:
            self.fault(i)
        x = np.full(4, i / EXAMPLES, np.float32) + np.random.normal(size=4).astype(np.float32) + random.random()
        return torch.from_numpy(x).float() + torch.rand(4), i % 3


class Net(nn.Module):
    """Dropout draws from the global generator, BatchNorm keeps statistics, what is reported draws from the other two.

    ``ballast`` is so many bytes of state that change with every update.
    """

    def __init__(self, ballast=0):
        super().__init__()
        self.register_buffer("ballast", torch.arange(ballast // 4, dtype=torch.int32) if ballast else None)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, t):
        if self.ballast is not None and self.training:
            self.ballast.add_(3)
        loss = nn.functional.cross_entropy(self.body(x), t)
        chainring.report({"loss": loss, "data": x.sum(), "draw": np.random.rand() + random.random()}, self)
        return loss


class Schedule(training.Extension):
    """Reports the learning rate of the update, and lets torch's scheduler step."""

    priority = training.PRIORITY_WRITER

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 13, 20], 0.5)

    def __call__(self, trainer):
        chainring.report({"lr": self.optimizer.param_groups[0]["lr"]})
        self.scheduler.step()

    def serialize(self, serializer):
        serializer.visit("scheduler", self.scheduler)


class Updater(training.StandardUpdater):
    """Counts the iterations that were begun, so that a signal can be told from one that came between two."""

    begun = 0
    inside = False

    def update(self):
        self.begun, self.inside = self.iteration + 1, True
        super().update()


class Last(training.Extension):
    """Is called when everything else of an iteration is over, and before that once when the run starts."""

    is_snapshot = True
    priority = -1000

    def __init__(self, started, ended):
        self.started, self.ended = started, ended

    def initialize(self, trainer):
        self.started()

    def __call__(self, trainer):
        self.ended(trainer)


def iterator(workers, fault, timeout, **settings):
    """The same batches from this process or from workers."""
    if not workers:
        return iterators.SerialIterator(Noisy(fault), BATCH, **settings)
    return iterators.MultiprocessIterator(
        Noisy(fault), BATCH, n_processes=workers, dataset_timeout=timeout, start_method="fork", **settings
    )


def build(
    out, workers=0, start="autoload", fault=None, timeout=30.0, started=lambda: None, ended=lambda trainer: None, ballast=0
):
    """A trainer over fresh objects.

    Args:
        out: the directory or the address of the run.
        workers: the processes that make the training batches.
        start: ``"autoload"``, ``"anew"``, or the name of the snapshot in ``out`` to continue from.
        fault: called with the index of each training example.
        timeout: seconds that an example may take.
        started: called when every extension is initialized.
        ended: called with the trainer at the end of every iteration.
        ballast: bytes of the model beside its parameters.
    """
    chainring.deterministic(0)
    net = Net(ballast)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    updater = Updater(iterator(workers, fault, timeout), optimizer, net)
    trainer = training.Trainer(updater, (ITERATIONS, "iteration"), out=out)
    held_out = iterators.SerialIterator(Noisy(), 8, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held_out, net), trigger=(2, "iteration"))
    trainer.extend(Schedule(optimizer))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    trainer.extend(extensions.snapshot(autoload=start == "autoload", n_retains=2), trigger=(PERIOD, "iteration"))
    best = triggers.MinValueTrigger("main/loss", (4, "iteration"))  # noisy, and its means go across snapshots
    trainer.extend(extensions.snapshot("best"), trigger=best)
    trainer.extend(Last(started, ended))
    if start not in ("autoload", "anew"):
        serializers.load(f"{out}/{start}", trainer)
    return trainer


def outcome(trainer):
    """A digest of each part that a run killed on its way must have in common with one that was not."""
    updater, out = trainer.updater, trainer.url or trainer.out
    best = open_store(out).link_target("best")
    parts = {
        "iteration": updater.iteration,
        "parameters": updater.get_model("main").state_dict(),
        "optimizer": updater.get_optimizer("main").state_dict(),
        "schedule": trainer.get_extension("Schedule").scheduler.state_dict(),
        "generators": _random.get_rng_state(),
        "observation": trainer.observation,
        "log": rows_of(trainer.get_extension("LogReport").log),
        "log.jsonl": rows_of(json.loads(line) for line in content_of(out, "log.jsonl").splitlines()),
        "log file": rows_of(json.loads(content_of(out, "log"))),
        "best": (best, tensors_of(out, best)),
        "newest": tensors_of(out, f"snapshot_iter_{updater.iteration}"),
    }
    return {name: hashlib.sha256(repr(_plain(part)).encode()).hexdigest()[:16] for name, part in parts.items()}


def rows_of(rows):
    """The rows of a log without what a clock has measured."""
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]


def content_of(out, name):
    """A file beside the snapshots."""
    return open_store(out).files.bucket.get(name).content if is_url(out) else Path(out, name).read_bytes()


def tensors_of(out, name):
    """The size and checksum of each file of tensors in a snapshot: model, optimizer and generators, to the last bit."""
    files = open_store(out).snapshot(name).read_manifest().files
    return {file: sizes for file, sizes in files.items() if file.endswith(".safetensors")}


def _plain(value):
    if isinstance(value, dict):
        return [(str(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
