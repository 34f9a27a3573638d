"""Fails where Chainring has become slower than a stored table says, by more than a quarter of a ratio.

    python benchmarks/gate.py           # a part of `make check`
    python benchmarks/gate.py --write   # stores what is measured, on a machine that has nothing else to do
    python benchmarks/gate.py --parts kept ranks   # of some parts only, with --write too

A ratio is the time of Chainring over that of what is named behind the stroke, in one run: the median of three rounds. A part
with a row beyond its limit is measured again, up to three times, because a shared machine may have been busy: what is slower
stays slower.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _chainring
import _epochs
import _loops
import _snapshots
import data
import epochs
import numpy as np
import overhead
import recovery
import snapshot
import torch
import virtual_ranks
from _measure import Plan, Row, figure, measure, ratios

from chainring.datasets import TupleDataset

TABLE = Path(__file__).with_name("ratios.json")
MEMORY = "/dev/shm"
SLACK = 1.25
ROUNDS = 3
EPOCHS_OF_ROUND = 5
ATTEMPTS = 4
OVERHEAD = [
    overhead.BARE,
    "a recorder",
    "a callback",
    "in stages (an own update_core)",
    "the script's extensions",
    "the same and a snapshot an epoch",
]
RANKS = {"two ranks, a plain model": 0, "two virtual ranks on two ranks": 2}
COMPILED = epochs.COMPILED_FUSED, epochs.FUSED
EPOCHS = [(epochs.SCRIPT, epochs.LOADER), (epochs.SCRIPT_FUSED, epochs.FUSED), (epochs.COMPILED, epochs.FUSED), COMPILED]


def iterations(out: Path) -> dict[str, float]:
    """Of an iteration."""
    rows = {row.name: row for row in overhead.rows_of(out, {})}
    pairs = [(name, str(rows[name].over)) for name in OVERHEAD]
    return _ratios(pairs, rows, Plan(_loops.EPOCH, ROUNDS, EPOCHS_OF_ROUND))


def keys(out: Path) -> dict[str, float]:
    """Of a hundred keys more in an iteration, as a part of the raw loop."""
    few, many = (Row(f"{n}", partial(_chainring.with_keys, keys=n, out=out), over="raw") for n in (1, 101))
    times = measure([Row("raw", _loops.raw), few, many], Plan(_loops.EPOCH, ROUNDS, EPOCHS_OF_ROUND))
    pairs = zip(ratios(many.name, "raw", times), ratios(few.name, "raw", times), strict=True)
    return {"100 reported keys more / raw loop": figure([one - other for one, other in pairs]).median}


def whole_epochs(out: Path) -> dict[str, float]:
    """Of an epoch of the script; of one of layers of 1,000 units, which takes seconds, where it is compiled."""
    small, large = ({row.name: row for row in epochs.rows_of(out, units)[0]} for units in (50, 1_000))
    found = _ratios(EPOCHS, small, Plan(_epochs.STEPS, ROUNDS, EPOCHS_OF_ROUND, begins_at_once=True))
    wide = _ratios([COMPILED], large, Plan(_epochs.STEPS, ROUNDS, 1, begins_at_once=True))
    return found | {f"{name}, 1,000 units": ratio for name, ratio in wide.items()}


def _ratios(pairs: list[tuple[str, str]], rows: dict[str, Row], plan: Plan) -> dict[str, float]:
    names = dict.fromkeys(name for pair in pairs for name in pair)
    times = measure([rows[name] for name in names], plan)
    return {f"{name} / {over}": figure(ratios(name, over, times)).median for name, over in pairs}


def batches(out: Path) -> dict[str, float]:
    """Of reading arrays in memory, beside a DataLoader without workers."""
    arrays = TupleDataset(np.zeros((20_000, 784), np.float32), np.zeros(20_000, np.int64))
    result = data.measured("arrays", arrays, 0, 3, ROUNDS)
    found = {"SerialIterator, arrays in memory / DataLoader": 1 / result["ratio"]["median"]}
    images = data.measured("images", data.Images(out, 4_000), 2, 4, ROUNDS)
    return found | {"images, Pillow, with 2 workers / DataLoader": 1 / images["ratio"]["median"]}


def stops(out: Path) -> dict[str, float]:
    """Of the time for which a snapshot stops the loop."""
    rows = snapshot.measured(100, ROUNDS, out / "large", 400, only=(_snapshots.MEMCPY, _snapshots.ASYNCHRONOUS))
    found = {"stop for a snapshot of 100 MB in 3,200 tensors / memcpy": rows[1]["ratio"]["median"]}
    small = _chainring.of_many_tensors(50_000, out / "small", ROUNDS, loads=False)
    pairs = zip(small["stop, s"], small["torch.save, s"], strict=True)
    return found | {
        "stop for one of 50,000 small tensors / torch.save": figure([one / other for one, other in pairs]).median
    }


def kept(out: Path) -> dict[str, float]:
    """Of a commit where many snapshots are kept; those that are there first take most of the time, so there is one round.

    They lie in memory where they can, because how long a disk takes to remove a file differs by half from run to run.
    """
    names = {"kept": False, "kept and one removed": True}
    pairs = [(f"a commit with 1,000 {name}", f"a commit with 1 {name}") for name in names]
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else out) as directory:
        rows = [
            Row(f"a commit with {number:,} {name}", partial(_chainring.committing, Path(directory), number, removes))
            for name, removes in names.items()
            for number in (1, 1_000)
        ]
        return _ratios(pairs, {row.name: row for row in rows}, Plan(_loops.COMMITS, 1, EPOCHS_OF_ROUND))


def ranks(out: Path) -> dict[str, float]:
    """Of an update of two ranks."""
    args = argparse.Namespace(rounds=ROUNDS, turns=virtual_ranks.TURNS, updates=virtual_ranks.UPDATES, cpu=False)
    found = {name: virtual_ranks.measured("10^6", 2, count, args) for name, count in RANKS.items()}
    return {f"{name} / DDP": result["ratio"]["median"] for name, result in found.items()}


def recorder(out: Path) -> dict[str, float]:
    """Of what a recorder does in an iteration of a perceptron of a million parameters."""
    percent = figure([_chainring.recorder_percent(100, 2, out) for _ in range(ROUNDS)])
    return {"a recorder, 10^6 parameters / the rest of an iteration": percent.median / 100}


def restart(out: Path) -> dict[str, float]:
    """Of the time from the imports to the first new update after SIGKILL."""
    steps = recovery.measured(ROUNDS, out / "killed")
    return {"from SIGKILL to the first new update / imports": steps["beside imports"].median / steps["imported"].median}


PARTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "iterations": iterations, "keys": keys, "epochs": whole_epochs, "data": batches, "stops": stops, "kept": kept,
    "ranks": ranks, "recorder": recorder, "recovery": restart,
}  # fmt: skip


def measured(part: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        return part(Path(directory))


def checked(part: Callable[[Path], dict[str, float]], limits: dict[str, float]) -> dict[str, float]:
    """Return the ratios of a part, the least of the attempts that it takes until none is beyond its limit."""
    best = measured(part)
    for _ in range(ATTEMPTS - 1):
        if all(ratio <= limits.get(name, 0.0) for name, ratio in best.items()):
            break
        best = {name: min(best[name], ratio) for name, ratio in measured(part).items()}
    return best


def middle(part: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    """Return the ratios of a part, the median of the attempts."""
    attempts = [measured(part) for _ in range(ATTEMPTS)]
    return {name: round(figure([each[name] for each in attempts]).median, 4) for name in attempts[0]}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the ratios in {TABLE.name}")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    return parser.parse_args()


def main() -> int:
    args = options()
    torch.set_num_threads(1)
    parts = [PARTS[name] for name in args.parts]
    stored = json.loads(TABLE.read_text())
    if args.write:
        for part in parts:
            stored |= middle(part)
            TABLE.write_text(json.dumps(stored, indent=1) + "\n")
        return 0
    limits = {name: SLACK * ratio for name, ratio in stored.items()}
    print(f"{'time of Chainring over that of what is named behind the stroke':<82}{'ratio':>7}{'limit':>7}")
    slower = []
    for part in parts:
        for name, ratio in checked(part, limits).items():
            is_slower = ratio > limits.get(name, 0.0)
            slower += [name] if is_slower else []
            print(f"{name:<82}{ratio:>7.3f}{limits.get(name, 0.0):>7.3f}{'  slower' if is_slower else ''}", flush=True)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
