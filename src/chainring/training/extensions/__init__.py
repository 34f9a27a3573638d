"""What else happens besides updating."""

from chainring.training.extensions.evaluator import Evaluator
from chainring.training.extensions.log_report import LogReport
from chainring.training.extensions.print_report import PrintReport
from chainring.training.extensions.progress_bar import ProgressBar

__all__ = ["Evaluator", "LogReport", "PrintReport", "ProgressBar"]
