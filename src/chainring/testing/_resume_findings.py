"""What `verify_resume` finds: how runs differ from an uninterrupted one, and the report of it: what is first, and why."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from chainring._files import from_json, is_temporary
from chainring._messages import list_names
from chainring._places.base import MANIFEST
from chainring._runs.comparison import Difference, Trace, describe_difference, differences
from chainring.serializers._loading import read_state
from chainring.testing._verified_run import Task
from chainring.training._digests import leaves
from chainring.training._unsaved import changed, may_be_cache, remedy, unsaved, unseen

_TIME = "elapsed_time"
_KINDS = ("iterator", "batch", "generators", "observation", "buffers", "parameters", "optimizer")  # causes first
_SAVED = ("parameters", "buffers", "optimizer", "iterator", "generators")  # those that loading must restore
_NOT_OF_THE_RUN = ("run.json", "previous", "abandoned")  # of the directory, which tells of every start
_LARGEST_FILE = 1 << 26
_MAX_SHOWN = 100  # characters of a line
_MAX_LINES = 8

Files = dict[str, bytes]
"""By path, what a run has written beside its logs: absolute where it is outside of its ``out``."""


@dataclass
class Repetition:
    """How two uninterrupted runs differ."""

    iterations: tuple[int, int]  # the last ones of both
    first: list[Difference] = field(default_factory=list)  # all in the first iteration in which the training differs
    keys: set[str] = field(default_factory=set)  # that they report differently while the training is the same
    paths: set[str] = field(default_factory=set)  # in the state at the end, of what differs then
    idle: set[str] = field(default_factory=set)  # of generators from which nobody draws
    speeds: set[str] = field(default_factory=set)  # keys of what reports speeds and use of memory
    generators: list[str] = field(default_factory=list)  # global ones in other states where the run begins
    own_generators: list[str] = field(default_factory=list)  # paths of others that are

    @property
    def differs(self) -> bool:
        return bool(self.first) or self.iterations[0] != self.iterations[1]

    @property
    def left_out_keys(self) -> set[str]:
        return {*self.keys, *self.speeds, _TIME}


@dataclass
class Findings:
    """How a resumed run differs from the uninterrupted one."""

    is_at_loading: bool = False  # the first difference was there before an update was made with what was loaded
    first: list[Difference] = field(default_factory=list)  # all in the first iteration that differs, causes first
    iterations: tuple[int, int] = (0, 0)  # the last ones, if the resumed run was not killed again
    last: list[Difference] = field(default_factory=list)  # in the state at the end and in the rows of the logs
    count: int = 0  # of the values compared at the end
    files: dict[str, str] = field(default_factory=dict)  # what differs in those beside the logs
    left_out_files: list[str] = field(default_factory=list)  # that could not be compared
    compared_files: int = 0
    failure: str = ""  # how it failed instead

    @property
    def differs(self) -> bool:
        return bool(self.failure or self.first or self.last or self.files or self.iterations[0] != self.iterations[1])


def compare_repeated(first: Task, second: Task) -> Repetition:
    """Compare two uninterrupted runs; a generator from which neither has drawn does not count."""
    trace, again = _read_trace(first), _read_trace(second)
    facts = first.read("facts")
    repetition = Repetition((max(trace), max(again)), idle=_undrawn(trace) & _undrawn(again))
    reported = {path.removeprefix("observation/") for iteration in trace.values() for path in iteration["observation"]}
    repetition.speeds = {key for key in reported if key.split("/")[0] in facts["speeds"]}
    left_out = repetition.idle | {f"observation/{key}" for key in repetition.speeds}
    for differing in differences(trace, again, _KINDS, left_out):
        if any(difference.what != "observation" for difference in differing):
            repetition.first = sorted(differing, key=lambda difference: difference.what == "observation")
            break
        repetition.keys |= {difference.name.removeprefix("observation/") for difference in differing}
    repetition.generators = differing_generators(first, second)
    start, start_again = first.records("memory")[0], second.records("memory")[0]
    others = [path for path, text in start.items() if start_again.get(path) != text]
    repetition.own_generators = [path for path in others if " in state " in start[path]]
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
    trace, uninterrupted = _read_trace(resumed), _read_trace(whole)
    findings = Findings()
    left_out = repetition.idle | {f"observation/{key}" for key in repetition.left_out_keys}
    loaded = dict(list(trace.items())[:1])
    later = {iteration: kinds for iteration, kinds in trace.items() if iteration not in loaded}
    at_loading = next(differences(_read_trace(killed), loaded, _SAVED, left_out), [])
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
    memory, loaded = killed.records("memory"), resumed.records("memory")
    if len(memory) < 2 or not loaded:
        return {}
    return unsaved(changed(memory[0], memory[-2], memory[-1]), memory[-1], loaded[0])


def compare_attributes(whole: Task, again: Task, resumed: Task) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return by path what is another at the end of a resumed run, the same of what may be a cache, and what is not seen."""
    end, end_again, end_resumed = (task.read("end") for task in (whole, again, resumed))
    begin, caches, others = whole.records("memory")[0], list[str](), list[str]()
    for path, text in end.items():
        if end_again.get(path) == text:
            (caches if path not in begin or may_be_cache(text) else others).append(path)
    lost, lost_caches = (unsaved(paths, end, end_resumed) for paths in (others, caches))
    return lost, lost_caches, unseen(end)


def _read_trace(task: Task) -> Trace:
    return {record["iteration"]: record["fingerprint"] for record in task.records("jsonl")}


def _undrawn(trace: Trace) -> set[str]:
    """Return the paths of the generators whose state never changes."""
    states = defaultdict(set)
    for kinds in trace.values():
        for path, text in kinds["generators"].items():
            states[path].add(text)
    return {path for path, texts in states.items() if len(texts) == 1}


def _rows(task: Task, log: str) -> list[dict[str, Any]]:
    path = Path(task.out) / log
    return [from_json(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _final_values(task: Task, logs: list[str], repetition: Repetition) -> dict[str, Any]:
    """Return every value of the state at the end, and of the rows, by path, but what follows the clock or is left out."""
    left_out, state = repetition.left_out_keys, read_state(task.path("state"))
    flat = {at: leaf for path, value in state.items() for at, leaf in leaves(path, value)}
    prefixes = [path.removesuffix("passed") for path in flat if path.endswith("/passed")]
    skipped = [prefix for prefix in prefixes if {f"{prefix}next", f"{prefix}period"} <= flat.keys()]  # of a TimeTrigger
    values: dict[str, Any] = {}
    for path, value in flat.items():
        is_reported = path.startswith(("observation/", "extensions/"))
        is_left_out = is_reported and any(f"/{key}/" in f"{path}/" for key in left_out)
        if _TIME not in path.split("/") and not is_left_out and not path.startswith(tuple(skipped)):
            values[path] = value
    for log in logs:
        for index, row in enumerate(_rows(task, log)):
            for key, value in row.items():
                if key not in left_out:
                    values.update(leaves(f"rows of {log}/{index}/{key}", value))
    return {path: value for path, value in values.items() if path not in repetition.paths}


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
    for path, start in (record for task in runs for record in task.records("written")):
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
        return f"{len(content)} bytes -> {len(continued)} others"
    pairs = enumerate(zip_longest(content.split(b"\n"), continued.split(b"\n")), 1)
    number, pair = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    shown = [repr(line[:_MAX_SHOWN].decode(errors="replace")) if line else "nothing" for line in pair]
    lines, others = content.count(b"\n"), continued.count(b"\n")
    return f"line {number}: {' -> '.join(shown)}" + (f", and {lines} -> {others} lines" if lines != others else "")


# --- in words ---

_GENERATOR = (
    "a random generator that is not restored draws in the dataset, the model, the loss or an extension: Python's, NumPy's "
    "and torch's global ones are restored, a numpy Generator, a random.Random or a torch.Generator of one's own is not. "
    "Draw from the global ones, or give the object that holds it serialize(serializer)"
)
_UNSAVED = (
    "something is remembered and not saved: an attribute of a module that is not a buffer (register_buffer), an updater, "
    "an extension or a callback without serialize(serializer), such as one that sets the learning rate from a count of its "
    "own, a scheduler or an average of weights that is not saved"
)
_LOADER = (
    "the iterator, or the loader or sampler in it, leaves out some of its state, or draws from a generator of its own: give "
    "it serialize(serializer), or state_dict() and load_state_dict(state)"
)
_DATA = "the dataset changes while it is used, or is read in an order that changes, such as that of a set or a directory"
_CALLS = (
    "code that draws from a global generator is called at other times in the resumed run: it counts calls, keeps a cache, "
    "or follows the clock"
)
_CAUSES = {"iterator": [_LOADER, _DATA], "batch": [_LOADER, _GENERATOR, _DATA], "generators": [_CALLS, _GENERATOR]}
_ONLY_REPORTED = (
    "the training is the same and its rows or extensions are not: an extension, a trigger or a postprocess remembers "
    "something that its serialize(serializer) does not save, or the rows hold values that do not follow from the training"
)
_NOT_RESTORED = (
    "saved state is not restored: a serialize(serializer), or a load_state_dict, leaves it out, or the program changes "
    "it in initialize, after it was loaded"
)
_FILES = (
    "the file is written apart from the state: lines of iterations that are computed again are there twice, or those before "
    "the kill are gone. Write it from the state, or cut it back to the length that serialize(serializer) restores, as the "
    "writers of a LogReport do"
)
_NOT_RUN = "Not tried: what the script does after its trainer's run, such as that of another Trainer"
_NEVER_SEEN = (
    "Never looked into: variables of installed packages, worker processes and other programs, and files that are only read."
)
_SEEDS = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}
_OWN_SEEDS = "random.Random(0), numpy.random.default_rng(0), or torch.Generator().manual_seed(0)"


def format_exact(
    findings: Findings, kills: list[str], repetition: Repetition, first: Task, unsaved: Sequence[str]
) -> list[str]:
    """Return the lines for a run that is the uninterrupted one, as far as that was tried."""
    trace, facts = _read_trace(first), first.read("facts")
    begin, end = min(trace), max(trace)
    limits = []
    if not facts["ended_itself"]:
        limits.append(f"up to iteration {end}, where it was stopped")
    if not facts["continues"]:
        limits.append(
            "if its state is loaded, as it was here: the program has no snapshot(autoload=True), and begins anew unless it "
            "loads a snapshot in its own code"
        )
    if trace[begin]["parameters"] == trace[end]["parameters"]:
        limits.append("without learning: no parameter has changed, since no optimizer has stepped with a gradient")
    if unsaved:
        limits.append(
            f"for the run itself: no state holds what it has changed in {list_names(unsaved, 2)}, which other code may use, "
            "such as what follows trainer.run()"
        )
    times = "once" if len(kills) == 1 else f"{len(kills)} times"
    count = findings.compared_files
    files = f" In {count} files beside the logs no difference was found." if count else ""
    return [
        *([f"exact, but only {'; only '.join(limits)}."] if limits else []),
        f"{'Killed' if limits else 'exact: killed'} {times} and resumed, the run is bit for bit the uninterrupted one: "
        f"{findings.count} values are the same after iteration {findings.iterations[0]}, and those of each iteration on the "
        f"way.{files}",
        *(f"  killed {kill}" for kill in kills),
        *_left_out_lines(repetition, findings.left_out_files),
        *([_NOT_RUN] if facts["is_script"] else []),
    ]


def format_difference(
    findings: Findings, kill: str, repetition: Repetition, facts: Mapping[str, Any], resumed_facts: Mapping[str, Any] | None
) -> list[str]:
    """Return the lines for a run that is another after a kill, with what may have caused it, the likeliest first."""
    if findings.failure:
        return [f"differs: killed {kill}, the run does not continue.", *findings.failure.splitlines()]
    lines = [
        f"differs: killed {kill}, the resumed run differs from the uninterrupted one.",
        "Where two values are given, they are: uninterrupted -> resumed",
    ]
    causes: list[str] = []
    end, resumed_end = findings.iterations
    if end != resumed_end:
        lines.append(f"One ended after iteration {end}, the resumed one after {resumed_end}")
        causes.append("a stop trigger that counts, and does not save its count, ends the run at another iteration")
    if resumed_facts and facts["threads"] != resumed_facts["threads"]:
        text = f"torch used {facts['threads']} threads and then {resumed_facts['threads']}: sums round otherwise"
        causes.insert(0, text)
    if findings.first:
        first = findings.first[0]
        where = f"It differs first in iteration {first.iteration}, in"
        if findings.is_at_loading:
            where = f"Right after the snapshot of iteration {first.iteration} was loaded, it differs from the saved state in"
        lines += [f"{where} the {_text(first)}", *_others(findings.first)]
        causes += [_NOT_RESTORED] if findings.is_at_loading else _CAUSES.get(first.what, [_UNSAVED, _GENERATOR])
    elif findings.last:
        causes.append(_ONLY_REPORTED)
    if findings.last:
        names = {item.name for item in findings.first}
        ordered = sorted(findings.last, key=lambda item: item.name not in names)
        lines.append(f"At the end {len(ordered)} of {findings.count} values differ:")
        lines += _shortened([f"  {item.name}: {item.text}" for item in ordered])
    if findings.files:
        lines.append("Files that the run has written beside its logs differ:")
        lines += _shortened([f"  {path}: {text}" for path, text in findings.files.items()])
        causes.append(_FILES)
    if facts["inexact"]:
        causes.append(f"the run was {facts['inexact']}")
    lines += ["Why it might:", *(f"- {cause}" for cause in causes + _clocks(facts))]
    return lines + _left_out_lines(repetition, findings.left_out_files)


def format_repetition(repetition: Repetition, facts: Mapping[str, Any], shared: list[str]) -> list[str]:
    """Return the lines for a program whose uninterrupted runs differ, with what would make them the same."""
    lines = ["inconclusive: two uninterrupted runs of the program already differ, so that its resume cannot be judged."]
    first = repetition.first[0] if repetition.first else None
    if first is not None:
        lines += [f"They differ first {_when(first)}, in the {_text(first)}", *_others(repetition.first)]
    else:
        lines.append(f"One ended after iteration {repetition.iterations[0]}, the other after {repetition.iterations[1]}")
    if repetition.generators or repetition.own_generators:
        names = [f"the global one of {name}" for name in repetition.generators] + repetition.own_generators
        lines.append(f"Random generators that begin otherwise each time: {', '.join(names[:_MAX_LINES])}")
    if shared:
        lines.append(f"All runs share files that it has written outside of its out: {', '.join(shared[:_MAX_LINES])}")
    to_add = []
    if repetition.generators:
        to_add.append(f"{_seeds_of(repetition.generators)}, in place of what seeds it by the clock or not at all")
    to_add += [f"a seed such as {_OWN_SEEDS}, where {path} is made" for path in repetition.own_generators]
    if not to_add:
        to_add.append("chainring.deterministic(0) as the first line, which also asks for deterministic kernels")
        to_add += [
            f"a seed for every generator of the program's own, such as {_OWN_SEEDS}",
            "sorted(...) around sets and directories; and let nothing follow the clock, or files that an earlier run has "
            "left",
        ]
    return [*lines, "Add:", *(f"  {line}" for line in to_add + _clocks(facts))]


def format_unseeded(findings: Findings, generators: list[str]) -> list[str]:
    """Return the lines for a program whose resume is exact only where it draws the same again before its run."""
    where = f" {_when(findings.first[0])}, in the {_text(findings.first[0])}" if findings.first else " at the end"
    return [
        "inconclusive: two uninterrupted runs of the program already differ, since it does not seed its generators, and "
        "what it draws before the run, such as its data or their split, is in no state.",
        f"With the same draws the resumed run is exact; with others it differs first{where}",
        "Add, before anything is drawn:",
        f"  {_seeds_of(generators)}",
    ]


def _seeds_of(generators: list[str]) -> str:
    """Return the line that seeds these global generators."""
    seeds = [_SEEDS[name] for name in generators if name in _SEEDS]
    return "; ".join(seeds) if 0 < len(seeds) < len(_SEEDS) else "chainring.deterministic(0)"


def format_forgotten(unsaved: Mapping[str, str], caches: Mapping[str, str], unseen: Mapping[str, str]) -> list[str]:
    """Return the lines for what the run has changed and no state holds, and for what could not be looked into."""
    lines = ["In what was looked into, nothing has changed that no state holds."]
    if unsaved:
        lines = ["Not part of any state, in the killed or uninterrupted run -> in the resumed run:"]
        lines += _shortened([f"  {path}: {text}. To save it: {remedy(path, text)}" for path, text in unsaved.items()])
    if caches:
        lines.append(
            "Not part of any state either, which does not matter for caches and for results that are only collected:"
        )
        lines += _shortened([f"  {path}: {text}" for path, text in caches.items()])
    if unseen:
        lines.append("Could not be looked into:")
        lines += _shortened([f"  {path}: {text}" for path, text in unseen.items()])
    return [*lines, _NEVER_SEEN]


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"  and {more} more"]


def _left_out_lines(repetition: Repetition, files: list[str]) -> list[str]:
    left_out = [*sorted(repetition.keys), *sorted(repetition.paths), *sorted(files)]
    if not left_out:
        return []
    return [f"Not compared, because two starts of the program differ in: {list_names(left_out, _MAX_LINES)}"]


def _text(difference: Difference) -> str:
    return f"{difference.what}: {difference.name}: {difference.text}"


def _when(difference: Difference) -> str:
    return f"in iteration {difference.iteration}" if difference.iteration else "before the first iteration"


def _others(differences: list[Difference]) -> list[str]:
    others = Counter(other.what for other in differences[1:])
    counts = ", ".join(f"{count} of {what}" for what, count in others.items())
    return [f"  then also, in the same iteration: {counts}"] if others else []


def _clocks(facts: Mapping[str, Any]) -> list[str]:
    clocks = ", ".join(facts["clocks"])
    return [f"triggers that follow the clock fire at other iterations each time: those of {clocks}"] if clocks else []
