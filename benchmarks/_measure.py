"""Times of several loops, taken in turns, and what one costs more than another."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name: what the reader sees.
        run: does that many iterations, its own preparation included.
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
    """How often and by which clock it is measured."""

    iterations: int
    rounds: int
    tries: int
    clock: Callable[[], float]


@dataclass
class Figure:
    """A figure of five or so rounds: the median, and how far the rounds lie apart."""

    median: float
    least: float
    most: float


def figure(values: Sequence[float]) -> Figure:
    return Figure(statistics.median(values), min(values), max(values))


def measure(rows: Sequence[Row], plan: Plan) -> dict[str, list[float]]:
    """Microseconds an iteration of each row, one number a round: (time of 2N iterations - time of N) / N.

    The difference leaves out what happens once a run. Each of the two times is the least of some tries, because what
    other programs do only ever makes a loop slower. Every try goes through all rows, every second one backwards, so that
    a machine that grows faster or slower favours none.
    """
    for row in rows:
        row.run(plan.iterations)  # whatever a library does in its first run only
    gc.collect()
    gc.freeze()  # what the peers' modules hold would otherwise lengthen every row's collections
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(plan.rounds):
        tries: dict[str, list[tuple[float, float]]] = {row.name: [] for row in rows}
        for attempt in range(plan.tries):
            _say(f"round {number + 1} of {plan.rounds}, try {attempt + 1} of {plan.tries}")
            for row in rows if attempt % 2 == 0 else reversed(rows):
                tries[row.name].append((_timed(row, plan.iterations, plan), _timed(row, 2 * plan.iterations, plan)))
        for name, pairs in tries.items():
            once, twice = (min(column) for column in zip(*pairs, strict=True))
            times[name].append((twice - once) / plan.iterations * 1e6)
    _say("")
    return times


def _timed(row: Row, iterations: int, plan: Plan) -> float:
    gc.collect()
    began = plan.clock()
    row.run(iterations)
    return plan.clock() - began


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text:<40}", end="\r", file=sys.stderr, flush=True)


def differences(row: Row, times: dict[str, list[float]]) -> list[float]:
    """What a row costs more than the row it is over, round by round."""
    assert row.over is not None
    return [(own - other) / row.share for own, other in zip(times[row.name], times[row.over], strict=True)]


def parser_of(text: str | None, slack: float | None, limit: str = "SLACK x budget") -> argparse.ArgumentParser:
    """What the command lines of all tables have: rounds, a file, and with a ``slack`` a check of the budgets."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round there")
    if slack is not None:
        parser.add_argument("--check", action="store_true", help="exit with 1 when a budget is exceeded beyond the slack")
        told = f"the limit of --check is {limit} (default: {slack:g})"
        parser.add_argument("--slack", type=float, default=slack, help=told)
    return parser


def conclude(args: argparse.Namespace, report: dict[str, Any], failed: Sequence[str]) -> int:
    """Writes the figures where that was asked for, and says what is over its limit; returns the exit status."""
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in failed:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if failed else 0


def begin() -> dict[str, object]:
    """Computes with one thread from now on; prints and returns what the figures are taken on."""
    torch.set_num_threads(1)
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    return facts


def machine() -> dict[str, object]:
    """What the figures were taken on."""
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
