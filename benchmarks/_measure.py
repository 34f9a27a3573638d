"""Times of several loops, taken in turns, and what one costs more than another."""

from __future__ import annotations

import argparse
import gc
import json
import operator
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _turns import QUARTERS, Loop


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name: what the reader sees.
        run: trains for that many epochs, its own preparation included, and calls `lap` when a training step begins.
        over: the name of the row whose time is subtracted; ``None`` for a loop that others are compared with.
        budget: how much of a difference is allowed, in microseconds an iteration; ``None`` where nothing is promised.
        share: the difference is divided by this, for a row with several of the thing that is priced.
    """

    name: str
    run: Callable[[int], object]
    over: str | None = None
    budget: float | None = None
    share: int = 1


@dataclass
class Plan:
    """How often and by which clock it is measured.

    Attributes:
        steps: training steps of an epoch.
        rounds: of which the median is taken.
        epochs: of a round, of which the median is taken as well.
        clock: gives seconds.
        begins_at_once: the first epochs of a round, which are not timed, run beside one another: where they compile.
    """

    steps: int
    rounds: int
    epochs: int
    clock: Callable[[], float] = time.perf_counter
    begins_at_once: bool = False


@dataclass
class Figure:
    """A figure of five or so rounds: the median, and how far the rounds lie apart."""

    median: float
    least: float
    most: float


def figure(values: Sequence[float]) -> Figure:
    return Figure(statistics.median(values), min(values), max(values))


Times = dict[str, list[list[float]]]
"""By the name of a row: rounds of epochs, in seconds. Epochs of the same place were taken in turn."""


def measure(rows: Sequence[Row], plan: Plan) -> Times:
    """Time epochs of all rows in turn, without what happens once a run."""
    gc.collect()
    gc.freeze()  # what modules hold would otherwise lengthen every row's collections
    rounds = [_round(rows, plan, f"round {number + 1} of {plan.rounds}") for number in range(plan.rounds)]
    _say("")
    return {row.name: [epochs[place] for epochs in rounds] for place, row in enumerate(rows)}


def _round(rows: Sequence[Row], plan: Plan, name: str) -> list[list[float]]:
    """Seconds of the epochs of each row.

    The rows go round a quarter of an epoch at a time, every second time backwards, so that a machine that grows faster or
    slower favours none. Each round has new processes, because where its memory lies makes a loop faster or slower by
    several percent for as long as it runs.
    """
    epochs = [[0.0] * plan.epochs for _ in rows]
    loops: list[Loop] = []
    try:
        for row in rows:
            _say(f"{name}, the first epoch of {row.name}")
            loops.append(Loop(row.name, row.run, plan.epochs, plan.steps, plan.clock))
            if not plan.begins_at_once:
                loops[-1].wait()
        for loop in loops if plan.begins_at_once else ():
            loop.wait()
        for epoch in range(plan.epochs):
            _say(f"{name}, epoch {epoch + 1} of {plan.epochs}")
            for quarter in range(QUARTERS):
                order = range(len(loops)) if quarter % 2 == 0 else reversed(range(len(loops)))
                for place in order:
                    epochs[place][epoch] += loops[place].turn()
    finally:
        for loop in loops:
            loop.close()
    return epochs


def seconds(name: str, times: Times) -> list[float]:
    """Of an epoch of the row, one number a round."""
    return [statistics.median(epochs) for epochs in times[name]]


def differences(name: str, over: str, times: Times) -> list[float]:
    """Seconds an epoch of one row beyond those of another, one number a round: the median of epochs taken in turn."""
    return [statistics.median(map(operator.sub, *pair)) for pair in zip(times[name], times[over], strict=True)]


def ratios(name: str, over: str, times: Times) -> list[float]:
    """Parts of an epoch of another row that one takes, one number a round: the median of epochs taken in turn."""
    return [statistics.median(map(operator.truediv, *pair)) for pair in zip(times[name], times[over], strict=True)]


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text:<80}", end="\r", file=sys.stderr, flush=True)


def parser_of(text: str | None, slack: float | None, limit: str = "SLACK x budget") -> argparse.ArgumentParser:
    """Return the parser that all tables have in common: rounds, a file, and with a ``slack`` a check of the budgets."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round there")
    if slack is not None:
        parser.add_argument("--check", action="store_true", help="exit with 1 when a budget is exceeded beyond the slack")
        told = f"the limit of --check is {limit} (default: {slack:g})"
        parser.add_argument("--slack", type=float, default=slack, help=told)
    return parser


def conclude(args: argparse.Namespace, report: dict[str, Any], failed: Sequence[str]) -> int:
    """Write the figures where that was asked for, and print what is over its limit; returns the exit status."""
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in failed:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if failed else 0


def begin() -> dict[str, object]:
    """Compute with one thread from now on; print and return what the figures are taken on."""
    torch.set_num_threads(1)
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    return facts


def machine() -> dict[str, object]:
    """Describe the machine on which the figures were taken."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
