"""Where two runs part: differences of what iterations had and computed, and the comparison of what two runs have left."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from chainring._runs.finished import FinishedRun, as_mapping, start_in_force
from chainring.serializers._loading import opened_state
from chainring.serializers._store import CorruptError, SavedSnapshot
from chainring.serializers._values import StoredTensor, read_stored
from chainring.training._digests import as_tensor, bytes_of, checksum, describe, leaves
from chainring.training._ledger import MARK, Ledger, loss_value
from chainring.training._run_directory import Settings

Trace = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""By iteration, and by the kind of thing, such as ``"loss"``, each value, or its digest, by its key or path."""
CAUSES = ("batch", "module", "loss", "gradient", "generators", "value", "state", "tensor")
"""Kinds of things, in the order in which an iteration has them."""

_WORDS = {"generators": "the random generators", "gradient": "the gradient of"}
_NEED_BOTH = ("loss", "settings")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a floating-point number
_MAX_KEPT = 20  # differences of one snapshot that are kept
_ORDER = ("updater/iterator:", "generators/", "observation/", "updater/", "extensions/")  # of paths, causes first
_LEFT_OUT = ("updater/settings/",)  # which are compared as settings
_RATES = "/param_groups/"  # which come before the tensors that they change
_LEFT_OUT_BY_FROZEN = "None"  # or what is None
_ABSENT = object()  # in place of a value that one of the snapshots has not


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two runs differ."""

    iteration: int  # the first in which it was seen
    what: str  # the kind of thing
    name: str = ""  # its key or path
    text: str = ""  # both values, or by how much they differ
    after: int | None = None  # the last earlier iteration in which the same thing was compared and was equal

    @property
    def named(self) -> str:
        return f"{self.name}{': ' * bool(self.text and self.name)}{self.text}"

    @property
    def words(self) -> str:
        """All of it but the iteration, such as ``"the loss main/loss: 0.5 -> 0.25"``."""
        return f"{_WORDS.get(self.what, f'the {self.what}')} {self.named}".rstrip()

    @property
    def is_exact(self) -> bool:
        """Whether it cannot have been there in an iteration before."""
        return self.iteration == 0 or self.after == self.iteration - 1


def differences(a: Trace, b: Trace, kinds: Iterable[str], left_out: Container[str] = ()) -> Iterator[list[Difference]]:
    """Yield for each iteration that both have, and in which they differ, all that does, in the order of the kinds.

    Names that are ``left_out`` are not compared, nor is a loss or a setting that only one of them has.
    """
    for iteration in sorted(a.keys() & b.keys()):
        differing = []
        for kind in kinds:
            values_a, values_b = a[iteration].get(kind, {}), b[iteration].get(kind, {})
            for name in dict.fromkeys([*values_a, *values_b]):
                value_a, value_b = values_a.get(name, "nothing"), values_b.get(name, "nothing")
                is_compared = name not in left_out and (kind not in _NEED_BOTH or (name in values_a and name in values_b))
                if is_compared and value_a != value_b:
                    differing.append(Difference(iteration, kind, name, f"{value_a} -> {value_b}", iteration - 1))
        if differing:
            yield differing


def first_difference(a: Trace, b: Trace, kinds: Iterable[str], left_out: Container[str] = ()) -> Difference | None:
    """Return the first difference, of several in one iteration the cause; ``None`` if there is none. See `differences`.

    Its text has both values of a loss, and otherwise how many of the kind differ, of which the values are digests.
    """
    differing = next(differences(a, b, kinds, left_out), None)
    if differing is None:
        return None
    first = differing[0]
    if first.what == "loss":
        return first
    names = a[first.iteration].get(first.what, {}).keys() | b[first.iteration].get(first.what, {}).keys()
    return replace(first, text=f"{sum(difference.what == first.what for difference in differing)} of {len(names)} differ")


def describe_difference(a: Any, b: Any) -> str | None:
    """Return how two values differ, ``None`` where they are the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    texts = f"{describe(a)} -> {describe(b)}"
    same_class = type(a) is type(b)
    a, b = as_tensor(a), as_tensor(b)
    if not (same_class and isinstance(a, Tensor)):
        return None if same_class and describe(a) == describe(b) else texts
    is_comparable = (a.dtype, a.shape) == (b.dtype, b.shape)
    if is_comparable and torch.equal(bytes_of(a), bytes_of(b)):
        return None
    if not is_comparable or a.numel() == 1:
        return texts
    dtype = torch.complex128 if a.is_complex() else torch.float64
    distances = (a.detach().cpu().to(dtype) - b.detach().cpu().to(dtype)).abs()
    largest = distances.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    if largest == 0:
        return "the same numbers in other bits, such as -0.0 for 0.0"
    return f"by at most {largest:.3g}, in {int((distances != 0).sum())} of {distances.numel()} elements"


def _units_apart(a: Tensor, b: Tensor) -> int | None:
    """Return by how many units in the last place two tensors differ at most; ``None`` where that says nothing."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not a.is_floating_point() or not a.numel() or a.element_size() == 1:
        return None
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (a, b)):
        return None
    ordinals = []  # integers in the order of the numbers, one apart for neighbors
    for tensor in (a, b):
        bits = bytes_of(tensor).view(_BITS[tensor.element_size()]).to(torch.int64)
        ordinals.append(torch.where(bits < 0, -(bits & ((1 << 8 * tensor.element_size() - 1) - 1)), bits))
    furthest = int((ordinals[0].double() - ordinals[1].double()).abs().argmax())  # the distance may exceed an int64
    return abs(int(ordinals[0][furthest]) - int(ordinals[1][furthest]))


# --- two finished runs ---


@dataclass
class Comparison:
    """What two runs have in common, and where they part."""

    settings: dict[str, tuple[Any, Any]]  # those that differ, by name the values of both
    lasts: tuple[int, int]  # the last iteration of each run
    differences: list[Difference] = field(default_factory=list)  # the first of each kind in each of the files
    same_until: int | None = None  # the last iteration in which something was compared and is the same
    compared: list[str] = field(default_factory=list)  # in words
    not_compared: list[str] = field(default_factory=list)  # what could not be, in words
    tensors_same_at: int | None = None  # the last iteration before their first difference after which they are the same

    @property
    def is_same(self) -> bool | None:
        """Whether all that can be compared is the same; ``None`` if nothing can."""
        return False if self.differences else None if self.same_until is None else True

    @property
    def first(self) -> Difference | None:
        """The first difference, of several in one iteration the cause."""
        return min(self.differences, key=lambda found: (found.iteration, CAUSES.index(found.what)), default=None)

    @property
    def answer(self) -> str:
        """Whether they are the same, and if not, from where on, in words."""
        first = self.first
        if self.is_same is None:
            return "not known: the two runs have left nothing that can be compared"
        if first is None:
            return f"same up to iteration {self.same_until}"
        if first.iteration == 0:
            return f"different from the beginning: {first.words}"
        if first.is_exact:
            return f"different from iteration {first.iteration} on: {first.words}"
        since = "the first to compare" if not first.after else f"and the same in iteration {first.after}"
        return f"different by iteration {first.iteration}, {since}: {first.words}"

    def first_of(self, *kinds: str) -> Difference | None:
        differences = (found for found in self.differences if found.what in kinds)
        return min(differences, key=lambda found: found.iteration, default=None)

    def add_same(self, iteration: int, *, tensors: bool = False) -> None:
        """Remember that something was compared in an iteration, and is the same; it may be all tensors at its end."""
        self.same_until = max(self.same_until or 0, iteration)
        if tensors and (self.first is None or iteration < self.first.iteration):
            self.tensors_same_at = max(self.tensors_same_at or 0, iteration)


def compare_runs(a: FinishedRun, b: FinishedRun, *, with_snapshots: bool = True) -> Comparison:
    """Compare what two runs have left, with a progress bar where large snapshots are read, unless they are left out.

    What is damaged is a `ValueError`: it says nothing about whether they differ.
    """
    try:
        return _compare_files(a, b, with_snapshots)
    except (CorruptError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _compare_files(a: FinishedRun, b: FinishedRun, with_snapshots: bool) -> Comparison:
    comparison = Comparison(_differing_settings(a, b), (a.last, b.last))
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


def _differing_settings(a: FinishedRun, b: FinishedRun) -> dict[str, tuple[Any, Any]]:
    """Return by name both values of each setting that differs, ``None`` where one run has none."""
    settings, settings_b = map(Settings.recorded, (a.record, b.record) if a.record and b.record else ({}, {}))
    saved, saved_b = a.saved_settings(), b.saved_settings()
    if saved and saved_b:
        settings |= saved
        settings_b |= saved_b
    return {path: (value, other) for path, value, other in settings.differences(settings_b)}


# --- recorders ---


def _recorded_rows(
    a: Ledger, b: Ledger, iterations: NDArray[np.int64], names: Iterable[str]
) -> Iterator[tuple[str, str, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the kinds and names of what is recorded, the iterations of which both have it, and those in which it differs.

    The ``iterations`` are some that both have, the ``names`` those of losses; one that a ledger has not was not reported.
    """
    rows, rows_b = (np.searchsorted(ledger.iterations, iterations) for ledger in (a, b))
    batches, batches_b = a.batches[rows], b.batches[rows_b]
    is_known = (batches != 0) & (batches_b != 0)
    yield "batch", "", iterations[is_known], iterations[is_known & (batches != batches_b)]
    for name in names:
        (bits, types), (bits_b, types_b) = _losses(a, name, rows), _losses(b, name, rows_b)
        yield "loss", name, iterations, iterations[(bits != bits_b) | (types != types_b)]
    generators, generators_b = a.generators[rows], b.generators[rows_b]
    is_known = (generators != 0) & (generators_b != 0)
    yield "generators", "", iterations[is_known], iterations[is_known & (generators != generators_b)]


def _losses(ledger: Ledger, name: str, rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if name not in ledger.names:
        return np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.uint8)
    column = ledger.names.index(name)
    return ledger.bits[:, column][rows], ledger.types[:, column][rows]


def first_recorded_difference(
    recorded: Ledger, replayed: Ledger, after: int, until: int, *, with_generators: bool
) -> tuple[int, Difference | None]:
    """Return in how many iterations up to the first difference a replay is the same as its run, and that difference."""
    common = np.intersect1d(recorded.iterations, replayed.iterations)
    common = common[(common > after) & (common <= until)]
    first: Difference | None = None
    names = [name for name in recorded.names if not name.startswith(MARK)]
    for kind, name, _, differing in _recorded_rows(recorded, replayed, common, names):
        is_compared = kind != "generators" or with_generators
        if is_compared and len(differing) and (first is None or differing[0] < first.iteration):
            first = Difference(int(differing[0]), kind, name)
    for iteration in sorted(recorded.digests.keys() & replayed.digests.keys() & set(common.tolist())):
        digests, digests_replayed = recorded.digests[iteration], replayed.digests[iteration]
        names = [name for name, digest in digests.items() if digest != digests_replayed.get(name)]
        if names and (first is None or iteration < first.iteration):
            first = Difference(iteration, "tensor", names[0])
    return len(common) if first is None else int((common < first.iteration).sum()), first


def _compare_recorders(comparison: Comparison, a: Ledger, b: Ledger) -> None:
    iterations = np.intersect1d(a.iterations, b.iterations)
    names = [name for name in a.names if name in b.names]
    if len(iterations):
        knows_batches = bool((a.batches != 0).any() and (b.batches != 0).any())
        if parts := [*(["batches"] if knows_batches else []), *names]:
            comparison.compared.append(f"{', '.join(parts)} of {_ranges(iterations.tolist())}, as recorded")
        if not knows_batches:
            comparison.not_compared.append("batches, whose indices were not recorded")
        if alone := sorted(set(a.names) ^ set(b.names)):
            comparison.not_compared.append(f"{', '.join(alone)}, which only one of the runs has recorded")
    else:
        comparison.not_compared.append("what was recorded, since it is of different iterations")
    same = iterations
    for kind, name, known, differing in _recorded_rows(a, b, iterations, names):
        if kind == "generators" and len(known):
            comparison.compared.append(f"generators after {_ranges(known.tolist())}, as recorded")
        elif kind == "generators":
            comparison.not_compared.append("generators, which were recorded after different iterations")
        same = np.setdiff1d(same, differing)
        if len(differing):
            iteration, text = int(differing[0]), ""
            if name:
                losses = [row.losses.get(name) if row else None for row in (a.row(iteration), b.row(iteration))]
                text = " -> ".join("nothing" if loss is None else repr(loss_value(*loss)) for loss in losses)
            comparison.differences.append(Difference(iteration, kind, name, text, _before(known.tolist(), iteration, 1)))
    for iteration in same[-1:].tolist():
        comparison.add_same(iteration)
    _compare_digests(comparison, a, b)


def _compare_digests(comparison: Comparison, a: Ledger, b: Ledger) -> None:
    common = sorted(a.digests.keys() & b.digests.keys())
    if common:
        comparison.compared.append(f"{len(a.digests[common[-1]])} tensors after {_ranges(common)}, by their digests")
    elif a.digests or b.digests:
        comparison.not_compared.append("digests of tensors, which were taken after different iterations")
    for iteration in common:
        digests, digests_b = a.digests[iteration], b.digests[iteration]
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


# --- logs and snapshots ---


def _compare_logs(comparison: Comparison, name: str, a: FinishedRun, b: FinishedRun) -> None:
    rows, rows_b = a.logs[name], b.logs[name]
    of_interval = {(row.after, row.iteration): row for row in rows_b}
    pairs = [(row, of_interval[row.after, row.iteration]) for row in rows if (row.after, row.iteration) in of_interval]
    if pairs:
        plural = "s" * (len(pairs) > 1)
        comparison.compared.append(f"{len(pairs)} row{plural} of {name}, of iterations up to {pairs[-1][0].iteration}")
    elif rows and rows_b:
        comparison.not_compared.append(f"the rows of {name}, which are of different intervals")
    keys, keys_b = ({key for row in log for key in row.values} for log in (rows, rows_b))
    if keys and keys_b and keys != keys_b:
        comparison.not_compared.append(f"what only one of the runs reports in {name}: {', '.join(sorted(keys ^ keys_b))}")
    for row, row_b in pairs:
        for key, value in row.values.items():
            if key not in row_b.values or a.is_speed(key) or b.is_speed(key):
                continue
            text, text_b = repr(value), repr(row_b.values[key])
            if value != row_b.values[key] and text != text_b:
                difference = Difference(row.iteration, _kind_of_value(key), key, f"{text} -> {text_b}", row.after)
                comparison.differences.append(difference)
                return
        comparison.add_same(row.iteration)


def _kind_of_value(key: str) -> str:
    return "loss" if key.rpartition("/")[2] == "loss" else "value"


def _compare_snapshots(comparison: Comparison, a: FinishedRun, b: FinishedRun) -> None:
    """Compare the snapshots of the same iterations, up to the first with a different tensor."""
    common = sorted(a.snapshots.keys() & b.snapshots.keys())
    if not common and a.snapshots and b.snapshots:
        comparison.not_compared.append("snapshots, which are of different iterations")
    compared: list[int] = []
    for iteration in common:
        first = comparison.first
        if first is not None and iteration > first.iteration and comparison.first_of("tensor") is not None:
            break
        try:
            differences_here = _compare_saved(a, b, iteration, compared[-1] if compared else None)
        except FileNotFoundError:  # a run that continues has removed it
            continue
        except (CorruptError, OSError, ValueError) as error:
            comparison.not_compared.append(f"the snapshots of iteration {iteration}: {error}")
            continue
        comparison.differences += differences_here
        compared.append(iteration)
        if any(difference.what == "tensor" for difference in differences_here):
            break
        if not differences_here:
            comparison.add_same(iteration, tensors=True)
    if compared:
        comparison.compared.append(f"the snapshots of {_ranges(compared)}, bit for bit")


def _compare_saved(a: FinishedRun, b: FinishedRun, iteration: int, after: int | None) -> list[Difference]:
    """Return what differs in the snapshots of an iteration: the first few values, and a tensor if there is one."""
    with a.opened(iteration) as state, b.opened(iteration) as state_b:
        differing = (replace(found, after=after) for found in _differing_values(a, b, state, state_b, iteration))
        kept = list(itertools.islice(differing, _MAX_KEPT))
        if not any(found.what == "tensor" for found in kept):
            kept += itertools.islice((found for found in differing if found.what == "tensor"), 1)
    return kept


def _differing_values(
    a: FinishedRun, b: FinishedRun, state: dict[str, Any], state_b: dict[str, Any], iteration: int
) -> Iterator[Difference]:
    """Yield what differs in the flat states of two snapshots, whose tensors have not been read, causes first.

    Left out are settings, what extensions hold but for their tensors, speeds, and the generators of ranks that one of the
    runs does not have.
    """
    flat, flat_b = ({path: value for key, item in s.items() for path, value in leaves(key, item)} for s in (state, state_b))
    ranks = min(len({key.split("/")[1] for key in s if key.startswith("generators/")}) for s in (state, state_b))
    unused = _not_drawn(a, state) & _not_drawn(b, state_b)
    title = f"compare snapshots of iteration {iteration}"
    paths = sorted(flat | flat_b, key=_rank_of_cause)
    for path in tqdm(paths, title, delay=2.0, leave=False, file=sys.stderr, disable=None):
        value, value_b = flat.get(path, _ABSENT), flat_b.get(path, _ABSENT)
        is_of_one = value is _ABSENT or value_b is _ABSENT
        is_tensor = isinstance(value, Tensor | StoredTensor) or isinstance(value_b, Tensor | StoredTensor)
        start, _, name = path.partition("/")
        is_compared, kind = _is_computed(path, is_tensor), "tensor" if is_tensor else "state"
        if start == "generators":
            (rank, _, generator), kind = name.partition("/"), "generators"
            is_compared &= rank.isdecimal() and int(rank) < ranks and generator.partition("/")[0] not in unused
        elif start == "observation":
            kind = _kind_of_value(name)
            is_compared &= not (is_of_one or a.is_speed(name) or b.is_speed(name))
        elif start == "extensions":
            is_compared &= not is_of_one
        if not is_compared:
            continue
        text: str | None = f"only in {'the second' if value is _ABSENT else 'the first'}"
        if not is_of_one:
            value, value_b = read_stored(value), read_stored(value_b)
            text = describe_difference(value, value_b)
            if text is not None and isinstance(value, Tensor) and isinstance(value_b, Tensor):
                units = _units_apart(value, value_b)
                text += "" if units is None else f", at most {units} ulp"
        if text is not None:
            yield Difference(iteration, kind, name if start == "observation" else path, text)


def _is_computed(path: str, is_tensor: bool) -> bool:
    """Return whether what is at a path of a snapshot follows from the iterations: no settings, nor times of extensions."""
    if path.startswith(("generators/", "observation/")):
        return "/constructed/" not in path
    if not path.startswith(_ORDER) or path.startswith(_LEFT_OUT):
        return False
    is_compared = is_tensor or not path.startswith("extensions/")
    return is_compared and "/constructed/" not in path and "/summary/" not in path


def digests_of(saved: SavedSnapshot) -> dict[str, str]:
    """Return 64 bits of each value in a snapshot that a replay makes again, by its path; every byte is verified first."""
    digests = {}
    with opened_state(saved) as state:
        for path, value in (leaf for key, item in state.items() for leaf in leaves(key, item)):
            if _is_computed(path, isinstance(value, Tensor | StoredTensor)) and not path.startswith("observation/"):
                content = as_tensor(read_stored(value))
                digest = hashlib.blake2b(digest_size=8)
                if isinstance(content, Tensor):
                    digest.update(f"{content.dtype} {tuple(content.shape)} ".encode())
                    digest.update(bytes_of(content).numpy().data)
                else:
                    digest.update(describe(content).encode())
                digests[path] = _LEFT_OUT_BY_FROZEN if content is None else digest.hexdigest()
    return digests


def differing_digests(thinned: Mapping[str, str], made: Mapping[str, str]) -> list[str]:
    """Return the paths at which two snapshots differ, causes first; what ``frozen=False`` has left out is not compared."""
    paths = sorted({*thinned, *made}, key=_rank_of_cause)
    return [path for path in paths if thinned.get(path) not in (_LEFT_OUT_BY_FROZEN, made.get(path))]


def _not_drawn(run: FinishedRun, state: Mapping[str, Any]) -> set[str]:
    """Return the generators that have in a snapshot the state with which the run began, which may be of no seed."""
    began = as_mapping(start_in_force(run.record, 0).get("generators"))
    saved = as_mapping(read_stored(state.get("generators/0")))
    return {name for name, value in saved.items() if began.get(name) == checksum(value)}


def _rank_of_cause(path: str) -> tuple[int, bool]:
    order = (index for index, start in enumerate(_ORDER) if path.startswith(start))
    return next(order, len(_ORDER)), _RATES not in path


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
