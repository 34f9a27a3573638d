"""Every public extension keeps to what `check_extension` asks."""

import inspect
from functools import cache

import pytest
import torch
from training_parts import data, model, updater

from chainring import iterators
from chainring.testing import check_extension
from chainring.training import extensions
from still_machine import hold_still

EACH = (1, "iteration")


def evaluator(source):
    return extensions.Evaluator(iterators.SerialIterator(data(), 3, repeat=False), source.get_model("main"))


def scheduler(source):
    return extensions.LRScheduler(torch.optim.lr_scheduler.StepLR(source.get_optimizer("main"), 1, 0.5))


def plateau(source):
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(source.get_optimizer("main"), patience=0)
    return extensions.LRScheduler(schedule, monitor="main/loss")


def average(source):
    return extensions.ExponentialMovingAverage(source.get_model("main"))


def throughput():
    """In a process whose peak of memory stands still, because it was higher before."""
    raise_peak_memory()
    return extensions.Throughput(trigger=(2, "iteration"))


@cache
def raise_peak_memory():
    torch.ones(2**27)


@pytest.fixture(autouse=True)
def _still_machine(monkeypatch):
    hold_still(monkeypatch)


def rows(extension):
    return extension.log


EXTENSIONS = {
    "BestValue": lambda: extensions.BestValue("main/loss", lambda best, new: new < best, trigger=EACH),
    "DumpGraph": lambda: extensions.dump_graph("main/loss"),
    "Evaluator": evaluator,
    "ExponentialMovingAverage": average,
    "ExponentialShift": lambda: extensions.ExponentialShift("lr", 0.5),
    "FailOnNonNumber": extensions.FailOnNonNumber,
    "InverseShift": lambda: extensions.InverseShift("lr", 0.1, 2.0),
    "LRScheduler": scheduler,
    "LRScheduler by a value": plateau,
    "LinearShift": lambda: extensions.LinearShift("lr", (0.1, 0.01), (1, 4)),
    "LogReport": extensions.LogReport,
    "LogReport every second iteration": lambda: extensions.LogReport(trigger=(2, "iteration")),
    "MaxValue": lambda: extensions.MaxValue("main/loss", trigger=(2, "iteration")),
    "MinValue": lambda: extensions.MinValue("main/loss", trigger=EACH),
    "MicroAverage": lambda: extensions.MicroAverage("main/loss", "main/accuracy", "ratio", trigger=(2, "iteration")),
    "MultistepShift": lambda: extensions.MultistepShift("lr", 0.5, [2, 4], 0.1),
    "ParameterStatistics": lambda source: extensions.ParameterStatistics(source.get_model("main"), trigger=EACH),
    "PlotReport": lambda: extensions.PlotReport(["main/loss"], trigger=(3, "iteration")),
    "PolynomialShift": lambda: extensions.PolynomialShift("lr", 2.0, 5),
    "PrintReport": lambda: extensions.PrintReport(["main/loss"], log_report=extensions.LogReport(trigger=EACH)),
    "Profiler": extensions.Profiler,
    "RankTimes": extensions.RankTimes,
    "ProgressBar": lambda: extensions.ProgressBar(update_interval=1),
    "Recorder": lambda: extensions.Recorder(parameters=(2, "iteration")),
    "RunningAverage": lambda: extensions.RunningAverage("main/loss", trigger=(2, "iteration")),
    "StepShift": lambda: extensions.StepShift("lr", 0.5, 2),
    "SystemMetrics": lambda: extensions.SystemMetrics(trigger=(2, "iteration")),
    "Throughput": throughput,
    "Timer": lambda: extensions.Timer(1e6),
    "WarmupShift": lambda: extensions.WarmupShift("lr", 0.01, 4, 0.1),
    "observe_lr": extensions.observe_lr,
    "observe_value": lambda: extensions.observe_value("twice", lambda trainer: 2 * trainer.updater.iteration),
    "snapshot": lambda: extensions.snapshot(filename="{.updater.iteration}"),
    "snapshot_object": lambda: extensions.snapshot_object(model(), "model"),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_it_is_resumed_and_finalized(name):
    """After every iteration, and after failures."""
    check_extension(EXTENSIONS[name], updater=updater, result=rows if name.startswith("LogReport") else lambda _: None)


def test_every_public_extension_is_tried():
    """None is left out: neither a class nor a function that makes one."""
    public = {name for name in extensions.__all__ if not _is_error(getattr(extensions, name))}
    assert public == {name.partition(" ")[0] for name in EXTENSIONS} | {
        "dump_graph", "defaults", "find_learning_rate", "predict", "LearningRates",
    }  # fmt: skip


def _is_error(kind):
    return inspect.isclass(kind) and issubclass(kind, Exception)
