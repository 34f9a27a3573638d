"""``chainring reproduce RUN``: the whole run once more, from its record alone, and whether it has the same bits."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chainring import _version
from chainring._messages import info, list_names, printable
from chainring._runs.comparison import Comparison, compare_runs
from chainring._runs.finished import FinishedRun, as_mapping, start_in_force
from chainring.cli._common import add_command, ended_by_sigterm, new_directory, show
from chainring.cli.diff import facts_of, lines_of
from chainring.cli.replay import add_run
from chainring.testing._processes import failure_of, run
from chainring.testing._workspace import Reproduction, Workspace, ranks_to_start
from chainring.testing.replay import NoReplay
from chainring.training._provenance import distributions, provenance

_MOST_SHOWN = 8
_ANOTHER = ("argv", "distributions.pip", "distributions.uv")  # than the run's, and not what computes it
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
            attempt = _Attempt(recorded, needed, directory, out, options.here)
            attempt.make(attempt.until)
            made = FinishedRun.open(out)
            comparison = compare_runs(recorded, made)
            for name in [name for name, (_, now) in comparison.settings.items() if name in _ANOTHER or now == out]:
                del comparison.settings[name]
            status, answer = _judge(comparison, made, attempt, recorded.last)
            is_kept, notes = is_kept or status == 1, attempt.notes
            if status == 1:
                notes += [*(_unseeded(recorded, made) or attempt.repeat(comparison)), f"the new run is in {out}"]
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


class _Attempt:
    """The code and the environment of a run, in which it is made again.

    Attributes:
        until: the last iteration that can be made.
        reason: why it is not the last of the run; empty if it is.
    """

    def __init__(self, recorded: FinishedRun, needed: Mapping[str, Any], directory: Path, out: str, here: bool) -> None:
        self._segments, self.until, self.reason, self._notes = _segments(recorded)
        self._recorded, self._needed, self._directory, self._out = recorded, needed, directory, out
        self._workspace = Workspace(needed, str(recorded.directory), out, directory, _began(recorded))
        self._ranks = ranks_to_start(needed)
        if here:
            self._workspace.use_this_environment()
        else:
            info("the recorded versions are installed into a new environment, which takes minutes; --here needs none")
            self._workspace.build_environment()
        self._notes += _differing(needed, here)
        if needed["ranks"] > 1:
            self._notes.append(f"the run had {needed['ranks']} ranks, and is made again on {self._ranks}")

    @property
    def notes(self) -> list[str]:
        return [*dict.fromkeys([*self._workspace.notes, *self._notes])]

    def make(self, until: int) -> None:
        """Run each command line up to the iteration with which the next one began."""
        os.makedirs(self._out, exist_ok=True)
        commands = [each for each in self._recorded.record.get("commands", ()) if "refused" not in each]
        for segment, end in zip(self._segments, [*(later.begin for later in self._segments[1:]), self.until], strict=True):
            if segment.begin >= until:
                return
            mark, threads, where = secrets.token_hex(16), self._needed["threads"], str(self._directory)
            task = Reproduction(mark, where, self._out, mark, until=min(end, until), threads=threads, commands=commands)
            code = run(self._workspace.starter(segment.arguments, self._ranks), task)
            if not task.is_done:
                told = "; ".join(self.notes)
                raise NoReplay(failure_of(task, code, "the script failed") + (f"\n({told})" if told else ""))

    def repeat(self, parted: Comparison) -> list[str]:
        """Make the run once more, up to where it has parted; return what that tells of the reason."""
        if parted.first is None:
            return []
        until, kept = max(parted.first.iteration, 1), f"{self._out}-{secrets.token_hex(4)}"
        os.rename(self._out, kept)
        try:
            self.make(until)
            again = compare_runs(FinishedRun.open(kept), FinishedRun.open(self._out))
        except (NoReplay, OSError, ValueError):
            return []
        finally:
            shutil.rmtree(self._out, ignore_errors=True)
            os.rename(kept, self._out)
        if again.is_same is None:
            return []
        if again.is_same:
            text = f"made here once more, it has the same bits up to iteration {until}: something outside of the program"
            return [f"{text} is not as it was, such as data, a variable of the environment, a version, or the date"]
        text = f"made here once more, it parts from itself too ({again.answer}): it depends on something that is another"
        return [f"{text} at each start, such as the clock, a generator without a seed, the order of a set, or its own files"]


def _began(recorded: FinishedRun) -> float:
    """Return when the run began, by the clock; infinity if its record does not tell."""
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(str(recorded.record["starts"][0].get("time"))).timestamp()
    return math.inf


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
    now = {"instructions": provenance()["instructions"], "device": _version.device_name()}
    was = {name: str(needed.get(name)) for name in now}
    if was["device"] == "cpu":  # chosen, where there may be an accelerator
        now["device"] = "cpu"
    if here:
        now |= {"python": _version.versions()["python"], **distributions()}
        was |= {"python": str(needed.get("python")), **needed["distributions"]}
    changed = [f"{name} {was[name]} -> {now.get(name, 'absent')}" for name in sorted(was) if was[name] != now.get(name)]
    if changed:
        yield f"differs here: {list_names(changed, _MOST_SHOWN)}"


def _judge(comparison: Comparison, made: FinishedRun, attempt: _Attempt, last: int) -> tuple[int, str]:
    """Return the exit status, and the answer in a sentence."""
    until, reason = attempt.until, attempt.reason
    if comparison.is_same is None:
        return 2, "not known: the run has left nothing that can be compared; extensions.Recorder records every iteration"
    if not comparison.is_same:
        return 1, "the run that was made again has other bits"
    if made.last < until:
        return 1, f"the run that was made again ended with iteration {made.last}, and the run came to {until}"
    if reason:
        return 2, f"the same bits up to iteration {until}, and no further: {reason}, which is not repeated"
    return 0, f"the same bits, up to iteration {last}"


def _unseeded(recorded: FinishedRun, made: FinishedRun) -> list[str]:
    """Return a sentence about generators with which the two runs have begun differently, if there are such."""
    began, began_again = (as_mapping(start_in_force(run.record, 0).get("generators")) for run in (recorded, made))
    names = sorted(name for name in began_again if began.get(name) != began_again[name])
    text = f"the generators of {', '.join(names)} did not begin alike: chainring.deterministic(seed) at the beginning of "
    return [f"{text}the script seeds all of them"] if names else []
