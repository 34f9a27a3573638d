"""``chainring control RUN COMMAND...``: changes a run while it trains."""

from __future__ import annotations

import argparse
from typing import Any

from chainring._runs.finished import FinishedRun
from chainring.cli._common import add_command, show

_HELP = """
Change a run while it trains: the learning rate, when it stops, the weights of
its sources; take a snapshot, or call an extension. A command is carried out
between two iterations, in the same one on all ranks, within two seconds, and
recorded: a resumed run and a replay do the same without it being said again.
Without a command, what was done so far is shown, and what waits.

commands:
  lr=1e-4               the learning rate of the optimizer
  lr:NAME=1e-4          that of the optimizer of a name
  stop                  take all snapshots, and end the run
  stop=(30, "epoch")    replace the stop trigger; quote it for the shell
  snapshot              take all snapshots
  call=EXTENSION        call the extension of this name now
  weights=web:1,code:2  the weights of the sources of a MixtureIterator

examples:
  chainring control result lr=1e-4 snapshot
  chainring control result 'stop=(30, "epoch")'
  chainring control s3://bucket/run stop
  chainring control result                  what was done

exit status:
  0  the commands are written, or shown
  2  a command is wrong, the run has ended, or there is none"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "control", _run, "change a run while it trains: learning rate, stop, snapshot", _HELP)
    parser.add_argument("run_directory", metavar="RUN", help="the directory of a run (its out), or its address")
    parser.add_argument("commands", metavar="COMMAND", nargs="*", help="what to do; none shows what was done")


def _run(options: argparse.Namespace) -> None:
    from chainring._runs.control import control, lines_of, waiting  # which no other command needs

    control(options.run_directory, *options.commands)
    finished = FinishedRun.open(options.run_directory)
    facts = {"run": options.run_directory, "done": finished.record.get("commands", []), "waiting": waiting(finished)}
    show(options, facts, list(lines_of(finished)) or ["nothing was commanded"])
