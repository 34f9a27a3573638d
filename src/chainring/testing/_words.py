"""Says what was found: what differs first, and why it might."""

from __future__ import annotations

from collections import Counter

from chainring.testing._compare import Difference, Findings
from chainring.testing._trial import Task

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
