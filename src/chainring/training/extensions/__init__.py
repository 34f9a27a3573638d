"""The extensions: evaluation, snapshots, logs, learning rates and everything else that happens between updates."""

from typing import TYPE_CHECKING, Any

from chainring.training.extensions.evaluator import Evaluator, predict
from chainring.training.extensions.exponential_moving_average import ExponentialMovingAverage
from chainring.training.extensions.fail_on_non_number import FailOnNonNumber, NonNumberError
from chainring.training.extensions.learning_rates import LearningRates, find_learning_rate
from chainring.training.extensions.log_report import LogReport
from chainring.training.extensions.lr_scheduler import LRScheduler
from chainring.training.extensions.performance import Profiler, SystemMetrics, Throughput, Timer
from chainring.training.extensions.pictures import DumpGraph, PlotReport, dump_graph
from chainring.training.extensions.print_report import PrintReport
from chainring.training.extensions.progress_bar import ProgressBar
from chainring.training.extensions.rank_times import RankTimes
from chainring.training.extensions.recorder import Recorder
from chainring.training.extensions.shifts import (
    ExponentialShift,
    InverseShift,
    LinearShift,
    MultistepShift,
    PolynomialShift,
    StepShift,
    WarmupShift,
)
from chainring.training.extensions.snapshot import snapshot, snapshot_object
from chainring.training.extensions.values import (
    BestValue,
    MaxValue,
    MicroAverage,
    MinValue,
    ParameterStatistics,
    RunningAverage,
    observe_lr,
    observe_value,
)
from chainring.training.triggers import TriggerLike

__all__ = [
    "BestValue",
    "DumpGraph",
    "Evaluator",
    "ExponentialMovingAverage",
    "ExponentialShift",
    "FailOnNonNumber",
    "InverseShift",
    "LRScheduler",
    "LearningRates",
    "LinearShift",
    "LogReport",
    "MaxValue",
    "MicroAverage",
    "MinValue",
    "MultistepShift",
    "NonNumberError",
    "ParameterStatistics",
    "PlotReport",
    "PolynomialShift",
    "PrintReport",
    "Profiler",
    "ProgressBar",
    "RankTimes",
    "Recorder",
    "RunningAverage",
    "StepShift",
    "SystemMetrics",
    "Throughput",
    "Timer",
    "WarmupShift",
    "defaults",
    "dump_graph",
    "find_learning_rate",
    "observe_lr",
    "observe_value",
    "predict",
    "snapshot",
    "snapshot_object",
]


def defaults(*extensions: Any, trigger: TriggerLike = (1, "epoch")) -> list[Any]:
    """Return the extensions that most scripts register, after those that are given.

    They are a log of all values that are reported, its rows as a table, a bar of progress, and the newest two snapshots,
    from which the same command continues a run that was stopped.

    Example::

        evaluator = extensions.Evaluator(test_iter, model)
        trainer = training.Trainer(updater, (20, "epoch"), extensions=extensions.defaults(evaluator))

    Args:
        extensions: others, which come first and have triggers of their own.
        trigger: when a row is logged and a snapshot is taken; on a stream, which has no epochs, a number of iterations.
    """
    snapshots = snapshot(autoload=True, n_retains=2)
    snapshots.trigger = trigger
    return [*extensions, LogReport(trigger=trigger), PrintReport(), ProgressBar(), snapshots]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from chainring._hints import find_missing

        return find_missing(__name__, name)
