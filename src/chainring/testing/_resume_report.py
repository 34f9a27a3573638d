"""The report of `verify_resume`: the verdict, what differs first, and why it might."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from chainring._runs.comparison import Difference
from chainring.testing._resume_findings import Findings, Repetition
from chainring.training._unsaved import remedy

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
_FILES = (
    "the file is written apart from the state: lines of iterations that are computed again are there twice, or those before "
    "the kill are gone. Write it from the state, or cut it back to the length that serialize(serializer) restores, as the "
    "writers of a LogReport do"
)
_SEEDS = {"python": "random.seed(0)", "numpy": "numpy.random.seed(0)", "torch": "torch.manual_seed(0)"}
_MADE = {
    "Generator": "numpy.random.default_rng(0), or torch.Generator().manual_seed(0)",
    "RandomState": "numpy.random.RandomState(0)",
    "Random": "random.Random(0)",
}


def format_exact(findings: Findings, kills: list[str], repetition: Repetition) -> list[str]:
    """Return the lines for a run that is the uninterrupted one."""
    times = "once" if len(kills) == 1 else f"{len(kills)} times"
    count = findings.compared_files
    files = f" In {count} files beside the logs no difference was found." if count else ""
    return [
        f"exact: killed {times} and resumed, the run is bit for bit the uninterrupted one: {findings.count} values are the "
        f"same after iteration {findings.iterations[0]}, and those of each iteration on the way.{files}",
        *(f"  killed {kill}" for kill in kills),
        *_left_out_lines(repetition, findings.left_out_files),
    ]


def format_difference(findings: Findings, kill: str, repetition: Repetition, facts: tuple[Any, Any]) -> list[str]:
    """Return the lines for a run that is another after a kill."""
    if findings.failure:
        return [f"differs: killed {kill}, the run does not continue.", *findings.failure.splitlines()]
    lines = [
        f"differs: killed {kill}, the resumed run differs from the uninterrupted one.",
        "Where two values are given, they are: uninterrupted -> resumed",
        *_first_lines(findings),
    ]
    if findings.last:
        first = {item.name for item in findings.first}
        ordered = sorted(findings.last, key=lambda item: item.name not in first)
        lines.append(f"At the end {len(ordered)} of {findings.count} values differ:")
        lines += shortened([f"  {item.name}: {item.text}" for item in ordered])
    if findings.files:
        lines.append("Files that the run has written beside its logs differ:")
        lines += shortened([f"  {path}: {text}" for path, text in findings.files.items()])
    lines += ["Why it might:", *(f"- {cause}" for cause in _causes(findings, facts))]
    if findings.warnings:
        lines += ["The resumed run was warned:", *(f"  {text}" for text in findings.warnings[:_MAX_LINES])]
    return lines + _left_out_lines(repetition, findings.left_out_files)


def format_repetition(repetition: Repetition, facts: Mapping[str, Any], shared: list[str]) -> list[str]:
    """Return the lines for a program of which two uninterrupted runs differ."""
    lines = ["inconclusive: two uninterrupted runs of the program already differ, so that its resume cannot be judged."]
    if repetition.first:
        lines.append(f"They differ first {_when(repetition.first[0])}, in the {_text(repetition.first[0])}")
        lines += _others(repetition.first)
    else:
        lines.append(f"One ended after iteration {repetition.iterations[0]}, the other after {repetition.iterations[1]}")
    if repetition.generators or repetition.own_generators:
        names = [f"the global one of {name}" for name in repetition.generators] + list(repetition.own_generators)
        lines.append(f"Random generators that begin otherwise each time: {', '.join(names[:_MAX_LINES])}")
    if shared:
        lines.append(f"All runs share files that it has written outside of its out: {', '.join(shared[:_MAX_LINES])}")
    lines.append("Add:")
    lines += [f"  {line}" for line in _lines_to_add(repetition, facts)]
    return lines


def format_unseeded(findings: Findings, generators: list[str]) -> list[str]:
    """Return the lines for a program whose resume is exact only where it draws the same again before its run."""
    where = f" {_when(findings.first[0])}, in the {_text(findings.first[0])}" if findings.first else " at the end"
    seeds = [_SEEDS[name] for name in generators if name in _SEEDS]
    line = "; ".join(seeds) if 0 < len(seeds) < len(_SEEDS) else "chainring.deterministic(0)"
    return [
        "inconclusive: two uninterrupted runs of the program already differ, since it does not seed its generators, and "
        "what it draws before the run, such as its data or their split, is in no state.",
        f"With the same draws the resumed run is exact; with others it differs first{where}",
        "Add, before anything is drawn:",
        f"  {line}",
    ]


def format_forgotten(unsaved: Mapping[str, str]) -> list[str]:
    """Return the lines for what the run has changed and no state holds."""
    if not unsaved:
        return ["No unsaved state was found: all attributes that it changes are part of its state."]
    lines = [f"  {path}: {text}. To save it: {remedy(path, text)}" for path, text in unsaved.items()]
    return ["Not part of any state, in the killed run when it was saved -> in the resumed run:", *shortened(lines)]


def shortened(lines: list[str]) -> list[str]:
    """Return the first lines, and the number of the others."""
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"  and {more} more"]


def _left_out_lines(repetition: Repetition, files: list[str]) -> list[str]:
    left_out = [*sorted(repetition.keys), *sorted(repetition.paths), *sorted(files)]
    if not left_out:
        return []
    more = f" and {len(left_out) - _MAX_LINES} more" if len(left_out) > _MAX_LINES else ""
    return [f"Not compared, because two starts of the program differ in: {', '.join(left_out[:_MAX_LINES])}{more}"]


def _first_lines(findings: Findings) -> Iterator[str]:
    if findings.iterations[0] != findings.iterations[1]:
        yield f"One ended after iteration {findings.iterations[0]}, the resumed one after {findings.iterations[1]}"
    if not findings.first:
        return
    iteration = findings.first[0].iteration
    if findings.is_at_loading:
        where = f"Right after the snapshot of iteration {iteration} was loaded, it differs from the saved state in"
    else:
        where = f"It differs first in iteration {iteration}, in"
    yield f"{where} the {_text(findings.first[0])}"
    yield from _others(findings.first)


def _text(difference: Difference) -> str:
    return f"{difference.what}: {difference.name}: {difference.text}"


def _when(difference: Difference) -> str:
    return f"in iteration {difference.iteration}" if difference.iteration else "before the first iteration"


def _others(differences: list[Difference]) -> Iterator[str]:
    others = Counter(other.what for other in differences[1:])
    if others:
        counts = ", ".join(f"{count} of {what}" for what, count in others.items())
        yield f"  then also, in the same iteration: {counts}"


def _causes(findings: Findings, facts: tuple[Any, Any]) -> list[str]:
    """Return what may have caused the first difference, the likeliest first."""
    if findings.is_at_loading and findings.first:
        causes = [_NOT_RESTORED]
    elif findings.first:
        causes = list(_CAUSES.get(findings.first[0].what, [_UNSAVED]))
    else:
        causes = [_ONLY_REPORTED] if findings.last else []
    if findings.files:
        causes.append(_FILES)
    if findings.iterations[0] != findings.iterations[1]:
        causes.insert(0, "a stop trigger that counts, and does not save its count, ends the run at another iteration")
    whole, resumed = facts
    if resumed and whole["threads"] != resumed["threads"]:
        causes.insert(0, f"torch used {whole['threads']} threads and then {resumed['threads']}: sums round otherwise")
    if whole["inexact"]:
        causes.append(f"the run was {whole['inexact']}")
    return causes + _clocks(whole)


def _clocks(facts: Mapping[str, Any]) -> list[str]:
    clocks = ", ".join(facts["clocks"])
    return [f"triggers that follow the clock fire at other iterations each time: those of {clocks}"] if clocks else []


def _lines_to_add(repetition: Repetition, facts: Mapping[str, Any]) -> list[str]:
    """Return the lines that make two runs of a program the same, the likeliest first."""
    lines = []
    if repetition.generators:
        seeds = "; ".join(map(_SEEDS.__getitem__, filter(_SEEDS.__contains__, repetition.generators)))
        lines.append(f"{seeds or 'chainring.deterministic(0)'}, in place of what seeds it by the clock or not at all")
    for path, text in repetition.own_generators.items():
        made = next((made for name, made in _MADE.items() if f"a {name} in" in text), "a seed")
        lines.append(f"{made}, where {path} is made")
    if lines:
        return lines + _clocks(facts)
    if (
        repetition.first
        and repetition.first[0].iteration > 0
        and repetition.first[0].what in ("buffers", "parameters", "optimizer")
    ):
        lines.append("torch.set_num_threads(1), since sums over other numbers of threads round otherwise")
    return [
        "chainring.deterministic(0) as the first line, which also asks for deterministic kernels",
        *lines,
        "a seed for every generator of the program's own, such as torch.manual_seed(0), random.Random(0), "
        "numpy.random.default_rng(0)",
        "sorted(...) around sets and directories; and let nothing follow the clock, or files that an earlier run has left",
        *_clocks(facts),
    ]
