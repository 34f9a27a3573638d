"""A run that is made again from its record, in a process, or in one for each rank: the whole of it, in another ``out``.

``python -m chainring.testing._reproduced_run TASK SCRIPT`` runs a script so.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chainring.testing._processes import ProcessTask, run_script
from chainring.testing.replay import ends_by_the_clock, recorded_threads
from chainring.training._entry import Observer
from chainring.training.trainer import Trainer


@dataclass(frozen=True)
class Reproduction(ProcessTask):
    """One start of the script that is made again, up to the iteration with which the run ended or was started again."""

    until: int
    threads: int | None = None  # of torch
    arguments: list[str] = field(default_factory=list, kw_only=True)  # of the script, some of which torchrun would take
    commands: list[Any] = field(default_factory=list, kw_only=True)  # that the run has carried out


class _End(Observer):
    """Ends a run after an iteration as a signal would, with a snapshot; nothing is sent to services meanwhile."""

    is_replay = True

    def __init__(self, until: int, commands: list[Any]) -> None:
        self._until, self.commands = until, commands

    def ends(self, trainer: Trainer, ends: Callable[[], bool]) -> bool:
        would_end = ends()
        if trainer.updater.iteration < self._until:
            return would_end and not ends_by_the_clock(trainer)
        if not would_end and not trainer.interruption.is_shared:
            signal.raise_signal(signal.SIGTERM)
            ends()  # which answers the signal
        return True


def main() -> None:
    """Run the script of the command line up to the end of its trainer's run."""
    task = Reproduction(**json.loads(sys.argv[1]))
    sys.argv += task.arguments

    def run(trainer: Trainer, run_trainer: Callable[[Trainer], None]) -> None:
        trainer.out = task.out
        if not trainer.is_resumed:  # what a replay leaves out
            found = [entry.optional("newest")(trainer) for entry in trainer.entries if entry.optional("autoload")]
            if newest := max(filter(None, found), key=lambda state: state[0], default=None):
                newest[1]()
        trainer.watch(_End(task.until, task.commands))
        try:
            run_trainer(trainer)
        except SystemExit:
            if trainer.updater.iteration < task.until:
                raise
        task.path("done").touch()

    with recorded_threads(task.threads):
        run_script(task, run, "replay")


if __name__ == "__main__":
    main()
