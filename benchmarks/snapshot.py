"""How long a snapshot stops the training loop, beside one memcpy of the same state and other writers in the same run.

Run it on a machine that has nothing else to do, on the disk that is meant::

    python benchmarks/snapshot.py

A figure is the median of the rounds; a round takes each row once, after some training steps in which nothing is written.
All files are flushed to the disk, Lightning's too, so the times until then compare. A writer's first snapshot, in which it
gets its buffers, is not counted. "slowest step" is that of the training steps made while the files are written, in the row
of the memcpy that of the steps made while nothing is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import Figure, begin, conclude, figure, parser_of
from _snapshots import ASYNCHRONOUS, LAYERS, LIGHTNING, MEMCPY, Rounds, State, Writers

BUDGET, BUDGET_SIZE = 1.3, 200
"""How often the time of one memcpy the loop may stand still for an asynchronous snapshot, and for how many MB."""


def measured(
    size: int, rounds: int, directory: Path, layers: int = LAYERS, device: str = "cpu", only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a state of ``size`` MB in so many layers, as they go into the table and the file.

    ``only`` names some of them, the memcpy among them, for those who need no others.
    """
    directory.mkdir()
    state = State(size * 10**6, layers, device)
    writers = Writers(state, directory, only)
    calls = Rounds(writers, lambda number, name: say(f"{size} MB, round {number} of {rounds}: {name}"))
    writers.run(calls, rounds + 1)
    say("")
    return [result_of(size, name, calls) for name in writers.rows]


def result_of(size: int, name: str, calls: Rounds) -> dict[str, Any]:
    taken, copies = calls.taken[name], calls.taken[MEMCPY]
    ordinary = [figure(steps) for steps in calls.ordinary]
    slowest = [max(each.steps) for each in taken if each.steps] if name != MEMCPY else [step.most for step in ordinary]
    return {
        "size_mb": size,
        "row": name,
        "stop_ms": vars(figure([each.stop for each in taken])),
        "ratio": vars(figure([each.stop / copy.stop for each, copy in zip(taken, copies, strict=True)])),
        "durable_ms": None if name == MEMCPY else vars(figure([each.durable for each in taken])),
        "slowest_step_ms": vars(figure(slowest)) if slowest else None,
        "ordinary_step_ms": vars(figure([step.median for step in ordinary])),
        "budget": BUDGET if (size, name) == (BUDGET_SIZE, ASYNCHRONOUS) else None,
        "rounds": [vars(each) for each in taken],
    }


def print_table(results: list[dict[str, Any]]) -> None:
    print(
        f"{'MB':>5}  {'':<26}{'stop, ms':>9} {'(least to most)':<20}{'x memcpy':>8}  {'budget':<16}"
        f"{'on disk, ms':>12}{'slowest step':>14}{'ordinary step, ms':>19}"
    )
    before = None
    for result in results:
        if before not in (None, result["size_mb"]):
            print()
        before = result["size_mb"]
        print(line_of(result))
    if not any(result["row"] == LIGHTNING for result in results):
        print(f"{'':>5}  {'lightning':<26}  missing: pip install --group bench")


def line_of(result: dict[str, Any]) -> str:
    stop, ratio = Figure(**result["stop_ms"]), Figure(**result["ratio"])
    spread = f"({stop.least:.1f} to {stop.most:.1f})"
    budget = result["budget"]
    allowed = "" if budget is None else f"<= {budget:g} {'met' if ratio.median <= budget else 'exceeded'}"
    return (
        f"{result['size_mb']:>5}  {result['row']:<26}{stop.median:>9.1f} {spread:<20}{ratio.median:>8.2f}  {allowed:<16}"
        f"{median(result['durable_ms']):>12}{median(result['slowest_step_ms']):>14}{median(result['ordinary_step_ms']):>19}"
    )


def median(one: dict[str, float] | None) -> str:
    return "-" if one is None else f"{one['median']:.1f}"


def failures(results: list[dict[str, Any]], slack: float) -> list[str]:
    """Return the rows that exceed their budget by more than the slack."""
    checked = [result for result in results if result["budget"] is not None]
    return [
        f"{result['size_mb']} MB, {result['row']}: the loop stands still for {result['ratio']['median']:.2f} memcpys, "
        f"the limit is {slack * result['budget']:g}"
        for result in checked
        if result["ratio"]["median"] > slack * result["budget"]
    ]


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text:<60}", end="\r", file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.5)
    help_sizes = "of the states: the parameters and their Adam (default: 20 200 1000)"
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 200, 1000], metavar="MB", help=help_sizes)
    parser.add_argument("--dir", type=Path, help="where to write; on the disk that is meant (default: the temporary files)")
    args = parser.parse_args()
    if args.rounds < 1 or min(args.sizes) < 1:
        parser.error(f"--rounds and --sizes are at least 1, got {args.rounds} and {args.sizes}")
    if args.check and BUDGET_SIZE not in args.sizes:
        parser.error(f"--check is of {BUDGET_SIZE} MB, got --sizes {args.sizes}; add it")
    return args


def main() -> int:
    args = options()
    facts = begin()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as directory, warnings.catch_warnings(action="ignore"):
        print(f"median of {args.rounds} rounds, written to {directory}\n")
        for size in args.sizes:
            results += measured(size, args.rounds, Path(directory) / f"{size}")
    print_table(results)
    return conclude(args, {"machine": facts, "rows": results}, failures(results, args.slack) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
