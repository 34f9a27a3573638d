"""What lies at a path or an address, and a run there: its record, logs, recorder and snapshots, and what they tell."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chainring._checks import is_number
from chainring._files import below_home, from_json, is_url, open_regular, parse_strict
from chainring._messages import warn
from chainring._places.base import MANIFEST, StoredFile
from chainring._places.connection import ChangedError
from chainring.serializers._loading import opened_state
from chainring.serializers._safetensors import is_pickle, read_header, to_tensor
from chainring.serializers._store import (
    STATE,
    THINNED,
    CorruptError,
    Manifest,
    Place,
    SavedSnapshot,
    Snapshots,
    Thinned,
    explain_absence,
    find_snapshot,
    format_manifest,
    has_name,
    open_file,
    open_store,
    split,
)
from chainring.training._ledger import MAGIC, Ledger, LedgerError, loss_value
from chainring.training._run_directory import RECORD, parse_record

LOG = "log.jsonl"
"""The lines of the log of the default name."""

_RECORDER = "recorder.bin"  # the default name
_SETTING = re.compile(r"updater/settings/.*|updater/iterator:[^/]*/(size|batch_size)")
SPEEDS = {"Throughput": "throughput", "SystemMetrics": "system", "RankTimes": "rank_times"}
"""What reports times and speeds, with its default name."""

_CHUNK = 1 << 20  # bytes read at once
_TAIL = 256  # bytes by which a file that was cut back and written on is told from one that has grown
_ASCII = frozenset(b"\t\n\r") | frozenset(range(32, 127))
_WORDS = (b'"NaN"', b'Infinity"', b"\\u")  # without them a line has nothing that `from_json` changes


@dataclass(frozen=True, slots=True)
class LogRow:
    """A row of a log, by key, of which the means are of the iterations ``after`` that of the row before, 0 for the first."""

    after: int
    iteration: int
    values: Mapping[str, Any]


class FinishedRun:
    """A run that has ended, was killed, or is still running; it is only read, and nothing in it is trusted.

    Files of a run in an object store are copied when they are asked for, into a directory that is removed with this object,
    or into an empty one that is given for the ``copies``, and stays.
    """

    def __init__(self, place: Place, copies: Path | None = None) -> None:
        self.place = os.fspath(place)
        self._is_remote = is_url(self.place)
        if not self._is_remote and not os.path.isdir(self.place):
            raise FileNotFoundError(f"there is no directory {self.place or repr(self.place)}; give that of a run, its out")
        if (not self._is_remote or has_name(self.place)) and find_snapshot(self.place).exists():
            above = split(self.place)[0] if self._is_remote else os.path.dirname(os.path.realpath(self.place))
            raise ValueError(f"{self.place} is a snapshot; give its run, such as {above}")
        self.store: Snapshots = open_store(self.place)
        if not self._is_remote:
            self.directory = Path(self.store.place)  # where its files are, or their copies
        elif copies is not None:
            copies.mkdir(parents=True, exist_ok=True)
            self.directory = copies.resolve()
        else:
            self.directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="chainring-run-")))
            weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self._copied: set[str] = set()

    @classmethod
    def open(cls, place: Place, copies: Path | None = None) -> FinishedRun:
        """Return the run; raise a `FileNotFoundError` where there is nothing that a run leaves."""
        run = cls(place, copies)
        if not (any(map(run.file, (RECORD, *run.log_names, *run._recorder_names))) or run.snapshots):
            raise FileNotFoundError(
                f"{run.place} holds no run: neither {RECORD} nor a snapshot, and no {LOG}; give the out= of the Trainer"
            )
        return run

    @property
    def name(self) -> str:
        """The last part of its path or its address."""
        return Path(self.store.place).name or self.place

    # --- files ---

    def file(self, name: str) -> Path | None:
        """Return the regular file of a name, which a file of the run may have told; ``None`` if there is none inside it."""
        try:
            path = (self.directory / name).resolve()
            if not path.is_relative_to(self.directory):
                return None
        except (OSError, ValueError):  # of no file
            return None
        if self._is_remote and name not in self._copied:
            with suppress(FileNotFoundError, FileExistsError, NotADirectoryError, ValueError):  # of no object
                self._copy(name, path)
            self._copied.add(name)
        try:
            return path if path.is_file() else None
        except OSError:  # too long a name
            return None

    def _copy(self, name: str, path: Path, times: int = 3) -> None:
        file = open_file(f"{self.store.place}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.copy_to(path)
        except ChangedError:  # the run has written it meanwhile
            path.unlink()
            if times == 1:
                raise
            self._copy(name, path, times - 1)

    def copy_files(self) -> None:
        """Copy the record, the logs with their media, and what was recorded, of a run in an object store."""
        media = [name for name in self.files if name.endswith(".media.jsonl")]
        for name in (RECORD, *self.log_names, *self._recorder_names, *media):
            self.file(name)

    @cached_property
    def _parsed_record(self) -> tuple[dict[str, Any], str | None]:
        path = self.file(RECORD)
        try:
            return ({} if path is None else parse_record(path)), None
        except (OSError, ValueError) as error:
            return {}, str(error)

    @property
    def record_error(self) -> str | None:
        """Why run.json cannot be read, if it is there and cannot."""
        return self._parsed_record[1]

    @property
    def record(self) -> Mapping[str, Any]:
        """The content of run.json, empty if there is none; a `ValueError` if it cannot be read."""
        record, error = self._parsed_record
        if error is not None:
            raise ValueError(f"{self.place.rstrip('/')}/{RECORD}: {error}")
        return record

    @property
    def files(self) -> list[str]:
        """The names of what the run writes, as its record lists them."""
        names: list[str] = self._parsed_record[0].get("files", [])
        return names

    @property
    def log_names(self) -> list[str]:
        """The files of rows that the run lists, and first the one of the default name.

        Of the two files of a log, ``log`` and ``log.jsonl``, the lines are read, to which every row is appended at once.
        """
        files = set(self.files)
        names = sorted(name for name in files if name.endswith(".jsonl") and name.removesuffix(".jsonl") in files)
        return list(dict.fromkeys([LOG, *names]))

    @property
    def _recorder_names(self) -> list[str]:
        names = [name for name in self.files if name.endswith(".bin") and "{" not in name]
        return list(dict.fromkeys([_RECORDER, *names]))

    # --- what was logged and recorded ---

    @cached_property
    def logs(self) -> dict[str, list[LogRow]]:
        logs: dict[str, list[LogRow]] = {}
        for name in self.log_names:
            if (path := self.file(name)) is None:
                continue
            logs[name], after = [], 0
            for number, values in enumerate(chain.from_iterable(RowReader(path).read()), 1):
                iteration = None if values is None else values.get("iteration")
                if values is None or type(iteration) is not int or iteration < after:
                    raise ValueError(
                        f"{self.place.rstrip('/')}/{name}: line {number} is not a row that a log has after iteration "
                        f"{after}; the file is damaged"
                    )
                logs[name].append(LogRow(after, iteration, values))
                after = iteration
        return logs

    @cached_property
    def recorder(self) -> Ledger | None:
        """What a `Recorder` has recorded, also in a file of another name; ``None`` if there is nothing."""
        for name in self._recorder_names:
            if (path := self.file(name)) is None:
                continue
            with open(path, "rb") as file:
                is_recorder = name == _RECORDER or file.read(len(MAGIC)) == MAGIC
            if is_recorder:
                try:
                    return Ledger.read(path)
                except ValueError as error:  # about a file that may be a copy
                    raise type(error)(str(error).replace(str(self.directory), self.place.rstrip("/"))) from error
        return None

    def sound_recorder(self) -> Ledger | None:
        """Return what was recorded, and ``None`` with a warning where it is damaged."""
        try:
            return self.recorder
        except LedgerError as error:
            warn(f"what is recorded is skipped: {error}")
            return None

    def faults(self) -> list[str]:
        """Return in words the faults of devices that are recorded, which audits have found."""
        recorder = self.sound_recorder()
        return [] if recorder is None else recorder.faults

    def is_speed(self, key: str) -> bool:
        """Return whether a value is a time, a speed, or a use of memory, which no two runs share."""
        return key == "elapsed_time" or key.split("/")[0] in self._names_of_speeds

    @cached_property
    def _names_of_speeds(self) -> set[str]:
        entries = planned_extensions(self.record)
        return {str(entry.get("name")) for entry in entries if str(entry.get("class")) in SPEEDS} or set(SPEEDS.values())

    @property
    def last(self) -> int:
        """The last iteration that it is known to have reached."""
        rows = [rows[-1].iteration for rows in self.logs.values() if rows]
        recorded = [] if self.recorder is None else list(map(int, self.recorder.iterations[-1:]))
        return max([0, *rows, *recorded, *self.snapshots])

    # --- snapshots ---

    @cached_property
    def snapshots(self) -> dict[int, str]:
        """The names of the snapshots by iteration, in order, without thinned ones and those taken because of an error."""
        listing = [(name, manifest) for name, manifest in self.store.listing() if manifest is not None]
        return dict(sorted((m.iteration, name) for name, m in listing if not {"error", THINNED} & m.about.keys()))

    def thinned(self, iteration: int) -> dict[str, str] | None:
        """Return the digests of the snapshot of an iteration, see `Snapshots.thin`; ``None`` if none was thinned."""
        for name, manifest in self.store.listing():
            if manifest is not None and manifest.iteration == iteration and THINNED in manifest.about:
                try:
                    self.store.snapshot(name).read_manifest()
                except Thinned as error:
                    return dict(error.manifest.about[THINNED])
        return None

    def opened(self, iteration: int) -> AbstractContextManager[dict[str, Any]]:
        """Open the snapshot of an iteration, see `opened_state`."""
        return opened_state(self.store.snapshot(self.snapshots[iteration]))

    def saved_settings(self) -> dict[str, Any]:
        """Return the settings of the updater and the sizes of data and batches, from the last snapshot that can be read."""
        for name in reversed(self.snapshots.values()):
            with suppress(OSError, ValueError):  # damaged, or removed
                values = read_values(self.store.snapshot(name))
                return {key.replace("/", "."): value for key, value in values.items() if _SETTING.fullmatch(key)}
        return {}

    def copy_nearest(self, latest: int) -> None:
        """Copy the latest sound snapshot up to an iteration, with the files beside it, of a run in an object store."""
        for saved, manifest, _ in saved_trainers(self.store, latest):
            target, draft = self.directory / saved.name, self.directory / ".copied"
            if not self._is_remote or target.exists():
                return
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            title, total = f"copy {saved.name}", sum(size for size, _ in manifest.files.values())
            bar: Any = tqdm(desc=title, total=total, unit="B", unit_scale=True, delay=2.0, file=sys.stderr, disable=None)
            try:
                with bar:
                    for name, (size, _) in manifest.files.items():
                        saved.open(name, manifest).copy_to(draft / name)
                        bar.update(size)
                (draft / MANIFEST).write_bytes(format_manifest(replace(manifest, folder="")))
                find_snapshot(draft).verify()
                draft.rename(target)
            except FileNotFoundError:  # removed by the run, which continues
                continue
            except CorruptError as error:
                warn(f"snapshot {saved} is skipped: {error}")
                continue
            for name in manifest.beside:
                self.file(name)
            return


def saved_trainers(store: Snapshots, latest: int | None = None) -> Iterator[tuple[SavedSnapshot, Manifest, int]]:
    """Yield the snapshots of the trainer up to an iteration, the latest first, whatever series they are of.

    With each come its manifest, and on how many ranks the run was there. Those that were taken because of an error are left
    out, since the update may be incomplete, as are those in ``abandoned``, which the run has left behind.
    """
    for name, manifest in store.listing():
        if manifest is None or (latest is not None and manifest.iteration > latest):
            continue
        if {"error", THINNED} & manifest.about.keys():
            continue
        with suppress(OSError, ValueError):  # removed meanwhile, or damaged
            saved = store.snapshot(name)
            values = read_values(saved)
            if values.get("updater/iteration") == manifest.iteration:
                ranks = {path.split("/")[1] for path in values if path.startswith("generators/")}
                yield saved, manifest, max(len(ranks), 1)


def read_values(snapshot: SavedSnapshot) -> dict[str, Any]:
    """Return the plain values in a snapshot by their paths, without reading its tensors."""
    file = snapshot.open(STATE, snapshot.read_manifest())
    document = parse_strict(file.read_bytes())
    if not isinstance(values := as_mapping(document).get("state"), dict):
        raise ValueError(f"{file.path} is not the state of a snapshot")
    return values


def as_mapping(content: Any) -> dict[str, Any]:
    """Return a mapping of a record as it is, and anything else that stands there as an empty one."""
    return content if isinstance(content, dict) else {}


def planned_extensions(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a record tells of each extension."""
    entries = as_mapping(record.get("plan")).get("extensions")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _placed_starts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [start for start in record.get("starts", ()) if isinstance(start.get("iteration"), int)]


def start_in_force(record: Mapping[str, Any], iteration: int) -> Mapping[str, Any]:
    """Return the start of a run that computed an iteration, of those in its record; empty where there is none."""
    starts = _placed_starts(record)
    before = [start for start in starts if start["iteration"] < iteration]
    return before[-1] if before else starts[0] if starts else {}


def starts_between(record: Mapping[str, Any], after: int, until: int) -> list[Mapping[str, Any]]:
    """Return the start that computed the iteration after one, and all later ones up to another, also those left behind.

    Each is recorded with what has changed since the start before it, of which nothing else may be left.
    """
    starts = _placed_starts(record)
    return [start_in_force(record, after + 1), *(start for start in starts if after < start["iteration"] < until)]


def is_like_first(starts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all starts had the settings and arguments of the first, as one replay of them has."""
    return not any(start.get("changed") or start.get("argv") != starts[0].get("argv") for start in starts[1:])


# --- what lies at a path or an address ---


def locate(place: Place) -> StoredFile | list[SavedSnapshot]:
    """Return a file, a snapshot alone, or all snapshots of a run, the newest first; an error tells what to give instead."""
    given = os.fspath(below_home(place))
    if not given:
        raise ValueError("the path is empty; give a snapshot, or the directory of a run, such as result")
    if not is_url(given) or has_name(given):
        saved = find_snapshot(given)
        if saved.exists():
            return [saved]
        if is_url(given) and saved.name != split(given)[1]:  # a link to nothing
            raise explain_absence(given)
        if is_url(given) or os.path.isfile(given):
            with suppress(FileNotFoundError):
                return open_file(given)
    if is_url(given) or os.path.isdir(given):
        run = open_store(given)
        if names := run.names():
            return [run.snapshot(name) for name in names]
    raise explain_absence(given)


def describe_file(file: StoredFile) -> str:
    """Return words for a file that is not a snapshot, with a remedy."""
    above = file.path.rpartition("/")[0] or "."
    for snapshot in (above, above.rpartition("/")[0]):
        if is_file(f"{snapshot}/{MANIFEST}"):
            return f"one file of the snapshot {snapshot}; give " + ("its address" if is_url(snapshot) else "the directory")
    if is_model(file):
        return "the file of a model, not a snapshot: `chainring inspect` and `chainring verify` take it"
    return describe_foreign_file(file) or f"not a snapshot, which has a {MANIFEST}, nor the file of a model"


def describe_foreign_file(file: StoredFile) -> str | None:
    """Return words for a file that Chainring neither writes nor opens; ``None`` if it may be a model's, sound or not."""
    if is_pickle(file):
        return (
            "a file such as torch.save or NumPy write, which is not opened, because a pickle can run code. In Python, "
            "chainring.serializers.load(path, model) reads its tensors alone, and serializers.save writes them again"
        )
    start = bytes(file.read(0, min(8, file.size)).numpy())
    if len(start) == 8 and _ASCII.issuperset(start):  # as a length of a safetensors header it would be beyond any disk
        run = file.path.rpartition("/")[0] or "."
        remedy = f"; to look at the run it belongs to, give {run}" if is_file(f"{run}/{RECORD}") else ""
        return f"text, not a model{remedy}"
    return None


def is_model(file: StoredFile) -> bool:
    """Return whether a file begins as safetensors does: the length of a header, and the header."""
    start = bytes(file.read(0, min(9, file.size)).numpy())
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= file.size


def is_file(place: str) -> bool:
    """Return whether there is a regular file at a path or an address."""
    try:
        open_file(place)
    except (OSError, ValueError):
        return False
    return True


# --- files of rows ---


Rows = list[dict[str, Any] | None]
"""For each line the row, or ``None`` where it is not one: it was damaged, or changed by hand."""


class RowReader:
    """Reads the rows of a file of lines, such as ``log.jsonl``, and later what was appended to it since.

    A last line without its end is being written, or was cut by a kill, and does not count.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # of the lines that were read
        self._tail = b""

    def read(self, begin_again: Callable[[], None] = lambda: None) -> Iterator[Rows]:
        """Yield the rows after those that were read, in blocks.

        A run that was resumed may have cut the file back: then ``begin_again`` is called, and it is read from the start.
        """
        with open(open_regular(self._path), "rb") as file:
            file.seek(self._end - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._end, self._tail = 0, b""
                file.seek(0)
                begin_again()
            rest = b""
            while chunk := file.read(_CHUNK):
                text, end, rest = (rest + chunk).rpartition(b"\n")
                if end:
                    self._end += len(text) + 1
                    self._tail = (self._tail + text + end)[-_TAIL:]
                    yield _parse_rows(text.split(b"\n"))


def _parse_rows(lines: list[bytes]) -> Rows:
    """Return the row of each line, with the words for NaN and infinities as numbers."""
    text = b",0,".join(lines)  # all at once is much faster; between lines that are not whole a 0 fits nowhere
    with suppress(ValueError, RecursionError):
        items = json.loads(b"[" + text + b"]")
        rows: Rows = items[::2]
        if len(items) == 2 * len(lines) - 1 and not any(items[1::2]) and all(isinstance(row, dict) for row in rows):
            return [from_json(row) for row in rows] if any(word in text for word in _WORDS) else rows
    rows = []
    for line in lines:
        row = None
        with suppress(ValueError, RecursionError):
            row = from_json(json.loads(line))
        rows.append(row if isinstance(row, dict) else None)
    return rows


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(\S.*?[^\s<>=!]|[^\s<>=!])\s*(<=|>=|==|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """A condition such as ``main/loss > 10``. A value that is not finite satisfies every one."""

    key: str
    operator: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition that a text is; raise a `ValueError` if it is none."""
        if (match := _CONDITION.fullmatch(text)) is not None:
            with suppress(ValueError):
                number = float(match[3])
                if match[2] == "==" or not math.isnan(number):  # == nan, as == inf, holds for what is not finite alone
                    return cls(match[1], match[2], number)
        raise ValueError(
            f'a condition is KEY <, <=, >, >= or == NUMBER, such as "main/loss > 10", got {text!r}; a value that is not '
            "finite satisfies every one"
        )

    def holds(self, value: float | None) -> bool:
        return value is not None and (not math.isfinite(value) or _OPERATORS[self.operator](value, self.number))

    def __str__(self) -> str:
        return f"{self.key} {self.operator} {self.number:g}"


@dataclass
class Evidence:
    """What is known of a key without a replay."""

    begin: int  # the iteration with which the run began
    last: int  # that it is known to have reached
    values: dict[int, float | None] = field(default_factory=dict)  # by iteration; None where it was not reported
    means: list[tuple[int, int, float]] = field(default_factory=list)  # of intervals: the iteration before, and the last
    logged: set[str] = field(default_factory=set)  # the keys in the rows of the logs

    def first_unknown(self, condition: Condition) -> int:
        """Return the first iteration in which the condition may hold."""
        iteration = self.begin + 1
        while iteration in self.values and not condition.holds(self.values[iteration]):
            iteration += 1
        return iteration

    def bounds(self, condition: Condition) -> tuple[int, int]:
        """Return the last iteration for which it does not hold before the first for which it does, and that one."""
        shown = [iteration for iteration, value in self.values.items() if condition.holds(value)]
        for _, end, mean in self.means:  # one that equals a number does not tell that a value does
            if condition.holds(mean) and (condition.operator != "==" or not math.isfinite(mean)):
                shown.append(end)
        end = min(shown, default=self.last)
        known = [i for i, value in self.values.items() if value is not None and i < end and not condition.holds(value)]
        return max(known, default=self.begin), end


def collect(run: FinishedRun, key: str, *, looks_into_snapshots: bool = False) -> Evidence:
    """Return the values of a key in the recorder and the logs of a run, and its snapshots."""
    begin = start_in_force(run.record, 0).get("iteration", 0)  # above 0 after another run
    last = max((manifest.iteration for _, manifest in run.store.listing() if manifest is not None), default=0)
    evidence = Evidence(begin, last)
    # Rows that tell something else.
    postprocessed = {name for start in run.record.get("starts", ()) for name in start.get("postprocessed", ())}
    for name, rows in run.logs.items():
        for row in rows:
            evidence.last = max(evidence.last, row.iteration)
            evidence.logged.update(row.values)
            value = None if name in postprocessed else row.values.get(key)
            if is_number(value) and row.iteration > 0:  # 0 is before the first
                mean = float(str(value))  # an integer beyond floats becomes an infinity
                evidence.means.append((row.after, row.iteration, mean))
                if row.iteration == row.after + 1:
                    evidence.values[row.iteration] = mean
    for saved, manifest, _ in saved_trainers(run.store) if looks_into_snapshots else ():
        if (value := _observed(saved, f"observation/{key}")) is not None:
            evidence.values[manifest.iteration] = value
    ledger = run.sound_recorder()
    if ledger is not None and len(ledger.iterations):
        evidence.last = max(evidence.last, int(ledger.iterations[-1]))
        if key in ledger.names:
            column = ledger.names.index(key)
            bits, types = ledger.bits[:, column].tolist(), ledger.types[:, column].tolist()
            for iteration, each, kind in zip(ledger.iterations.tolist(), bits, types, strict=True):
                evidence.values[iteration] = loss_value(each, kind) if kind else None
    return evidence


def _observed(snapshot: SavedSnapshot, path: str) -> float | None:
    """Return a number in a snapshot, which may be a tensor; ``None`` if it has none of that path."""
    value = read_values(snapshot).get(path)
    if value is None or isinstance(value, (int, float)):
        return None if value is None else float(value)
    manifest = snapshot.read_manifest()  # `opened_state` would read every byte
    for file in (snapshot.open(name, manifest) for name in sorted(manifest.files) if name.endswith(".safetensors")):
        if (stored := read_header(file)[1].get(path)) is not None:
            start, end = stored.span
            return float(to_tensor(file.read(start, end - start), stored.dtype, stored.shape, stored.strides))
    return None
