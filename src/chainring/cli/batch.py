"""``chainring batch RUN K SCRIPT``: the examples of an iteration."""

from __future__ import annotations

import argparse
from typing import Any

from chainring.cli._common import add_command, print_json
from chainring.cli._replays import (
    RecordedRun,
    add_run,
    add_script,
    batch_lines,
    describe_comparison,
    describe_origin,
    indices_of,
    iteration_number,
)
from chainring.testing._replaying import NoReplay

_HELP = """
Print the indices, in the dataset, of the examples that an iteration of a run
was trained on. The iteration is replayed with the script that trained the run,
from the nearest snapshot before; see `chainring replay`. Options come before
RUN.

examples:
  chainring batch result 48123 train.py
  chainring batch result 48123 train.py --lr 0.1    with its arguments
  chainring batch --json result 48123 train.py | jq .indices

exit status:
  0  they are printed
  1  the replay differs from the recording
  2  there is no run, the script fails, or its loader does not tell them"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "batch", run, "the indices of the examples of an iteration", _HELP)
    add_run(parser)
    parser.add_argument("iteration", type=iteration_number, metavar="K", help="the iteration; the first is 1")
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    """Replay, print the indices, and return the exit status."""
    iteration = options.iteration
    if iteration == 0:
        raise ValueError("the first iteration is 1; 0 is the state before it, which had no batch")
    replayed = RecordedRun(options).replay(iteration, latest=iteration - 1, until=iteration, needs_same_bits=False)
    batches, is_same = replayed["batches"], replayed["same"]
    indices = indices_of(batches)
    if options.json:
        print_json({
            "run": options.run_directory, "iteration": iteration, "indices": indices, "batches": batches,
            "from": replayed["origin"]["snapshot"], "same": is_same,
            "difference": replayed["difference"], "notes": replayed["notes"],
        })  # fmt: skip
    elif indices is not None:
        print(*indices)
        if len([each for each in batches.values() if each != []]) > 1:
            print(*batch_lines(batches), sep="\n")
        print(f"iteration {iteration}, replayed from {describe_origin(replayed)}: {describe_comparison(replayed)}")
        print(*replayed["notes"], sep="\n", end="\n" * bool(replayed["notes"]))
    if is_same is False:
        return 1
    if indices is None:
        raise NoReplay("\n".join(batch_lines(batches)) or "the updater takes no examples from an iterator")
    return 0
