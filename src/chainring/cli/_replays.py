"""What `replay`, `batch` and `bisect` share: the run, the script and its arguments, and the words for a replay."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chainring._files import is_url
from chainring._runs.finished import FinishedRun, start_in_force, starts_between
from chainring.cli._common import ended_by_sigterm, printable
from chainring.testing._replay_process import replay_script
from chainring.testing._replaying import NoReplay
from chainring.training._run_directory import read_record

_MOST_SHOWN = 8


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the run."""
    parser.add_argument(
        "run_directory", metavar="RUN", help="the directory or address of the run (its out); nothing is changed there"
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments, which come last."""
    parser.add_argument("script", metavar="SCRIPT", help="the script that trained it")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments (default: those in run.json)"
    )


def iteration_number(text: str) -> int:
    """Return the number of an iteration; the type of an argument."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"an iteration is a whole number of 0 or more, got {text!r}")
    return int(text)


class RecordedRun:
    """A run with its record, of which iterations are replayed.

    Attributes:
        place: where the run is, as it was given.
        directory: that of the run; of one in an object store a copy of what is needed of it.
        run: the same, read.
        replays: how many replays were made.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.place = options.run_directory
        self.run = FinishedRun.open(self.place)
        self.run.copy_files()
        self.directory = self.run.directory
        self.replays = 0
        self._script, self._given = options.script, options.arguments
        self._record = read_record(self.directory)

    def replay(self, iteration: int, *, latest: int, **settings: Any) -> dict[str, Any]:
        """Replay with the arguments with which the run computed an iteration; see `replay_script`.

        What is returned has besides: ``same``, whether it is the recorded run, ``None`` if nothing of it is recorded; how it
        differs, if it does; and ``notes``, sentences about it.
        """
        arguments = self._given or [str(each) for each in start_in_force(self._record, iteration).get("argv", ())][1:]
        threads = self._record.get("threads")
        settings["threads"] = threads if isinstance(threads, int) else None
        self.replays += 1
        self.run.copy_nearest(latest)
        try:
            with contextlib.redirect_stdout(sys.stderr), ended_by_sigterm():
                replayed = replay_script(self.directory, self._script, arguments, latest=latest, **settings)
        except NoReplay as error:  # about what was copied
            raise NoReplay(str(error).replace(str(self.directory), self.place)) from error
        comparison = replayed["comparison"]
        replayed["difference"] = comparison and comparison["difference"]
        replayed["same"] = None if comparison is None else replayed["difference"] is None
        replayed["notes"] = self._notes(replayed, iteration)
        return replayed

    def _notes(self, replayed: Mapping[str, Any], iteration: int) -> list[str]:
        notes, begin = [], replayed["origin"]["iteration"]
        if not replayed["origin"]["is_exact"]:
            notes.append(
                f"The run was one of {replayed['origin']['ranks']} ranks: one process computes the same examples with other "
                "last bits"
            )
        starts = starts_between(self._record, begin, iteration)
        if any(start.get("changed") or start.get("argv") != starts[0].get("argv") for start in starts[1:]):
            places = ", ".join(str(start["iteration"]) for start in starts[1:])
            notes.append(f"The run was started again in between, at iteration {places}, with other settings or arguments")
        return notes


def describe_origin(replayed: Mapping[str, Any]) -> str:
    """Return where a replay began, in words."""
    name = replayed["origin"]["snapshot"]
    return "the beginning" if name is None else printable(name)


def describe_comparison(replayed: Mapping[str, Any]) -> str:
    """Return in words how a replay was compared with the recorder."""
    comparison = replayed["comparison"]
    if comparison is None:
        return "nothing of it is recorded to compare it with (extensions.Recorder does that)"
    if replayed["difference"] is not None:
        return str(replayed["difference"])
    count = comparison["count"]
    rest = f", which ends with iteration {comparison['last']}" if comparison["last"] < replayed["iteration"] else ""
    return f"the same as the recorder says in {count} iteration{'s' * (count != 1)}{rest}"


def indices_of(batches: Mapping[str, Any]) -> list[int] | None:
    """Return the indices of the main iterator, or of the only one; ``None`` if they are not known."""
    names = [name for name in batches if name == "main"] or list(batches)
    taken = batches[names[0]] if names else None
    return taken if isinstance(taken, list) else None


def batch_lines(batches: Mapping[str, Any]) -> list[str]:
    """Return a line for each iterator from which examples were taken."""
    return [f"{printable(name)}: {_describe_batch(taken)}" for name, taken in batches.items() if taken != []]


def _describe_batch(taken: Any) -> str:
    if isinstance(taken, list):
        return " ".join(map(str, taken))
    if taken is None:
        return "not known"
    begin, end = taken["from"], taken["to"]
    return f"from position {begin[1]} of epoch {begin[0]} to {end[1]} of {end[0]}; its loader does not tell the indices"


def shorten(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(map(printable, names[:_MOST_SHOWN])) + more


def refuse_inside(run: Path, directory: str) -> None:
    """Refuse to save into the directory of the run, or over anything.

    Raises:
        FileExistsError: something is there.
        ValueError: it lies in the directory of the run, or in an object store.
    """
    path = Path(directory)
    if is_url(directory):
        raise ValueError(f"{directory} is an address; save in a new directory, and copy it there")
    if path.resolve().is_relative_to(run):
        raise ValueError(f"{directory} lies in {run}, where a replay changes nothing; save elsewhere")
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{directory} is there already; give a new directory")
