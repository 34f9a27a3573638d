"""On an accelerator: training steps beside a hand-written loop, and how long a snapshot stops the training.

Run it on a machine that has nothing else to do::

    python benchmarks/accelerator.py
    python benchmarks/accelerator.py --check               # with tests, and a page of all that was found
    python benchmarks/accelerator.py --device cpu --small  # whether it runs

Data lie on the device, and a batch is one gather there. A figure is the median of the rounds; loops take turns, a quarter of
an epoch each, and wait for the device at its ends only. A snapshot copies the state from the device, so it stands beside a
copy of the same tensors into pinned memory. Without an accelerator nothing is measured.

With ``--check``, tests/gpu is run, a run is killed and resumed, virtual ranks are compared on one device and two, and waits
and the peak of memory are counted. The page says with which device and PyTorch; please send it in, also if all is well.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _device_page
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


def begin_forked() -> None:
    """Make PyTorch's pool of threads anew, which a fork has lost, before autograd's threads do so, several at once."""
    torch.set_num_threads(1)


def by_hand(epochs: int, work: _models.Work, device: str) -> None:
    """Train as an engineer would by hand."""
    begin_forked()
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
    begin_forked()
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


def can_compile(device: str) -> bool:
    """Whether PyTorch compiles updates, and there is what it does so with: Triton for an accelerator."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return version >= (2, 13) and (device == "cpu" or importlib.util.find_spec("triton") is not None)


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
        rows = rows_of(work, args.device, out, compiles=number == 0 and can_compile(args.device))
        times = measure(rows, Plan(work.steps, args.rounds, args.epochs, clock))
        measured = [result_of(name, work, row, times) for row in rows]
        print(*map(line_of, measured), sep="\n", flush=True)
        results += measured
    return results


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.25)
    parser.add_argument("--epochs", type=int, default=8, help="of a round (default: 8)")
    parser.add_argument("--device", help="(default: the accelerator)")
    parser.add_argument("--page", type=Path, default=Path("accelerator.md"), help="of --check (default: accelerator.md)")
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
        if args.check:
            print("run this on a machine with one, with a build of PyTorch for it: https://pytorch.org/get-started/locally")
            print("`make device` tests on a stand-in for one, which needs no hardware")
        return 0
    args.device = args.device or str(accelerator)
    facts = begin() | {"device": args.device}
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        results = steps(args, Path(directory))
        print()
        sizes = [20] if args.small else [200, 1000]
        only = (snapshot.MEMCPY, snapshot.ASYNCHRONOUS) if args.check else ()
        measured = partial(snapshot.measured, rounds=args.rounds, device=args.device, only=only)
        taken = [measured(size, directory=Path(directory) / f"{size}") for size in sizes]
        checks = _device_page.checks_of(args.device, Path(directory)) if args.check else []
    snapshots = [row for rows in taken for row in rows]
    snapshot.print_table(snapshots)
    failed = [
        f"{result['model']}, {result['row']}: {result['ratio']['median']:.2f} of by hand"
        for result in results
        if args.check and result["budget"] is not None and result["ratio"]["median"] > args.slack * result["budget"]
    ]
    failed += [f"not found to hold: {check.name}" for check in checks if check.holds is False]
    if args.check:
        tables = {
            "milliseconds a training step, beside a loop by hand": "\n".join(map(line_of, results)),
            "milliseconds the loop stands still for a snapshot, beside one copy of the state": "\n".join(
                f"{row['size_mb']:>5} MB  {row['row']:<26}{row['stop_ms']['median']:>9.1f}{row['ratio']['median']:>8.2f}"
                for row in snapshots
            ),
        }
        args.page.write_text(_device_page.page_of(facts | _device_page.facts_of(args.device), checks, tables, failed))
        print(f"written to {args.page}")
    return conclude(args, {"machine": facts, "steps": results, "snapshots": taken}, failed)


if __name__ == "__main__":
    sys.exit(main())
