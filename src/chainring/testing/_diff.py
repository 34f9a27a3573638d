"""Compares what the runs have seen and saved; wall-clock times are no part of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainring._json import from_json
from chainring.serializers._checkpoint import read_state
from chainring.testing._fingerprint import Look, difference, leaves
from chainring.testing._subprocess import KILLED, RESUMED, WHOLE, Task

_TIME = "elapsed_time"
_STATE = ("parameters", "buffers", "optimizer", "iterator", "generators")
KINDS = ("iterator", "batch", "generators", "observation", "buffers", "parameters", "optimizer")
"""What a look holds, a cause before its effect."""


@dataclass
class Difference:
    """One value that is another.

    Attributes:
        kind: of `KINDS`, or what the path of a saved value begins with.
        path: of the value.
        what: both values, or by how much they differ.
    """

    kind: str
    path: str
    what: str


@dataclass
class Findings:
    """What the comparison has found.

    Attributes:
        iteration: of the first difference, ``None`` if every iteration looked alike.
        when: ``"before the kill"``, ``"after loading"`` or ``"after the kill"``.
        first: what differs in that iteration, causes first.
        last: what differs in the state at the end and in the files of the log.
        count: values compared at the end.
        iterations: the last iteration of the whole run, and that of the resumed one.
        left_out: keys that two starts of the program report differently, such as speeds.
        memory: what the killed run remembered and the resumed one does not, by path.
        facts: of the whole run and of the resumed one.
        warnings: what the resumed run was warned of and the whole one was not.
    """

    iteration: int | None = None
    when: str = ""
    first: list[Difference] = field(default_factory=list)
    last: list[Difference] = field(default_factory=list)
    count: int = 0
    iterations: tuple[int, int] = (0, 0)
    left_out: set[str] = field(default_factory=set)
    memory: dict[str, tuple[str, str]] = field(default_factory=dict)
    facts: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    warnings: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether the runs are not the same."""
        return bool(self.first or self.last or self.iterations[0] != self.iterations[1])


def compare(directory: str, task: Task) -> Findings:
    """Compares the three runs of a directory."""
    parts = {part: Task(part, directory, task.iterations, task.kill_after) for part in (WHOLE, KILLED, RESUMED)}
    looks = {part: _looks(each.place("jsonl")) for part, each in parts.items()}
    found = Findings(left_out=_unrepeatable(looks[WHOLE], looks[KILLED]))
    found.iterations = (max(looks[WHOLE]), max(looks[RESUMED], default=-1))
    warned = [_warnings(parts[part].place("output")) for part in (WHOLE, RESUMED)]
    found.warnings = [warning for warning in warned[1] if warning not in warned[0]]
    firsts = list(_firsts(looks, found.left_out))
    if firsts:
        found.when, found.iteration, found.first = firsts[0]
    whole, resumed = (parts[part] for part in (WHOLE, RESUMED))
    if resumed.place("memory").exists():
        found.memory = dict(_forgotten(*(json.loads(parts[part].place("memory").read_text()) for part in (KILLED, RESUMED))))
    facts = [json.loads(each.place("facts").read_text()) for each in (whole, resumed)]
    found.facts = facts[0], facts[1]
    if found.when != "before the kill":
        for name in facts[0]["logs"]:
            found.left_out |= _unrepeatable_columns(*(_rows(parts[part].rows(name)) for part in (WHOLE, KILLED)))
    states = [dict(_timeless(read_state(each.place("state")), found.left_out)) for each in (whole, resumed)]
    for name in facts[0]["logs"]:
        for state, each in zip(states, (whole, resumed), strict=True):
            state.update(_named_rows(name, _rows(each.rows(name)), found.left_out))
    found.last = list(_differences(*states))
    found.count = len(states[0])
    if found.when == "after loading" and len(firsts) == 1 and not found.last:
        found.first = []  # what was not put back is made anew, and has changed nothing
    return found


def iterations_of(task: Task) -> list[int]:
    """The iterations after which a run was looked at."""
    return list(_looks(task.place("jsonl")))


def _looks(path: Path) -> dict[int, Look]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["iteration"]: line["seen"] for line in map(json.loads, lines)}


def _firsts(looks: dict[str, dict[int, Look]], left_out: set[str]) -> Iterator[tuple[str, int, list[Difference]]]:
    """The first iteration with a difference before the kill, after loading and after the kill, as far as there is one."""
    whole, killed, resumed = looks[WHOLE], looks[KILLED], looks[RESUMED]
    begun, later = list(resumed)[:1], list(resumed)[1:]
    stages: list[tuple[str, dict[int, Look], dict[int, Look], Iterable[str], list[int]]] = [
        ("before the kill", whole, killed, KINDS, list(killed)),
        ("after loading", killed, resumed, _STATE, begun),
        ("after the kill", whole, resumed, KINDS, later),
    ]
    for when, one, other, kinds, iterations in stages:
        for iteration in iterations:
            differences = list(_unlike(one[iteration], other[iteration], kinds, left_out)) if iteration in one else []
            if differences:
                yield when, iteration, differences
                break


def _unlike(one: Look, other: Look, kinds: Iterable[str], left_out: set[str]) -> Iterator[Difference]:
    for kind in kinds:
        for path in one[kind] | other[kind]:
            values = one[kind].get(path, "nothing"), other[kind].get(path, "nothing")
            if values[0] != values[1] and path.removeprefix("observation/") not in left_out:
                yield Difference(kind, path, _apart(*values))


def _apart(one: str, other: str) -> str:
    form, _, crc = one.partition(" of CRC ")
    return f"{form} of other bytes" if crc and other.startswith(f"{form} of CRC ") else f"{one} -> {other}"


def _unrepeatable(whole: dict[int, Look], killed: dict[int, Look]) -> set[str]:
    """The keys that two starts of the program report differently while all that is trained is the same: speeds, times."""
    keys: set[str] = set()
    for iteration in killed.keys() & whole.keys():
        for each in _unlike(whole[iteration], killed[iteration], KINDS, set()):
            if each.kind != "observation":
                return set()
            keys.add(each.path.removeprefix("observation/"))
    return keys


def _timeless(state: dict[str, Any], left_out: set[str]) -> Iterator[tuple[str, Any]]:
    """Every value of a saved state by its path, without those that follow the clock, or are left out."""
    flat = [pair for path, value in state.items() for pair in leaves(path, value)]
    paths = {path for path, _ in flat}
    beginnings = [path.removesuffix("passed") for path in paths if path.endswith("/passed")]
    skipped = [start for start in beginnings if {f"{start}next", f"{start}period"} <= paths]  # the state of a TimeTrigger
    for path, value in state.items():
        if path.endswith("/names") and isinstance(value, list):  # of a summary, whose parts are numbered
            start = path.removesuffix("names")
            skipped += [f"{start}{number}/" for number, name in enumerate(value) if name in {*left_out, _TIME}]
    for path, value in flat:
        is_reported = path.startswith(("observation/", "extensions/"))
        is_left_out = is_reported and any(path.endswith(f"/{key}") for key in left_out)
        if _TIME not in path.split("/") and not is_left_out and not path.startswith(tuple(skipped)):
            yield path, value


def _warnings(output: Path) -> list[str]:
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    return [line.partition("Warning: ")[2] for line in lines if "Warning: " in line]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [from_json(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _unrepeatable_columns(whole: list[dict[str, Any]], killed: list[dict[str, Any]]) -> set[str]:
    """The keys of rows that two starts of the program write differently before the kill."""
    pairs = zip(whole, killed, strict=False)
    return {key for one, other in pairs for key in one if key != _TIME and difference(one[key], other.get(key)) is not None}


def _named_rows(name: str, rows: list[dict[str, Any]], left_out: set[str]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows):
        for key, value in row.items():
            if key not in {*left_out, _TIME}:
                yield from leaves(f"rows of {name}/{number}/{key}", value)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Difference]:
    for path in one | other:
        kind = path.partition(":")[0] if ":" in path else path.partition("/")[0]
        if path not in other or path not in one:
            yield Difference(kind, path, f"only in the {'whole' if path in one else 'resumed'} run")
        elif (what := difference(one[path], other[path])) is not None:
            yield Difference(kind, path, what)


def _forgotten(killed: dict[str, str], resumed: dict[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Generators first, then numbers and arrays, then the lengths of containers."""

    def rank(path: str) -> tuple[bool, bool]:
        return path.endswith(", length") or "[" in path, "in state" not in killed[path]

    paths = [path for path in killed if killed[path] != resumed.get(path)]
    longer = tuple(f"{path.removesuffix(', length')}[" for path in paths if path.endswith(", length"))
    for path in sorted((path for path in paths if not path.startswith(longer)), key=rank):
        yield path, (killed[path], resumed.get(path, "nothing"))


_SHOWN = 8

_OUTSIDE = (
    "a random generator that is not restored draws in the dataset, the model, the loss or an extension: Python's, NumPy's "
    "and torch's global ones are restored, a numpy Generator, a random.Random or a torch.Generator of one's own is not. "
    "Draw from the global ones, or give what holds it serialize(serializer)"
)
_FORGOTTEN = (
    "something is remembered and not saved: an attribute of a module that is no buffer (register_buffer), an updater, "
    "an extension or a callback without serialize(serializer), a scheduler or an average of weights that no one saves"
)
_BY_KIND = {
    "iterator": [
        "the iterator, or the loader in it, has no state, or leaves some of it out: give it serialize(serializer), or "
        "state_dict() and load_state_dict(state)",
        "the dataset or batch size is another one when the program is started again",
    ],
    "batch": [
        "a loader without state that begins its passes otherwise after a restart: a generator, or a sampler that draws from "
        "its own random generator",
        _OUTSIDE,
        "the dataset changes while it is used, or is read in an order that changes, such as that of a set or a directory",
    ],
    "generators": [
        "code that draws from a global generator is called at other times in the resumed run: it counts calls, keeps a "
        "cache, or follows the clock",
        _OUTSIDE,
    ],
    "observation": [_FORGOTTEN, _OUTSIDE],
    "buffers": [_FORGOTTEN],
    "parameters": [_FORGOTTEN],
    "optimizer": [
        _FORGOTTEN,
        "an extension sets the learning rate from a count of its own instead of trainer.updater.iteration",
    ],
}
_AT_THE_END = (
    "the training is the same and what is written about it is not: an extension, a trigger or a postprocess remembers what "
    "its serialize(serializer) does not save, or the rows hold what is no function of the training"
)
_AT_LOADING = (
    "what was saved is not put back: a serialize(serializer), or a load_state_dict, leaves it out, or the program changes "
    "it in initialize, after it was loaded"
)
_UNREPEATABLE = (
    "two starts of the program are not the same, so nothing can be said about a resume: call chainring.deterministic(seed) "
    "first, before the model is made; seed generators of one's own; let nothing depend on the clock, on the order of a set "
    "or a directory, or on what an earlier run has left"
)


def told(found: Findings, task: Task) -> str:
    """The report."""
    return "\n".join(_equal(found, task) if not found.differs else _different(found, task))


def _equal(found: Findings, task: Task) -> list[str]:
    return [
        f"Killed after {task.kill_after} iterations and resumed, the run is bit for bit the uninterrupted one: "
        f"{found.count} values are the same after iteration {found.iterations[0]}, and those of each iteration on the way",
        *_left_out(found),
    ]


def _different(found: Findings, task: Task) -> list[str]:
    lines = [
        f"Killed after {task.kill_after} iterations and resumed, the run is not the uninterrupted one.",
        "Where two values are given, they are: uninterrupted -> resumed",
    ]
    if found.iterations[0] != found.iterations[1]:
        lines.append(f"One ended after iteration {found.iterations[0]}, the resumed one after {found.iterations[1]}")
    if found.first:
        lines += _first(found)
    if found.last and found.when != "before the kill":
        lines += _last(found)
    return [*lines, *_reasons(found), *_remembered(found), *_warned(found), *_left_out(found)]


def _first(found: Findings) -> list[str]:
    where = {
        "before the kill": f"After iteration {found.iteration}, before the kill, two starts of the program differ first in",
        "after loading": f"Right after the snapshot of iteration {found.iteration} was loaded, it differs from what was "
        "saved in",
        "after the kill": f"It differs first in iteration {found.iteration}, in",
    }
    first = found.first[0]
    lines = [f"{where[found.when]} the {_name(first)}"]
    others = Counter(each.kind for each in found.first[1:])
    if others:
        listed = ", ".join(f"{count} of {kind}" for kind, count in others.items())
        lines.append(f"  then also, in the same iteration: {listed}")
    return lines


def _name(each: Difference) -> str:
    return f"{each.kind}: {each.path}: {each.what}"


def _last(found: Findings) -> list[str]:
    lines = [f"At the end {len(found.last)} of {found.count} values differ:"]
    paths = {each.path for each in found.first}
    ordered = sorted(found.last, key=lambda each: each.path not in paths)
    lines += [f"  {each.path}: {each.what}" for each in ordered[:_SHOWN]]
    return lines if len(ordered) <= _SHOWN else [*lines, f"  and {len(ordered) - _SHOWN} more"]


def _reasons(found: Findings) -> list[str]:
    if found.when == "before the kill":
        reasons = [_UNREPEATABLE]
    elif found.when == "after loading":
        reasons = [_AT_LOADING]
    elif found.first:
        reasons = list(_BY_KIND[found.first[0].kind])
    else:
        reasons = [_AT_THE_END]
    if found.iterations[0] != found.iterations[1]:
        reasons.insert(0, "a stop trigger that counts, and does not save what it has counted, ends the run elsewhere")
    before, after = found.facts
    if before.get("threads") != after.get("threads"):
        reasons.insert(
            0, f"torch used {before.get('threads')} threads and then {after.get('threads')}: sums round otherwise"
        )
    if before.get("inexact"):
        reasons.append(f"the run was {before['inexact']}")
    if before.get("clocks"):
        clocks = ", ".join(before["clocks"])
        reasons.append(f"triggers that follow the clock fire at other iterations each time: those of {clocks}")
    return ["Why it might:", *(f"- {reason}" for reason in reasons)]


def _remembered(found: Findings) -> list[str]:
    if not found.memory or found.when == "before the kill":
        return []
    lines = ["What the killed run remembered when it was saved -> what the resumed one does:"]
    for path, (before, after) in list(found.memory.items())[:_SHOWN]:
        lines.append(f"  {path}: {before} -> {after}")
    return lines if len(found.memory) <= _SHOWN else [*lines, f"  and {len(found.memory) - _SHOWN} more"]


def _warned(found: Findings) -> list[str]:
    return ["The resumed run was warned:", *(f"  {text}" for text in found.warnings[:_SHOWN])] if found.warnings else []


def _left_out(found: Findings) -> list[str]:
    if not found.left_out:
        return []
    return [f"Left out, because two starts of the program report it differently: {', '.join(sorted(found.left_out))}"]
