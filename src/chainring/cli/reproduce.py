"""``chainring reproduce RUN``: the whole run once more, from its record alone, and whether it has the same bits."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chainring import _environment
from chainring._messages import list_names, printable
from chainring._runs.comparison import Comparison, compare_runs
from chainring._runs.finished import FinishedRun, as_mapping, start_in_force
from chainring.cli._common import add_command, ended_by_sigterm, new_directory, show
from chainring.cli.diff import facts_of, lines_of
from chainring.cli.replay import add_run
from chainring.testing._processes import failure_of, run
from chainring.testing._reproduced_run import Reproduction
from chainring.testing._workspace import Workspace, ranks_to_start
from chainring.testing.replay import NoReplay
from chainring.training._provenance import distributions, provenance

_MOST_SHOWN = 8
_HELP = """
Make a run again from its record, run.json, and compare the two bit for bit:
the commit with the difference that the work tree had to it, the arguments,
the versions of all distributions in a new environment, and the variables and
threads that change numbers. It runs the code that was recorded: do that with
runs that you trust. In the directory of the run nothing is changed, and no
rows go to services such as W&B. The script ends with its trainer's run.

examples:
  chainring reproduce result                 in a new environment
  chainring reproduce --here result          in this one; says what differs
  chainring reproduce --out again result     keep the new run

exit status:
  0  the same bits, up to the last iteration of the run
  1  they part; the output says where
  2  it cannot be made again, or not all of it; the output says why"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "reproduce", reproduce, "the whole run once more, from its record: the same bits?", _HELP)
    parser.add_argument("--here", action="store_true", help="use this environment, and say what differs from the run's")
    parser.add_argument("--out", metavar="DIR", help="keep the new run in this directory, new or empty")
    add_run(parser)


class Segment(NamedTuple):
    """Iterations that one command line has computed, of the run as it is now."""

    begin: int
    arguments: list[str]
    differs: tuple[str, ...]  # what was not as at the first start


def reproduce(options: argparse.Namespace) -> int:
    recorded = FinishedRun.open(options.run_directory)
    recorded.copy_files()
    needed = recorded.record.get("reproduction")
    if not isinstance(needed, dict):
        raise NoReplay(f"the run.json of {options.run_directory} does not have what repeats a run")
    if (number := needed.get("run", 1)) != 1:
        raise NoReplay(
            f"{options.run_directory} is that of run {number} of its script, and the first alone is made again: let a "
            "script, or other arguments, run it alone, from what the others have left"
        )
    if not recorded.last:
        raise NoReplay(f"{options.run_directory} has not come to an iteration that it has saved, logged or recorded")
    out, is_kept = _new_out(options.out, recorded.directory), options.out is not None
    directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="chainring-reproduce-")))
    try:
        with contextlib.redirect_stdout(sys.stderr), ended_by_sigterm():
            end, notes = _make_again(recorded, needed, directory, out, options.here)
        made = FinishedRun.open(out)
        comparison = compare_runs(recorded, made)
        comparison.settings.pop("argv", None)
        status, answer = _judge(comparison, made, end, recorded.last)
        is_kept = is_kept or status == 1
        notes += [*_unseeded(recorded, made), f"the new run is in {out}"] if status == 1 else []
        facts = facts_of(comparison) | {"status": status, "answer": answer, "notes": notes}
        lines = [answer, *lines_of(comparison), *notes]
        show(options, facts, map(printable, lines))
        return status
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not is_kept:
            shutil.rmtree(os.path.dirname(out), ignore_errors=True)


def _new_out(given: str | None, run_directory: Path) -> str:
    if given is None:
        return os.path.join(os.path.realpath(tempfile.mkdtemp(prefix="chainring-again-")), "result")
    return new_directory(given, run_directory)


def _make_again(
    recorded: FinishedRun, needed: Mapping[str, Any], directory: Path, out: str, here: bool
) -> tuple[tuple[int, str], list[str]]:
    """Run all that can be, and return with which iteration that ends, why if it is not the last, and notes."""
    segments, end, reason, notes = _segments(recorded)
    workspace = Workspace(needed, str(recorded.directory), out, directory)
    ranks = ranks_to_start(needed)
    if here:
        workspace.use_this_environment()
    else:
        workspace.build_environment()
    notes += _differing(needed, here)
    if needed["ranks"] > 1:
        notes.append(f"the run had {needed['ranks']} ranks, and is made again on {ranks}")
    os.makedirs(out, exist_ok=True)
    commands = [each for each in recorded.record.get("commands", ()) if "refused" not in each]
    for number, segment in enumerate(segments):
        until = segments[number + 1].begin if number + 1 < len(segments) else end
        mark, threads = secrets.token_hex(16), needed["threads"]
        name, where = f"start{number}", str(directory)
        task = Reproduction(name, where, out, mark, until=until, threads=threads, commands=commands)
        code = run(workspace.starter(segment.arguments, ranks), task)
        if not task.is_done:
            told = "; ".join([*workspace.notes, *notes])
            raise NoReplay(failure_of(task, code, "the script failed") + (f"\n({told})" if told else ""))
    return (end, reason), [*dict.fromkeys([*workspace.notes, *notes])]


def _segments(recorded: FinishedRun) -> tuple[list[Segment], int, str, list[str]]:
    """Return the command lines that have computed the run, to which iteration, why not further, and notes about them.

    Other code ends what can be made again. With anything else that was another one later on, the bits may be the same.
    """
    segments: list[Segment] = []
    for start in recorded.record["starts"]:
        begin, argv, differs = (start.get(name) for name in ("iteration", "argv", "differs"))
        if not isinstance(begin, int) or not isinstance(argv, list) or not argv:
            raise NoReplay("a start in run.json has no iteration, or no arguments")
        while segments and segments[-1].begin >= begin:  # what it had computed was left behind
            segments.pop()
        arguments, names = list(map(str, argv[1:])), tuple(map(str, differs or ()))
        if not segments or segments[-1][1:] != (arguments, names):
            segments.append(Segment(begin, arguments, names))
    if not segments:
        raise NoReplay("run.json has no start")
    notes: list[str] = []
    for number, segment in enumerate(segments):
        text = f"from iteration {segment.begin} on it ran with other {', '.join(segment.differs)}"
        if "code" in segment.differs:
            if not number:
                raise NoReplay(f"{text}, and only the code of its first start is recorded")
            return segments[:number], segment.begin, text, notes
        notes += [text] if segment.differs else []
    return segments, recorded.last, "", notes


def _differing(needed: Mapping[str, Any], here: bool) -> Iterator[str]:
    """Yield what is not as it was, in words."""
    now = {"instructions": provenance()["instructions"], "device": _environment.device_name()}
    was = {name: str(needed.get(name)) for name in now}
    if was["device"] == "cpu":  # chosen, where there may be an accelerator
        now["device"] = "cpu"
    if here:
        now |= {"python": _environment.versions()["python"], **distributions()}
        was |= {"python": str(needed.get("python")), **needed["distributions"]}
    changed = [f"{name} {was[name]} -> {now.get(name, 'absent')}" for name in sorted(was) if was[name] != now.get(name)]
    if changed:
        yield f"differs here: {list_names(changed, _MOST_SHOWN)}"


def _judge(comparison: Comparison, made: FinishedRun, end: tuple[int, str], last: int) -> tuple[int, str]:
    """Return the exit status, and the answer in a sentence."""
    until, reason = end
    if comparison.is_same is None:
        return 2, "not known: the run has left nothing that can be compared; extensions.Recorder records every iteration"
    if not comparison.is_same:
        return 1, "the run that was made again has other bits"
    if made.last < until:
        return 1, f"the run that was made again ended with iteration {made.last}, and the run came to {until}"
    if reason:
        return 2, f"the same bits up to iteration {until}, and no further: {reason}, which is not repeated"
    return 0, f"the same bits, up to iteration {last}"


def _unseeded(recorded: FinishedRun, made: FinishedRun) -> Iterator[str]:
    """Yield a sentence about generators with which the two runs have begun differently."""
    began, began_again = (as_mapping(start_in_force(run.record, 0).get("generators")) for run in (recorded, made))
    if names := sorted(name for name in began_again if began.get(name) != began_again[name]):
        yield (
            f"the generators of {', '.join(names)} did not begin alike: chainring.deterministic(seed) at the beginning of "
            "the script seeds all of them"
        )
