"""How the figures of the other tables grow: with extensions, keys, parameters and worker processes.

Run it on a machine that has nothing else to do::

    python benchmarks/growth.py

A figure is the median of the rounds. Of an iteration it is what it costs more than the loop named beside it, which does the
same work with as many parameters; of an epoch the part of the time of a hand-written loop over a DataLoader; of data the
examples a second beside a DataLoader with as many workers; of a snapshot the time for which the loop stands still, beside
one memcpy of the same tensors, whose number grows while their bytes stay the same. Another part is one run without the end
of an epoch, with ten keys in an open interval and a row of another log every ten iterations: a snapshot after so many
iterations, and the memory of the process. Then, what a recorder's own calls add to an iteration of a perceptron, in epochs
of so many iterations, and the time until a snapshot is on the disk where so many others are kept, and what a snapshot of
many small tensors takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _chainring
import _epochs
import _loops
import _snapshots
import data
import epochs
import numpy as np
import overhead
import snapshot
from _measure import Figure, Plan, Row, begin, conclude, figure, measure, parser_of, ratios

from chainring.datasets import TupleDataset

EXTENSIONS, KEYS, LAYERS = (1, 10, 100), (1, 10, 100), (2, 20, 100)
UNITS = (50, 200)
WORKERS = (0, 1, 2, 4)
TENSORS, MEGABYTES = (8, 80, 400), 100
EPOCHS = (100, 600)
KEPT, SMALL = (1, 100, 1_000), (500, 5_000, 50_000)
Result = dict[str, Any]


def iterations(out: Path, args: argparse.Namespace) -> list[Result]:
    """Microseconds more, an iteration."""
    rows = [Row(f"raw, {number} layers", partial(_loops.raw, layers=number)) for number in LAYERS]
    base = rows[0].name
    own = [("extensions", n, partial(_chainring.idle, count=n, out=out), base) for n in EXTENSIONS]
    own += [("keys in the log", n, partial(_chainring.with_keys, keys=n, out=out), base) for n in KEYS]
    own += [("layers", n, partial(_chainring.bare, layers=n, out=out), f"raw, {n} layers") for n in LAYERS]
    rows += [Row(f"{what}, {n}", run, over=over) for what, n, run, over in own]
    times = measure(rows, Plan(_loops.EPOCH, args.rounds, args.epochs))
    found = {row.name: overhead.more(row, times) for row in rows if row.over}
    return [_result("us an iteration", what, n, found[f"{what}, {n}"], f"over {over}") for what, n, _, over in own]


def whole_epochs(out: Path, args: argparse.Namespace) -> list[Result]:
    """Return the part of the time of a hand-written loop over a DataLoader."""
    results = []
    for units in UNITS:
        rows = {row.name: row for row in epochs.rows_of(out, units)[0]}
        times = measure([rows[epochs.LOADER], rows[epochs.SCRIPT]], Plan(_epochs.STEPS, args.rounds, args.epochs))
        ratio = figure(ratios(epochs.SCRIPT, epochs.LOADER, times))
        results.append(_result("an epoch of the script", "units of a layer", units, ratio, "x the DataLoader loop"))
    return results


def batches(out: Path, args: argparse.Namespace) -> list[Result]:
    """Examples a second, as a multiple of the DataLoader's."""
    arrays = TupleDataset(np.zeros((20_000, 784), np.float32), np.zeros(20_000, np.int64))
    sets = {"arrays in memory": (arrays, 3), "slow transform": (data.Slow(1_000), 1)}
    results = []
    for name, (dataset, passes) in sets.items():
        for workers in WORKERS:
            ratio = Figure(**data.measured(name, dataset, workers, passes, args.rounds)["ratio"])
            results.append(_result(f"examples a second, {name}", "workers", workers, ratio, "x the DataLoader"))
    return results


def snapshots(out: Path, args: argparse.Namespace) -> list[Result]:
    """Time one memcpy for which the loop stands still."""
    results = []
    for layers in TENSORS:
        taken = snapshot.measured(MEGABYTES, args.rounds, out / f"{layers}", layers)
        ours = next(each for each in taken if each["row"] == _snapshots.ASYNCHRONOUS)
        what = f"stop for a snapshot of {MEGABYTES} MB"
        results.append(_result(what, "tensors", 8 * layers, Figure(**ours["ratio"]), "x memcpy"))
    return results


def lengths(out: Path, args: argparse.Namespace) -> list[Result]:
    """Milliseconds and kilobytes of a snapshot, and megabytes of memory, after so many iterations."""
    results = []
    for iteration, costs in _chainring.unending(args.iterations, out / "lengths", args.rounds).items():
        for unit, values in costs.items():
            results.append(_result(f"a snapshot, {unit}", "iterations before", iteration, figure(values), unit))
    return results


def recorder(out: Path, args: argparse.Namespace) -> list[Result]:
    """Return the part of an iteration of a perceptron that a recorder takes; the promise is 1 %."""
    results = []
    for length in EPOCHS:
        percent = figure([_chainring.recorder_percent(length, args.epochs, out) for _ in range(args.rounds)])
        results.append(_result("a recorder, % of an iteration", "in an epoch", length, percent, "% more"))
    return results


def kept(out: Path, args: argparse.Namespace) -> list[Result]:
    """Milliseconds until a snapshot is on the disk, with so many kept before it."""
    times = _chainring.with_snapshots_kept(KEPT, out / "kept", 10 * args.rounds)
    return [_result("a snapshot until it is on the disk", "kept before", n, figure(times[n]), "ms") for n in KEPT]


def small_tensors(out: Path, args: argparse.Namespace) -> list[Result]:
    """Seconds of a snapshot of many tensors of four numbers each, and what it has beside the numbers."""
    results = []
    for number in SMALL:
        of_number = _chainring.of_many_tensors(number, out / f"small{number}", args.rounds)
        results += [_result("a snapshot of small tensors", "tensors", number, figure(v), u) for u, v in of_number.items()]
    return results


PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Result]]] = {
    "iterations": iterations, "epochs": whole_epochs, "data": batches, "snapshots": snapshots, "lengths": lengths,
    "recorder": recorder, "kept": kept, "small": small_tensors,
}  # fmt: skip


def _result(figure_of: str, what: str, number: int, value: Figure, unit: str) -> Result:
    return {"of": figure_of, "what": what, "number": number, "figure": vars(value), "unit": unit}


def line_of(result: Result) -> str:
    value = Figure(**result["figure"])
    spread = f"({value.least:.2f} to {value.most:.2f})"
    return f"{result['of']:<38}{result['what']:<18}{result['number']:>8}{value.median:>10.2f} {spread:<24}{result['unit']}"


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=None)
    parser.add_argument("--epochs", type=int, default=3, help="of a round (default: 3)")
    told = "after which a snapshot is measured (default: 10000 100000)"
    parser.add_argument("--iterations", type=int, nargs="+", default=[10_000, 100_000], help=told)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    args = parser.parse_args()
    if min(args.rounds, args.epochs) < 1:
        parser.error(f"--rounds and --epochs are at least 1, got {args.rounds} and {args.epochs}")
    return args


def main() -> int:
    args = options()
    facts = begin()
    print(f"median of {args.rounds} rounds (least to most)\n")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        for part in args.parts:
            found = PARTS[part](Path(directory), args)
            print(*map(line_of, found), sep="\n", flush=True)
            results += found
    return conclude(args, {"machine": facts, "rows": results}, [])


if __name__ == "__main__":
    sys.exit(main())
