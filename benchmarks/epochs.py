"""How long an epoch of examples/mnist/train_mnist.py takes, as parts of a hand-written loop over a DataLoader.

Run it on a machine that has nothing else to do::

    python benchmarks/epochs.py

A figure is the median of the rounds. All loops take turns, a quarter of an epoch each; a round is the median of its epochs,
and a ratio that of pairs taken in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import _epochs
from _measure import Figure, Plan, Row, Times, begin, conclude, figure, measure, parser_of, ratios, seconds
from _peers import version

LOADER, GATHER, FUSED = "by hand, DataLoader", "by hand, one gather", "by hand, one gather, fused Adam"
SCRIPT, SCRIPT_FUSED = "Chainring, as written", "Chainring, fused Adam"
COMPILED, COMPILED_FUSED = "Chainring, compile=True", "Chainring, compile=True, fused Adam"
BUDGETS = {
    (50, SCRIPT): (LOADER, 0.70), (50, SCRIPT_FUSED): (FUSED, 1.05), (50, COMPILED): (FUSED, 1.0),
    (50, COMPILED_FUSED): (FUSED, 0.85), (1000, COMPILED_FUSED): (FUSED, 1.0),
}  # fmt: skip
"""Units and row: over which row, and how much of its time is allowed."""
LARGE = 500
"""Units from which an epoch takes seconds, so that three rounds of one are enough."""


def rows_of(out: Path, units: int) -> tuple[list[Row], list[str]]:
    """Return the rows, and the names of the peers that are not installed."""
    by_hand = partial(_epochs.by_hand, out=out, units=units)
    held_out = partial(_epochs.loader, False)
    ours = partial(_epochs.chainring, out=out, units=units)
    rows = [
        Row(LOADER, partial(by_hand, train=_epochs.loader, test=held_out)),
        Row(GATHER, partial(by_hand, train=_epochs.gathered, test=_epochs.sliced)),
        Row(FUSED, partial(by_hand, train=_epochs.gathered, test=_epochs.sliced, fused=True)),
        Row(SCRIPT, ours),
        Row(SCRIPT_FUSED, partial(ours, fused=True)),
        Row(COMPILED, partial(ours, compile=True)),
        Row(COMPILED_FUSED, partial(ours, compile=True, fused=True)),
    ]
    missing = []
    for name, make in _epochs.PEERS.items():
        try:
            rows.append(Row(f"{name} {version(name)}, DataLoader", make(out, units)))
        except ImportError:
            missing.append(name)
    return rows, missing


def result_of(units: int, row: Row, times: Times) -> dict[str, Any]:
    over, budget = BUDGETS.get((units, row.name), (LOADER, None))
    rounds = seconds(row.name, times)
    return {
        "units": units, "row": row.name, "ms": figure(rounds).median * 1e3, "rounds": rounds, "budget": budget, "over": over,
        "of loader": vars(figure(ratios(row.name, LOADER, times))), "ratio": vars(figure(ratios(row.name, over, times))),
    }  # fmt: skip


def line_of(result: dict[str, Any]) -> str:
    whole, ratio, budget = Figure(**result["of loader"]), Figure(**result["ratio"]), result["budget"]
    line = f"{result['units']:>5}  {result['row']:<42}{result['ms']:>9.1f}{whole.median:>8.2f}"
    line += f" ({whole.least:.2f} to {whole.most:.2f})"
    if budget is not None:
        line += f"   {ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f}) of {result['over']}, "
        line += f"<= {budget:g} {'met' if ratio.median <= budget else 'exceeded'}"
    return line


def failures(results: list[dict[str, Any]], slack: float) -> list[str]:
    """Return the rows that exceed their budget by more than the slack."""
    return [
        f"{result['row']}, {result['units']} units: {result['ratio']['median']:.2f} of {result['over']}, the limit is "
        f"{slack * result['budget']:.2f}"
        for result in results
        if result["budget"] is not None and result["ratio"]["median"] > slack * result["budget"]
    ]


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.25)
    parser.add_argument("--units", type=int, nargs="+", default=[50, 1000], help="of a hidden layer (default: 50 1000)")
    told = f"of a round (default: 8); from {LARGE} units on there are three rounds of one at most"
    parser.add_argument("--epochs", type=int, default=8, help=told)
    args = parser.parse_args()
    if min(args.rounds, args.epochs, *args.units) < 1:
        parser.error(f"--units, --rounds and --epochs are at least 1, got {args.units}, {args.rounds} and {args.epochs}")
    return args


def main() -> int:
    args = options()
    facts = begin()
    print(
        f"median of {args.rounds} rounds of {args.epochs} epochs; {_epochs.EXAMPLES} images in batches of {_epochs.BATCH}\n"
    )
    print(f"{'units':>5}  {'':<42}{'ms':>9}{'ratio':>8}   of the DataLoader loop (least to most)")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        for units in args.units:
            rows, missing = rows_of(Path(directory), units)
            rounds, each = (args.rounds, args.epochs) if units < LARGE else (min(args.rounds, 3), 1)
            times = measure(rows, Plan(_epochs.STEPS, rounds, each))
            measured = [result_of(units, row, times) for row in rows]
            print(*map(line_of, measured), sep="\n", flush=True)
            results += measured
    for name in missing:
        print(f"{'':>5}  {name:<42}  missing: pip install --group bench")
    return conclude(args, {"machine": facts, "rows": results}, failures(results, args.slack) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
