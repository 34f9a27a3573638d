"""``chainring bisect RUN --bad CONDITION SCRIPT``: the iteration in which a run went wrong, and its batch."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from chainring._messages import list_names, printable
from chainring._runs.finished import Condition, Evidence, collect
from chainring.cli._common import add_command, show
from chainring.cli.replay import RecordedRun, add_run, add_script, batch_lines, describe_replay, indices_of, iteration_number
from chainring.testing.replay import NoReplay

_MOST_SHOWN = 8  # parameters

_HELP = """
Find the first iteration of a run for which a reported value is bad, the
examples of its batch, and which parameters were first not finite. A condition
is KEY, one of < <= > >= ==, and a number; a value that is NaN or infinite
satisfies every one.

All iterations are replayed from the first whose value is not known, by
extensions.Recorder or a log with a row for each. With --monotone only those
after the last snapshot for which it does not hold: enough if it continues to
hold once it does, as with NaN. Options come before SCRIPT.

examples:
  chainring bisect result --bad "main/loss > 10" train.py
  chainring bisect result --bad "main/loss == inf" train.py    not finite
  chainring bisect --json result --bad "main/loss > 10" train.py | jq .indices

exit status:
  0  it is found
  1  it never holds, or the replay differs from the recording
  2  there is no run, no such value, or the script fails"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "bisect", run, "the first iteration for which a value is bad, and its batch", _HELP)
    parser.add_argument("--bad", type=_condition, required=True, metavar="CONDITION", help='such as "main/loss > 10"')
    parser.add_argument("--monotone", action="store_true", help="look only after the last snapshot without it")
    parser.add_argument("--to", type=iteration_number, metavar="K", help="the last iteration (default: the last known)")
    add_run(parser)
    add_script(parser)


def _condition(text: str) -> Condition:
    try:
        return Condition.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    recorded, condition = RecordedRun(options.run_directory, options.script, options.arguments), options.bad
    key = condition.key
    evidence = collect(recorded.run, key, looks_into_snapshots=options.monotone)
    last, replayed = evidence.last if options.to is None else options.to, None
    goes_on = options.to is None and not _was_stopped(recorded.run.record, last)
    if last == 0 and not goes_on:
        raise ValueError("--to is the last iteration to look at, and the first is 1; 0 is the state before it")
    if evidence.first_unknown(condition) <= last or goes_on:
        if evidence.logged and not (key in evidence.logged or evidence.values):  # it may be misspelled
            near = difflib.get_close_matches(key, evidence.logged, 1)
            text = f"no row of a log has {key}; {f'did you mean {near[0]}? ' if near else ''}it is looked for in a replay"
            print(f"chainring: {printable(text)}", file=sys.stderr)
        replayed = _search(recorded, condition, evidence, last, options.monotone, goes_on)
        seen = replayed["seen"]
        if not (key in seen or evidence.values or evidence.means):
            near = difflib.get_close_matches(key, seen, 1) or seen[:5]
            raise NoReplay(f"nothing has reported {key!r}; reported: {', '.join(near) or 'nothing'}")
    answer = _answer(options, recorded, evidence, replayed, last)
    show(options, answer, _lines(answer, replayed, condition))
    return 0 if answer["found"] else 1


def _was_stopped(record: Mapping[str, Any], last: int) -> bool:
    """Return whether a command has ended the run after this iteration, and nobody has started it again."""
    stops = [entry for entry in record.get("commands", ()) if entry["command"] == "stop" and "refused" not in entry]
    started = max((str(start.get("time")) for start in record.get("starts", ())), default="")
    return any(entry["iteration"] == last and entry["time"] > started for entry in stops)


def _search(
    recorded: RecordedRun, condition: Condition, evidence: Evidence, last: int, is_monotone: bool, goes_on: bool
) -> dict[str, Any]:
    """Replay the iterations of which it is not known whether the condition holds, until it does."""
    first = evidence.first_unknown(condition)
    settings: dict[str, Any] = {"condition": condition, "needs_same_bits": False}
    if condition.holds(evidence.values.get(first)):
        replayed = recorded.replay(first, latest=first - 1, **settings)
        if replayed["match"] is None and replayed["same"] is not False:
            raise NoReplay(
                f"the run has {condition.key} = {evidence.values[first]!r} in iteration {first}, and the replay has not: it "
                "differs from the run; `chainring verify-resume` finds why"
            )
        return replayed
    if is_monotone:
        begin, end = evidence.bounds(condition)
        replayed = recorded.replay(min(end, last), latest=begin, goes_on=goes_on and end >= last, **settings)
        if replayed["match"] is not None or end >= last:
            return replayed
    return recorded.replay(last, latest=first - 1, goes_on=goes_on, **settings)


def _answer(
    options: argparse.Namespace, recorded: RecordedRun, evidence: Evidence, replayed: dict[str, Any] | None, last: int
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "run": options.run_directory, "bad": str(options.bad), "found": False, "iteration": None, "value": None,
        "indices": None, "batches": None, "not_finite": None, "looked_at": [evidence.begin + 1, last],
        "known_to": last, "assumed": 0, "replays": recorded.replays, "from": None, "same": None, "difference": None,
        "error": None, "notes": [],
    }  # fmt: skip
    if replayed is None:
        return answer
    begin = replayed["origin"]["iteration"]
    answer |= {name: replayed[name] for name in ("same", "difference", "error", "notes")}
    answer |= {"looked_at": [evidence.begin + 1, replayed["iteration"]], "from": replayed["origin"]["snapshot"]}
    answer["assumed"] = max(begin - evidence.first_unknown(options.bad) + 1, 0)
    if (matched := replayed["match"]) is not None:
        answer |= {"found": replayed["same"] is not False, **matched, "indices": indices_of(matched["batches"])}
    if replayed["not_finite"] is not None:
        iteration, names = replayed["not_finite"]
        answer["not_finite"] = {"iteration": iteration, "parameters": names, "is_first": iteration > begin}
    return answer


def _lines(answer: Mapping[str, Any], replayed: Mapping[str, Any] | None, condition: Condition) -> Iterator[str]:
    first, end = answer["looked_at"]
    if answer["same"] is False:
        yield printable(answer["difference"])
    elif answer["iteration"] is not None:
        yield f"iteration {answer['iteration']} is the first with {printable(condition)}: it is {answer['value']!r}"
        yield from batch_lines(answer["batches"])
    elif answer["assumed"] and replayed is not None:
        begin = replayed["origin"]["iteration"]
        yield f"not found: {printable(condition)} does not hold in iterations {begin + 1} to {end}"
    else:
        yield f"never: {printable(condition)} does not hold in iterations {first} to {end}"
    if replayed is None:
        yield "All of them are recorded, and nothing was replayed"
        return
    if (not_finite := answer["not_finite"]) is None:
        yield "All parameters are finite"
    else:
        names, iteration = not_finite["parameters"], not_finite["iteration"]
        when = "first not finite" if not_finite["is_first"] else "already not finite"
        yield f"Parameters were {when} after iteration {iteration}: {list_names(names, _MOST_SHOWN)}"
    if count := answer["assumed"]:
        before = f"in the {count} iteration{'s' * (count != 1)} before {replayed['origin']['iteration'] + 1}"
        if replayed["origin"]["snapshot"] is None:  # and not the beginning either
            remedy = "the script loads a state itself; give the arguments with which it began"
            yield f"It was not looked for {before}: {remedy}"
        else:
            yield f"By --monotone it is taken not to hold {before} that are not known"
    if end > answer["known_to"]:
        yield f"The run is known to have come to iteration {answer['known_to']}, and may have come further"
    if answer["error"]:
        yield f"The replay ended with {printable(answer['error'])}"
    if answer["same"] is not False:
        yield f"Replayed {describe_replay(replayed)}"
    yield from answer["notes"]
