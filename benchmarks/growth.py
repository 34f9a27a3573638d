"""How the figures of the other tables grow: with keys, extensions, layers, tensors, snapshots kept, rows, ranks and workers.

Run it on a machine that has nothing else to do::

    python benchmarks/growth.py

A figure is the median of the rounds, beside the loops of other libraries where they have the same. Of an iteration it is
what it costs more than the raw loop with as many layers, in microseconds and as a multiple of its time; of an epoch the part
of the time of a hand-written loop over a DataLoader; of data the examples a second beside a DataLoader with as many workers;
of a snapshot the time for which the loop stands still, beside one memcpy of the same tensors, whose number grows while their
bytes stay the same. Then come the time until a snapshot is on the disk where so many others are kept; an iteration that
writes a row of the log, and a snapshot, after so many rows; an update of several ranks beside that of DDP; what a snapshot
of many small tensors takes; and what a recorder's own calls add to an iteration of a perceptron, in epochs of so many
iterations. Another part is one run without the end of an epoch, with ten keys in an open interval and a row of another log
every ten iterations: a snapshot after so many iterations, and the memory of the process.

docs/pictures/growth.py draws the curves of the file that `--json` names.
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
import _peers
import _snapshots
import data
import epochs
import numpy as np
import overhead
import snapshot
import virtual_ranks
from _measure import Figure, Plan, Row, begin, conclude, figure, measure, parser_of, ratios, seconds

from chainring.datasets import TupleDataset

EXTENSIONS, KEYS, LAYERS = (1, 10, 100), (1, 11, 101), (2, 20, 100)
PATIENT = {"lightning Trainer": 11}
"""Keys, at most, of a library whose iteration with more takes longer than all else together."""
UNITS = (50, 200)
WORKERS = (0, 1, 2, 4)
TENSORS, MEGABYTES = (8, 80, 400), 100
EPOCHS = (100, 600)
KEPT, SMALL = (1, 100, 1_000), (500, 5_000, 50_000)
ROWS, ROWS_OF_PEERS = (100, 1_000, 30_000), (100, 1_000)
RANKS = {"virtual ranks, one a rank": ((1, 1), (2, 2), (4, 4)), "a plain model": ((2, 0), (4, 0))}
OWN = "Chainring"
Result = dict[str, Any]


def iterations(out: Path, args: argparse.Namespace) -> list[Result]:
    """Microseconds more, an iteration, and its time as a multiple of the raw loop's."""
    raw = {number: f"raw, {number} layers" for number in LAYERS}
    own = [("extensions", n, OWN, partial(_chainring.idle, count=n, out=out)) for n in EXTENSIONS]
    own += [("keys in the log", n, OWN, partial(_chainring.with_keys, keys=n, out=out)) for n in KEYS]
    own += [("layers", n, OWN, partial(_chainring.bare, layers=n, out=out)) for n in LAYERS]
    for n in EXTENSIONS:
        loops, _ = _peers.installed(out, _peers.GROWING, extensions=n)
        own += [("extensions", n, *each) for each in loops.items()]
    for n in KEYS:
        peers = {name: make for name, make in _peers.GROWING.items() if n <= PATIENT.get(name, n)}
        own += [("keys in the log", n, *each) for each in _peers.installed(out, peers, keys=n)[0].items()]
    rows = [Row(raw[number], partial(_loops.raw, layers=number)) for number in LAYERS]
    rows += [Row(f"{w}, {n}, {who}", run, over=raw[n if w == "layers" else LAYERS[0]]) for w, n, who, run in own]
    times = measure(rows, Plan(_loops.EPOCH, args.rounds, args.epochs))
    results = []
    for (what, number, who, _), row in zip(own, rows[len(LAYERS) :], strict=True):
        multiple = figure(ratios(row.name, str(row.over), times))
        results.append(_result("an iteration", what, number, multiple, "x the raw loop", who))
        results.append(_result("an iteration", what, number, overhead.more(row, times), "us more", who))
    return results


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
    images = data.Images(out, 4_000)
    sets = {"arrays in memory": (arrays, 3), "images, Pillow": (images, 2), "slow transform": (data.Slow(1_000), 1)}
    results = []
    for name, (dataset, passes) in sets.items():
        for workers in WORKERS:
            ratio = Figure(**data.measured(name, dataset, workers, passes, args.rounds)["ratio"])
            results.append(_result("examples a second", "workers", workers, ratio, "x the DataLoader", name))
    return results


def snapshots(out: Path, args: argparse.Namespace) -> list[Result]:
    """Return the memcpys for whose time the loop stands still."""
    results = []
    for layers in TENSORS:
        for taken in snapshot.measured(MEGABYTES, args.rounds, out / f"{layers}", layers, only=_snapshots.GROWING):
            who = OWN if taken["row"] == _snapshots.ASYNCHRONOUS else taken["row"]
            what = f"stop for a snapshot of {MEGABYTES} MB"
            results.append(_result(what, "tensors", 8 * layers, Figure(**taken["ratio"]), "x memcpy", who))
    return [each for each in results if each["who"] != _snapshots.MEMCPY]


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
    kinds = {OWN: False, "Chainring, n_retains as many": True}
    runs: dict[tuple[int, str], _peers.Loop] = {
        (n, who): partial(_chainring.committing, out, n, removes) for who, removes in kinds.items() for n in KEPT
    }
    for n in KEPT:
        runs |= {(n, who): run for who, run in _peers.installed(out, _peers.SAVING, kept=n)[0].items()}
    rows = {key: Row(f"{key[0]}, {key[1]}", run) for key, run in runs.items()}
    times = measure(list(rows.values()), Plan(_loops.COMMITS, args.rounds, args.epochs))
    of, milliseconds = "a snapshot until it is on the disk", 1e3 / _loops.COMMITS
    found = {key: figure([milliseconds * each for each in seconds(row.name, times)]) for key, row in rows.items()}
    return [_result(of, "kept before", n, spent, "ms", who) for (n, who), spent in found.items()]


def rows_of_log(out: Path, args: argparse.Namespace) -> list[Result]:
    """Milliseconds of an iteration that writes a row of the log, and of a snapshot, after so many rows."""
    rounds, what = 10 * args.rounds, "rows of the log"
    own = _chainring.rows_of_log(ROWS, out, rounds)
    results = [_result(of, what, n, figure(v), "ms") for n, each in own.items() for of, v in each.items()]
    try:
        who = f"pytorch-pfn-extras {_peers.version('pytorch-pfn-extras')}"
        peers = _peers.rows_of_log(ROWS_OF_PEERS, out / "pfn-extras", rounds)
    except ImportError:
        return results
    return results + [_result("an iteration", what, n, figure(values), "ms", who) for n, values in peers.items()]


def ranks(out: Path, args: argparse.Namespace) -> list[Result]:
    """Return the part of an update of a perceptron of a million parameters in DDP; on one rank, of a plain update."""
    settings = argparse.Namespace(rounds=args.rounds, turns=virtual_ranks.TURNS, updates=virtual_ranks.UPDATES, cpu=False)
    results = []
    for who, sizes in RANKS.items():
        for size, count in sizes:
            ratio = Figure(**virtual_ranks.measured("10^6", size, count, settings)["ratio"])
            results.append(_result("an update", "ranks", size, ratio, "x DDP", who))
    return results


def small_tensors(out: Path, args: argparse.Namespace) -> list[Result]:
    """Seconds of a snapshot of many tensors of four numbers each, and what it has beside the numbers."""
    results = []
    for number in SMALL:
        for unit, values in _chainring.of_many_tensors(number, out / f"small{number}", args.rounds).items():
            results.append(_result("a snapshot of small tensors", "tensors", number, figure(values), unit))
    return results


PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Result]]] = {
    "iterations": iterations, "epochs": whole_epochs, "data": batches, "snapshots": snapshots, "lengths": lengths,
    "recorder": recorder, "kept": kept, "rows": rows_of_log, "ranks": ranks, "small": small_tensors,
}  # fmt: skip


def _result(figure_of: str, what: str, number: int, value: Figure, unit: str, who: str = OWN) -> Result:
    return {"of": figure_of, "what": what, "number": number, "figure": vars(value), "unit": unit, "who": who}


def line_of(result: Result) -> str:
    value, name = Figure(**result["figure"]), f"{result['of']}, {result['who']}"
    spread = f"({value.least:.2f} to {value.most:.2f})"
    return f"{name:<66}{result['what']:<18}{result['number']:>8}{value.median:>10.2f} {spread:<24}{result['unit']}"


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
