"""What a run has left in its directory, read into plain values; nothing in it is trusted, and nothing is unpickled."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainring._json import from_json
from chainring.serializers._store import MANIFEST, CorruptError, Manifest, Store, verify_sizes
from chainring.serializers._store import verify as verify_bytes
from chainring.training import _run_record
from chainring.training._run_directory import pattern_of

COUNTERS = ("epoch", "iteration", "elapsed_time")


@dataclass(frozen=True, slots=True)
class Log:
    """A log of a run.

    Attributes:
        name: of the file of its lines.
        rows: the rows, NaN and infinities as floats.
        unreadable: how many whole lines are no row.
    """

    name: str
    rows: list[dict[str, Any]]
    unreadable: int = 0

    @property
    def keys(self) -> list[str]:
        """The keys of all rows: the counters first, then the others as they first occur."""
        found = dict.fromkeys(key for row in self.rows for key in row)
        return [key for key in COUNTERS if key in found] + [key for key in found if key not in COUNTERS]


def read_logs(directory: Path, files: Iterable[str]) -> list[Log]:
    """The logs among the files that a run says it writes; without such a list, the one of the default name.

    Of a log there are two files, ``log`` and ``log.jsonl``. The lines are read, to which every row is appended at once.
    """
    names = set(files)
    lines = sorted(name for name in names if name.endswith(".jsonl") and name.removesuffix(".jsonl") in names)
    if "log.jsonl" not in lines:
        lines.insert(0, "log.jsonl")
    return [read_log(path, name) for name in lines if (path := inside(directory, name)) is not None]


def inside(directory: Path, name: str) -> Path | None:
    """The plain file of this name in a directory, or ``None``: a name out of a file may lead anywhere."""
    try:
        path = (directory / name).resolve()
        return path if path.is_relative_to(directory.resolve()) and path.is_file() else None
    except (OSError, ValueError):
        return None


def read_log(path: Path, name: str) -> Log:
    """A log. A last line without its end is being written, or was cut by a kill: it does not count."""
    rows, unreadable = [], 0
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        row = _row(line)
        if row is None:
            unreadable += 1
        else:
            rows.append(row)
    return Log(name, rows, unreadable)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


VERIFIED, COMPLETE, DAMAGED = "verified", "complete", "damaged"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot.

    Attributes:
        name: of its directory.
        iteration: ``None`` where its manifest cannot be read.
        epoch: completed epochs, as the manifest says, if it does.
        size: bytes of its files.
        state: ``"verified"``, ``"complete"`` (names and sizes agree, the bytes were not read), or ``"damaged"``.
        note: what is wrong with it, or what its manifest notes.
        links: the fixed names that lead to it, such as ``best``.
    """

    name: str
    iteration: int | None
    epoch: int | None
    size: int
    state: str
    note: str
    links: list[str]


def read_snapshots(directory: Path, templates: Iterable[str], *, verify: bool) -> list[Snapshot]:
    """The snapshots, the newest first, after those whose manifest cannot be read.

    Args:
        directory: of the run.
        templates: names of what the run writes. A directory so named that has no manifest is a damaged snapshot.
        verify: whether every byte is read.
    """
    store = Store(directory)
    patterns = [pattern for template in templates if (pattern := _pattern(template)) is not None]
    links: dict[str, list[str]] = {}
    for name in sorted(os.listdir(directory)):
        if not name.startswith(".") and (target := store.link_target(name)) is not None:
            links.setdefault(target, []).append(name)
    found = []
    for name, manifest in store.listing():
        is_own = (directory / name / MANIFEST).is_file() or any(pattern.fullmatch(name) for pattern in patterns)
        if is_own and (snapshot := _snapshot(directory / name, manifest, links.get(name, []), verify)) is not None:
            found.append(snapshot)
    return found


def _pattern(template: str) -> re.Pattern[str] | None:
    """The names of snapshots that a template stands for; a name without fields is that of a link or of a file."""
    try:
        return pattern_of(template) if "{" in template else None
    except ValueError:  # a person may have edited the list
        return None


def _snapshot(path: Path, manifest: Manifest | None, links: list[str], verify: bool) -> Snapshot | None:
    """The snapshot, or ``None`` if the run has removed it meanwhile."""
    state, note = VERIFIED if verify else COMPLETE, ""
    try:
        manifest = verify_bytes(path) if verify else verify_sizes(path)
    except (CorruptError, OSError) as error:
        state, note = DAMAGED, str(error)
    if not path.is_dir():
        return None
    if manifest is None:
        return Snapshot(path.name, None, None, _size(path), state, note, links)
    epoch = manifest.about.get("epoch")
    notes = [
        note,
        *(f"{key}: {manifest.about[key]}" for key in ("error", "not bit-exact", "left out") if key in manifest.about),
    ]
    size = sum(size for size, _ in manifest.files.values())
    return Snapshot(
        path.name,
        manifest.iteration,
        epoch if isinstance(epoch, int) else None,
        size,
        state,
        "; ".join(filter(None, notes)),
        links,
    )


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir() if file.is_file())


PROFILE = "profile.txt"
_LARGEST_TEXT = 4 << 20  # bytes of a table or a graph; those that Chainring writes are smaller


@dataclass(frozen=True, slots=True)
class Model:
    """A model's parameters: the shape of each by its name, ``None`` where it was not known at the start."""

    name: str
    kind: str
    shapes: dict[str, tuple[int, ...] | None]
    frozen: frozenset[str]

    def count(self, *, trainable: bool = False) -> int:
        """How many numbers the parameters are, or only those that need a gradient."""
        wanted = [shape for name, shape in self.shapes.items() if not (trainable and name in self.frozen)]
        return sum(math.prod(shape) for shape in wanted if shape is not None)


@dataclass(frozen=True, slots=True)
class Phase:
    """A line of the table of a profiler: share of the time, milliseconds an iteration, seconds."""

    name: str
    share: float
    milliseconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its directory tells it.

    Attributes:
        directory: where it is.
        record: ``run.json``, empty where there is none.
        trouble: why ``run.json`` could not be read.
        logs: the logs.
        snapshots: the newest first.
        profile: the phases by a profiler, and of how many iterations.
        graph: the text of the graph in DOT, and the name of its file.
    """

    directory: Path
    record: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None
    logs: list[Log] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    profile: tuple[int, list[Phase]] | None = None
    graph: tuple[str, str] | None = None

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The entries of ``run.json``, one a start."""
        return [start for start in self.record.get("starts", ()) if isinstance(start, dict)]

    @property
    def models(self) -> list[Model]:
        """The models, of which ``run.json`` records the parameters."""
        found = self.record.get("models")
        return (
            [_model(name, each) for name, each in found.items() if isinstance(each, dict)] if isinstance(found, dict) else []
        )


def read_run(directory: Path, *, verify: bool = True) -> Run:
    """Reads the directory of a run, which may still be going on.

    Args:
        directory: the trainer's ``out``.
        verify: whether every byte of the snapshots is compared with its checksum.

    Raises:
        FileNotFoundError: there is no such directory, or no run has written there; the error says what to give instead.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}")
    if (directory / MANIFEST).exists():
        raise FileNotFoundError(f"{directory} is a snapshot; give the directory of its run, {directory.resolve().parent}")
    record, trouble = _read_record(directory)
    files = [name for name in record.get("files", ()) if isinstance(name, str)]
    logs, snapshots = read_logs(directory, files), read_snapshots(directory, files, verify=verify)
    if not (record or trouble or logs or snapshots):
        raise FileNotFoundError(
            f"{directory} is no directory of a run: it has no {_run_record.NAME}, no log.jsonl and no snapshot; "
            'give the out= of the Trainer, "result" by default'
        )
    return Run(directory, record, trouble, logs, snapshots, _read_profile(directory), _read_graph(directory, files))


def _read_record(directory: Path) -> tuple[dict[str, Any], str | None]:
    path = inside(directory, _run_record.NAME)
    if path is None:
        return {}, None
    try:
        return _run_record.parsed(path), None
    except (OSError, ValueError) as error:
        return {}, str(error)


def _read_text(directory: Path, name: str) -> str | None:
    path = inside(directory, name)
    if path is None:
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_LARGEST_TEXT)


def _read_profile(directory: Path) -> tuple[int, list[Phase]] | None:
    """The table that `Profiler` writes when a run ends."""
    lines = (_read_text(directory, PROFILE) or "").splitlines()
    counted = re.match(r"(\d{1,18}) iterations", lines[0]) if lines else None
    if counted is None:
        return None
    line = re.compile(r"(.*\S) +(-?[\d.]{1,20})% +(-?[\d.]{1,20}) +(-?[\d.]{1,20})")
    found = [match.groups() for text in lines[2:] if (match := line.fullmatch(text))]
    try:
        phases = [Phase(name, float(share) / 100, float(each), float(whole)) for name, share, each, whole in found]
    except ValueError:
        return None
    return int(counted[1]), [phase for phase in phases if phase.name != "all"]


def _read_graph(directory: Path, files: list[str]) -> tuple[str, str] | None:
    """The first graph of those that `dump_graph` writes, each of which may have a picture beside it."""
    names = [name for name in sorted(files) if not name.endswith(".svg") and str(Path(name).with_suffix(".svg")) in files]
    for name in [*names, "cg.dot"]:
        text = _read_text(directory, name)
        if text is not None and text.startswith("digraph"):
            return name, text
    return None


def _model(name: str, content: dict[str, Any]) -> Model:
    parameters, frozen = content.get("parameters"), content.get("frozen")
    shapes = {key: _shape(text) for key, text in parameters.items()} if isinstance(parameters, dict) else {}
    held = frozenset(path for path in frozen if isinstance(path, str)) if isinstance(frozen, list) else frozenset()
    return Model(name, str(content.get("class", "")), shapes, held)


def _shape(text: Any) -> tuple[int, ...] | None:
    if text == "scalar":
        return ()
    if isinstance(text, str) and re.fullmatch(r"\d{1,15}(x\d{1,15}){0,20}", text):
        return tuple(map(int, text.split("x")))
    return None
