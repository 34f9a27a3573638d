"""Where two runs part, as far as their files tell it: the first iteration that differs, and what differs there."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from chainring._runs.finished import FinishedRun, LogRow
from chainring._runs.traces import CAUSES, Difference
from chainring.serializers._store import CorruptError
from chainring.testing._saved_difference import compare_saved, count_compared
from chainring.testing._settings import differing_settings
from chainring.training._ledger import Ledger, loss_value

Digests = Mapping[int, Mapping[str, int]]
"""By iteration the digest of each tensor."""
_MOST_FOUND = 20  # differences of one snapshot that are kept


@dataclass
class Parting:
    """What two runs have in common, and where they part.

    Attributes:
        settings: those that differ, by name the values of both.
        findings: the first differences of each kind in each of the files.
        same_until: the last iteration in which something was compared and is the same, ``None`` if there is none.
        compared: what was compared, in words.
        not_compared: what could not be, in words.
        lasts: the last iteration of each run.
        tensors_same_at: the last iteration before the first difference of tensors after which they are known to be the same.
    """

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    findings: list[Difference] = field(default_factory=list)
    same_until: int | None = None
    compared: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    lasts: tuple[int, int] = (0, 0)
    tensors_same_at: int | None = None

    @property
    def is_same(self) -> bool | None:
        """Whether all that can be compared is the same; ``None`` if nothing can."""
        if self.findings:
            return False
        return None if self.same_until is None else True

    @property
    def first(self) -> Difference | None:
        """The first difference, of several in one iteration the cause."""
        return min(self.findings, key=lambda each: (each.iteration, CAUSES.index(each.what)), default=None)

    @property
    def tensor(self) -> Difference | None:
        """The first difference of a tensor."""
        return min((each for each in self.findings if each.what == "tensor"), key=lambda each: each.iteration, default=None)

    def add_same(self, iteration: int, *, tensors: bool = False) -> None:
        """Remember that something was compared in an iteration, and is the same; it may be all tensors at its end."""
        self.same_until = max(self.same_until or 0, iteration)
        if tensors and (self.first is None or iteration < self.first.iteration):
            self.tensors_same_at = max(self.tensors_same_at or 0, iteration)


def compare_runs(one: FinishedRun, other: FinishedRun, *, with_snapshots: bool = True) -> Parting:
    """Compare the files of two runs, with a progress bar where large snapshots are read, unless they are left out."""
    found = Parting(differing_settings(one, other), lasts=(one.last, other.last))
    if not (one.record and other.record):
        names = [run.place for run in (one, other) if not run.record]
        found.not_compared.append(f"settings, since there is no run.json in {' and '.join(names)}")
    _compare_ledgers(found, one, other)
    for name in one.logs.keys() & other.logs.keys():
        _compare_logs(found, name, one, other)
    for name in sorted(one.logs.keys() ^ other.logs.keys()):
        found.not_compared.append(f"the rows of {name}, which only {(one if name in one.logs else other).place} has")
    if with_snapshots:
        _compare_snapshots(found, one, other)
    shorter, longer = sorted((one, other), key=lambda run: run.last)
    if shorter.last < longer.last:
        found.not_compared.append(f"iterations {shorter.last + 1} to {longer.last}, which only {longer.place} has")
    return found


# --- recorders ---


def _compare_ledgers(found: Parting, one: FinishedRun, other: FinishedRun) -> None:
    found.not_compared += [
        run.recorder.note for run in (one, other) if run.recorder is not None and run.recorder.note is not None
    ]
    if one.recorder is None or other.recorder is None:
        without = [run.place for run in (one, other) if run.recorder is None]
        found.not_compared.append(f"single iterations, since nothing was recorded in {' and '.join(without)}")
        return
    ledgers = one.recorder, other.recorder
    common = np.intersect1d(one.recorder.iterations, other.recorder.iterations)
    names = [name for name in one.recorder.names if name in other.recorder.names]
    _add_compared_rows(found, ledgers, common, names)
    anywhere = np.zeros(len(common), bool)
    for what, name, is_known, differs in _differing_rows(ledgers, common, names):
        if what == "generators":
            _add_compared_generators(found, common[is_known].tolist())
        differs &= is_known
        anywhere |= differs
        if differs.any():
            iteration = int(common[differs.argmax()])
            text = _loss_text(ledgers, name, iteration) if name else ""
            found.findings.append(Difference(iteration, what, name, text, _before(common[is_known].tolist(), iteration, 1)))
    for iteration in common[~anywhere][-1:].tolist():
        found.add_same(iteration)
    _compare_digests(found, one.recorder.digests, other.recorder.digests)


def _differing_rows(
    ledgers: Sequence[Ledger], common: NDArray[np.int64], names: Sequence[str]
) -> Iterator[tuple[str, str, NDArray[np.bool_], NDArray[np.bool_]]]:
    """Yield what is recorded of iterations, in which of them both have it, and in which it differs."""
    one, other = ledgers
    rows, rows_other = (np.searchsorted(ledger.iterations, common) for ledger in ledgers)
    batches, batches_other = one.batches[rows], other.batches[rows_other]
    yield "batch", "", (batches != 0) & (batches_other != 0), batches != batches_other
    for name in names:
        column, column_other = (ledger.names.index(name) for ledger in ledgers)
        bits = one.bits[:, column][rows] != other.bits[:, column_other][rows_other]
        types = one.types[:, column][rows] != other.types[:, column_other][rows_other]
        yield "loss", name, np.ones(len(common), bool), bits | types
    generators, generators_other = one.generators[rows], other.generators[rows_other]
    yield "generators", "", (generators != 0) & (generators_other != 0), generators != generators_other


def _add_compared_generators(found: Parting, iterations: list[int]) -> None:
    if iterations:
        found.compared.append(f"generators after {_ranges(iterations)}, as recorded")
    else:
        found.not_compared.append("generators, which were recorded after different iterations")


def _add_compared_rows(found: Parting, ledgers: Sequence[Ledger], common: NDArray[np.int64], names: list[str]) -> None:
    if not len(common):
        found.not_compared.append("what was recorded, since it is of different iterations")
        return
    knows = [bool((ledger.batches != 0).any()) for ledger in ledgers]
    if parts := [*(["batches"] if all(knows) else []), *names]:
        found.compared.append(f"{', '.join(parts)} of {_ranges(common.tolist())}, as recorded")
    if not all(knows):
        found.not_compared.append("batches, whose indices were not recorded")
    if alone := sorted(set(ledgers[0].names) ^ set(ledgers[1].names)):
        found.not_compared.append(f"{', '.join(alone)}, which only one of the runs has recorded")


def _loss_text(ledgers: Sequence[Ledger], name: str, iteration: int) -> str:
    losses = [row.losses.get(name) if (row := ledger.row(iteration)) is not None else None for ledger in ledgers]
    return " -> ".join("nothing" if loss is None else repr(loss_value(*loss)) for loss in losses)


def _compare_digests(found: Parting, first: Digests, second: Digests) -> None:
    common = sorted(first.keys() & second.keys())
    if common:
        found.compared.append(f"{len(first[common[-1]])} tensors after {_ranges(common)}, by their digests")
    elif first or second:
        found.not_compared.append("digests of tensors, which were taken after different iterations")
    for iteration in common:
        one, other = first[iteration], second[iteration]
        names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
        if names:
            text = _share(names, one, other)
            found.findings.append(Difference(iteration, "tensor", names[0], text, _before(common, iteration)))
            return
        found.add_same(iteration, tensors=True)


def _share(names: Sequence[str], one: Mapping[str, int], other: Mapping[str, int]) -> str:
    share = f"{len(names)} of {len(one.keys() | other.keys())} tensors differ"
    if names[0] in one and names[0] in other:
        return share
    return f"only in {'the first' if names[0] in one else 'the second'}; {share}"


def _before(iterations: Iterable[int], iteration: int, earliest: int = 0) -> int | None:
    """Return the last of the iterations before another one; that before the first of all if it is this one."""
    return max((each for each in iterations if each < iteration), default=0 if iteration == earliest else None)


# --- logs ---


def _compare_logs(found: Parting, name: str, one: FinishedRun, other: FinishedRun) -> None:
    rows, rows_other = one.logs[name], other.logs[name]
    others = {(row.after, row.iteration): row for row in rows_other}
    pairs = [(row, others[row.after, row.iteration]) for row in rows if (row.after, row.iteration) in others]
    if pairs:
        found.compared.append(
            f"{len(pairs)} row{'s' * (len(pairs) > 1)} of {name}, of iterations up to {pairs[-1][0].iteration}"
        )
    elif rows and rows_other:
        found.not_compared.append(f"the rows of {name}, which are of different intervals")
    if keys := _keys_of_one(rows, rows_other):
        found.not_compared.append(f"what only one of the runs reports in {name}: {', '.join(keys)}")
    for row, row_other in pairs:
        keys = [key for key in row.values if key in row_other.values and not (one.is_speed(key) or other.is_speed(key))]
        for key in keys:
            values = row.values[key], row_other.values[key]
            if values[0] != values[1] and repr(values[0]) != repr(values[1]):
                what = "loss" if key.rpartition("/")[2] == "loss" else "value"
                text = f"{values[0]!r} -> {values[1]!r}"
                found.findings.append(Difference(row.iteration, what, key, text, row.after))
                return
        found.add_same(row.iteration)


def _keys_of_one(rows: Iterable[LogRow], rows_other: Iterable[LogRow]) -> list[str]:
    keys, keys_other = ({key for row in each for key in row.values} for each in (rows, rows_other))
    return sorted(keys ^ keys_other) if keys and keys_other else []


# --- snapshots ---


def _compare_snapshots(found: Parting, one: FinishedRun, other: FinishedRun) -> None:
    """Compare the snapshots of the same iterations, up to the first that differs."""
    common = sorted(one.snapshots.keys() & other.snapshots.keys())
    if not common and one.snapshots and other.snapshots:
        found.not_compared.append("snapshots, which are of different iterations")
    compared: list[int] = []
    for iteration in common:
        limit = found.first
        is_beyond = limit is not None and iteration > limit.iteration
        if is_beyond and found.tensor is not None:
            break
        try:
            differences = _compare_saved(found, one, other, iteration)
        except FileNotFoundError:  # a run that continues has removed it
            continue
        except (CorruptError, OSError, ValueError) as error:
            found.not_compared.append(f"the snapshots of iteration {iteration}: {error}")
            continue
        found.findings += [replace(each, after=compared[-1] if compared else None) for each in differences]
        compared.append(iteration)
        if any(each.what == "tensor" for each in differences):
            break
        if differences:
            continue
        found.add_same(iteration, tensors=True)
    if compared:
        found.compared.append(f"the snapshots of {_ranges(compared)}, bit for bit")


def _compare_saved(found: Parting, one: FinishedRun, other: FinishedRun, iteration: int) -> list[Difference]:
    """Compare the snapshots of an iteration; return what differs."""
    with one.opened(iteration) as state, other.opened(iteration) as state_other:
        title = f"compare snapshots of iteration {iteration}"
        with tqdm(desc=title, total=count_compared(state), delay=2.0, leave=False, file=sys.stderr, disable=None) as bar:
            differences = (
                Difference(iteration, each.what, each.name, each.text)
                for each in compare_saved(
                    state, state_other, lambda key: one.is_speed(key) or other.is_speed(key), bar.update
                )
            )
            kept = list(itertools.islice(differences, _MOST_FOUND))
            if not any(each.what == "tensor" for each in kept):
                kept += [each for each in differences if each.what == "tensor"][:1]
    return kept


def _ranges(iterations: Sequence[int]) -> str:
    """Return words for iterations, which increase."""
    ends = [iterations[0]]
    for before, iteration in itertools.pairwise(iterations):
        if iteration != before + 1:
            ends += [before, iteration]
    ends.append(iterations[-1])
    parts = [str(begin) if begin == end else f"{begin} to {end}" for begin, end in zip(ends[::2], ends[1::2], strict=True)]
    if len(parts) > 6:
        parts = [*parts[:3], "...", parts[-1]]
    return f"iteration{'s' * (len(iterations) > 1)} {', '.join(parts)}"
