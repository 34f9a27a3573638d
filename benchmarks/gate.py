"""Fails where Chainring has become slower than a stored table says, by more than a quarter of a ratio.

    python benchmarks/gate.py           # a part of `make check`
    python benchmarks/gate.py --write   # stores what is measured, on a machine that has nothing else to do

A ratio is the time of Chainring over that of a loop that does the same, in one run: the median of three rounds. A row beyond
its limit is measured again, up to three times, because a shared machine may have been busy: what is slower stays slower.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import _epochs
import _loops
import data
import epochs
import numpy as np
import overhead
import torch
from _measure import Plan, Row, figure, measure, ratios

from chainring.datasets import TupleDataset

TABLE = Path(__file__).with_name("ratios.json")
SLACK = 1.25
ROUNDS = 3
EPOCHS_OF_ROUND = 5
ATTEMPTS = 4
OVERHEAD = [
    overhead.BARE,
    "a recorder",
    "in stages (a callback)",
    "the script's extensions",
    "the same and a snapshot an epoch",
]
EPOCHS = [(epochs.SCRIPT, epochs.LOADER), (epochs.SCRIPT_FUSED, epochs.FUSED), (epochs.COMPILED, epochs.FUSED)]


def iterations(out: Path) -> dict[str, float]:
    """Of an iteration."""
    rows = {row.name: row for row in overhead.rows_of(out, {})}
    pairs = [(name, str(rows[name].over)) for name in OVERHEAD]
    return _ratios(pairs, rows, Plan(_loops.EPOCH, ROUNDS, EPOCHS_OF_ROUND))


def whole_epochs(out: Path) -> dict[str, float]:
    """Of an epoch of the script."""
    rows, _ = epochs.rows_of(out, 50)
    return _ratios(EPOCHS, {row.name: row for row in rows}, Plan(_epochs.STEPS, ROUNDS, EPOCHS_OF_ROUND))


def _ratios(pairs: list[tuple[str, str]], rows: dict[str, Row], plan: Plan) -> dict[str, float]:
    names = dict.fromkeys(name for pair in pairs for name in pair)
    times = measure([rows[name] for name in names], plan)
    return {f"{name} / {over}": figure(ratios(name, over, times)).median for name, over in pairs}


def batches(out: Path) -> dict[str, float]:
    """Of reading arrays in memory, beside a DataLoader without workers."""
    arrays = TupleDataset(np.zeros((20_000, 784), np.float32), np.zeros(20_000, np.int64))
    result = data.measured("arrays", arrays, 0, 3, ROUNDS)
    return {"SerialIterator, arrays in memory / DataLoader": 1 / result["ratio"]["median"]}


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
    return {name: round(figure([each[name] for each in attempts]).median, 3) for name in attempts[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the ratios in {TABLE.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = (iterations, whole_epochs, batches)
    if args.write:
        stored = {name: ratio for part in parts for name, ratio in middle(part).items()}
        TABLE.write_text(json.dumps(stored, indent=1) + "\n")
        return 0
    limits = {name: SLACK * ratio for name, ratio in json.loads(TABLE.read_text()).items()}
    print(f"{'time of Chainring over that of a loop that does the same':<82}{'ratio':>7}{'limit':>7}")
    slower = []
    for part in parts:
        for name, ratio in checked(part, limits).items():
            is_slower = ratio > limits.get(name, 0.0)
            slower += [name] if is_slower else []
            print(f"{name:<82}{ratio:>7.3f}{limits.get(name, 0.0):>7.3f}{'  slower' if is_slower else ''}", flush=True)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
