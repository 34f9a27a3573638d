"""``chainring verify-resume SCRIPT``: whether a script that is killed and resumed ends where the uninterrupted one does."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from chainring.testing.verify_resume import NotTried, ResumeDiffers, verify_script


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "verify-resume",
        help="prove that a script, killed and resumed, trains bit for bit what it trains uninterrupted",
        description="Runs a script that trains with one Trainer three times in fresh processes: uninterrupted, killed by "
        "SIGKILL after some iterations, and resumed. Everything is compared bit for bit, but for times. The trainer gets an "
        "out of its own, and what the script does after the run is not executed. Exit status 1 means that the runs differ; "
        "what differs first is printed, and why it might.",
    )
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="of the whole run (default: %(default)s)")
    parser.add_argument("--kill-after", type=int, default=7, metavar="K", help="iterations (default: %(default)s)")
    parser.add_argument("--keep", metavar="DIR", help="leave what the runs have written in this directory, new or empty")
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tries the script and returns the exit status."""
    numbers = {"iterations": options.iterations, "kill_after": options.kill_after}
    try:
        print(verify_script(options.script, options.arguments, **numbers, directory=options.keep))
    except ResumeDiffers as error:
        print(error)
        return 1
    except NotTried as error:
        print(f"chainring: {error}", file=sys.stderr)
        return 2
    return 0
