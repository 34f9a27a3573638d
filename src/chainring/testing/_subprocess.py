"""What is done to a trainer in the process that tries it: an ``out`` of its own, an end, and a look at each iteration."""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chainring import _random, serializers
from chainring.serializers.base import AbstractSerializer
from chainring.testing._fingerprint import Batches, look
from chainring.testing._unsaved import memory
from chainring.training._trainer_state import visit_part
from chainring.training.extensions import LogReport
from chainring.training.trainer import Trainer
from chainring.training.triggers import TimeTrigger
from chainring.training.triggers.base import never
from chainring.training.updaters.callbacks import UpdateCallbacks

WHOLE, KILLED, RESUMED = "whole", "killed", "resumed"
"""The three runs: one that nothing interrupts, one that is killed, and the one that continues it."""
SNAPSHOT = "verify_resume"


@dataclass(frozen=True)
class Task:
    """One of the three runs.

    Attributes:
        part: which of them.
        directory: where all three leave what they have seen.
        iterations: how many the whole run has.
        kill_after: after how many the second is killed.
    """

    part: str
    directory: str
    iterations: int
    kill_after: int

    def place(self, ending: str) -> Path:
        """The file for what this run has seen."""
        return Path(self.directory) / f"{self.part}.{ending}"

    def rows(self, name: str) -> Path:
        """Where the rows of that log are found: of the killed run as it was killed, since its ``out`` is continued."""
        return self.place(name.replace("/", "-")) if self.part == KILLED else Path(self.out) / name

    @property
    def out(self) -> str:
        """The trainer's ``out``: the resumed run has that of the killed one."""
        return str(Path(self.directory) / ("out of the whole run" if self.part == WHOLE else "out of the killed run"))

    def refuse(self, reason: str) -> None:
        """Says why this cannot be tried, and ends the process."""
        self.place("refusal").write_text(reason)
        sys.exit(1)


class Watch:
    """A stop trigger around the trainer's own: it is asked before each iteration, when all that belongs to the last is done.

    Args:
        trainer: the trainer.
        task: which run this is.
    """

    predictable = False

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._inner: Any = trainer.stop_trigger
        self._task = task
        self._kill_at = trainer.updater.iteration + task.kill_after
        self._last = trainer.updater.iteration + task.iterations
        self._has_begun = self._is_saved = False
        self._batches: Batches | None = None
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            self._batches = Batches()
            callbacks.add("batch_on_finish", self._batches)
        if self._inner is never:  # then the end of the data is no surprise
            warnings.filterwarnings("ignore", "the training iterator ended after")

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def initialize(self, trainer: Trainer) -> None:
        """As the trainer's own."""
        trainer.initialize_trigger(self._inner)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """The trainer's own."""
        visit_part(serializer, "inner", self._inner)

    def __call__(self, trainer: Trainer) -> bool:
        seen = {"iteration": trainer.updater.iteration, "seen": look(trainer, self._batches)}
        with open(self._task.place("jsonl"), "a") as file:
            file.write(json.dumps(seen) + "\n")
        if self._task.part == RESUMED and not self._has_begun:
            self._remember(trainer)
        self._has_begun = True
        if self._task.part == KILLED and trainer.updater.iteration == self._kill_at:
            self._remember(trainer)
            for name in _logs(trainer):
                shutil.copy(Path(trainer.out) / name, self._task.rows(name))
            serializers.save(Path(trainer.out) / SNAPSHOT, trainer)
            os.kill(os.getpid(), signal.SIGKILL)
        stops = trainer.updater.iteration >= self._last or bool(self._inner(trainer))
        if stops:
            self.save(trainer)
        return stops

    def _remember(self, trainer: Trainer) -> None:
        self._task.place("memory").write_text(json.dumps(memory(trainer, self._inner)))

    def save(self, trainer: Trainer) -> None:
        """Saves the state at the end, and what helps to explain it; once."""
        if self._is_saved:
            return
        self._is_saved = True
        clocks = [entry.name for entry in trainer.entries if isinstance(entry.trigger, TimeTrigger)]
        facts = {
            "threads": torch.get_num_threads(),
            "inexact": _random.nondeterminism_reason(),
            "logs": _logs(trainer),
            "clocks": clocks,
        }
        self._task.place("facts").write_text(json.dumps(facts))
        serializers.save(self._task.place("state"), trainer)


def _logs(trainer: Trainer) -> list[str]:
    """The files of lines that its LogReports write."""
    reports = [entry.extension for entry in trainer.entries if isinstance(entry.extension, LogReport)]
    return [name for report in reports for name in report.writes if name.endswith(".jsonl")]


def run(trainer: Trainer, task: Task, original: Callable[[Trainer], None]) -> None:
    """Runs the trainer as the task says, by ``original``."""
    watch = Watch(trainer, task)
    trainer.stop_trigger = watch
    trainer.out = task.out
    if task.part == RESUMED:
        serializers.load(Path(trainer.out) / SNAPSHOT, trainer)
    original(trainer)
    watch.save(trainer)


def run_made(make_trainer: Callable[..., Any], task: Task) -> None:
    """In a process of its own: makes a trainer and runs it. What is printed goes to a file."""
    with open(task.place("output"), "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        trainer = called(make_trainer, task.out)
        if not isinstance(trainer, Trainer):
            task.refuse(f"make_trainer returns a Trainer that has not run, and returned a {type(trainer).__name__}")
        run(trainer, task, type(trainer).run)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)


def called(make_trainer: Callable[..., Any], out: str) -> Any:
    """What it returns, called with ``out`` if it has such a parameter, or one that it cannot do without."""
    parameters = inspect.signature(make_trainer).parameters
    if "out" in parameters:
        return make_trainer(out=out)
    positional = [each for each in parameters.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return make_trainer(out) if any(each.default is each.empty for each in positional) else make_trainer()


class _Ended(BaseException):
    """The run is over, and with it what was to be tried."""


def main() -> None:
    """Runs the script of the command line as Python would."""
    task = Task(**json.loads(sys.argv[1]))
    sys.argv = sys.argv[2:]
    script = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _wrap(task)
    try:
        runpy.run_path(script, run_name="__main__")
    except _Ended:
        return
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    task.refuse(f"{script} has ended and no Trainer in it has run; give the arguments with which it trains")


def _wrap(task: Task) -> None:
    """Lets the first run of a trainer be the one that is tried."""
    construct, original = Trainer.__init__, Trainer.run
    made: list[int] = []
    ran: list[Trainer] = []

    @functools.wraps(construct)
    def counted(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        made.append(id(trainer))
        construct(trainer, *args, **kwargs)

    @functools.wraps(original)
    def tried(trainer: Trainer) -> None:
        if ran or len(made) > 1:
            task.refuse(
                f"{sys.argv[0]} has {'run' if ran else 'made'} two Trainers, and one is tried: "
                "write a function that makes the one, for chainring.testing.verify_resume"
            )
        ran.append(trainer)
        run(trainer, task, original)
        raise _Ended

    vars_of: Any = Trainer
    vars_of.__init__, vars_of.run = counted, tried


if __name__ == "__main__":
    main()
