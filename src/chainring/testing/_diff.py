"""The comparison of an uninterrupted with a resumed run, and its report; times by the clock are not compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chainring._files import from_json
from chainring.serializers._checkpoint import read_state
from chainring.testing._fingerprint import Fingerprint, difference
from chainring.testing._subprocess import Task
from chainring.training._unsaved import leaves, unsaved

_Fingerprints = dict[int, Fingerprint]

_TIME = "elapsed_time"
_CATEGORIES = ("iterator", "batch", "generators", "observation", "buffers", "parameters", "optimizer")  # causes first
_SAVED = ("parameters", "buffers", "optimizer", "iterator", "generators")  # those that loading must restore


class Difference(NamedTuple):
    """One value that differs: its category and path, and as text both values, or by how much they differ."""

    category: str
    path: str
    text: str


@dataclass
class Findings:
    """The result of the comparison; two values are of the uninterrupted and of the resumed run."""

    left_out: set[str]  # keys that two starts of the program report differently, such as speeds
    iterations: tuple[int, int]  # the last ones
    facts: tuple[dict[str, Any], dict[str, Any]]
    warnings: list[str]  # of the resumed run alone
    when: str = ""  # "before the kill", "after loading" or "after the kill": of the first difference
    iteration: int = 0
    first: list[Difference] = field(default_factory=list)  # in that iteration, causes first
    last: list[Difference] = field(default_factory=list)  # in the state at the end and in the rows of the logs
    count: int = 0  # values compared at the end
    unsaved: list[str] = field(default_factory=list)  # lines with the values of the killed and of the resumed run

    @property
    def differs(self) -> bool:
        return bool(self.first or self.last or self.iterations[0] != self.iterations[1])


def compare(whole: Task, killed: Task, resumed: Task) -> Findings:
    """Compare the three runs."""
    seen_whole, seen_killed, seen_resumed = map(read_fingerprints, (whole, killed, resumed))
    found = Findings(
        left_out=_unrepeatable_keys(seen_whole, seen_killed),
        iterations=(max(seen_whole), max(seen_resumed, default=-1)),
        facts=(json.loads(whole.path("facts").read_text()), json.loads(resumed.path("facts").read_text())),
        warnings=[warning for warning in _warnings_of(resumed) if warning not in _warnings_of(whole)],
    )
    stages = list(_first_differences(seen_whole, seen_killed, seen_resumed, found.left_out))
    if stages:
        found.when, found.iteration, found.first = stages[0]
    found.unsaved = _unsaved_differences(*(json.loads(run.path("memory").read_text()) for run in (killed, resumed)))
    logs = found.facts[0]["logs"]
    if found.when != "before the kill":
        for log in logs:
            for one, other in zip(_rows(whole, log), _rows(killed, log), strict=False):
                found.left_out |= {key for key in one if key != _TIME and difference(one[key], other.get(key)) is not None}
    one, other = (_final_values(run, logs, found.left_out) for run in (whole, resumed))
    found.last = list(_differences(one, other))
    found.count = len(one)
    if found.when == "after loading" and len(stages) == 1 and not found.last:
        found.first = []  # a value that was not restored but made anew has changed nothing
    return found


def read_fingerprints(task: Task) -> _Fingerprints:
    """Return the fingerprints of a run by iteration."""
    return {line["iteration"]: line["fingerprint"] for line in map(json.loads, task.lines("jsonl"))}


def _warnings_of(task: Task) -> list[str]:
    return [line.partition("Warning: ")[2] for line in task.lines("output") if "Warning: " in line]


def _rows(task: Task, log: str) -> list[dict[str, Any]]:
    path = task.rows_path(log)
    return [from_json(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _first_differences(
    whole: _Fingerprints, killed: _Fingerprints, resumed: _Fingerprints, left_out: set[str]
) -> Iterator[tuple[str, int, list[Difference]]]:
    """Yield the first iteration that differs before the kill, after loading and after the kill, as far as there is one."""
    loaded, later = list(resumed)[:1], list(resumed)[1:]
    stages = [
        ("before the kill", whole, killed, _CATEGORIES, list(killed)),
        ("after loading", killed, resumed, _SAVED, loaded),
        ("after the kill", whole, resumed, _CATEGORIES, later),
    ]
    for when, one, other, categories, iterations in stages:
        for iteration in iterations:
            found = _compare_fingerprints(one[iteration], other[iteration], categories, left_out) if iteration in one else []
            if found:
                yield when, iteration, found
                break


def _compare_fingerprints(
    one: Fingerprint, other: Fingerprint, categories: Iterable[str], left_out: set[str]
) -> list[Difference]:
    found = []
    for category in categories:
        for path in one[category] | other[category]:
            texts = one[category].get(path, "nothing"), other[category].get(path, "nothing")
            if texts[0] != texts[1] and path.removeprefix("observation/") not in left_out:
                found.append(Difference(category, path, " -> ".join(texts)))
    return found


def _unrepeatable_keys(whole: _Fingerprints, killed: _Fingerprints) -> set[str]:
    """Return the keys that two starts report differently while the training is the same: speeds, times."""
    keys: set[str] = set()
    for iteration in killed.keys() & whole.keys():
        for found in _compare_fingerprints(whole[iteration], killed[iteration], _CATEGORIES, set()):
            if found.category != "observation":
                return set()
            keys.add(found.path.removeprefix("observation/"))
    return keys


def _final_values(task: Task, logs: list[str], left_out: set[str]) -> dict[str, Any]:
    """Return every value of the state at the end, and of the rows, by path."""
    values = dict(_repeatable_state(read_state(task.path("state")), left_out))
    for log in logs:
        for index, row in enumerate(_rows(task, log)):
            for key, value in row.items():
                if key not in {*left_out, _TIME}:
                    values.update(leaves(f"rows of {log}/{index}/{key}", value))
    return values


def _repeatable_state(state: dict[str, Any], left_out: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield every value of a saved state by its path, without those that follow the clock, or are left out."""
    flat = [pair for path, value in state.items() for pair in leaves(path, value)]
    paths = {path for path, _ in flat}
    prefixes = [path.removesuffix("passed") for path in paths if path.endswith("/passed")]
    skipped = [prefix for prefix in prefixes if {f"{prefix}next", f"{prefix}period"} <= paths]  # a TimeTrigger's state
    for path, value in state.items():
        if path.endswith("/names") and isinstance(value, list):  # of a summary, whose values are numbered
            prefix = path.removesuffix("names")
            skipped += [f"{prefix}{index}/" for index, name in enumerate(value) if name in {*left_out, _TIME}]
    for path, value in flat:
        is_reported = path.startswith(("observation/", "extensions/"))
        is_left_out = is_reported and any(path.endswith(f"/{key}") for key in left_out)
        if _TIME not in path.split("/") and not is_left_out and not path.startswith(tuple(skipped)):
            yield path, value


def _differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Difference]:
    for path in one | other:
        category = path.partition(":")[0] if ":" in path else path.partition("/")[0]
        if path not in other or path not in one:
            yield Difference(category, path, f"only in the {'uninterrupted' if path in one else 'resumed'} run")
        elif (text := difference(one[path], other[path])) is not None:
            yield Difference(category, path, text)


def _unsaved_differences(killed: dict[str, str], resumed: dict[str, str]) -> list[str]:
    """Return one line for each: generators first, then attributes, then the items of containers."""
    paths = [path for path in killed if killed[path] != resumed.get(path)]
    paths.sort(key=lambda path: ("[" in path, "in state" not in killed[path]))
    return [f"  {path}: {text}" for path, text in unsaved(paths, killed, resumed).items()]


_MAX_LINES = 8

_GENERATOR = (
    "a random generator that is not restored draws in the dataset, the model, the loss or an extension: Python's, NumPy's "
    "and torch's global ones are restored, a numpy Generator, a random.Random or a torch.Generator of one's own is not. "
    "Draw from the global ones, or give the object that holds it serialize(serializer)"
)
_UNSAVED = (
    "something is remembered and not saved: an attribute of a module that is not a buffer (register_buffer), an updater, "
    "an extension or a callback without serialize(serializer), a scheduler or an average of weights that is not saved"
)
_CAUSES = {
    "iterator": [
        "the iterator, or the loader in it, has no state, or leaves some of it out: give it serialize(serializer), or "
        "state_dict() and load_state_dict(state)",
        "the dataset or batch size is another one when the program is started again",
    ],
    "batch": [
        "a loader without state that begins its passes otherwise after a restart: a generator, or a sampler that draws from "
        "its own random generator",
        _GENERATOR,
        "the dataset changes while it is used, or is read in an order that changes, such as that of a set or a directory",
    ],
    "generators": [
        "code that draws from a global generator is called at other times in the resumed run: it counts calls, keeps a "
        "cache, or follows the clock",
        _GENERATOR,
    ],
    "observation": [_UNSAVED, _GENERATOR],
    "optimizer": [
        _UNSAVED,
        "an extension sets the learning rate from a count of its own instead of trainer.updater.iteration",
    ],
}
_ONLY_REPORTED = (
    "the training is the same and its rows or extensions are not: an extension, a trigger or a postprocess remembers "
    "something that its serialize(serializer) does not save, or the rows hold values that do not follow from the training"
)
_NOT_RESTORED = (
    "saved state is not restored: a serialize(serializer), or a load_state_dict, leaves it out, or the program changes "
    "it in initialize, after it was loaded"
)
_UNREPEATABLE = (
    "two starts of the program are not the same, so nothing can be said about a resume: call chainring.deterministic(seed) "
    "first, before the model is made; seed generators of one's own; let nothing depend on the clock, on the order of a set "
    "or a directory, or on files that an earlier run has left"
)


def format_report(found: Findings, kill_after: int) -> str:
    """Return the report of a comparison."""
    opening = f"Killed after {kill_after} iterations and resumed, the run is "
    if found.differs:
        lines = [
            f"{opening}not the uninterrupted one.",
            "Where two values are given, they are: uninterrupted -> resumed",
            *_first_lines(found),
        ]
        if found.last and found.when != "before the kill":
            first = {item.path for item in found.first}
            ordered = sorted(found.last, key=lambda item: item.path not in first)
            lines.append(f"At the end {len(ordered)} of {found.count} values differ:")
            lines += _shortened([f"  {item.path}: {item.text}" for item in ordered])
        lines += ["Why it might:", *(f"- {cause}" for cause in _causes(found))]
        if found.unsaved and found.when != "before the kill":
            lines.append("Unsaved state that differs, of the killed run when it was saved -> of the resumed run:")
            lines += _shortened(found.unsaved)
        if found.warnings:
            lines += ["The resumed run was warned:", *(f"  {text}" for text in found.warnings[:_MAX_LINES])]
    else:
        lines = [
            f"{opening}bit for bit the uninterrupted one: {found.count} values are the same after iteration "
            f"{found.iterations[0]}, and those of each iteration on the way"
        ]
    if found.left_out:
        keys = ", ".join(sorted(found.left_out))
        lines.append(f"Left out, because two starts of the program report it differently: {keys}")
    return "\n".join(lines)


def _first_lines(found: Findings) -> Iterator[str]:
    if found.iterations[0] != found.iterations[1]:
        yield f"One ended after iteration {found.iterations[0]}, the resumed one after {found.iterations[1]}"
    if not found.first:
        return
    where = {
        "before the kill": f"After iteration {found.iteration}, before the kill, two starts of the program differ first in",
        "after loading": f"Right after the snapshot of iteration {found.iteration} was loaded, it differs from the saved "
        "state in",
        "after the kill": f"It differs first in iteration {found.iteration}, in",
    }
    first = found.first[0]
    yield f"{where[found.when]} the {first.category}: {first.path}: {first.text}"
    others = Counter(other.category for other in found.first[1:])
    if others:
        counts = ", ".join(f"{count} of {category}" for category, count in others.items())
        yield f"  then also, in the same iteration: {counts}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"  and {more} more"]


def _causes(found: Findings) -> list[str]:
    """Return what may have caused the first difference, the likeliest first."""
    if found.when == "before the kill":
        causes = [_UNREPEATABLE]
    elif found.when == "after loading":
        causes = [_NOT_RESTORED]
    else:
        causes = list(_CAUSES.get(found.first[0].category, [_UNSAVED])) if found.first else [_ONLY_REPORTED]
    if found.iterations[0] != found.iterations[1]:
        causes.insert(0, "a stop trigger that counts, and does not save its count, ends the run at another iteration")
    whole, resumed = found.facts
    if whole["threads"] != resumed["threads"]:
        causes.insert(0, f"torch used {whole['threads']} threads and then {resumed['threads']}: sums round otherwise")
    if whole["inexact"]:
        causes.append(f"the run was {whole['inexact']}")
    if whole["clocks"]:
        clocks = ", ".join(whole["clocks"])
        causes.append(f"triggers that follow the clock fire at other iterations each time: those of {clocks}")
    return causes
