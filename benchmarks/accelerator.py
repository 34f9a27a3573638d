"""On an accelerator: training steps beside a hand-written loop, and how long a snapshot stops the training.

Run it on a machine that has nothing else to do::

    python benchmarks/accelerator.py
    python benchmarks/accelerator.py --device cpu --small  # whether it runs

Data lie on the device, and a batch is one gather there. A figure is the median of the rounds; loops take turns, a quarter of
an epoch each, and wait for the device at its ends only. A snapshot copies the state from the device, so it stands beside a
copy of the same tensors into pinned memory. Without an accelerator nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _models
import snapshot
import torch
from _chainring import Lapping
from _measure import Figure, Plan, Row, Times, begin, conclude, figure, measure, parser_of, ratios, seconds
from _turns import lap
from torch.utils.data import TensorDataset

from chainring.iterators import SerialIterator
from chainring.training import Trainer

BY_HAND, OURS, COMPILED = "by hand", "Chainring", "Chainring, compile=True"
BUDGETS = {OURS: 1.05, COMPILED: 1.0}
"""Of the time by hand."""


def by_hand(epochs: int, work: _models.Work, device: str) -> None:
    """Train as an engineer would by hand."""
    model = work.model().to(device)
    forward = model.__call__
    if work.precision == "bf16":
        forward = torch.autocast(torch.device(device).type, torch.bfloat16)(forward)
    optimizer = work.optimizer(model.parameters())
    columns = [column.to(device) for column in work.data(work.batch * work.steps)]
    for _ in range(epochs):
        for indices in torch.randperm(len(columns[0]), device=device).split(work.batch):
            lap()
            batch = [column.index_select(0, indices) for column in columns]
            loss = forward(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def chainring(epochs: int, work: _models.Work, device: str, out: Path, **settings: Any) -> None:
    """Do the same through a trainer that has no extension."""
    model = work.model().to(device)
    optimizer = work.optimizer(model.parameters())
    data = TensorDataset(*[column.to(device) for column in work.data(work.batch * work.steps)])
    iterator = SerialIterator(data, work.batch)
    updater = Lapping(iterator, optimizer, model, device=device, precision=work.precision, **settings)
    Trainer(updater, (epochs, "epoch"), out=tempfile.mkdtemp(dir=out)).run()


def rows_of(work: _models.Work, device: str, out: Path, compiles: bool) -> list[Row]:
    ours = partial(chainring, work=work, device=device, out=out)
    rows = [Row(BY_HAND, partial(by_hand, work=work, device=device)), Row(OURS, ours)]
    if compiles:  # on an accelerator into a graph, which the optimizer must be told
        graphed = replace(work, optimizer=partial(work.optimizer, capturable=device != "cpu"))
        rows.append(Row(COMPILED, partial(ours, work=graphed, compile=True)))
    return rows


def clock() -> float:
    """Seconds, when the device has done what it was told."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def result_of(name: str, work: _models.Work, row: Row, times: Times) -> dict[str, Any]:
    ratio = figure(ratios(row.name, BY_HAND, times))
    milliseconds = figure(seconds(row.name, times)).median * 1e3 / work.steps
    budget = BUDGETS.get(row.name)
    return {"model": name, "row": row.name, "ms": milliseconds, "ratio": vars(ratio), "budget": budget}


def line_of(result: dict[str, Any]) -> str:
    ratio, budget = Figure(**result["ratio"]), result["budget"]
    line = f"{result['model']:<30}{result['row']:<26}{result['ms']:>9.3f}{ratio.median:>8.2f}"
    line += f" ({ratio.least:.2f} to {ratio.most:.2f})"
    return line if budget is None else f"{line}   <= {budget:g} {'met' if ratio.median <= budget else 'exceeded'}"


def steps(args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    print(f"{'ms a training step':<56}{'ms':>9}{'ratio':>8} (least to most)")
    results = []
    for number, (name, work) in enumerate(_models.works(args.small).items()):
        rows = rows_of(work, args.device, out, compiles=number == 0)
        times = measure(rows, Plan(work.steps, args.rounds, args.epochs, clock))
        measured = [result_of(name, work, row, times) for row in rows]
        print(*map(line_of, measured), sep="\n", flush=True)
        results += measured
    return results


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.25)
    parser.add_argument("--epochs", type=int, default=8, help="of a round (default: 8)")
    parser.add_argument("--device", help="(default: the accelerator)")
    parser.add_argument("--small", action="store_true", help="models and snapshots of a size for any machine")
    args = parser.parse_args()
    if min(args.rounds, args.epochs) < 1:
        parser.error(f"--rounds and --epochs are at least 1, got {args.rounds} and {args.epochs}")
    return args


def main() -> int:
    # Otherwise the question whether there is one starts CUDA here, and a forked process can no longer use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    args = options()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if args.device is None and accelerator is None:
        print("no accelerator: nothing measured")
        return 0
    args.device = args.device or str(accelerator)
    facts = begin() | {"device": args.device}
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        results = steps(args, Path(directory))
        print()
        sizes = [20] if args.small else [200, 1000]
        taken = [snapshot.measured(size, args.rounds, Path(directory) / f"{size}", device=args.device) for size in sizes]
    snapshot.print_table([row for rows in taken for row in rows])
    failed = [
        f"{result['model']}, {result['row']}: {result['ratio']['median']:.2f} of by hand"
        for result in results
        if args.check and result["budget"] is not None and result["ratio"]["median"] > args.slack * result["budget"]
    ]
    return conclude(args, {"machine": facts, "steps": results, "snapshots": taken}, failed)


if __name__ == "__main__":
    sys.exit(main())
