"""How long it takes until a program trains: imports, and the first batch of a run that is resumed late in a large epoch.

Run it on a machine that has nothing else to do::

    python benchmarks/start.py

A figure is the median of the rounds. Imports, in fresh processes, are what they take on top of ``import torch``. The
resume is that of a ``SerialIterator`` at 90 % of an epoch of 10^9 examples, from its loaded state to its next batch; the
examples themselves cost nothing. From ``run()`` to the first update: ``overhead.py``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from _measure import conclude, figure, machine, parser_of

from chainring.iterators import SerialIterator
from chainring.serializers import DictionaryDeserializer, DictionarySerializer

IMPORTS = [
    "chainring",
    "chainring.training",
    "chainring.training.extensions",
    "chainring.iterators",
    "chainring.serializers",
]
EXAMPLES = 10**9
IMPORT = """
import gc, time
import numpy, torch
gc.collect()  # of PyTorch's objects, which takes as long as all the imports, and would come sooner or later
began = time.perf_counter()
import {module}
print(time.perf_counter() - began)
"""


class Endless:
    """As many examples as wanted, each its number."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> int:
        return i


def import_seconds(module: str) -> float:
    """On top of NumPy and torch, in a fresh process that may write, or read, compiled files, as those of users may."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    program = [sys.executable, "-c", IMPORT.format(module=module)]
    return float(subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout)


def resume_seconds() -> float:
    """From the state of an iterator at 90 % of its epoch to the batch after it."""
    numbers = Endless()
    saved: dict[str, object] = {}
    SerialIterator(numbers, 100, seed=0).serialize(DictionarySerializer(saved))
    saved["position"] = EXAMPLES * 9 // 10
    began = time.perf_counter()
    resumed = SerialIterator(numbers, 100, seed=0)
    resumed.serialize(DictionaryDeserializer(saved))
    next(resumed)
    seconds = time.perf_counter() - began
    assert resumed.epoch_detail > 0.9
    return seconds


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=None)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is at least 1, got {args.rounds}")
    return args


def main() -> int:
    args = options()
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"median of {args.rounds} rounds\n")
    print(f"{'':<52}{'seconds':>9} (least to most)")
    measured = {f"import {module}": figure([import_seconds(module) for _ in range(args.rounds)]) for module in IMPORTS}
    measured["resume at 90 % of 10^9 examples, to the next batch"] = figure([resume_seconds() for _ in range(args.rounds)])
    for name, each in measured.items():
        print(f"{name:<52}{each.median:>9.4f} ({each.least:.4f} to {each.most:.4f})")
    return conclude(args, {"machine": facts, "rows": {name: vars(each) for name, each in measured.items()}}, [])


if __name__ == "__main__":
    sys.exit(main())
