"""What `verify_resume` finds: how two uninterrupted runs differ, and how a killed and resumed run differs from one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainring._files import from_json, is_temporary
from chainring._places.base import MANIFEST
from chainring._runs.comparison import Difference, Trace, describe_difference, differences
from chainring.serializers._loading import read_state
from chainring.testing._verified_run import Task
from chainring.training._unsaved import changed, leaves, unsaved

_TIME = "elapsed_time"
_KINDS = ("iterator", "batch", "generators", "observation", "buffers", "parameters", "optimizer")  # causes first
_NOT_OF_THE_RUN = ("run.json", "previous", "abandoned")  # of the directory, which tells of every start
_LARGEST_FILE = 1 << 26
_MAX_SHOWN = 100  # characters of a line
_SAVED = ("parameters", "buffers", "optimizer", "iterator", "generators")  # those that loading must restore

Files = dict[str, bytes]
"""By path, what a run has written beside its logs: absolute where it is outside of its ``out``."""


@dataclass
class Repetition:
    """How two uninterrupted runs differ.

    Attributes:
        iterations: the last ones of both.
        first: all that differs in the first iteration in which the training does, causes first.
        keys: what they report differently while the training is the same, such as speeds.
        paths: what differs in the state at the end while the training is the same, such as times.
        idle: the paths of generators from which nobody draws.
        speeds: keys of what reports speeds and use of memory.
        generators: the global random generators that are in other states where the run begins.
        own_generators: by path, other generators that are.
    """

    iterations: tuple[int, int]
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
        is_at_loading: whether the first difference was there before an update was made with what was loaded.
        first: all that differs in the first iteration that does, causes first.
        iterations: the last ones, if the resumed run was not killed again.
        last: differences in the state at the end and in the rows of the logs.
        count: values compared at the end.
        files, left_out_files: what differs in files beside the logs, and those that could not be compared.
        compared_files: the number of those that could.
        warnings: of the resumed run alone.
        failure: how it failed instead.
    """

    is_at_loading: bool = False
    first: list[Difference] = field(default_factory=list)
    iterations: tuple[int, int] = (0, 0)
    last: list[Difference] = field(default_factory=list)
    count: int = 0
    files: dict[str, str] = field(default_factory=dict)
    left_out_files: list[str] = field(default_factory=list)
    compared_files: int = 0
    warnings: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.failure or self.first or self.last or self.files or self.iterations[0] != self.iterations[1])


def compare_repeated(first: Task, second: Task) -> Repetition:
    """Compare two uninterrupted runs; a generator from which neither has drawn does not count."""
    trace, again = read_trace(first), read_trace(second)
    facts = first.read("facts")
    repetition = Repetition((max(trace), max(again)))
    repetition.idle = _undrawn(trace) & _undrawn(again)
    reported = {path.removeprefix("observation/") for iteration in trace.values() for path in iteration["observation"]}
    repetition.speeds = {key for key in reported if key.split("/")[0] in facts["speeds"]}
    for differing in differences(
        trace, again, _KINDS, repetition.idle | {f"observation/{key}" for key in repetition.speeds}
    ):
        if any(difference.what != "observation" for difference in differing):
            repetition.first = sorted(differing, key=lambda difference: difference.what == "observation")
            break
        repetition.keys |= {difference.name.removeprefix("observation/") for difference in differing}
    repetition.generators = differing_generators(first, second)
    start, start_again = (json.loads(task.lines("memory")[0]) for task in (first, second))
    repetition.own_generators = {
        path: text for path, text in start.items() if " in state " in text and start_again.get(path) != text
    }
    if not repetition.differs:
        for log in facts["logs"]:
            for row, row_again in zip(_rows(first, log), _rows(second, log), strict=False):
                differing_keys = {key for key in row if describe_difference(row[key], row_again.get(key)) is not None}
                repetition.keys |= differing_keys - {_TIME, *repetition.speeds}
        values, values_again = (_final_values(task, facts["logs"], repetition) for task in (first, second))
        repetition.paths = {difference.name for difference in _differing_values(values, values_again, max(trace))}
    return repetition


def differing_generators(first: Task, second: Task) -> list[str]:
    """Return the names of the global generators that are in other states where the trainer of a script begins to run."""
    states, others = first.read("begin"), second.read("begin")
    return [name for name in states if states[name] != others.get(name)]


def compare_resumed(whole: Task, killed: Task, resumed: Task, repetition: Repetition) -> Findings:
    """Compare what a resumed run did, until it was killed again or to the end, with the uninterrupted one."""
    trace = read_trace(resumed)
    findings = Findings(warnings=[text for text in _warnings_of(resumed) if text not in _warnings_of(whole)])
    left_out = repetition.idle | {f"observation/{key}" for key in repetition.left_out_keys}
    loaded = dict(list(trace.items())[:1])
    at_loading = next(differences(read_trace(killed), loaded, _SAVED, left_out), [])
    uninterrupted = read_trace(whole)
    later = {iteration: kinds for iteration, kinds in trace.items() if iteration not in loaded}
    after_kill = next(differences(uninterrupted, later, _KINDS, left_out), [])
    findings.is_at_loading, findings.first = bool(at_loading), at_loading or after_kill
    if resumed.kill_at is None:
        findings.iterations = (max(uninterrupted), max(trace, default=-1))
        logs = whole.read("facts")["logs"]
        values, values_resumed = (_final_values(task, logs, repetition) for task in (whole, resumed))
        findings.last = list(_differing_values(values, values_resumed, findings.iterations[1]))
        findings.count = len(values)
        if at_loading and not after_kill and not findings.last:
            findings.first = []  # a value that was not restored but created again has changed nothing
    return findings


def forgotten(killed: Task, resumed: Task) -> dict[str, str]:
    """Return by path what a run has changed and no state holds, when it was saved -> when that was loaded."""
    memory, loaded = ([json.loads(line) for line in task.lines("memory")] for task in (killed, resumed))
    if len(memory) < 2 or not loaded:
        return {}
    return unsaved(changed(memory[0], memory[-2], memory[-1]), memory[-1], loaded[0])


def read_trace(task: Task) -> Trace:
    """Return the fingerprints of a run by iteration."""
    return {line["iteration"]: line["fingerprint"] for line in map(json.loads, task.lines("jsonl"))}


def read_events(task: Task) -> dict[int, list[str]]:
    """Return what each iteration of a run ended with: "epoch", "evaluation"."""
    return {line["iteration"]: line["events"] for line in map(json.loads, task.lines("jsonl"))}


def _undrawn(trace: Trace) -> set[str]:
    """Return the paths of the generators whose state never changes."""
    states: dict[str, set[str]] = {}
    for kinds in trace.values():
        for path, text in kinds["generators"].items():
            states.setdefault(path, set()).add(text)
    return {path for path, texts in states.items() if len(texts) == 1}


def _warnings_of(task: Task) -> list[str]:
    return [line.partition("Warning: ")[2] for line in task.lines("output") if "Warning: " in line]


def _rows(task: Task, log: str) -> list[dict[str, Any]]:
    path = Path(task.out) / log
    return [from_json(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


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


def _differing_values(whole: dict[str, Any], resumed: dict[str, Any], last: int) -> Iterator[Difference]:
    for path in whole | resumed:
        kind = path.partition(":")[0] if ":" in path else path.partition("/")[0]
        if path not in resumed or path not in whole:
            yield Difference(last, kind, path, f"only in the {'uninterrupted' if path in whole else 'resumed'} run")
        elif (text := describe_difference(whole[path], resumed[path])) is not None:
            yield Difference(last, kind, path, text)


# --- the files beside the logs ---


def read_files(runs: list[Task], logs: list[str]) -> Files:
    """Return what a run has written beside logs, snapshots and its record, in all of its processes."""
    starts: dict[str, int] = {}
    for path, start in (json.loads(line) for task in runs for line in task.lines("written")):
        starts.setdefault(path, start)
    left_out = {*logs, *(log.removesuffix(".jsonl") for log in logs), *_NOT_OF_THE_RUN}
    out = runs[0].out
    for parent, folders, names in os.walk(out):
        # A snapshot may have been lost with the kill.
        folders[:] = [name for name in folders if not os.path.exists(os.path.join(parent, name, MANIFEST))]
        for group in (folders, names):
            paths = {name: os.path.relpath(os.path.join(parent, name), out) for name in group}
            group[:] = [name for name, path in paths.items() if path not in left_out and path[0] != "."]
        starts |= {os.path.join(parent, name): 0 for name in names if not is_temporary(name)}
    files = {}
    for path, start in starts.items():
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) - start <= _LARGEST_FILE:
            with open(path, "rb") as file:
                file.seek(start)
                content = file.read()
            # One of safetensors, such as `snapshot_object` takes, is no file of its own: its state is compared at the end.
            if not (content[8:9] == b"{" and int.from_bytes(content[:8], "little") <= len(content)):
                files[os.path.relpath(path, out) if path.startswith(os.path.join(out, "")) else path] = content
    return files


def compare_files(findings: Findings, first: Files, second: Files, resumed: Files) -> None:
    """Add to what was found how the files of a resumed run differ, and which two runs write differently anyway.

    Of text that two uninterrupted runs write differently in the same number of lines, such as times, that number counts.
    """
    drawn_names = {_without_digits(path) for path in first.keys() ^ second.keys()}
    for path in first | resumed:
        if os.path.isabs(path) and path not in second:
            continue  # made by the first run once for all, such as data, or under a name that is drawn
        if _without_digits(path) in drawn_names or (path in resumed and path not in first and path in second):
            findings.left_out_files.append(path)
            continue
        content, again, continued = first.get(path), second.get(path), resumed.get(path)
        if content is None or again is None or continued is None:
            findings.files[path] = f"only in the {'uninterrupted' if continued is None else 'resumed'} run"
        elif content == again:
            if content != continued:
                findings.files[path] = _first_difference(content, continued)
        else:
            lines, lines_again, lines_continued = (text.count(b"\n") for text in (content, again, continued))
            if b"\0" in content or lines != lines_again:
                findings.left_out_files.append(path)
            elif lines != lines_continued:
                findings.files[path] = f"{lines} lines -> {lines_continued} lines"
    findings.compared_files = len(first.keys() - set(findings.left_out_files))


def _without_digits(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _first_difference(content: bytes, continued: bytes) -> str:
    if b"\0" in content + continued:
        sizes = f"{len(content)} bytes -> {len(continued)} bytes"
        return sizes if len(content) != len(continued) else f"{len(content)} other bytes"
    lines, others = (text.decode(errors="replace").splitlines() for text in (content, continued))
    index = next((i for i, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1]), None)
    index = min(len(lines), len(others)) if index is None else index
    shown = [repr(group[index][:_MAX_SHOWN]) if index < len(group) else "nothing" for group in (lines, others)]
    counts = f", and {len(lines)} -> {len(others)} lines" if len(lines) != len(others) else ""
    return f"line {index + 1}: {' -> '.join(shown)}{counts}"
