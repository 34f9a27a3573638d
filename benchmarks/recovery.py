"""How long a run that was killed takes until its first new update, and of what that consists.

Run it on a machine that has nothing else to do::

    python benchmarks/recovery.py

A perceptron of a million parameters trains by Adam, takes a snapshot every ten iterations, and gets SIGKILL while it does.
The same program is then started again, and says when it has come where. A figure is the median of the rounds. Imports are
those of NumPy, torch (with ``torch._dynamo``, which the first optimizer imports) and Chainring; the budget is for all that
comes after them. The program is in a repository of its own, since the record of a run asks git for its code: how long git
takes depends on the repository, and is ten times as long in a clone that is seconds old, all of whose files git reads again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import Figure, begin, conclude, figure, parser_of

BUDGET = 0.5
"""Seconds from the end of the imports to the end of the first new update."""
FILES = 200
"""In the repository of the program."""
KILLED_AFTER = 25
"""Iterations, the last of them with a snapshot under way or just written."""
STEPS = {
    "imported": "Python and imports",
    "built": "model, optimizer, trainer",
    "initialized": "the run's directory, the snapshot found, read and loaded",
    "updated": "the first new update",
}
PROGRAM = """
import sys, time
started = float(sys.argv[2])
told = {}
def tell(step):
    told[step] = time.time() - started
import numpy as np, torch
import torch._dynamo
from torch import nn
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.training import StandardUpdater, Trainer
from chainring.training.extensions import snapshot
tell("imported")
torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(784, 1_000), nn.ReLU(), nn.Linear(1_000, 210), nn.ReLU(), nn.Linear(210, 10))
data = TupleDataset(np.zeros((10_000, 784), np.float32), np.arange(10_000) % 10)
class Telling(StandardUpdater):
    def update(self):
        if "initialized" not in told:
            tell("initialized")
            self.resumed_at = self.iteration
        super().update()
        if "updated" not in told:
            tell("updated")
            print(__import__("json").dumps({"resumed at": self.resumed_at, **told}), flush=True)
        print(self.iteration, flush=True)
model = Classifier(mlp)
updater = Telling(SerialIterator(data, 100), torch.optim.Adam(model.parameters()), model)
trainer = Trainer(updater, (10**6, "iteration"), out=sys.argv[1])
trainer.extend(snapshot(autoload=True, n_retains=2), trigger=(10, "iteration"))
tell("built")
trainer.run()
"""


def begin_repository(directory: Path) -> None:
    """Commit the program and other files, an hour old, so that git takes their word for what they contain."""
    directory.mkdir(parents=True)
    (directory / "train.py").write_text(PROGRAM)
    (directory / ".gitignore").write_text("result\n")
    for number in range(FILES):
        (directory / f"{number}.py").write_text("pass\n" * number)
    for path in directory.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    git = ["git", "-C", str(directory), "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    for arguments in (["init"], ["add", "."], ["commit", "--message", "Begin"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)


def run_until_killed(directory: Path) -> dict[str, Any]:
    """Start the program, kill it some iterations later, and return what it has said of its start."""
    command = [sys.executable, "train.py", "result", repr(time.time())]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        told: dict[str, Any] = json.loads(next(line for line in process.stdout if line.startswith("{")))
        for line in process.stdout:
            if int(line) >= told["resumed at"] + KILLED_AFTER:
                break
        process.kill()
    return told


def measured(rounds: int, directory: Path) -> dict[str, Figure]:
    """Return the seconds of each step of the restarts; the directory is made."""
    begin_repository(directory)
    run_until_killed(directory)
    starts = []
    for number in range(rounds):
        if sys.stderr.isatty():
            print(f"round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
        starts.append(run_until_killed(directory))
        if not starts[-1]["resumed at"]:
            raise RuntimeError(f"the run in {directory} began again instead of being resumed")
    found, before = {}, [0.0] * rounds
    for step in STEPS:
        times = [start[step] for start in starts]
        found[step] = figure([time - earlier for time, earlier in zip(times, before, strict=True)])
        before = times
    found["beside imports"] = figure([start["updated"] - start["imported"] for start in starts])
    return found


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.5)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is at least 1, got {args.rounds}")
    return args


def main() -> int:
    args = options()
    facts = begin()
    print(f"median of {args.rounds} rounds\n")
    with tempfile.TemporaryDirectory() as directory:
        rows = measured(args.rounds, Path(directory) / "program")
    print(f"{'':<60}{'seconds':>9} (least to most)")
    for step, each in rows.items():
        name = STEPS.get(step, "all of it beside imports")
        print(f"{name:<60}{each.median:>9.3f} ({each.least:.3f} to {each.most:.3f})")
    total = rows["beside imports"].median
    print(f"\nbudget beside imports: <= {BUDGET:g} s, {'met' if total <= BUDGET else 'exceeded'}")
    exceeded = ["beside imports"] if args.check and total > args.slack * BUDGET else []
    return conclude(args, {"machine": facts, "rows": {name: vars(each) for name, each in rows.items()}}, exceeded)


if __name__ == "__main__":
    sys.exit(main())
