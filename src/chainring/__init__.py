"""Chainring: Chainer's training loop for PyTorch.

A `Trainer` runs an `Updater` and every `Extension` whose trigger fires. A batch walks through the folders::

    dataset -> iterators/ -> converters -> updaters/ -> your model -- report({"loss": loss}, self) --> reporter
                                                                                                          |
                                                                                                 trainer.observation
                                                                                                          |
    disk, screen <-- writers/ <-- extensions/ (Evaluator, LogReport, PrintReport, ...) <-- when triggers/ say so

State flows beside it, from `Trainer.serialize` down through ``serializers/``; settings never do.
"""

from typing import TYPE_CHECKING

from chainring._random import deterministic
from chainring._version import __version__ as __version__
from chainring.reporting.media import report_histogram, report_image, report_text
from chainring.reporting.reporter import Reporter, get_current_reporter, report, report_scope
from chainring.reporting.summary import DictSummary, Summary

__all__ = [
    "DictSummary",
    "Reporter",
    "Summary",
    "control",
    "deterministic",
    "get_current_reporter",
    "report",
    "report_histogram",
    "report_image",
    "report_scope",
    "report_text",
]

if TYPE_CHECKING:
    from chainring._runs.control import control as control
else:

    def __getattr__(name: str) -> object:
        if name == "control":  # which needs most of the package
            from chainring._runs.control import control

            return control
        from chainring._hints import find_missing

        return find_missing(__name__, name)
