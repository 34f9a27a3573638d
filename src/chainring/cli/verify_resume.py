"""``chainring verify-resume SCRIPT``: whether a script that is killed and resumed ends where the uninterrupted one does."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from chainring.cli._common import add_command, add_json, print_json
from chainring.testing.verify_resume import ResumeDiffers, ResumeNotVerified, verify_script

_DESCRIPTION = """
Runs a script that trains with one Trainer three times in fresh processes:
uninterrupted, killed by SIGKILL after some iterations, and resumed. Everything is
compared bit for bit, but for times. The trainer gets an out of its own, and what the
script does after the run is not executed. Options come before SCRIPT; what follows it
is the script's. What differs first is printed, and why it might."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "verify-resume",
        purpose="whether a script, killed and resumed, ends up the same",
        description=_DESCRIPTION,
        examples=[
            "chainring verify-resume train.py",
            "chainring verify-resume train.py --lr 0.1 -e 3    with its arguments",
            "chainring verify-resume --iterations 40 --kill-after 25 train.py",
        ],
        status=["the runs are the same", "they differ", "the script could not be tried; its error is shown"],
    )
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="of the whole run (default: %(default)s)")
    parser.add_argument("--kill-after", type=int, default=7, metavar="K", help="iterations (default: %(default)s)")
    parser.add_argument("--keep", metavar="DIR", help="leave what the runs have written in this directory, new or empty")
    add_json(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tries the script and returns the exit status."""
    numbers = {"iterations": options.iterations, "kill_after": options.kill_after}
    steps = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    same = True
    try:
        with steps:
            report = verify_script(options.script, options.arguments, **numbers, directory=options.keep)
    except ResumeDiffers as error:
        same, report = False, str(error)
    except ResumeNotVerified as error:
        print(f"chainring: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json({"same": same, "script": options.script, "arguments": options.arguments, **numbers, "report": report})
    else:
        print(report)
    return 0 if same else 1
