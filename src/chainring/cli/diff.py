"""``chainring diff A B``: where two runs part."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from chainring._files import to_json
from chainring.cli._common import add_command, print_json, printable
from chainring.serializers._store import CorruptError
from chainring.testing._parting import Finding, Parting, compare_runs
from chainring.testing._run_files import RunFiles, read_run_files

_MOST_SHOWN = 12
_WORDS = {"batch": "the batch", "loss": "the loss", "generators": "the random generators", "value": "the value",
          "state": "the state", "tensor": "the tensor"}  # fmt: skip
_HELP = """
Compare two runs by what they have left: the first iteration in which they
differ, and the loss, batch, generators or tensor that does; and the settings
and versions that differ. What extensions.Recorder has taken down is compared
for every iteration, otherwise rows of logs, of the same intervals, and
snapshots of the same iterations, bit for bit. Times and speeds are left out.
A run may have ended, been killed, or still be going on, and either may be an
address in an object store; nothing is changed there.

Runs are the same if all is that both have: one that is longer, or has other
settings that change nothing, is too. The output says what was compared.

examples:
  chainring diff result other
  chainring diff s3://bucket/run result
  chainring diff --json result other | jq .iteration

exit status:
  0  the runs are the same, as far as both go
  1  they differ
  2  there is no run, a file is damaged, or nothing can be compared"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "diff", run, "where two runs part: the first iteration, loss, batch or tensor", _HELP)
    parser.add_argument("one", metavar="A", help="a run: the directory (its out), or an address such as s3://bucket/run")
    parser.add_argument("other", metavar="B", help="another one")


def run(options: argparse.Namespace) -> int:
    """Compare, print what was found, and return the exit status."""
    try:
        with read_run_files(options.one) as one, read_run_files(options.other) as other:
            found = compare_runs(one, other)
            if options.json:
                print_json(to_json(_facts(found)))
            else:
                print(*map(printable, _lines(found, one, other)), sep="\n")
    except (CorruptError, RecursionError) as error:
        raise ValueError(str(error)) from error  # 1 is the answer that they differ
    except (OSError, ValueError):
        raise
    except Exception:
        traceback.print_exc()
        return 2
    return {True: 0, False: 1, None: 2}[found.is_same]


def _facts(found: Parting) -> dict[str, Any]:
    first, tensor = found.first, found.tensor
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
        "module": None,
        "settings": {name: list(values) for name, values in found.settings.items()},
        "iterations": list(found.lasts),
        "compared": found.compared,
        "not_compared": found.not_compared,
    }


def _lines(found: Parting, one: RunFiles, other: RunFiles) -> Iterator[str]:
    yield _answer(found, one, other)
    first = found.first
    if first is not None:
        others = [each for each in found.findings if each != first and each.iteration == first.iteration]
        yield from (f"  {_describe(each)}" for each in others[:_MOST_SHOWN])
        if first.what != "tensor" and found.tensor is not None and found.tensor.iteration > first.iteration:
            yield f"the first tensor that differs, after iteration {found.tensor.iteration}: {_named(found.tensor)}"
        causes = [each for each in found.findings if each.what == "batch" and each.iteration > first.iteration]
        yield from (f"the first batch that differs is that of iteration {each.iteration}" for each in causes[:1])
    yield from _setting_lines(found.settings)
    yield from (f"compared: {text}" for text in found.compared)
    yield from (f"not compared: {text}" for text in found.not_compared)


def _answer(found: Parting, one: RunFiles, other: RunFiles) -> str:
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
    since = "the first to compare" if first.after is None else f"and the same in iteration {first.after}"
    return f"different by iteration {first.iteration}, {since}: {_describe(first)}"


def _describe(found: Finding) -> str:
    return f"{_WORDS[found.what]} {_named(found)}".rstrip()


def _named(found: Finding) -> str:
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
