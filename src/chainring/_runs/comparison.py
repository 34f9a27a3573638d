"""The comparison of two finished runs: where they part, as far as what they have left tells it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from chainring._runs.finished import FinishedRun, LogRow
from chainring._runs.traces import CAUSES, Difference, describe_difference, units_apart
from chainring.serializers._store import CorruptError
from chainring.serializers._values import StoredTensor, read_stored
from chainring.training._ledger import Ledger, loss_value
from chainring.training._settings import Settings
from chainring.training._unsaved import leaves

_MOST_FOUND = 20  # differences of one snapshot that are kept
_ORDER = ("updater/iterator:", "generators/", "observation/", "updater/", "extensions/")  # of paths, causes first
_LEFT_OUT = ("updater/settings/",)  # which are compared as settings
_RATES = "/param_groups/"  # which come before the tensors that they change
_ABSENT = object()  # in place of a value that one of the snapshots has not


@dataclass
class Comparison:
    """What two runs have in common, and where they part.

    Attributes:
        settings: those that differ, by name the values of both.
        differences: the first of each kind in each of the files.
        same_until: the last iteration in which something was compared and is the same, ``None`` if there is none.
        compared: what was compared, in words.
        not_compared: what could not be, in words.
        lasts: the last iteration of each run.
        tensors_same_at: the last iteration before the first difference of tensors after which they are known to be the same.
    """

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    same_until: int | None = None
    compared: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    lasts: tuple[int, int] = (0, 0)
    tensors_same_at: int | None = None

    @property
    def is_same(self) -> bool | None:
        """Whether all that can be compared is the same; ``None`` if nothing can."""
        if self.differences:
            return False
        return None if self.same_until is None else True

    @property
    def first(self) -> Difference | None:
        """The first difference, of several in one iteration the cause."""
        return min(self.differences, key=lambda found: (found.iteration, CAUSES.index(found.what)), default=None)

    def first_of(self, *kinds: str) -> Difference | None:
        """Return the first difference of these kinds."""
        differences = (found for found in self.differences if found.what in kinds)
        return min(differences, key=lambda found: found.iteration, default=None)

    def add_same(self, iteration: int, *, tensors: bool = False) -> None:
        """Remember that something was compared in an iteration, and is the same; it may be all tensors at its end."""
        self.same_until = max(self.same_until or 0, iteration)
        if tensors and (self.first is None or iteration < self.first.iteration):
            self.tensors_same_at = max(self.tensors_same_at or 0, iteration)


def compare_runs(a: FinishedRun, b: FinishedRun, *, with_snapshots: bool = True) -> Comparison:
    """Compare what two runs have left, with a progress bar where large snapshots are read, unless they are left out."""
    comparison = Comparison(differing_settings(a, b), lasts=(a.last, b.last))
    not_compared = comparison.not_compared
    if without := [run.place for run in (a, b) if not run.record]:
        not_compared.append(f"settings, since there is no run.json in {' and '.join(without)}")
    not_compared += [run.recorder.note for run in (a, b) if run.recorder is not None and run.recorder.note is not None]
    if a.recorder is not None and b.recorder is not None:
        _compare_recorders(comparison, a.recorder, b.recorder)
    else:
        without = [run.place for run in (a, b) if run.recorder is None]
        not_compared.append(f"single iterations, since nothing was recorded in {' and '.join(without)}")
    for name in a.logs.keys() & b.logs.keys():
        _compare_logs(comparison, name, a, b)
    for name in sorted(a.logs.keys() ^ b.logs.keys()):
        not_compared.append(f"the rows of {name}, which only {(a if name in a.logs else b).place} has")
    if with_snapshots:
        _compare_snapshots(comparison, a, b)
    shorter, longer = sorted((a, b), key=lambda run: run.last)
    if shorter.last < longer.last:
        not_compared.append(f"iterations {shorter.last + 1} to {longer.last}, which only {longer.place} has")
    return comparison


def differing_settings(a: FinishedRun, b: FinishedRun) -> dict[str, tuple[Any, Any]]:
    """Return by name both values of each setting that differs, ``None`` where one run has none."""
    records = (a.record, b.record) if a.record and b.record else ({}, {})
    settings, settings_b = map(Settings.recorded, records)
    saved = [run.saved_settings() for run in (a, b)]
    if all(saved):
        settings |= saved[0]
        settings_b |= saved[1]
    return {path: (value, other) for path, value, other in settings.differences(settings_b)}


# --- recorders ---


def recorded_rows(
    a: Ledger, b: Ledger, iterations: NDArray[np.int64], names: Iterable[str]
) -> Iterator[tuple[str, str, NDArray[np.bool_], NDArray[np.bool_]]]:
    """Yield the kinds and names of what is recorded of iterations, in which of them both have it, and in which it differs.

    The ``iterations`` are some that both have, the ``names`` those of losses; one that a ledger has not was not reported.
    """
    rows, rows_b = (np.searchsorted(ledger.iterations, iterations) for ledger in (a, b))
    batches, batches_b = a.batches[rows], b.batches[rows_b]
    yield "batch", "", (batches != 0) & (batches_b != 0), batches != batches_b
    for name in names:
        (bits, types), (bits_b, types_b) = _losses(a, name, rows), _losses(b, name, rows_b)
        yield "loss", name, np.ones(len(iterations), bool), (bits != bits_b) | (types != types_b)
    generators, generators_b = a.generators[rows], b.generators[rows_b]
    yield "generators", "", (generators != 0) & (generators_b != 0), generators != generators_b


def first_recorded_difference(
    recorded: Ledger, replayed: Ledger, after: int, until: int, *, with_generators: bool
) -> tuple[int, Difference | None]:
    """Compare what a run has recorded of the iterations after one up to another with what a replay of them has.

    Return the number of iterations that are the same, up to the first difference, and that.
    """
    common = np.intersect1d(recorded.iterations, replayed.iterations)
    common = common[(common > after) & (common <= until)]
    first: Difference | None = None
    for kind, name, is_known, differs in recorded_rows(recorded, replayed, common, recorded.names):
        iterations = common[is_known & differs]
        is_compared = kind != "generators" or with_generators
        if is_compared and len(iterations) and (first is None or iterations[0] < first.iteration):
            first = Difference(int(iterations[0]), kind, name)
    for iteration in common.tolist():
        digests, digests_replayed = recorded.digests.get(iteration, {}), replayed.digests.get(iteration)
        if digests_replayed is None or (first is not None and iteration >= first.iteration):
            continue
        names = [name for name, digest in digests.items() if digest != digests_replayed.get(name)]
        if names:
            first = Difference(iteration, "tensor", names[0])
            break
    return len(common) if first is None else int((common < first.iteration).sum()), first


def _losses(ledger: Ledger, name: str, rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if name not in ledger.names:
        return np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.uint8)
    column = ledger.names.index(name)
    return ledger.bits[:, column][rows], ledger.types[:, column][rows]


def _compare_recorders(comparison: Comparison, a: Ledger, b: Ledger) -> None:
    common = np.intersect1d(a.iterations, b.iterations)
    names = [name for name in a.names if name in b.names]
    if len(common):
        knows_batches = bool((a.batches != 0).any() and (b.batches != 0).any())
        if parts := [*(["batches"] if knows_batches else []), *names]:
            comparison.compared.append(f"{', '.join(parts)} of {_ranges(common.tolist())}, as recorded")
        if not knows_batches:
            comparison.not_compared.append("batches, whose indices were not recorded")
        if alone := sorted(set(a.names) ^ set(b.names)):
            comparison.not_compared.append(f"{', '.join(alone)}, which only one of the runs has recorded")
    else:
        comparison.not_compared.append("what was recorded, since it is of different iterations")
    differs_anywhere = np.zeros(len(common), bool)
    for kind, name, is_known, differs in recorded_rows(a, b, common, names):
        known = common[is_known].tolist()
        if kind == "generators":
            if known:
                comparison.compared.append(f"generators after {_ranges(known)}, as recorded")
            else:
                comparison.not_compared.append("generators, which were recorded after different iterations")
        differs &= is_known
        differs_anywhere |= differs
        if differs.any():
            iteration = int(common[differs.argmax()])
            text = _loss_text((a, b), name, iteration) if name else ""
            comparison.differences.append(Difference(iteration, kind, name, text, _before(known, iteration, 1)))
    for iteration in common[~differs_anywhere][-1:].tolist():
        comparison.add_same(iteration)
    _compare_digests(comparison, a.digests, b.digests)


def _loss_text(ledgers: Sequence[Ledger], name: str, iteration: int) -> str:
    losses = [row.losses.get(name) if (row := ledger.row(iteration)) is not None else None for ledger in ledgers]
    return " -> ".join("nothing" if loss is None else repr(loss_value(*loss)) for loss in losses)


def _compare_digests(comparison: Comparison, a: Mapping[int, Mapping[str, int]], b: Mapping[int, Mapping[str, int]]) -> None:
    common = sorted(a.keys() & b.keys())
    if common:
        comparison.compared.append(f"{len(a[common[-1]])} tensors after {_ranges(common)}, by their digests")
    elif a or b:
        comparison.not_compared.append("digests of tensors, which were taken after different iterations")
    for iteration in common:
        digests, digests_b = a[iteration], b[iteration]
        names = [name for name in dict.fromkeys([*digests, *digests_b]) if digests.get(name) != digests_b.get(name)]
        if names:
            text = f"{len(names)} of {len(digests.keys() | digests_b.keys())} tensors differ"
            if names[0] not in digests or names[0] not in digests_b:
                text = f"only in {'the first' if names[0] in digests else 'the second'}; {text}"
            comparison.differences.append(Difference(iteration, "tensor", names[0], text, _before(common, iteration)))
            return
        comparison.add_same(iteration, tensors=True)


def _before(iterations: Iterable[int], iteration: int, earliest: int = 0) -> int | None:
    """Return the last of the iterations before another one; that before the first of all if it is this one."""
    return max((earlier for earlier in iterations if earlier < iteration), default=0 if iteration == earliest else None)


# --- logs ---


def _compare_logs(comparison: Comparison, name: str, a: FinishedRun, b: FinishedRun) -> None:
    rows, rows_b = a.logs[name], b.logs[name]
    of_interval = {(row.after, row.iteration): row for row in rows_b}
    pairs = [(row, of_interval[row.after, row.iteration]) for row in rows if (row.after, row.iteration) in of_interval]
    if pairs:
        plural = "s" * (len(pairs) > 1)
        comparison.compared.append(f"{len(pairs)} row{plural} of {name}, of iterations up to {pairs[-1][0].iteration}")
    elif rows and rows_b:
        comparison.not_compared.append(f"the rows of {name}, which are of different intervals")
    keys, keys_b = (_keys(log) for log in (rows, rows_b))
    if keys and keys_b and keys != keys_b:
        comparison.not_compared.append(f"what only one of the runs reports in {name}: {', '.join(sorted(keys ^ keys_b))}")
    for row, row_b in pairs:
        for key, value in row.values.items():
            if key not in row_b.values or a.is_speed(key) or b.is_speed(key):
                continue
            text, text_b = repr(value), repr(row_b.values[key])
            if value != row_b.values[key] and text != text_b:
                kind = "loss" if key.rpartition("/")[2] == "loss" else "value"
                comparison.differences.append(Difference(row.iteration, kind, key, f"{text} -> {text_b}", row.after))
                return
        comparison.add_same(row.iteration)


def _keys(rows: Iterable[LogRow]) -> set[str]:
    return {key for row in rows for key in row.values}


# --- snapshots ---


def _compare_snapshots(comparison: Comparison, a: FinishedRun, b: FinishedRun) -> None:
    """Compare the snapshots of the same iterations, up to the first of which a tensor differs."""
    common = sorted(a.snapshots.keys() & b.snapshots.keys())
    if not common and a.snapshots and b.snapshots:
        comparison.not_compared.append("snapshots, which are of different iterations")
    compared: list[int] = []
    for iteration in common:
        first = comparison.first
        if first is not None and iteration > first.iteration and comparison.first_of("tensor") is not None:
            break
        try:
            differences = _compare_saved(a, b, iteration)
        except FileNotFoundError:  # a run that continues has removed it
            continue
        except (CorruptError, OSError, ValueError) as error:
            comparison.not_compared.append(f"the snapshots of iteration {iteration}: {error}")
            continue
        comparison.differences += [replace(found, after=compared[-1] if compared else None) for found in differences]
        compared.append(iteration)
        if any(found.what == "tensor" for found in differences):
            break
        if not differences:
            comparison.add_same(iteration, tensors=True)
    if compared:
        comparison.compared.append(f"the snapshots of {_ranges(compared)}, bit for bit")


def _compare_saved(a: FinishedRun, b: FinishedRun, iteration: int) -> list[Difference]:
    """Return what differs in the snapshots of an iteration: the first few values, and a tensor if there is one."""
    with a.opened(iteration) as state, b.opened(iteration) as state_b:
        total = sum(1 for key, item in state.items() if key.startswith(_ORDER) for _ in leaves(key, item))
        title = f"compare snapshots of iteration {iteration}"
        with tqdm(desc=title, total=total, delay=2.0, leave=False, file=sys.stderr, disable=None) as bar:
            is_speed = lambda key: a.is_speed(key) or b.is_speed(key)  # noqa: E731
            differences = differing_values(iteration, state, state_b, is_speed, bar.update)
            kept = list(itertools.islice(differences, _MOST_FOUND))
            if not any(found.what == "tensor" for found in kept):
                kept += [found for found in differences if found.what == "tensor"][:1]
    return kept


def differing_values(
    iteration: int,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    is_left_out: Callable[[str], bool],
    on_value: Callable[[], object],
) -> Iterator[Difference]:
    """Yield what differs in the flat states of two snapshots, whose tensors have not been read, causes first.

    Left out are settings, what extensions hold but for their tensors, reported values that ``is_left_out``, and the
    generators of ranks that one of the runs does not have. ``on_value`` is called for each value that is compared.
    """
    flat, flat_b = ({path: value for key, item in state.items() for path, value in leaves(key, item)} for state in (a, b))
    ranks = min(len({key.split("/")[1] for key in state if key.startswith("generators/")}) for state in (a, b))
    for path in sorted(flat | flat_b, key=_rank_of_cause):
        if not _is_compared(path, ranks, is_left_out):
            continue
        on_value()
        value, value_b = flat.get(path, _ABSENT), flat_b.get(path, _ABSENT)
        is_tensor = isinstance(value, Tensor | StoredTensor) or isinstance(value_b, Tensor | StoredTensor)
        is_of_one = value is _ABSENT or value_b is _ABSENT
        if path.startswith("extensions/") and (not is_tensor or is_of_one):
            continue
        if path.startswith("observation/") and is_of_one:
            continue
        if (text := _differ(read_stored(value), read_stored(value_b))) is None:
            continue
        if path.startswith("generators/"):
            yield Difference(iteration, "generators", path, text)
        elif path.startswith("observation/"):
            kind = "loss" if path.rpartition("/")[2] == "loss" else "value"
            yield Difference(iteration, kind, path.removeprefix("observation/"), text)
        else:
            yield Difference(iteration, "tensor" if is_tensor else "state", path, text)


def _rank_of_cause(path: str) -> tuple[int, bool]:
    order = (index for index, start in enumerate(_ORDER) if path.startswith(start))
    return next(order, len(_ORDER)), _RATES not in path


def _is_compared(path: str, ranks: int, is_left_out: Callable[[str], bool]) -> bool:
    if not path.startswith(_ORDER) or path.startswith(_LEFT_OUT) or "/constructed/" in path:
        return False
    if path.startswith("generators/"):
        rank = path.split("/")[1]
        return rank.isdecimal() and int(rank) < ranks
    if path.startswith("observation/"):
        return not is_left_out(path.removeprefix("observation/"))
    return "/summary/" not in path


def _differ(value: Any, value_b: Any) -> str | None:
    if value is _ABSENT or value_b is _ABSENT:
        return f"only in {'the second' if value is _ABSENT else 'the first'}"
    text = describe_difference(value, value_b)
    if text is None or not (isinstance(value, Tensor) and isinstance(value_b, Tensor)):
        return text
    units = units_apart(value, value_b)
    return text if units is None else f"{text}, at most {units} ulp"


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
