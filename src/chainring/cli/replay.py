"""``chainring replay RUN --to K SCRIPT``: the state of a run at any iteration."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

from chainring._files import to_json
from chainring.cli._common import add_command, print_json, printable
from chainring.cli._replays import (
    RecordedRun,
    add_run,
    add_script,
    describe_comparison,
    describe_origin,
    iteration_number,
    refuse_inside,
)

_HELP = """
Repeat a run from its nearest snapshot up to any iteration, bit for bit, with
the script that trained it: what the run had there, also if no snapshot was
taken. The run may have ended, been killed, or still be running; nothing is
changed in its directory, and no rows go to services such as W&B. Where
extensions.Recorder has recorded the run, each iteration is compared with it.
The script ends with its trainer's run. Options come before SCRIPT.

examples:
  chainring replay result --to 48123 train.py
  chainring replay result --to 48123 --save state train.py
  chainring replay result --to 48123 train.py --lr 0.1    with its arguments

exit status:
  0  the iteration was reached
  1  the replay differs from the recording
  2  there is no run, or the script fails or ends before"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "replay", run, "the state of a run at any iteration, repeated bit for bit", _HELP)
    parser.add_argument(
        "--to", type=iteration_number, required=True, metavar="K", help="the iteration; 0 is the state before the first"
    )
    parser.add_argument("--save", metavar="DIR", help="save the state as a snapshot in this directory, new or empty")
    add_run(parser)
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    """Replay, print what was there, and return the exit status."""
    recorded = RecordedRun(options)
    if options.save is not None:
        refuse_inside(recorded.directory, options.save)
    save = None if options.save is None else os.path.abspath(options.save)
    replayed = recorded.replay(options.to, latest=options.to, until=options.to, save=save)
    is_same, count = replayed["same"], options.to - replayed["origin"]["iteration"]
    if is_same is False and save is not None:
        shutil.rmtree(save)
    if options.json:
        comparison = replayed["comparison"]
        print_json(to_json({
            "run": options.run_directory, "iteration": options.to, "from": replayed["origin"]["snapshot"],
            "replayed": count, "same": is_same, "difference": replayed["difference"],
            "differs_at": comparison and comparison["iteration"], "observation": replayed["observation"],
            "digest": replayed["digest"], "saved": options.save if is_same is not False else None,
            "notes": replayed["notes"],
        }))  # fmt: skip
    else:
        print(f"iteration {options.to}, replayed from {describe_origin(replayed)}: {describe_comparison(replayed)}")
        print(*replayed["notes"], sep="\n", end="\n" * bool(replayed["notes"]))
        for key, value in replayed["observation"].items():
            print(f"  {printable(key)}: {value!r}")
        print(f"  state: {replayed['digest']}")
        if is_same is not False and options.save is not None:
            print(f"saved in {printable(options.save)}")
    return 1 if is_same is False else 0
