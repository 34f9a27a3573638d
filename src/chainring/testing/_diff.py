"""The comparison of runs: of two that were not interrupted, and of one that was killed and resumed with the first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chainring._files import from_json
from chainring.serializers._checkpoint import read_state
from chainring.testing._fingerprint import Fingerprint, difference
from chainring.testing._verified_run import Task
from chainring.training._unsaved import changed, leaves, unsaved

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
class Repetition:
    """How two uninterrupted runs differ.

    Attributes:
        iterations: the last ones of both.
        iteration, first: the first iteration in which they differ, and how, causes first.
        keys: those that they report differently while the training is the same, such as speeds.
        paths: those in the state at the end that differ while the training is the same, such as times.
        idle: the paths of generators from which nobody draws.
        speeds: keys of what reports speeds and use of memory.
        generators: the global random generators that are in other states where the run begins.
        own_generators: by path, other generators that are.
    """

    iterations: tuple[int, int]
    iteration: int = 0
    first: list[Difference] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    speeds: set[str] = field(default_factory=set)
    generators: list[str] = field(default_factory=list)
    own_generators: dict[str, str] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        return bool(self.first) or self.iterations[0] != self.iterations[1]

    @property
    def left_out_keys(self) -> set[str]:
        return {*self.keys, *self.speeds, _TIME}


@dataclass
class Findings:
    """How a resumed run differs from the uninterrupted one.

    Attributes:
        when: "after loading" or "after the kill": of the first difference.
        iteration, first: the first iteration that differs, and how, causes first.
        iterations: the last ones, if the resumed run was not killed again.
        last: differences in the state at the end and in the rows of the logs.
        count: values compared at the end.
        warnings: of the resumed run alone.
        failure: how it failed instead.
    """

    when: str = ""
    iteration: int = 0
    first: list[Difference] = field(default_factory=list)
    iterations: tuple[int, int] = (0, 0)
    last: list[Difference] = field(default_factory=list)
    count: int = 0
    warnings: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.failure or self.first or self.last or self.iterations[0] != self.iterations[1])


def compare_repeated(one: Task, other: Task) -> Repetition:
    """Compare two uninterrupted runs; a generator from which neither has drawn does not count."""
    seen, again = read_fingerprints(one), read_fingerprints(other)
    found = Repetition((max(seen), max(again)))
    found.idle = _undrawn(seen) & _undrawn(again)
    found.speeds = _speeds(seen, one.read("facts")["speeds"])
    left_out = found.idle | {f"observation/{key}" for key in found.speeds}
    for iteration in sorted(seen.keys() & again.keys()):
        differences = _compare_fingerprints(seen[iteration], again[iteration], _CATEGORIES, left_out)
        if any(each.category != "observation" for each in differences):
            found.iteration, found.first = iteration, sorted(differences, key=lambda each: each.category == "observation")
            break
        found.keys |= {each.path.removeprefix("observation/") for each in differences}
    found.generators = differing_generators(one, other)
    start, start_again = (json.loads(task.lines("memory")[0]) for task in (one, other))
    found.own_generators = {
        path: text for path, text in start.items() if " in state " in text and start_again.get(path) != text
    }
    if not found.differs:
        logs = one.read("facts")["logs"]
        for log in logs:
            for row, row_again in zip(_rows(one, log), _rows(other, log), strict=False):
                differing = {key for key in row if difference(row[key], row_again.get(key)) is not None}
                found.keys |= differing - {_TIME, *found.speeds}
        values = [_final_values(task, logs, found) for task in (one, other)]
        found.paths = {each.path for each in _differences(*values)}
    return found


def differing_generators(one: Task, other: Task) -> list[str]:
    """Return the names of the global generators that are in other states where the trainer of a script begins to run."""
    begin, begin_other = one.read("begin"), other.read("begin")
    return [name for name in begin if begin[name] != begin_other.get(name)]


def compare_resumed(whole: Task, killed: Task, resumed: Task, repetition: Repetition) -> Findings:
    """Compare what a resumed run did, until it was killed again or to the end, with the uninterrupted one."""
    seen, seen_killed, seen_resumed = map(read_fingerprints, (whole, killed, resumed))
    found = Findings(warnings=[text for text in _warnings_of(resumed) if text not in _warnings_of(whole)])
    left_out = repetition.idle | {f"observation/{key}" for key in repetition.left_out_keys}
    stages = list(_first_differences(seen, seen_killed, seen_resumed, left_out))
    if stages:
        found.when, found.iteration, found.first = stages[0]
    if resumed.kill_at is None:
        found.iterations = (max(seen), max(seen_resumed, default=-1))
        logs = whole.read("facts")["logs"]
        one, other = (_final_values(run, logs, repetition) for run in (whole, resumed))
        found.last = list(_differences(one, other))
        found.count = len(one)
        if found.when == "after loading" and len(stages) == 1 and not found.last:
            found.first = []  # a value that was not restored but created again has changed nothing
    return found


def forgotten(killed: Task, resumed: Task) -> dict[str, str]:
    """Return by path what a run has changed and no state holds, when it was saved -> when that was loaded."""
    memory, loaded = ([json.loads(line) for line in task.lines("memory")] for task in (killed, resumed))
    if len(memory) < 2 or not loaded:
        return {}
    return unsaved(changed(memory[0], memory[-2], memory[-1]), memory[-1], loaded[0])


def read_fingerprints(task: Task) -> _Fingerprints:
    """Return the fingerprints of a run by iteration."""
    return {line["iteration"]: line["fingerprint"] for line in map(json.loads, task.lines("jsonl"))}


def read_events(task: Task) -> dict[int, list[str]]:
    """Return what each iteration of a run ended with: "epoch", "evaluation"."""
    return {line["iteration"]: line["events"] for line in map(json.loads, task.lines("jsonl"))}


def _undrawn(seen: _Fingerprints) -> set[str]:
    """Return the paths of the generators whose state never changes."""
    states: dict[str, set[str]] = {}
    for each in seen.values():
        for path, text in each["generators"].items():
            states.setdefault(path, set()).add(text)
    return {path for path, texts in states.items() if len(texts) == 1}


def _speeds(seen: _Fingerprints, names: list[str]) -> set[str]:
    """Return the keys that extensions of these names report."""
    keys = {path.removeprefix("observation/") for each in seen.values() for path in each["observation"]}
    return {key for key in keys if key.split("/")[0] in names}


def _warnings_of(task: Task) -> list[str]:
    return [line.partition("Warning: ")[2] for line in task.lines("output") if "Warning: " in line]


def _rows(task: Task, log: str) -> list[dict[str, Any]]:
    path = Path(task.out) / log
    return [from_json(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _first_differences(
    whole: _Fingerprints, killed: _Fingerprints, resumed: _Fingerprints, left_out: set[str]
) -> Iterator[tuple[str, int, list[Difference]]]:
    """Yield the first iteration that differs after loading and after the kill, as far as there is one."""
    loaded, later = list(resumed)[:1], list(resumed)[1:]
    stages = [
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
            if texts[0] != texts[1] and path not in left_out:
                found.append(Difference(category, path, " -> ".join(texts)))
    return found


def _final_values(task: Task, logs: list[str], repetition: Repetition) -> dict[str, Any]:
    """Return every value of the state at the end, and of the rows, by path."""
    left_out = repetition.left_out_keys
    values = dict(_repeatable_state(read_state(task.path("state")), left_out))
    for log in logs:
        for index, row in enumerate(_rows(task, log)):
            for key, value in row.items():
                if key not in left_out:
                    values.update(leaves(f"rows of {log}/{index}/{key}", value))
    return {path: value for path, value in values.items() if path not in repetition.paths}


def _repeatable_state(state: dict[str, Any], left_out: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield every value of a saved state by its path, without those that follow the clock, or are left out."""
    flat = [pair for path, value in state.items() for pair in leaves(path, value)]
    paths = {path for path, _ in flat}
    prefixes = [path.removesuffix("passed") for path in paths if path.endswith("/passed")]
    skipped = [prefix for prefix in prefixes if {f"{prefix}next", f"{prefix}period"} <= paths]  # a TimeTrigger's state
    for path, value in state.items():
        if path.endswith("/names") and isinstance(value, list):  # of a summary, whose values are numbered
            prefix = path.removesuffix("names")
            skipped += [f"{prefix}{index}/" for index, name in enumerate(value) if name in left_out]
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
