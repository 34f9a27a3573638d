"""One run of `verify_resume`, in a process: the trainer gets an ``out`` of its own and an end, and is observed.

``python -m chainring.testing._verified_run TASK SCRIPT [ARGUMENTS]`` runs a script so.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chainring import _random, serializers
from chainring._runs.finished import SPEEDS
from chainring.testing._live_traces import fingerprint
from chainring.testing._processes import MARK, ProcessTask, call_make_trainer, run_script
from chainring.training._digests import checksum, describe_leaves
from chainring.training._entry import Entry, Observer
from chainring.training._unsaved import Attributes, attributes_of
from chainring.training.extensions import Evaluator, LogReport
from chainring.training.trainer import Trainer
from chainring.training.triggers import TimeTrigger
from chainring.training.triggers.base import never
from chainring.training.updaters.callbacks import UpdateCallbacks

_FEW = 10  # iterations, for which a run may take longer than its seconds
_LOOKS_EACH = 8  # iterations after which a run may be looked at
_MOST_LOOKS = 0.2  # of the time that a run may take, and as much of what it has taken
_RARELY = 4  # the part of the looks in which what marks a phase has changed at most
_CACHES = frozenset(["__pycache__", ".cache", "matplotlib"])  # folders of files that are no results
_HELD_OUT = frozenset(["validation", "valid", "val", "test", "eval", "dev"])  # in the keys that an evaluation reports


@dataclass(frozen=True)
class Task(ProcessTask):
    """One of the runs of a verification; iterations are counted as the updater does."""

    seed: int  # of the generators of Python, NumPy and torch before the script begins
    seconds: float  # of training, where no length is given
    length: int | None = None  # iterations from where the script begins
    resume_from: str | None = None  # the name of a snapshot in its ``out``, which a killed run has left
    save_at: int | None = None  # the iteration after which a snapshot is taken
    kill_at: int | None = None  # that after which the process is killed

    @property
    def snapshot(self) -> Path:
        """The snapshot that it takes before it is killed."""
        return Path(self.out) / f"verify_resume_{self.save_at}"


def main() -> None:
    """Run the script of the command line up to the end of its trainer's run."""
    task = Task(**json.loads(sys.argv[1]))
    _begin(task)
    run_script(task, lambda trainer, original: _run(trainer, task, original), "verify_resume")


def run_made_trainer(make_trainer: Callable[..., Any], task: Task) -> None:
    """Make a trainer and run it."""
    _begin(task)
    trainer = call_make_trainer(make_trainer, task.out)
    _run(trainer, task, type(trainer).run)


def _begin(task: Task) -> None:
    """Seed what a program may leave unseeded, and have written down where it hangs, and what it writes elsewhere.

    Of each file that it opens for writing there it is written down how much was there before.
    """
    os.environ[MARK] = task.mark
    if task.deadline < float("inf"):
        stack = open(task.path("stack"), "w")  # noqa: SIM115 - for as long as the process lives
        faulthandler.dump_traceback_later(max(task.deadline - time.monotonic() - 1, 0.1), file=stack)
    seen: set[str] = set()
    not_elsewhere = (os.path.join(os.path.realpath(task.directory), ""), "/dev/", "/proc/")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        mode, flags = arguments[1] or "", arguments[2] or 0
        if not (any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path in seen or path.startswith(not_elsewhere) or not _CACHES.isdisjoint(path.split(os.sep)):
            return
        seen.add(path)
        appends = "a" in mode or flags & os.O_APPEND
        _append(task, "written", [path, os.path.getsize(path) if appends and os.path.isfile(path) else 0])

    sys.addaudithook(audit)
    _random.seed_all("verify-resume", task.seed)


def _append(task: Task, suffix: str, record: Any) -> None:
    with open(task.path(suffix), "a") as file:
        file.write(json.dumps(record) + "\n")


def _run(trainer: Trainer, task: Task, original: Callable[[Trainer], None]) -> None:
    generators = {name: checksum(state) for name, state in _random.get_rng_state(trainer.updater).items()}
    task.path("begin").write_text(json.dumps(generators))
    recording = _Recording(trainer, task)
    trainer.out = task.out
    if task.resume_from is not None:
        serializers.load(Path(trainer.out) / task.resume_from, trainer)
    original(trainer)
    recording.save(trainer, ended_itself=True)  # at the end of the data, if that was not done before
    task.path("done").touch()


class _Recording(Observer):
    """Records a fingerprint of every iteration; saves, kills and ends the run where its task says so."""

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._task = task
        self._first = trainer.updater.iteration  # where the script begins, before a snapshot is loaded
        self._calls = 0
        self._began = 0.0
        self._seen: Attributes = {}
        self._changes: list[tuple[int, set[str]]] = []  # of attributes, and the iterations at which that was seen
        self._looked = 0.0  # seconds
        self._not_looked = 0  # times at which it would have taken too long
        self._events: set[str] = set()  # of the present iteration
        batches: list[dict[str, str]] = []
        self._batches = batches  # of the present iteration
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            add = batches.append
            callbacks.add("batch_on_finish", lambda context: add(describe_leaves(f"batch {len(batches)}", context.batch)))
        if trainer.stop_trigger is never:  # then the end of the data is expected
            warnings.filterwarnings("ignore", "the training iterator ended after")
        trainer.watch(self)

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        if isinstance(entry.extension, Evaluator):
            self._events.add("evaluation")
        call()

    def ends(self, trainer: Trainer, ends: Callable[[], bool]) -> bool:
        iteration, task = trainer.updater.iteration, self._task
        if self._calls > 0 and trainer.updater.is_new_epoch:
            self._events.add("epoch")
        if any(not _HELD_OUT.isdisjoint(key.split("/")) for key in trainer.observation):
            self._events.add("evaluation")
        self._calls += 1
        if self._calls <= 2:  # the first iteration takes long, and says nothing about the others
            self._began = time.monotonic()
        trace = fingerprint(trainer, self._batches)
        _append(task, "jsonl", {"iteration": iteration, "events": [*self._events], "fingerprint": trace})
        if task.run == "first" and ("epoch" in self._events or self._calls % _LOOKS_EACH == 0):
            self._look(trainer, iteration)
        self._events.clear()
        self._batches.clear()
        if self._calls == 1 or (task.save_at is not None and task.save_at - 1 <= iteration <= task.save_at):
            # At the start, and when a snapshot is taken and before.
            _append(task, "memory", attributes_of(trainer, in_modules=True))
        if iteration == task.save_at:
            serializers.save(task.snapshot, trainer)
        if iteration == task.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        ends_itself = ends()
        stops = ends_itself or self._is_long_enough(iteration - self._first)
        if stops:
            self.save(trainer, ends_itself)
        return stops

    def _is_long_enough(self, length: int) -> bool:
        task, seconds = self._task, time.monotonic() - self._began
        if task.length is not None:
            return length >= task.length
        return length > 1 and seconds > task.seconds and (length >= _FEW or seconds > 3 * task.seconds)

    def _look(self, trainer: Trainer, iteration: int) -> None:
        """Note which attributes have changed since the last look, unless the looks would take too long."""
        began = time.monotonic()
        if self._looked > _MOST_LOOKS * (began - self._began + self._task.seconds):
            self._not_looked += 1
            return
        seen = attributes_of(trainer, in_modules=True)
        self._changes.append((iteration, {path for path, text in self._seen.items() if seen.get(path) != text}))
        self._seen = seen
        self._looked += time.monotonic() - began

    def _phases(self) -> list[int]:
        """Return the iterations at which attributes had changed that do so rarely."""
        counts = Counter(path for _, paths in self._changes for path in paths)
        rare = {path for path, count in counts.items() if count * _RARELY <= len(self._changes)}
        return [iteration for iteration, paths in self._changes if not rare.isdisjoint(paths)]

    def save(self, trainer: Trainer, ended_itself: bool) -> None:
        """Save the state at the end, and facts that explain a difference; once."""
        if self._task.path("facts").exists():
            return
        reports = [entry.extension for entry in trainer.entries if isinstance(entry.extension, LogReport)]
        facts = {
            "ended_itself": ended_itself,
            "phases": self._phases(),
            "looks": [len(self._changes), self._not_looked],
            "is_script": __name__ == "__main__",
            "continues": any(getattr(entry.extension, "autoload", False) for entry in trainer.entries if entry.is_snapshot),
            "threads": torch.get_num_threads(),
            "inexact": _random.nondeterminism_reason(),
            "logs": [name for report in reports for name in report.writes if name.endswith(".jsonl")],
            "speeds": [entry.name for entry in trainer.entries if type(entry.extension).__name__ in SPEEDS],
            "clocks": [entry.name for entry in trainer.entries if isinstance(entry.trigger, TimeTrigger)],
        }
        _append(self._task, "end", attributes_of(trainer, in_modules=True))
        serializers.save(self._task.path("state"), trainer)
        self._task.path("facts").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
