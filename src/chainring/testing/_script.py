"""``python -m chainring.testing._script TASK SCRIPT [ARGS]``: runs a script whose one trainer is tried.

When the trainer's run has ended, the rest of the script is not executed, so that it replaces nothing outside of ``out``.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from typing import Any

from chainring.testing._trial import Task, run
from chainring.training.trainer import Trainer


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
