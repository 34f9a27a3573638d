"""Every public extension and trigger in a training of its own: a part of the table that the resume tests go through.

A key is the name of the part; behind a colon stands what is peculiar about this use of it. A value are settings of
`interrupted.Made`.
"""

import io

import numpy as np
import torch
from interrupted import BATCH, LENGTH, loss_of

from chainring import iterators, report, writers
from chainring.training import extensions, triggers
from resume_program import Noisy

OFTEN = (2, "iteration")


def points(n=20):
    """Whole arrays, of which no example is asked for by itself."""
    return np.linspace(-1, 1, 4 * n, dtype=np.float32).reshape(n, 4)


def labels(n=20):
    return np.arange(n) % 3


def alone(make, trigger=None):
    """One extension that knows neither model nor optimizer."""
    return {"extra": lambda net, optimizer: [(make(), trigger)]}


def shifting(kind, *arguments):
    return {"extra": lambda net, optimizer: [kind("lr", *arguments)]}


def printed():
    out = io.StringIO()
    report = extensions.PrintReport(["epoch", "iteration", "main/loss"], "rows", out=out)
    report.shown = out
    return report


def evaluated(net, optimizer):
    held_out = iterators.SerialIterator(Noisy(), BATCH, repeat=False)
    return [(extensions.Evaluator(held_out, net), (3, "iteration"))]


def averaged(net, optimizer):
    average = extensions.ExponentialMovingAverage(net, 0.9)
    held_out = iterators.SerialIterator(points(8), BATCH, repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(held_out, average.model, eval_func=lambda x: loss_of(average.model, x))
    return [average, (evaluator, OFTEN)]


def statistics(net, optimizer):
    return [extensions.ParameterStatistics(net, trigger=(3, "iteration"))]


def scheduled(net, optimizer):
    return [(extensions.LRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)), OFTEN)]


def on_plateau(net, optimizer):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    return [(extensions.LRScheduler(scheduler, monitor="main/loss"), OFTEN)]


def saved(net, optimizer):
    return [
        (extensions.snapshot("s_{.updater.iteration}", asynchronous=False), OFTEN),
        (extensions.snapshot("best", asynchronous=False), triggers.MinValueTrigger("main/loss", OFTEN)),
    ]


def saved_object(net, optimizer):
    return [(extensions.snapshot_object(net, "net_{.updater.iteration}", asynchronous=False), OFTEN)]


def usual(net, optimizer):
    named = extensions.defaults(trigger=(3, "iteration"))
    return [(each, getattr(each, "trigger", None)) for each in named if not isinstance(each, extensions.ProgressBar)]


EXTENSIONS = {
    "DumpGraph": alone(lambda: extensions.DumpGraph("main/loss")),
    "defaults": {"extra": usual},
    "dump_graph": alone(lambda: extensions.dump_graph("main/loss", "graph.dot")),
    "Evaluator": {"extra": evaluated},
    "ExponentialMovingAverage": {"extra": averaged},
    "ExponentialShift": shifting(extensions.ExponentialShift, 0.9),
    "FailOnNonNumber": alone(extensions.FailOnNonNumber),
    "FailOnNonNumber: skip": alone(lambda: extensions.FailOnNonNumber("skip")),
    "InverseShift": shifting(extensions.InverseShift, 0.5, 0.75),
    "LRScheduler": {"extra": scheduled},
    "LRScheduler: by a value": {"extra": on_plateau},
    "LinearShift": shifting(extensions.LinearShift, (0.1, 0.01), (1, 6)),
    "LogReport": alone(lambda: extensions.LogReport(trigger=(3, "iteration"))),
    "LogReport: to a table": alone(
        lambda: extensions.LogReport(trigger=OFTEN, filename=None, writers=[writers.CsvWriter()])
    ),
    "BestValue": alone(lambda: extensions.BestValue("main/loss", lambda best, new: new < best, (3, "iteration"))),
    "MaxValue": alone(lambda: extensions.MaxValue("main/loss", OFTEN)),
    "MinValue": alone(lambda: extensions.MinValue("main/loss"), (3, "iteration")),
    "MicroAverage": alone(lambda: extensions.MicroAverage("main/loss", "main/draw", "quotient", (3, "iteration"))),
    "MultistepShift": shifting(extensions.MultistepShift, 0.5, [2, 5], None),
    "ParameterStatistics": {"extra": statistics},
    "PlotReport": alone(lambda: extensions.PlotReport(["main/loss", "main/draw"], trigger=(4, "iteration"))),
    "PolynomialShift": shifting(extensions.PolynomialShift, 2, 6),
    "PrintReport": alone(printed),
    "Profiler": alone(extensions.Profiler),
    "ProgressBar": alone(lambda: extensions.ProgressBar(update_interval=3, out=io.StringIO())),
    "RankTimes": alone(lambda: extensions.RankTimes((3, "iteration"))),
    "Recorder": alone(lambda: extensions.Recorder((3, "iteration"))),
    "RunningAverage": alone(lambda: extensions.RunningAverage("main/draw", trigger=(3, "iteration"))),
    "StepShift": shifting(extensions.StepShift, 0.5, 3),
    "SystemMetrics": alone(lambda: extensions.SystemMetrics((1, "iteration"))),
    "Throughput": alone(lambda: extensions.Throughput((1, "iteration"))),
    "Timer": alone(lambda: extensions.Timer(1e6)),
    "WarmupShift": shifting(extensions.WarmupShift, 0.001, 6, None),
    "observe_lr": {"extra": lambda net, optimizer: [*scheduled(net, optimizer), (extensions.observe_lr(), OFTEN)]},
    "observe_value": alone(lambda: extensions.observe_value("time", lambda trainer: trainer.elapsed_time), OFTEN),
    "snapshot": {"extra": saved},
    "snapshot_object": {"extra": saved_object},
}


class EveryThird(triggers.Trigger):
    """A trigger of one's own, with state of its own."""

    def __init__(self):
        self.asked = 0

    def ask(self, trainer):
        self.asked += 1
        return self.asked % 3 == 0

    def serialize(self, serializer):
        super().serialize(serializer)
        self.asked = serializer("asked_so_far", self.asked)


def firing(make):
    """A trigger that two extensions share; that they were called is in the observation, and in the log."""

    def extra(net, optimizer):
        trigger = make()
        return [(lambda trainer, name=name: report({name: 1.0}), trigger) for name in ("fired", "fired too")]

    return {"extra": extra}


TRIGGERS = {
    "BestValueTrigger": firing(lambda: triggers.BestValueTrigger("main/loss", lambda best, new: new < 0.95 * best, OFTEN)),
    "EarlyStoppingTrigger": firing(lambda: triggers.EarlyStoppingTrigger(OFTEN, "main/loss", 1, max_trigger=None)),
    "EarlyStoppingTrigger: of the run": {
        "stop": lambda: triggers.EarlyStoppingTrigger(OFTEN, "main/draw", 1, "min", max_trigger=(LENGTH, "iteration"))
    },
    "IntervalTrigger": firing(lambda: triggers.IntervalTrigger(0.3, "epoch")),
    "ManualScheduleTrigger": firing(lambda: triggers.ManualScheduleTrigger([0.5, 2, 2.1], "epoch")),
    "MaxValueTrigger": firing(lambda: triggers.MaxValueTrigger("main/draw", OFTEN)),
    "MinValueTrigger": firing(lambda: triggers.MinValueTrigger("main/loss")),
    "OnceTrigger": firing(triggers.OnceTrigger),
    "ReachedTrigger": firing(lambda: triggers.ReachedTrigger(1.5, "epoch")),
    "ReachedTrigger: of the run, in seconds": {"stop": lambda: triggers.ReachedTrigger(3, "second")},
    "TimeTrigger": firing(lambda: triggers.TimeTrigger(1.5)),
    "Trigger": firing(EveryThird),
    "all_of": firing(lambda: triggers.all_of(OFTEN, triggers.MinValueTrigger("main/loss", OFTEN))),
    "any_of": firing(lambda: triggers.any_of((0.7, "epoch"), triggers.MinValueTrigger("main/draw", OFTEN))),
    "any_of: of the run": {
        "stop": lambda: triggers.any_of((LENGTH, "iteration"), triggers.EarlyStoppingTrigger(OFTEN, "main/draw", 2, "min"))
    },
    "get_stop_trigger": {"stop": lambda: triggers.get_stop_trigger((2, "epoch"))},
    "get_trigger": firing(lambda: triggers.get_trigger((1.5, "second"))),
}


def together(net, optimizer):
    """Every extension and every trigger in one training."""
    settings = [{**EXTENSIONS, **TRIGGERS}[name] for name in (*EXTENSIONS, *TRIGGERS)]
    return [each for setting in settings for each in setting.get("extra", lambda *_: ())(net, optimizer)]
