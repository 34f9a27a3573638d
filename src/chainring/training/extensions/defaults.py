"""defaults: the extensions that most scripts register."""

from __future__ import annotations

from typing import Any

from chainring.training.extensions.log_report import LogReport
from chainring.training.extensions.print_report import PrintReport
from chainring.training.extensions.progress_bar import ProgressBar
from chainring.training.extensions.snapshot import Snapshot
from chainring.training.triggers import TriggerLike


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
    snapshots = Snapshot(autoload=True, n_retains=2)
    snapshots.trigger = trigger
    return [*extensions, LogReport(trigger=trigger), PrintReport(), ProgressBar(), snapshots]
