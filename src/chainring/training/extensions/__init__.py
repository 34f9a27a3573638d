"""What happens besides updating."""

from chainring.training.extensions.dump_graph import DumpGraph, dump_graph
from chainring.training.extensions.evaluator import Evaluator
from chainring.training.extensions.fail_on_non_number import FailOnNonNumber, NonNumberError
from chainring.training.extensions.log_report import LogReport
from chainring.training.extensions.print_report import PrintReport
from chainring.training.extensions.progress_bar import ProgressBar
from chainring.training.extensions.snapshot import snapshot, snapshot_object

__all__ = [
    "DumpGraph",
    "Evaluator",
    "FailOnNonNumber",
    "LogReport",
    "NonNumberError",
    "PrintReport",
    "ProgressBar",
    "dump_graph",
    "snapshot",
    "snapshot_object",
]
