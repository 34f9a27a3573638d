"""Trainings that are hard to judge: seeded by the clock or not at all, with times, files, children, or without an end."""

import array
import enum
import functools
import itertools
import os
import queue
import random
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn

import chainring
from chainring import iterators, training
from chainring.training import extensions


class Model(nn.Module):
    """A layer, and what a test does with it in each forward."""

    def __init__(self, change=None):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.change = change
        self.calls = 0

    def forward(self, x):
        loss = self.layer(x).square().mean()
        if self.change is not None:
            loss = loss * self.change(self)
        chainring.report({"loss": loss}, self)
        return loss


def points(size=24):
    return np.linspace(-1, 1, 4 * size, dtype=np.float32).reshape(size, 4)


def build(out, change=None, data=None, stop=(100, "epoch"), evaluates=False):
    """A trainer whose epochs have six iterations; it seeds nothing."""
    model = Model(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    source = iterators.SerialIterator(points() if data is None else data, 4)
    trainer = training.Trainer(training.StandardUpdater(source, optimizer, model), stop, out=out)
    if evaluates:
        held_out = iterators.SerialIterator(points(4), 4, repeat=False, shuffle=False)
        trainer.extend(extensions.Evaluator(held_out, model), trigger=(4, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(3, "iteration")))
    return trainer


def evaluated(out):
    """Evaluates between the ends of epochs."""
    return build(out, evaluates=True)


def unseeded(out):
    """All that it draws, the weights and the order, is in its state."""
    return build(out)


def unseeded_data(out):
    """The data are drawn before the run, and are in no state."""
    return build(out, data=torch.rand(24, 4))


def torch_seeded(out):
    """Only torch is seeded; Python's generator begins by the clock, and nobody draws from it."""
    torch.manual_seed(0)
    random.seed()
    return build(out)


def clock_seeded(out):
    """The seed is the time."""
    torch.manual_seed(time.time_ns() % 2**32)
    return build(out)


class Noisy:
    """Examples with noise from an unseeded generator of its own."""

    def __init__(self):
        self.noise = np.random.default_rng()

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return points()[i] + self.noise.normal(size=4).astype(np.float32)


def noisy(out):
    return build(out, data=Noisy())


def entropic(out):
    """From the fifth iteration on, the loss is scaled by what the system draws."""

    def change(model):
        model.calls += 1
        return 1 + os.urandom(1)[0] if model.calls > 4 else 1

    return build(out, change)


def acts_late(out):
    """A count that no state holds, and that changes one loss, in iteration 25."""

    def change(model):
        model.calls += 1
        return 2 if model.calls == 25 else 1

    return build(out, change)


def counts_in_vain(out):
    """A count that no state holds and nothing follows."""

    def change(model):
        model.calls += 1
        return 1

    return build(out, change)


def timed(out):
    """Keeps times in a buffer, in the state of an extension, and in rows, and reports speeds."""

    class Times(training.Extension):
        began = 0.0
        lasted = 0.0

        def __call__(self, trainer):
            self.lasted, self.began = time.time() - self.began, time.time()
            trainer.updater.get_model("main").stamp.fill_(time.time())

        def serialize(self, serializer):
            self.began = serializer("began", self.began)
            self.lasted = serializer("lasted", self.lasted)

    trainer = build(out)
    trainer.updater.get_model("main").register_buffer("stamp", torch.zeros((), dtype=torch.float64))
    trainer.extend(Times())
    trainer.extend(extensions.Throughput(trigger=(2, "iteration")))
    return trainer


def appends(out):
    """Adds a line to a file of its own in each iteration."""

    def append(trainer):
        with open(Path(trainer.out) / "own.txt", "a") as file:
            file.write(f"{trainer.updater.iteration} {float(trainer.observation['main/loss'])}\n")

    trainer = build(out)
    trainer.extend(append)
    return trainer


def appends_elsewhere(out):
    """Adds the line to a file beside its out, which all runs share."""
    trainer = build(out)

    def append(trainer):
        with open(Path(out).parent.parent / "own.txt", "a") as file:
            file.write(f"{trainer.updater.iteration}\n")

    trainer.extend(append)
    return trainer


def writes_afresh(out):
    """Writes the last iterations of its state into a file, beside the time."""

    class Last(training.Extension):
        last = ()

        def __call__(self, trainer):
            self.last = (*self.last, trainer.updater.iteration)[-3:]
            (Path(trainer.out) / "last.txt").write_text(f"{self.last}\n{time.time()}\n")
            (Path(trainer.out) / f"plain_{trainer.updater.iteration}.txt").write_text(f"{self.last}\n")

        def serialize(self, serializer):
            self.last = tuple(serializer("last", self.last))

    trainer = build(out)
    trainer.extend(Last())
    return trainer


def hangs(out):
    """Waits in its fourth iteration for what never comes."""

    def wait_for_ever(trainer):
        if trainer.updater.iteration == 4:
            threading.Event().wait()

    trainer = build(out)
    trainer.extend(wait_for_ever)
    return trainer


class Noted(torch.utils.data.Dataset):
    """Read in worker processes, whose numbers it leaves in a file."""

    def __init__(self, pids):
        self.pids = pids

    def __len__(self):
        return 24

    def __getitem__(self, i):
        note(self.pids, os.getpid())
        return points()[i]


def note(path, pid):
    with open(path, "a") as file:
        file.write(f"{pid}\n")


def with_children(out):
    """Has workers that persist, a child, a child in a session of its own, and a thread that does not end."""
    chainring.deterministic(0)
    pids = Path(out).parent.parent / "pids"
    loader = torch.utils.data.DataLoader(Noted(pids), 4, num_workers=1, persistent_workers=True)
    for new_session in (False, True):
        note(
            pids,
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=new_session).pid,
        )
    threading.Thread(target=threading.Event().wait).start()
    trainer = build(out)
    model = trainer.updater.get_model("main")
    updater = training.StandardUpdater(loader, trainer.updater.get_optimizer("main"), model)
    return training.Trainer(updater, (100, "epoch"), out=out)


def short(out):
    """Ends after four iterations."""
    return build(out, stop=(4, "iteration"))


def frozen(out):
    """Every gradient is zero, so that no parameter changes."""
    return build(out, change=lambda model: model.calls * 0.0)


def continuing(out):
    """Saves snapshots, continues from them, and ends after 14 iterations."""
    trainer = build(out, stop=(14, "iteration"))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(20, "iteration"))
    return trainer


def saving(out):
    """Saves snapshots, from which it does not continue by itself."""
    trainer = build(out)
    trainer.extend(extensions.snapshot(), trigger=(20, "iteration"))
    return trainer


def turned(at, out, stop):
    """An extension scales the loss at the ends of some epochs, by an attribute that no state holds."""
    trainer = build(out, lambda model: model.scale, stop=stop)
    model = trainer.updater.get_model("main")
    model.scale = 1.0

    def turn(trainer):
        model.scale = at.get(trainer.updater.epoch, model.scale)

    trainer.extend(turn, trigger=(1, "epoch"))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(20, "epoch"))
    return trainer


def turned_late(out):
    """As mixup is turned off for the last epochs."""
    return turned({4: 0.5}, out, (6, "epoch"))


def turned_for_a_while(out):
    """And back again, in the second half of the run."""
    return turned({13: 0.5, 15: 1.0}, out, (20, "epoch"))


def turned_in_a_crowd(out):
    """The same in a model of so many attributes that all comparisons of them take seconds."""
    trainer = turned_for_a_while(out)
    trainer.updater.get_model("main").notes = [[number] for number in range(5000)]
    return trainer


class Phase(enum.Enum):
    """Of a training."""

    ONE = 1
    TWO = 2


class Settings:
    """A class that serves as a namespace."""

    step = 0


COLLECTED = []
COUNT = 0


def numbers():
    """A generator that counts."""
    number = 0
    while True:
        number += 1
        yield number


def remembering(out):
    """Remembers the iteration in every form that Python has, and saves none of them; nothing follows from it."""
    trainer = build(out, stop=(14, "iteration"))
    model, optimizer = trainer.updater.get_model("main"), trainer.updater.get_optimizer("main")
    generator, counter, listed, cycle = numbers(), itertools.count(), iter([0] * 99), itertools.cycle("ab")
    content, numbered, many = bytearray(4), array.array("d", [0]), [0] * 300
    zipped, names, waiting = zip("a" * 99, strict=False), types.SimpleNamespace(at=0), queue.Queue()
    file = open(__file__)  # noqa: SIM115 - it stays open

    @functools.lru_cache
    def costly(number):
        return number

    class Remembering(training.Extension):
        trigger = (1, "iteration")
        shared: list[int] = []  # noqa: RUF012 - of all objects
        phase = Phase.ONE
        cache = 0

        def __init__(self):
            self.by_iteration = {}

        def __call__(self, trainer):
            global COUNT
            at = COUNT = Settings.step = names.at = trainer.updater.iteration
            self.cache += 1
            many[200] += 1
            for iterator in (generator, counter, listed, cycle, zipped, file):
                next(iterator)
            content[0] = numbered[0] = self.by_iteration[at] = costly(at)
            self.shared.append(at)
            COLLECTED.append(at)
            waiting.put(at)
            os.environ["ITERATION"] = str(at)
            if at == 3:
                self.phase = Phase.TWO
                model.layer.register_forward_hook(lambda *_: None)
                model.layer.bias.register_hook(lambda gradient: None)
                optimizer.register_step_post_hook(lambda *_: None)

    trainer.extend(Remembering(), name="it")
    return trainer
