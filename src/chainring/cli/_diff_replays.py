"""The replays of two runs for `diff`: the first module of which the output differs, and what differs before it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainring._runs.finished import FinishedRun
from chainring._runs.traces import Difference
from chainring.cli._replays import RecordedRun, same
from chainring.testing._live_traces import Steps, differing_settings, first_module, first_step_apart, first_tensor
from chainring.testing._parting import Parting

_MOST_IN_DETAIL = 64  # iterations


@dataclass
class Replayed:
    """What two replays have found.

    Attributes:
        begin, end: the iterations that were compared are those after the one up to the other.
        first: the first step that differs.
        module: the first module that returns something else.
        tensor: the first tensor that differs at the end of an iteration.
        notes: sentences about the replays.
    """

    begin: int = 0
    end: int = 0
    first: Difference | None = None
    module: Difference | None = None
    tensor: Difference | None = None
    notes: list[str] = field(default_factory=list)


def require_script(script: str | None) -> None:
    """Refuse a script that is not there, also where it would not be needed.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if script is not None and not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")


def replay_both(script: str, found: Parting, one: FinishedRun, other: FinishedRun) -> Replayed:
    """Replay two runs where they part, each with its own arguments.

    Raises:
        ValueError: a run cannot be replayed.
    """
    last = min(found.lasts)
    if not last:
        raise ValueError("--script replays what both runs have computed, and one of them has not come to an iteration")
    runs = [RecordedRun(argparse.Namespace(run_directory=run.place, script=script, arguments=[])) for run in (one, other)]
    begin, end = _interval(found, last)
    replayed = _search(runs, begin, end)
    if begin and replayed.first is not None and replayed.first.iteration <= begin:  # it was there before
        replayed = _search(runs, 0, end)
    return replayed


def _interval(found: Parting, last: int) -> tuple[int, int]:
    """Return an iteration after which the state is the same, as far as it is known, and the last that is to be compared."""
    computed = [each for each in found.findings if each.what != "generators"]  # in which generators may be that nobody uses
    first = min(computed, key=lambda each: each.iteration, default=found.first)
    if first is None:
        return 0, last
    begin = first.after or 0
    if found.tensors_same_at is not None:
        begin = found.tensors_same_at
    elif first.is_exact:
        begin = first.iteration - 2
    return max(min(begin, first.iteration - 1, last - 1), 0), min(max(first.iteration, 1) + 1, last)


def _search(runs: list[RecordedRun], begin: int, end: int) -> Replayed:
    replayed = Replayed(begin, end)
    if end - begin > _MOST_IN_DETAIL:
        one, other = (_capture(run, begin, end, replayed, in_detail=False) for run in runs)
        first = first_step_apart(one, other)
        if first is None:
            return replayed
        begin, end = max(first.iteration - 2, begin), min(first.iteration + 1, end)
    one, other = (_capture(run, begin, end, replayed, in_detail=True) for run in runs)
    replayed.first, replayed.module = first_step_apart(one, other), first_module(one, other)
    replayed.tensor = first_tensor(one, other)
    if (settings := differing_settings(one, other)) is not None:
        replayed.notes.append(f"settings of the optimizer after iteration {settings[0]}: {', '.join(settings[1][:4])}")
    return replayed


def _capture(run: RecordedRun, begin: int, end: int, replayed: Replayed, *, in_detail: bool) -> Steps:
    found: dict[str, Any] = run.replay(end, latest=begin, until=end, capture=(begin + 1, end, in_detail))
    notes = [*found["notes"], *([found["comparison"]["difference"]] if same(found) is False else [])]
    replayed.notes += [text for note in notes if (text := f"{run.place}: {note}") not in replayed.notes]
    return {int(iteration): step for iteration, step in found["captured"].items()}
