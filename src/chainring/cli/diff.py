"""``chainring diff A B``: where two runs part."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from chainring._files import to_json
from chainring._runs.finished import FinishedRun
from chainring._runs.traces import Difference
from chainring.cli._common import add_command, print_json, printable
from chainring.cli._diff_replays import Replayed, replay_both, require_script
from chainring.serializers._store import CorruptError
from chainring.testing._parting import Parting, compare_runs

_MOST_SHOWN = 12
_WORDS = {"batch": "the batch", "loss": "the loss", "generators": "the random generators", "value": "the value",
          "state": "the state", "module": "the module", "gradient": "the gradient of", "tensor": "the tensor"}  # fmt: skip
_HELP = """
Compare two runs by what they have left: the first iteration in which they
differ, and the loss, batch, generators or tensor that does; and the settings
and versions that differ. What extensions.Recorder has recorded is compared
for every iteration, otherwise rows of logs, of the same intervals, and
snapshots of the same iterations, bit for bit. Times and speeds are left out.
A run may have ended, been killed, or still be running, and either may be an
address in an object store; nothing is changed there.

Runs are the same if all is that both have: one that is longer, or has other
settings that change nothing, is too. The output says what was compared.

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
    """Add the command to the parser."""
    parser = add_command(commands, "diff", run, "where two runs part: the first iteration, loss, batch or tensor", _HELP)
    parser.add_argument("--script", metavar="SCRIPT", help="the script that trained both, to replay them where they part")
    parser.add_argument("one", metavar="A", help="a run: the directory (its out), or an address such as s3://bucket/run")
    parser.add_argument("other", metavar="B", help="another one")


def run(options: argparse.Namespace) -> int:
    """Compare, print what was found, and return the exit status."""
    require_script(options.script)
    try:
        one, other = FinishedRun.open(options.one), FinishedRun.open(options.other)
        found = compare_runs(one, other)
        replayed = _replay(options.script, found, one, other) if options.script is not None else None
        if options.json:
            print_json(to_json(_facts(found, replayed)))
        else:
            print(*map(printable, _lines(found, replayed, one, other)), sep="\n")
    except (CorruptError, RecursionError) as error:
        raise ValueError(str(error)) from error  # 1 is the answer that they differ
    except (OSError, ValueError):
        raise
    except Exception:
        traceback.print_exc()
        return 2
    return {True: 0, False: 1, None: 2}[found.is_same]


def _replay(script: str, found: Parting, one: FinishedRun, other: FinishedRun) -> Replayed | None:
    """Replay two runs that differ, and add to what was found."""
    if found.is_same:
        return None
    replayed = replay_both(script, found, one, other)
    first = found.first
    if replayed.first is not None and (first is None or not first.is_exact):
        found.findings.append(replayed.first)
    return replayed


def _first_tensor(found: Parting, replayed: Replayed | None) -> Difference | None:
    both = found.tensor, None if replayed is None else replayed.tensor
    tensors = [each for each in both if each is not None]
    return min(tensors, key=lambda each: each.iteration, default=None)


def _facts(found: Parting, replayed: Replayed | None) -> dict[str, Any]:
    first, tensor = found.first, _first_tensor(found, replayed)
    module = replayed and replayed.module
    return {
        "same": found.is_same,
        "iteration": first and first.iteration,
        "exact": first and first.is_exact,
        "after": first.after if first else found.same_until,
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
        "settings": {name: list(values) for name, values in found.settings.items()},
        "iterations": list(found.lasts),
        "compared": found.compared,
        "not_compared": found.not_compared,
    }


def _lines(found: Parting, replayed: Replayed | None, one: FinishedRun, other: FinishedRun) -> Iterator[str]:
    yield _answer(found, one, other)
    first = found.first
    if first is not None:
        yield from (f"  {_describe(each)}" for each in _others(found, first)[:_MOST_SHOWN])
        tensor = _first_tensor(found, replayed)
        if tensor is not None and first.what != "tensor" and tensor.iteration != first.iteration:
            yield f"the first tensor that differs, after iteration {tensor.iteration}: {_named(tensor)}"
        yield from _later_lines(found, first)
    if replayed is not None:
        yield from _replayed_lines(replayed)
    yield from _setting_lines(found.settings)
    yield from (f"compared: {text}" for text in found.compared)
    yield from (f"not compared: {text}" for text in found.not_compared)


def _others(found: Parting, first: Difference) -> list[Difference]:
    """Return what else differs in the first iteration, each value once, although log and snapshot have it too."""
    others: dict[tuple[str, str], Difference] = {}
    for each in found.findings:
        if each.iteration == first.iteration and (each.what, each.name) != (first.what, first.name):
            others.setdefault((each.what, each.name), each)
    return [*others.values()]


def _later_lines(found: Parting, first: Difference) -> Iterator[str]:
    """Yield where each other kind of value differs for the first time, and what the generators have changed, if nothing."""
    for what in ("batch", "loss", "value", "state"):
        later = min((each for each in found.findings if each.what == what), key=lambda each: each.iteration, default=first)
        if what != first.what and later.iteration > first.iteration:
            text = f": {_named(later)}" if _named(later) else ""
            yield f"the first {_WORDS[what].removeprefix('the ')} that differs, in iteration {later.iteration}{text}"
    if first.what == "generators" and all(each.what == "generators" for each in found.findings):
        names = {each.name.split("/")[2] for each in found.findings if each.name.count("/") >= 2}
        which = f" ({', '.join(sorted(names))})" if names else ""
        remedy = "; chainring.deterministic(seed) lets all of them begin alike" if not first.after else ""
        yield f"all else that was compared is the same: what was drawn from them{which} has changed nothing{remedy}"


def _replayed_lines(replayed: Replayed) -> Iterator[str]:
    if replayed.first is None:
        yield (
            f"the replays compute the same in iterations {replayed.begin + 1} to {replayed.end}: what differs is kept by an "
            "extension, or it comes from code, data, versions or a machine that are others now"
        )
    elif replayed.first.what not in ("module", "tensor"):
        when = f"in iteration {replayed.first.iteration}" if replayed.first.iteration else "before the first update"
        yield f"the first that differs in the replays, {when}: {_describe(replayed.first)}"
    if replayed.module is not None:
        text = f"{replayed.module.name}, {replayed.module.text}"
        yield f"the first module whose output differs, in iteration {replayed.module.iteration}: {text}"
    elif replayed.first is not None:
        yield "no module returns anything else"
    yield from replayed.notes


def _answer(found: Parting, one: FinishedRun, other: FinishedRun) -> str:
    first = found.first
    if found.is_same is None:
        return "not known: the two runs have left nothing that can be compared"
    if first is None:
        shorter, longer = sorted((one, other), key=lambda run: run.last)
        end = f", with which {shorter.place} ends; {longer.place} has {longer.last}" if shorter.last < longer.last else ""
        return f"same up to iteration {found.same_until}{end}"
    if first.iteration == 0:
        return f"different from the beginning: {_describe(first)}"
    if first.is_exact:
        return f"different from iteration {first.iteration} on: {_describe(first)}"
    since = "the first to compare" if not first.after else f"and the same in iteration {first.after}"
    return f"different by iteration {first.iteration}, {since}: {_describe(first)}"


def _describe(found: Difference) -> str:
    return f"{_WORDS[found.what]} {_named(found)}".rstrip()


def _named(found: Difference) -> str:
    return f"{found.name}{': ' * bool(found.text and found.name)}{found.text}"


def _setting_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings:
        yield "settings that differ:"
    for name, (one, other) in list(settings.items())[:_MOST_SHOWN]:
        yield f"  {name}: {_short(one)} -> {_short(other)}"
    if len(settings) > _MOST_SHOWN:
        yield f"  and {len(settings) - _MOST_SHOWN} more, which --json shows"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:60]} ... {text[-30:]}"
