"""``chainring diff A B``: where two runs part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chainring._messages import printable
from chainring._runs.comparison import CAUSES, Comparison, Difference, compare_runs, first_difference
from chainring._runs.finished import FinishedRun
from chainring.cli._common import add_command, show
from chainring.cli.replay import RecordedRun
from chainring.testing._live_traces import Steps, differing_settings, first_module, first_step_apart

_MOST_SHOWN = 12
_MOST_IN_DETAIL = 64  # iterations
_HELP = """
Compare two runs by what they have left: the first iteration in which they
differ, and the loss, batch, generators or tensor that does; and the settings
and versions that differ. What extensions.Recorder has recorded is compared
for every iteration, otherwise rows of logs, of the same intervals, and
snapshots of the same iterations, bit for bit. Times and speeds are left out.
Runs are the same if all is that both have; the output says what was compared.

With --script both are replayed from the nearest snapshots before they part,
each with its own arguments, and the first module whose output differs is
named, or the loss, gradient or tensor, if no module does.

examples:
  chainring diff result other
  chainring diff --script train.py result other
  chainring diff s3://bucket/run result
  chainring diff --json result other | jq .iteration

exit status:
  0  the runs are the same, as far as both go
  1  they differ
  2  there is no run, a file is damaged, or nothing can be compared"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "diff", run, "where two runs part: the first iteration, loss, batch or tensor", _HELP)
    parser.add_argument("--script", metavar="SCRIPT", help="the script that trained both, to replay them where they part")
    parser.add_argument("one", metavar="A", help="a run: the directory (its out), or an address such as s3://bucket/run")
    parser.add_argument("other", metavar="B", help="another one")


def run(options: argparse.Namespace) -> int:
    if options.script is not None and not Path(options.script).is_file():  # also where it would not be needed
        raise FileNotFoundError(f"there is no script {options.script}")
    runs = FinishedRun.open(options.one), FinishedRun.open(options.other)
    comparison, replayed = compare_runs(*runs), None
    if options.script is not None and not comparison.is_same:
        replayed = _replay_both(options.script, comparison, runs)
        if replayed.first is not None and (comparison.first is None or not comparison.first.is_exact):
            comparison.differences.append(replayed.first)
    show(options, facts_of(comparison, replayed), map(printable, lines_of(comparison, replayed)))
    return {True: 0, False: 1, None: 2}[comparison.is_same]


def facts_of(comparison: Comparison, replayed: Replayed | None = None) -> dict[str, Any]:
    """Return where two runs part, as values of JSON."""
    first, tensor, module = comparison.first, _first_tensor(comparison, replayed), replayed and replayed.module
    return {
        "same": comparison.is_same,
        "iteration": first and first.iteration,
        "exact": first and first.is_exact,
        "after": first.after if first else comparison.same_until,
        "what": first and first.what,
        "name": first and first.name,
        "difference": first and first.text,
        "tensor": tensor and tensor.name,
        "tensor_iteration": tensor and tensor.iteration,
        "module": module and module.name,
        "module_iteration": module and module.iteration,
        "replayed": replayed
        and {
            "from": replayed.begin,
            "to": replayed.end,
            "notes": replayed.notes,
            "first": replayed.first and asdict(replayed.first),
            "module": module and asdict(module),
        },
        "settings": {name: list(values) for name, values in comparison.settings.items()},
        "iterations": list(comparison.lasts),
        "compared": comparison.compared,
        "not_compared": comparison.not_compared,
    }


def _first_tensor(comparison: Comparison, replayed: Replayed | None) -> Difference | None:
    tensors = [comparison.first_of("tensor"), None if replayed is None else replayed.tensor]
    return min((found for found in tensors if found is not None), key=lambda found: found.iteration, default=None)


# --- in words ---


def lines_of(comparison: Comparison, replayed: Replayed | None = None) -> Iterator[str]:
    """Yield in words where two runs part, and what was compared."""
    first = comparison.first
    yield comparison.answer
    if first is not None:
        others: dict[tuple[str, str], Difference] = {}  # in the same iteration, which both log and snapshot may have
        for found in comparison.differences:
            if found.iteration == first.iteration and (found.what, found.name) != (first.what, first.name):
                others.setdefault((found.what, found.name), found)
        yield from (f"  {found.words}" for found in [*others.values()][:_MOST_SHOWN])
        tensor = _first_tensor(comparison, replayed)
        if tensor is not None and first.what != "tensor" and tensor.iteration != first.iteration:
            yield f"the first tensor that differs, after iteration {tensor.iteration}: {tensor.named}"
        for kind in ("batch", "loss", "value", "state"):
            later = comparison.first_of(kind)
            if kind != first.what and later is not None and later.iteration > first.iteration:
                text = f": {later.named}" if later.named else ""
                yield f"the first {kind} that differs, in iteration {later.iteration}{text}"
        if all(found.what == "generators" for found in comparison.differences):
            names = {found.name.split("/")[2] for found in comparison.differences if found.name.count("/") >= 2}
            which = f" ({', '.join(sorted(names))})" if names else ""
            remedy = "; chainring.deterministic(seed) lets all of them begin alike" if not first.after else ""
            yield f"all else that was compared is the same: what was drawn from them{which} has changed nothing{remedy}"
    if replayed is not None:
        yield from _replayed_lines(replayed)
    if settings := comparison.settings:
        yield "settings that differ:"
    for name, values in list(settings.items())[:_MOST_SHOWN]:
        shown = [text if len(text) <= 100 else f"{text[:60]} ... {text[-30:]}" for text in map(repr, values)]
        yield f"  {name}: {' -> '.join(shown)}"
    if len(settings) > _MOST_SHOWN:
        yield f"  and {len(settings) - _MOST_SHOWN} more, which --json shows"
    yield from (f"compared: {text}" for text in comparison.compared)
    yield from (f"not compared: {text}" for text in comparison.not_compared)


def _replayed_lines(replayed: Replayed) -> Iterator[str]:
    first, module = replayed.first, replayed.module
    if first is None:
        yield (
            f"the replays compute the same in iterations {replayed.begin + 1} to {replayed.end}: what differs is kept by an "
            "extension, or it comes from code, data, versions or a machine that are others now"
        )
    elif first.what not in ("module", "tensor"):
        when = f"in iteration {first.iteration}" if first.iteration else "before the first update"
        yield f"the first that differs in the replays, {when}: {first.words}"
    if module is not None:
        yield f"the first module whose output differs, in iteration {module.iteration}: {module.name}, {module.text}"
    elif first is not None:
        yield "no module returns anything else"
    yield from replayed.notes


# --- replays of both ---


@dataclass
class Replayed:
    """What two replays have found in the iterations after one up to another."""

    begin: int
    end: int
    first: Difference | None = None  # the first step that differs
    module: Difference | None = None  # the first that returns something else
    tensor: Difference | None = None  # the first that differs at the end of an iteration
    notes: list[str] = field(default_factory=list)


def _replay_both(script: str, comparison: Comparison, runs: tuple[FinishedRun, FinishedRun]) -> Replayed:
    """Replay two runs where they part, each with its own arguments."""
    last = min(comparison.lasts)
    if not last:
        raise ValueError("--script replays what both runs have computed, and one of them has not come to an iteration")
    recorded = [RecordedRun(run.place, script) for run in runs]
    computed = [kind for kind in CAUSES if kind != "generators"]  # in which generators may be that nobody uses
    first = comparison.first_of(*computed) or comparison.first
    begin, end = 0, last
    if first is not None:
        same_at = comparison.tensors_same_at  # after which the state is the same, as far as it is known
        if same_at is None:
            same_at = first.iteration - 2 if first.is_exact else first.after or 0
        begin, end = max(min(same_at, first.iteration - 1, last - 1), 0), min(max(first.iteration, 1) + 1, last)
    replayed = _search(recorded, begin, end)
    if begin and replayed.first is not None and replayed.first.iteration <= begin:  # it was there before
        replayed = _search(recorded, 0, end)
    return replayed


def _search(runs: list[RecordedRun], begin: int, end: int) -> Replayed:
    replayed = Replayed(begin, end)
    if end - begin > _MOST_IN_DETAIL:
        a, b = (_capture(run, begin, end, replayed, in_detail=False) for run in runs)
        first = first_step_apart(a, b)
        if first is None:
            return replayed
        begin, end = max(first.iteration - 2, begin), min(first.iteration + 1, end)
    a, b = (_capture(run, begin, end, replayed, in_detail=True) for run in runs)
    replayed.first, replayed.module = first_step_apart(a, b), first_module(a, b)
    replayed.tensor = first_difference(a, b, ["tensor"])
    if (settings := differing_settings(a, b)) is not None:
        replayed.notes.append(f"settings of the optimizer after iteration {settings[0]}: {', '.join(settings[1][:4])}")
    return replayed


def _capture(run: RecordedRun, begin: int, end: int, replayed: Replayed, *, in_detail: bool) -> Steps:
    replay = run.replay(end, latest=begin, capture=(begin + 1, end, in_detail))
    notes = [*replay["notes"], *filter(None, [replay["difference"]])]
    replayed.notes += [text for note in notes if (text := f"{run.place}: {note}") not in replayed.notes]
    return {int(iteration): step for iteration, step in replay["captured"].items()}
