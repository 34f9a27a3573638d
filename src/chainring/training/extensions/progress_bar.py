"""ProgressBar: how far training is and how fast it goes."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from tqdm.auto import tqdm as tqdm_auto

from chainring.training.extension import Extension

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_SECONDS = 3.0  # refreshed at least so often, however slow the iterations are
_LINE_SECONDS = 1.0  # at least between two lines of a plain log
_TEXT = 66  # characters beside the bar


class ProgressBar(Extension):
    """Shows the progress of training: a bar of tqdm's in a terminal or notebook, plain lines anywhere else.

    Args:
        training_length: ``(number, "iteration")`` or ``(number, "epoch")``; by default that of the stop trigger. Without
            a known length there is no total.
        update_interval: iterations between two refreshes; slow iterations are shown every few seconds all the same.
        bar_length: characters of the bar, fewer where the terminal is narrow.
        out: where to show it; ``None`` is the ``sys.stdout`` of the moment.
    """

    def __init__(
        self,
        training_length: tuple[int, str] | None = None,
        update_interval: int = 100,
        bar_length: int = 50,
        out: Any = None,
    ) -> None:
        if training_length is not None and (len(training_length) != 2 or training_length[1] not in ("iteration", "epoch")):
            raise ValueError(f'training_length is (number, "iteration") or (number, "epoch"), got {training_length!r}')
        if update_interval < 1:
            raise ValueError(f"update_interval counts iterations and is at least 1, got {update_interval!r}")
        self._training_length = training_length
        self._update_interval = update_interval
        self._bar_length = bar_length
        self._out = out
        self._bar: Any = None
        self._next_iteration = 0
        self._next_time = 0.0

    def initialize(self, trainer: Trainer) -> None:
        if trainer.comm.rank != 0:
            return
        self._trainer = trainer
        length = self._training_length
        if length is None and hasattr(trainer.stop_trigger, "get_training_length"):
            length = trainer.stop_trigger.get_training_length()
        total, self._unit = length if length is not None and length[1] != "second" else (None, "iteration")
        self._bar = self._make_bar(total)
        self._plan_next(trainer.updater.iteration)

    def _make_bar(self, total: float | None) -> Any:
        """A bar of tqdm's in a terminal or a notebook; elsewhere lines, with the same text."""
        out = sys.stdout if self._out is None else self._out
        in_notebook = self._out is None and tqdm_auto.__mro__[0].__module__ == "tqdm.notebook"
        settings: dict[str, Any] = {
            "total": total,
            "initial": self._done(),
            "unit": self._unit,
            "bar_format": _format(self._unit, total is not None),
        }
        if in_notebook:
            return tqdm_auto(**settings)
        if getattr(out, "isatty", lambda: False)():
            return _Bar(file=out, ncols=_columns(self._bar_length), leave=False, **settings)
        return _Lines(out, self._bar_length, **settings)

    def _done(self) -> float:
        updater = self._trainer.updater
        return updater.iteration if self._unit == "iteration" else updater.epoch_detail

    def __call__(self, trainer: Trainer) -> None:
        iteration = trainer.updater.iteration
        if self._bar is not None and (iteration >= self._next_iteration or time.monotonic() >= self._next_time):
            self._show(iteration)
            self._plan_next(iteration)

    def _plan_next(self, iteration: int) -> None:
        self._next_iteration = iteration - iteration % self._update_interval + self._update_interval
        self._next_time = time.monotonic() + _SECONDS

    def _show(self, iteration: int) -> None:
        updater = self._trainer.updater
        if self._unit == "epoch":
            self._bar.set_postfix_str(f"iteration {iteration}", refresh=False)
        elif getattr(updater, "counts_epochs", True):
            self._bar.set_postfix_str(f"epoch {updater.epoch_detail:.2f}", refresh=False)
        self._bar.ncols = _columns(self._bar_length)
        self._bar.update(self._done() - self._bar.n)

    def finalize(self) -> None:
        if self._bar is not None:
            self._show(self._trainer.updater.iteration)
            self._bar.close()
            self._bar = None


def _format(unit: str, has_total: bool) -> str:
    done = "epoch {n:.2f}" if unit == "epoch" else "iteration {n}"
    if not has_total:
        return done + "{postfix} [{elapsed}, {rate_fmt}]"
    return "{percentage:3.0f}%|{bar}| " + done + "/{total}{postfix} [{elapsed}<{remaining}, {rate_fmt}]"


def _columns(bar_length: int) -> int:
    """The width of the line: that of the terminal, or less where the bar is to be shorter."""
    return min(shutil.get_terminal_size().columns - 1, bar_length + _TEXT)


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which outlives the bar; refreshing is timed here."""

    monitor_interval = 0


class _Lines:
    """What a bar says as plain lines, for a pipe or a file: no colour, no carriage return."""

    def __init__(self, out: Any, bar_length: int, *, total: Any, initial: float, unit: str, bar_format: str) -> None:
        self._out = out
        self._settings = {"total": total, "unit": unit, "bar_format": bar_format, "ascii": True, "initial": initial}
        self.ncols = bar_length + _TEXT
        self.n = initial
        self._postfix = ""
        self._began = self._printed = time.monotonic()
        self._shown: float | None = None

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._postfix = text

    def update(self, done: float) -> None:
        self.n += done
        if time.monotonic() - self._printed >= _LINE_SECONDS:
            self._print()

    def close(self) -> None:
        if self._shown != self.n:
            self._print()

    def _print(self) -> None:
        self._printed, self._shown = time.monotonic(), self.n
        elapsed = self._printed - self._began
        line = tqdm.format_meter(self.n, elapsed=elapsed, ncols=self.ncols, postfix=self._postfix, **self._settings)
        print(line.strip(), file=self._out, flush=True)
