"""How many files of the package a reader has to open, and how many functions to read, to follow one event of a run.

    python benchmarks/trace_files.py          # the table
    python benchmarks/trace_files.py --list   # and the files, each with its functions

A function counts when it runs during the event, in a process that has trained before. The run is that of the README's first
script on one process, a model of two layers with `LogReport` and, where named, `snapshot`, once an epoch. The program fails
where a walk is longer than its limit, which `tests/test_architecture.py` asks too.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import chainring
from chainring import serializers
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.training import StandardUpdater, Trainer, extensions

SOURCE = os.path.dirname(chainring.__file__) + os.sep
EPOCH = 5
TRACED = 2 * EPOCH
LIMITS = {"a bare iteration": (8, 25), "a log row": (12, 80), "a snapshot": (20, 150), "a resume": (24, 215)}
"""The most files and functions of each walk."""
Calls = dict[str, set[str]]


@contextmanager
def traced(calls: Calls) -> Iterator[None]:
    """Record the functions of the package that run, on every thread, by their file."""

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(SOURCE)].add(code.co_qualname)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Window:
    """A stop trigger that traces the iteration number ``at``: it is asked at the head of each."""

    def __init__(self, calls: Calls, at: int = TRACED, more: int = 1) -> None:
        self.at, self.last = at, at + more
        self.tracing = traced(calls)

    def __call__(self, trainer: Trainer) -> bool:
        if trainer.updater.iteration == self.at - 1:
            self.tracing.__enter__()
        elif trainer.updater.iteration == self.at:
            self.tracing.__exit__(None, None, None)
        return trainer.updater.iteration >= self.last


def make_trainer(out: Path, stop: Any, *, logs: bool = True, saves: bool = False) -> Trainer:
    """Return the script's trainer on 100 random examples."""
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    data = TupleDataset(torch.randn(100, 8), torch.randint(2, (100,)))
    updater = StandardUpdater(SerialIterator(data, 20), torch.optim.Adam(model.parameters()), model)
    trainer = Trainer(updater, stop, out=str(out))
    if logs:
        trainer.extend(extensions.LogReport())
    if saves:
        trainer.extend(extensions.snapshot())
    return trainer


def bare_iteration(out: Path, calls: Calls) -> None:
    """One iteration in the middle of an epoch, of a trainer without extensions."""
    make_trainer(out, Window(calls, at=TRACED + 2), logs=False).run()


def log_row(out: Path, calls: Calls) -> None:
    """One iteration that writes a row of the log."""
    make_trainer(out, Window(calls)).run()


def one_snapshot(out: Path, calls: Calls) -> None:
    """One iteration that writes a row and a snapshot."""
    make_trainer(out, Window(calls), saves=True).run()


def resume(out: Path, calls: Calls) -> None:
    """From the construction of the trainer to its first update, a snapshot being loaded."""
    make_trainer(out, Window(defaultdict(set), more=0), saves=True).run()
    window = Window(calls, more=0)  # ends the tracing when it is asked before the update
    trainer = make_trainer(out, window, saves=True)
    window.tracing.__enter__()
    serializers.load(out / f"snapshot_iter_{TRACED}", trainer)
    trainer.run()


def state_dict(out: Path, calls: Calls) -> None:
    """`Trainer.state_dict`."""
    trainer = make_trainer(out, (TRACED, "iteration"), saves=True)
    trainer.run()
    with traced(calls):
        trainer.state_dict()


def save(out: Path, calls: Calls) -> None:
    """`serializers.save` of a trainer."""
    trainer = make_trainer(out, (TRACED, "iteration"), saves=True)
    trainer.run()
    with traced(calls):
        serializers.save(out / "saved", trainer)


def load(out: Path, calls: Calls) -> None:
    """`serializers.load` of a trainer."""
    make_trainer(out, (TRACED, "iteration"), saves=True).run()
    trainer = make_trainer(out, (TRACED, "iteration"), saves=True)
    with traced(calls):
        serializers.load(out / f"snapshot_iter_{TRACED}", trainer)


EVENTS: dict[str, Callable[[Path, Calls], None]] = {
    "a bare iteration": bare_iteration,
    "a log row": log_row,
    "a snapshot": one_snapshot,
    "a resume": resume,
    "Trainer.state_dict()": state_dict,
    "serializers.save": save,
    "serializers.load": load,
}


def walk(name: str) -> Calls:
    """Return the functions that an event runs, by their file."""
    calls: Calls = defaultdict(set)
    with tempfile.TemporaryDirectory() as out, redirect_stdout(io.StringIO()):  # of the messages to the user
        EVENTS[name](Path(out) / "result", calls)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also list the files and their functions")
    options = parser.parse_args()
    failed = False
    print(f"{'event':24}{'files':>6}{'functions':>11}{'limit':>11}")
    for name in EVENTS:
        calls = walk(name)
        length, limit = (len(calls), sum(map(len, calls.values()))), LIMITS.get(name)
        failed |= limit is not None and any(map(int.__gt__, length, limit))
        row = f"{name:24}{length[0]:6}{length[1]:11}{'' if limit is None else '{}/{}'.format(*limit):>11}"
        print(row.rstrip())
        for file in sorted(calls) if options.list else ():
            print(f"    {file}: {', '.join(sorted(calls[file]))}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
