"""The process of one run of `verify_resume`: the trainer gets an ``out`` of its own and an end, and is observed.

``python -m chainring.testing._subprocess TASK SCRIPT [ARGUMENTS]`` runs a script so.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import os
import runpy
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from chainring import _random, serializers
from chainring.serializers.base import AbstractSerializer, visit_if_stateful
from chainring.testing._fingerprint import fingerprint
from chainring.testing._harness import call_factory
from chainring.training._unsaved import attributes_of, describe_leaves
from chainring.training.extensions import LogReport
from chainring.training.trainer import Trainer
from chainring.training.triggers import TimeTrigger
from chainring.training.triggers.base import never
from chainring.training.updaters.callbacks import UpdateCallbacks

SNAPSHOT = "verify_resume"  # the name of the one at which the run is killed


class Run(enum.StrEnum):
    """The runs that are compared: without an interruption, killed by SIGKILL, and continued from where that was killed."""

    UNINTERRUPTED = "whole"
    KILLED = "killed"
    RESUMED = "resumed"


@dataclass(frozen=True)
class Task:
    """One of the runs, in a directory that they share."""

    run: str
    directory: str
    iterations: int  # of the uninterrupted run
    kill_after: int  # iterations of the killed run

    def path(self, suffix: str) -> Path:
        return Path(self.directory) / f"{self.run}.{suffix}"

    def lines(self, suffix: str) -> list[str]:
        """Return the lines of a file of this run, none where it has not written it."""
        path = self.path(suffix)
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def rows_path(self, log: str) -> Path:
        """Return the path of a log's rows; of the killed run a copy of then, since its ``out`` is continued."""
        return self.path(log.replace("/", "-")) if self.run == Run.KILLED else Path(self.out) / log

    @property
    def out(self) -> str:
        """The trainer's ``out``; the resumed run has that of the killed one."""
        run = Run.UNINTERRUPTED if self.run == Run.UNINTERRUPTED else Run.KILLED
        return str(Path(self.directory) / f"out of the {run} run")

    def exit_with_reason(self, reason: str) -> NoReturn:
        """Leave the reason why this run cannot be made, and end the process."""
        self.path("refusal").write_text(reason)
        sys.exit(1)


def main() -> None:
    """Run the script of the command line as Python would, up to the end of its trainer's run."""
    task = Task(**json.loads(sys.argv[1]))
    sys.argv = sys.argv[2:]
    script = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _replace_run(task)
    try:
        runpy.run_path(script, run_name="__main__")
    except _RunEnded:
        return
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    task.exit_with_reason(f"{script} has ended and no Trainer in it has run; give the arguments with which it trains")


class _RunEnded(BaseException):
    """Ends a script whose trainer has run."""


def _replace_run(task: Task) -> None:
    """Make ``Trainer.run`` the observed run, and refuse a second trainer."""
    construct, original = Trainer.__init__, Trainer.run
    constructed: list[int] = []

    @functools.wraps(construct)
    def counting_init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        constructed.append(id(trainer))
        construct(trainer, *args, **kwargs)

    @functools.wraps(original)
    def observed_run(trainer: Trainer) -> None:
        if len(constructed) > 1:
            task.exit_with_reason(
                f"{sys.argv[0]} has made two Trainers, and one is verified: "
                "write a function that makes the one, for chainring.testing.verify_resume"
            )
        _run(trainer, task, original)
        raise _RunEnded

    trainer_class: Any = Trainer
    trainer_class.__init__, trainer_class.run = counting_init, observed_run


def run_made_trainer(make_trainer: Callable[..., Any], task: Task) -> None:
    """Make a trainer and run it, in a process of its own whose output goes to a file."""
    with open(task.path("output"), "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    takes_out = "out" in inspect.signature(make_trainer).parameters
    trainer = make_trainer(out=task.out) if takes_out else call_factory(make_trainer, task.out)
    if not isinstance(trainer, Trainer):
        task.exit_with_reason(f"make_trainer returns a Trainer that has not run, and returned a {type(trainer).__name__}")
    _run(trainer, task, type(trainer).run)


def _run(trainer: Trainer, task: Task, original: Callable[[Trainer], None]) -> None:
    observer = _Observer(trainer, task)
    trainer.stop_trigger = observer
    trainer.out = task.out
    if task.run == Run.RESUMED:
        serializers.load(Path(trainer.out) / SNAPSHOT, trainer)
    original(trainer)
    observer.save(trainer)


class _Observer:
    """A stop trigger around the trainer's own that records a fingerprint of every iteration, and kills the killed run."""

    predictable = False

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._stop_trigger: Any = trainer.stop_trigger
        self._task = task
        self._kill_at = trainer.updater.iteration + task.kill_after
        self._last = trainer.updater.iteration + task.iterations
        batches: list[dict[str, str]] = []
        self._batches = batches  # of the present iteration
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            add = batches.append
            callbacks.add("batch_on_finish", lambda context: add(describe_leaves(f"batch {len(batches)}", context.batch)))
        if self._stop_trigger is never:  # then the end of the data is expected
            warnings.filterwarnings("ignore", "the training iterator ended after")

    def __getattr__(self, name: str) -> Any:
        if name == "_stop_trigger":
            raise AttributeError(name)
        return getattr(self._stop_trigger, name)

    def initialize(self, trainer: Trainer) -> None:
        trainer.initialize_trigger(self._stop_trigger)

    def serialize(self, serializer: AbstractSerializer) -> None:
        visit_if_stateful(serializer, "inner", self._stop_trigger)

    def __call__(self, trainer: Trainer) -> bool:
        iteration = trainer.updater.iteration
        with open(self._task.path("jsonl"), "a") as file:
            file.write(json.dumps({"iteration": iteration, "fingerprint": fingerprint(trainer, self._batches)}) + "\n")
        self._batches.clear()
        is_killed = self._task.run == Run.KILLED and iteration == self._kill_at
        if is_killed or (self._task.run == Run.RESUMED and not self._task.path("memory").exists()):
            self._task.path("memory").write_text(json.dumps(attributes_of(trainer, self._stop_trigger)))
        if is_killed:
            for log in _logs_of(trainer):
                shutil.copy(Path(trainer.out) / log, self._task.rows_path(log))
            serializers.save(Path(trainer.out) / SNAPSHOT, trainer)
            os.kill(os.getpid(), signal.SIGKILL)
        stops = iteration >= self._last or bool(self._stop_trigger(trainer))
        if stops:
            self.save(trainer)
        return stops

    def save(self, trainer: Trainer) -> None:
        """Save the state at the end, and facts that explain a difference; once."""
        if self._task.path("facts").exists():
            return
        facts = {
            "threads": torch.get_num_threads(),
            "inexact": _random.nondeterminism_reason(),
            "logs": _logs_of(trainer),
            "clocks": [entry.name for entry in trainer.entries if isinstance(entry.trigger, TimeTrigger)],
        }
        self._task.path("facts").write_text(json.dumps(facts))
        serializers.save(self._task.path("state"), trainer)


def _logs_of(trainer: Trainer) -> list[str]:
    """Return the names of the files of rows that its LogReports write."""
    reports = [entry.extension for entry in trainer.entries if isinstance(entry.extension, LogReport)]
    return [name for report in reports for name in report.writes if name.endswith(".jsonl")]


if __name__ == "__main__":
    main()
