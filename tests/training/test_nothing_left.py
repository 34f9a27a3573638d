"""Two hundred trainers in one process, run, failed, rehearsed or only built: the process is as before."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from chainring import iterators, training
from chainring.datasets import TransformDataset, TupleDataset
from chainring.nn import Classifier
from chainring.training import Interrupted, extensions

TRAINERS = 200


def as_it_is(pair):
    """An example for which a worker is asked."""
    return pair


def fails(trainer):
    """An extension that ends the run by an error."""
    raise ArithmeticError("as planned")


def is_terminated(trainer):
    """An extension that ends the run by a signal."""
    os.kill(os.getpid(), signal.SIGTERM)


def trainer_of(out, number):
    """The trainer of the short script; some have workers, a plot, an update in parts, or something that ends the run."""
    x = np.linspace(0, 1, 48, dtype=np.float32).reshape(12, 4)
    data = TupleDataset(x, np.arange(12) % 3)
    if number % 11 == 0:
        data = TransformDataset(data, as_it_is)
        make, settings = iterators.MultiprocessIterator, {"n_processes": 1}
    else:
        make, settings = iterators.SerialIterator, {}
    model = Classifier(nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters())
    updater = training.StandardUpdater(make(data, 6, **settings), optimizer, model, accumulate=1 + number % 2)
    trainer = training.Trainer(updater, (1, "epoch"), out=str(out / str(number)))
    test = make(data, 6, repeat=False, shuffle=False, **settings)
    trainer.extend(extensions.Evaluator(test, model))
    trainer.extend(extensions.snapshot(asynchronous=number % 3 > 0), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "elapsed_time"]))
    trainer.extend(extensions.ProgressBar())
    if number % 50 == 0:
        trainer.extend(extensions.dump_graph("main/loss"))
        trainer.extend(extensions.PlotReport("main/loss"))
        trainer.extend(extensions.Profiler())
        trainer.extend(extensions.Throughput())
        trainer.extend(extensions.SystemMetrics())
        trainer.extend(extensions.FailOnNonNumber())
        trainer.extend(extensions.ExponentialMovingAverage(model))
    return trainer


def use(trainer, number):
    """Runs it, lets it fail or be interrupted, rehearses it, or does nothing with it."""
    way = number % 8
    if way == 5:
        trainer.extend(fails)
        with pytest.raises(ArithmeticError):
            trainer.run()
    elif way == 6:
        trainer.extend(is_terminated)
        with pytest.raises(Interrupted):
            trainer.run()
    elif way == 2:
        trainer.rehearse()
    elif way != 7:
        trainer.run()


def uses(out, numbers):
    """Builds and uses trainers; returns what tells whether they and their models are still there."""
    left = []
    for number in numbers:
        trainer = trainer_of(out, number)
        use(trainer, number)
        left += [weakref.ref(part) for part in (trainer, trainer.updater, trainer.updater.get_model("main"))]
    return left


def state_of_the_process():
    """Threads, open files, signal handlers and child processes."""
    gc.collect()
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))  # of Linux only
    return {
        "threads": set(threading.enumerate()),
        "all threads": {path.name for path in Path("/proc/self/task").glob("*")},
        "files": sorted(os.listdir("/dev/fd")),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "children": (multiprocessing.active_children(), sorted(children.split())),
    }


def left_since(before, seconds=60.0):
    """The names of what is not as it was; threads from before may have ended, and the system may take a while to end one."""
    end = time.monotonic() + seconds
    while True:
        after = state_of_the_process()
        for name in ("threads", "all threads"):
            after[name] |= before[name]
        left = [name for name in before if after[name] != before[name]]
        if left != ["all threads"] or time.monotonic() > end:
            return left
        threading.Event().wait(0.02)


def test_two_hundred_trainers_leave_nothing_behind(tmp_path):
    """No thread, open file, signal handler or worker process, and none of the trainers themselves."""
    uses(tmp_path / "first", range(12))  # what is loaded or started once in a process
    before = state_of_the_process()
    left = uses(tmp_path / "then", range(TRAINERS))
    assert left_since(before) == []
    assert {number // 3 for number, reference in enumerate(left) if reference() is not None} == set()


def test_a_run_that_has_ended_holds_nothing(tmp_path):
    """Its threads, files, handlers and workers go with the run, and not only with the trainer."""
    uses(tmp_path / "first", [0])
    before, trainers = state_of_the_process(), []
    for number in (0, 11, 22, 33, 53, 77):
        trainers.append(trainer_of(tmp_path / "then", number))
        use(trainers[-1], number)
    assert [trainer.updater.iteration > 0 for trainer in trainers] == [True] * 6
    assert left_since(before) == []
