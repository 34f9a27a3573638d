"""How long a snapshot to an object store stops the training loop, beside one to a directory of the same state in one run.

Run it on a machine that has nothing else to do; the store is moto's server of S3, in a process of its own::

    python benchmarks/object_stores.py

A figure is the median of the rounds; a round takes each row once, every second time backwards. The first snapshot of a row,
in which it gets its buffers, is not counted. "beyond" is by how much the memory of the process grows while a snapshot is
written, beyond the staged copy that is there when the loop goes on: at most a part of an upload for each connection.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _measure import begin, conclude, figure, parser_of
from _snapshots import PATIENCE, Idle, State, Step

from chainring._places.bucket import PART
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.training import Trainer
from chainring.training.extension import Extension
from chainring.training.extensions import snapshot

DIRECTORY, STORE = "directory", "object store"
BUDGET = 1.1
"""How often the stop for a directory the loop may stand still for an object store."""
CONNECTIONS = 4
"""That send parts at once, each of which holds one."""
TESTS = Path(__file__).parents[1] / "tests" / "remote"


@dataclass
class Taken:
    """What one snapshot cost: milliseconds of the stop, until it was there, of the slowest step meanwhile; and MiB."""

    stop: float
    durable: float
    step: float
    beyond: float


class Rounds(Extension):
    """In every iteration a round of both rows; the run in which it is called writes to the one, and `other` to the other."""

    is_snapshot = True  # called when all else of the iteration has been done, as a snapshot is

    def __init__(self, other: Trainer, rows: dict[str, Any]) -> None:
        self._other, self._rows = other, rows
        self._step = Step(State(1, 1))
        self.taken: dict[str, list[Taken]] = {name: [] for name in rows}

    def __call__(self, trainer: Trainer) -> None:
        number = self._other.updater.iteration = trainer.updater.iteration
        trainers = {DIRECTORY: self._other, STORE: trainer}
        for name in self._rows if number % 2 else reversed(self._rows):
            taken = self._take(self._rows[name], trainers[name])
            if number > 1:
                self.taken[name].append(taken)

    def _take(self, save: Any, trainer: Trainer) -> Taken:
        for _ in range(20):
            self._step()
        began = time.perf_counter()
        save(trainer)
        stop = time.perf_counter() - began
        held = _restart_peak()
        steps = [0.0]
        while save.saved_iteration != trainer.updater.iteration:
            at = time.perf_counter()
            self._step()
            steps.append(time.perf_counter() - at)
            if at - began > PATIENCE:
                raise TimeoutError(f"a snapshot is there within {PATIENCE:g} s, and this one is not")
        durable = time.perf_counter() - began
        return Taken(stop * 1e3, durable * 1e3, max(steps) * 1e3, max(0.0, _memory("VmHWM") - held))


class Nested(Extension):
    """Trains another trainer to its end in the first iteration of one."""

    trigger = (1, "iteration")

    def __init__(self, inner: Trainer) -> None:
        self._inner = inner

    def __call__(self, trainer: Trainer) -> None:
        self._inner.run()


def _restart_peak() -> float:
    """Let the peak of the memory begin anew; return what is held now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measured(size: int, rounds: int, directory: Path, url: str) -> dict[str, list[Taken]]:
    """Return what each snapshot of a state of ``size`` MB cost, by row."""
    state = State(size * 10**6, 8)
    outer, inner = _trainer(state, 1, str(directory)), _trainer(state, rounds + 1, url)
    rows = {name: snapshot(n_retains=1) for name in (DIRECTORY, STORE)}
    calls = Rounds(outer, rows)
    for name, trainer in ((DIRECTORY, outer), (STORE, inner)):
        trainer.extend(rows[name], trigger=lambda trainer: False)  # begun and ended with the run, called by the rounds
    outer.extend(Nested(inner))
    inner.extend(calls)
    outer.run()
    return calls.taken


def _trainer(state: State, iterations: int, out: str) -> Trainer:
    data = SerialIterator(TupleDataset(torch.zeros(1)), 1)
    return Trainer(Idle(data, state.optimizer, state.model), (iterations, "iteration"), out=out)


def ratio(taken: dict[str, list[Taken]]) -> float:
    """Return how often as long as for a directory the loop stands still for an object store, the median of the rounds."""
    pairs = zip(taken[STORE], taken[DIRECTORY], strict=True)
    return figure([store.stop / directory.stop for store, directory in pairs]).median


def measured_with_server(size: int, rounds: int, place: Path) -> dict[str, list[Taken]]:
    """Return the same, of a store that is started for it."""
    sys.path.append(str(TESTS))
    server: Any = importlib.import_module("object_server")
    with server.running_server() as address:
        os.environ.update(server.environment_for(address))
        server.make_bucket(address, "benchmark")
        return measured(size, rounds, place / "out", "s3://benchmark/run")


def print_table(taken: dict[str, list[Taken]]) -> None:
    print(f"{'':<14}{'stop, ms':>9}{'there, ms':>11}{'slowest step, ms':>18}{'beyond, MiB':>13}")
    for name, each in taken.items():
        columns = [figure([getattr(one, key) for one in each]).median for key in ("stop", "durable", "step", "beyond")]
        print("{:<14}{:>9.1f}{:>11.1f}{:>18.1f}{:>13.1f}".format(name, *columns))
    print(f"\nstop, {STORE} / {DIRECTORY}: {ratio(taken):.3f} (budget {BUDGET:g})")


def failures(taken: dict[str, list[Taken]], slack: float) -> list[str]:
    """Return what exceeds its budget by more than the slack."""
    found, beyond, allowed = ratio(taken), max(one.beyond for one in taken[STORE]), slack * CONNECTIONS * PART / 2**20
    failed = [f"the loop stands still for {found:.2f} times the stop for a directory"] if found > slack * BUDGET else []
    return failed + ([f"memory grows by {beyond:.0f} MiB, and {allowed:.0f} are allowed"] if beyond > allowed else [])


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.25)
    parser.add_argument("--size", type=int, default=200, metavar="MB", help="of the state (default: 200)")
    return parser.parse_args()


def main() -> int:
    args = options()
    facts = begin()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(action="ignore"):
        taken = measured_with_server(args.size, args.rounds, Path(place))
    print_table(taken)
    rows = {name: [vars(one) for one in each] for name, each in taken.items()}
    return conclude(args, {"machine": facts, "rows": rows}, failures(taken, args.slack) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
