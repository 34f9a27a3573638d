"""``chainring verify-resume SCRIPT``: compare a killed and resumed script with its uninterrupted run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from chainring.cli._common import add_command, print_json
from chainring.testing.verify_resume import NotTried, ResumeDiffers, verify_script

_HELP = """
Run a script that trains with one Trainer three times in fresh processes:
uninterrupted, killed by SIGKILL after some iterations, and resumed.
Everything but times is compared bit for bit; the first difference is printed
with its possible causes. The trainer gets an out of its own, and the script
ends with its run. Options come before SCRIPT; arguments after it are passed
to the script.

examples:
  chainring verify-resume train.py
  chainring verify-resume train.py --lr 0.1 -e 3    with its arguments
  chainring verify-resume --iterations 40 --kill-after 25 train.py

exit status:
  0  the runs are the same
  1  the runs differ
  2  the script could not be compared; its error is shown"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands, "verify-resume", run, "compare a script, killed and resumed, with its uninterrupted run", _HELP
    )
    parser.add_argument(
        "--iterations", type=int, default=20, metavar="N", help="iterations of the uninterrupted run (default: %(default)s)"
    )
    parser.add_argument(
        "--kill-after", type=int, default=7, metavar="K", help="iterations until the kill (default: %(default)s)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the files of the runs in this directory, new or empty")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    """Compare the runs of the script, print the report and return the exit status."""
    settings = {"iterations": options.iterations, "kill_after": options.kill_after}
    steps = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    same = True
    try:
        with steps:
            report = verify_script(options.script, options.arguments, **settings, directory=options.keep)
    except ResumeDiffers as error:
        same, report = False, str(error)
    except NotTried as error:
        print(f"chainring: {error}", file=sys.stderr)
        return 2
    if options.json:
        print_json({"same": same, "script": options.script, "arguments": options.arguments, **settings, "report": report})
    else:
        print(report)
    return 0 if same else 1
