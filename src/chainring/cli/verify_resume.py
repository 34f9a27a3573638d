"""``chainring verify-resume SCRIPT``: compare a killed and resumed script with its uninterrupted run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from chainring.cli._common import add_command, ended_by_sigterm, show
from chainring.testing._processes import runs_in_sight, script_starter
from chainring.testing.verify_resume import NotTried, verify_program

_HELP = """
Run a script that trains with one Trainer several times in fresh processes:
twice uninterrupted, and once killed by SIGKILL and resumed again and again:
within an epoch, after the end of one, after an evaluation, in each phase of
the run, and before its end, some iterations after a snapshot. Each iteration,
the state at the end, the logs and other files are compared bit for bit,
without times; the first difference is printed with its possible causes, and
in any case what is changed and not saved. The trainer gets an out of its own,
and the script ends with its run. Options come before SCRIPT; arguments after
it are its own.

examples:
  chainring verify-resume train.py
  chainring verify-resume train.py --lr 0.1 -e 3    with its arguments
  chainring verify-resume --iterations 40 --kill-after 25 train.py

exit status:
  0  exact: the runs are the same
  1  the runs differ
  2  the script could not be compared; its error is shown
  3  inconclusive: two uninterrupted runs differ already, or one hung"""
_STATUS = {"exact": 0, "differs": 1, "inconclusive": 3}


def add_to(commands: Any) -> None:
    purpose = "compare a script, killed and resumed, with its uninterrupted run"
    parser = add_command(commands, "verify-resume", run, purpose, _HELP)
    parser.add_argument("--iterations", type=int, metavar="N", help="length of a run (default: its own, up to --seconds)")
    text = "seconds that the uninterrupted run trains at most; all takes some three times as long (default: 20)"
    parser.add_argument("--seconds", type=float, metavar="S", help=text)
    text = "iterations until a kill, in place of those; may be given several times"
    parser.add_argument("--kill-after", type=int, action="append", metavar="K", help=text)
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="of each process (default: 120)")
    parser.add_argument("--keep", metavar="DIR", help="keep the files of the runs in this directory, new or empty")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    runs = runs_in_sight(options.arguments)
    start = script_starter("chainring.testing._verified_run", options.script, options.arguments, runs)
    settings = options.iterations, options.kill_after, options.timeout, options.keep, options.seconds
    steps = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    try:
        with steps, ended_by_sigterm():
            verdict = verify_program(start, options.script, *settings)
    except NotTried as error:
        print(f"chainring: {error}", file=sys.stderr)
        return 2
    facts = {
        "verdict": verdict.name, "same": verdict.name == "exact", "script": options.script,
        "arguments": options.arguments, "iterations": verdict.iterations,
        "kills": [vars(kill) for kill in verdict.kills], "not_reached": verdict.not_reached,
        "whole": verdict.is_whole, "continues": verdict.continues, "unsaved": verdict.unsaved, "caches": verdict.caches,
        "not_looked_into": verdict.unseen, "report": verdict.report,
    }  # fmt: skip
    show(options, facts, [verdict.report])
    return _STATUS[verdict.name]
