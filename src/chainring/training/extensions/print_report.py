"""PrintReport: the rows of a LogReport as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from chainring.training.extension import Extension

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class PrintReport(Extension):
    """Prints each new row of a `LogReport` once, under a header; after a resume the earlier rows first.

    Args:
        entries: the keys that are columns; ``None`` takes those of the first row.
        log_report: the name under which the LogReport is registered.
        out: where to print; ``None`` is the ``sys.stdout`` of the moment.
    """

    skip_on_resume = True

    def __init__(self, entries: Sequence[str] | None = None, log_report: str = "LogReport", out: Any = None) -> None:
        if isinstance(entries, str):
            raise TypeError(f"entries is a sequence of keys, got the string {entries!r}; write [{entries!r}]")
        self._entries = None if entries is None else list(entries)
        self._log_report = log_report
        self._out = out
        self._log: list[dict[str, Any]] | None = None
        self._printed = 0
        self._widths: list[int] = []

    def initialize(self, trainer: Trainer) -> None:
        if trainer.comm.rank == 0:
            self._log = self._find(trainer)
            self._print_new()

    def _find(self, trainer: Trainer) -> list[dict[str, Any]]:
        report = self._log_report if hasattr(self._log_report, "log") else trainer.get_extension(self._log_report)
        if not hasattr(report, "log"):
            raise TypeError(f"PrintReport shows the rows of a LogReport, and {self._log_report!r} has no log")
        return report.log  # type: ignore[no-any-return]

    def __call__(self, trainer: Trainer) -> None:
        self._print_new()

    def finalize(self) -> None:
        self._print_new()

    def _print_new(self) -> None:
        log = self._log
        if log is None or len(log) == self._printed:
            return
        if not self._widths:
            self._print_header(log[0])
        for row in log[self._printed :]:
            self._print("  ".join(map(_cell, [row.get(key, "") for key in self._entries or ()], self._widths)))
        self._printed = len(log)

    def _print_header(self, row: dict[str, Any]) -> None:
        if self._entries is None:
            self._entries = list(row)
        self._widths = [max(10, len(entry)) for entry in self._entries]
        self._print("  ".join(f"{entry:<{width}}" for entry, width in zip(self._entries, self._widths, strict=True)))

    def _print(self, line: str) -> None:
        out = sys.stdout if self._out is None else self._out
        tqdm.write(line.rstrip(), file=out)  # steps aside for a progress bar, if there is one
        if hasattr(out, "flush"):
            out.flush()


def _cell(value: Any, width: int) -> str:
    if isinstance(value, (int, float)):
        return f"{value:<{width}g}"
    return f"{value!s:<{width}}"
