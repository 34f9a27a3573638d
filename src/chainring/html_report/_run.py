"""The directory of a run, read into plain values; nothing in it is trusted, and nothing is unpickled."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chainring._files import from_json, is_url
from chainring._remote.errors import RemoteError
from chainring.html_report._log import MAX_ROWS, Log, LogFile
from chainring.html_report._media import MAX_SIZE, read_media
from chainring.serializers._store import (
    MANIFEST,
    CorruptError,
    DirectoryStore,
    Manifest,
    Place,
    Store,
    find_snapshot,
    has_name,
    open_file,
    open_store,
    split,
)
from chainring.training._run_directory import RECORD, NamePattern, parse_record

_LARGEST_FILE = 4 << 20  # bytes of a profile or a graph; those that Chainring writes are smaller
_LARGEST_PICTURE = 300_000  # bytes of an SVG inside the page
_GRAPH = "cg.json"  # the default name
NOTES = ("notes.md", "notes.txt")  # that a person may write into the directory of a run
_MAX_NOTES = 20_000  # bytes


@dataclass(frozen=True, slots=True)
class Run:
    """The content of the directory of a run."""

    directory: Path
    record: dict[str, Any] = field(default_factory=dict)  # run.json, empty if there is none
    record_error: str | None = None  # why run.json could not be read
    logs: list[Log] = field(default_factory=list)  # in the order of their names, after the one of the default name
    snapshots: list[Snapshot] = field(default_factory=list)  # the newest first
    profile: Profile | None = None
    graph: Graph | None = None

    notes: str = ""  # of a person, in NOTES

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts and the rollbacks, which have a reason."""
        return [start for start in self.record.get("starts", ()) if isinstance(start, dict)]

    @property
    def rollbacks(self) -> int:
        """The number of times that the run went back to a snapshot by itself, without a start."""
        return sum("rollback" in start for start in self.starts)

    @property
    def models(self) -> list[Model]:
        models = self.record.get("models")
        models = models if isinstance(models, dict) else {}
        return [_model(name, content) for name, content in models.items() if isinstance(content, dict)]


@contextmanager
def directory_of(place: Place) -> Iterator[tuple[Path, Store]]:
    """Return the directory of a run and the store of its snapshots.

    What a page shows of a run at an address, but for its snapshots, is copied into a directory for the time of the block.
    """
    if not is_url(place):
        yield Path(place), open_store(place)
        return
    store = open_store(place)
    if has_name(os.fspath(place)) and find_snapshot(place).exists():
        raise FileNotFoundError(f"{place} is a snapshot; give the address of its run, {split(place)[0]}")
    with tempfile.TemporaryDirectory(prefix="chainring-") as folder:
        directory = Path(folder, store.place.rpartition("/")[2])
        directory.mkdir()
        _fetch(store.place, [RECORD], directory)
        record, _ = _read_record(directory)
        files = {name for name in record.get("files", ()) if isinstance(name, str)} | {
            "log.jsonl",
            "profile.json",
            _GRAPH,
            *NOTES,
        }
        files |= {f"{name.removesuffix('.jsonl')}.media.jsonl" for name in files if name.endswith(".jsonl")}
        files |= {f"{name.removesuffix('.json')}.svg" for name in files if name.endswith(".json")}
        _fetch(store.place, sorted(name for name in files if name.endswith((".json", ".jsonl", ".svg", *NOTES))), directory)
        yield directory, store


def _fetch(url: str, names: Iterable[str], directory: Path) -> None:
    """Copy the objects that are there, and whose names do not lead out of the directory."""
    for name in names:
        path = directory / name
        with suppress(FileNotFoundError, FileExistsError, NotADirectoryError, ValueError):  # of no object
            if path.resolve().is_relative_to(directory.resolve()) and not path.exists():
                file = open_file(f"{url}/{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                file.copy_to(path)


def read_run(
    directory: Path,
    store: Store | None = None,
    *,
    verify: bool = True,
    with_snapshots: bool = True,
    readers: Readers | None = None,
) -> Run:
    """Read the directory of a run, which may still be running, and its snapshots, by default those there; see `write`."""
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}")
    if (directory / MANIFEST).exists():
        raise FileNotFoundError(f"{directory} is a snapshot; give the directory of its run, {directory.resolve().parent}")
    place = directory if store is None else store
    record, record_error = _read_record(directory)
    files = [name for name in record.get("files", ()) if isinstance(name, str)]
    logs, snapshots = read_logs(directory, files, readers), []
    if with_snapshots or not (record or record_error or logs):
        snapshots = read_snapshots(store or DirectoryStore(directory), files, verify=verify)
    if not (record or record_error or logs or snapshots):
        raise FileNotFoundError(
            f"{place} is not the directory of a run: it has no {RECORD}, no log.jsonl and no snapshot; "
            'give the out= of the Trainer, "result" by default'
        )
    profile, graph = _read_profile(directory), _read_graph(directory, files)
    return Run(directory, record, record_error, logs, snapshots, profile, graph, _read_notes(directory))


def _read_notes(directory: Path) -> str:
    paths = [path for name in NOTES if (path := inside(directory, name)) is not None]
    return "\n\n".join(path.read_bytes()[:_MAX_NOTES].decode("utf-8", "replace").strip() for path in paths)


def _read_record(directory: Path) -> tuple[dict[str, Any], str | None]:
    path = inside(directory, RECORD)
    try:
        return ({} if path is None else parse_record(path)), None
    except (OSError, ValueError) as error:
        return {}, str(error)


def inside(directory: Path, name: str) -> Path | None:
    """Return the plain file of this name in a directory, or ``None``: a name read from a file may lead anywhere."""
    try:
        path = (directory / name).resolve()
        return path if path.is_relative_to(directory.resolve()) and path.is_file() else None
    except (OSError, ValueError):
        return None


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        content = from_json(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _read_object(directory: Path, name: str) -> dict[str, Any] | None:
    if (path := inside(directory, name)) is None:
        return None
    with open(path, "rb") as file:
        return _json_object(file.read(_LARGEST_FILE))


def read_logs(directory: Path, files: Iterable[str], readers: Readers | None = None) -> list[Log]:
    """Read the logs among the files that a run lists, and the one of the default name.

    Of the two files of a log, ``log`` and ``log.jsonl``, the lines are read, to which every row is appended at once.
    """
    names = set(files)
    logs = sorted(name for name in names if name.endswith(".jsonl") and name.removesuffix(".jsonl") in names)
    if "log.jsonl" not in logs:
        logs.insert(0, "log.jsonl")
    readers = Readers() if readers is None else readers
    found = []
    for name in logs:
        if (path := inside(directory, name)) is not None:
            log = readers.files.setdefault(name, LogFile(path, name, readers.max_rows)).read()
            media = inside(directory, f"{name.removesuffix('.jsonl')}.media.jsonl")
            shown = [] if media is None else read_media(media, log.count, readers.max_media)
            found.append(replace(log, media=shown))
    return found


@dataclass(frozen=True, slots=True)
class Readers:
    """How much of the logs of a run is kept, and by the names of the files what has been read of them before."""

    max_rows: int = MAX_ROWS  # as they were written
    max_media: int = MAX_SIZE  # characters
    files: dict[str, LogFile] = field(default_factory=dict)


VERIFIED, COMPLETE, DAMAGED = "verified", "complete", "damaged"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot; ``None`` for what its manifest does not tell."""

    name: str
    iteration: int | None
    epoch: int | None
    size: int  # bytes of its files
    state: str  # COMPLETE: names and sizes agree, and the bytes were not read
    note: str  # why it is damaged, or the notes of its manifest
    links: list[str]  # the fixed names that lead to it, such as "best"


def read_snapshots(store: Store, templates: Iterable[str], *, verify: bool) -> list[Snapshot]:
    """Read the snapshots: first those whose manifest cannot be read, then the newest, and so on."""
    # A directory without a manifest is a damaged snapshot if the run writes what has such a name.
    patterns = [pattern for template in templates if (pattern := _pattern(template)) is not None]
    links: dict[str, list[str]] = {}
    for name, target in sorted(store.links().items()):
        if not name.startswith("."):
            links.setdefault(target, []).append(name)
    snapshots = []
    for name, manifest in store.listing():
        if store.snapshot(name).exists() or any(pattern.match(name) for pattern in patterns):
            found = _read_snapshot(store, name, manifest, links.get(name, []), verify)
            snapshots += [] if found is None else [found]
    return snapshots


def _pattern(template: str) -> NamePattern | None:
    """Return the pattern of the names of snapshots; a name without fields is that of a link or of a file."""
    try:
        return NamePattern(template) if "{" in template else None
    except ValueError:  # a person may have edited the list
        return None


def _read_snapshot(store: Store, name: str, manifest: Manifest | None, links: list[str], verify: bool) -> Snapshot | None:
    """Read a snapshot; return ``None`` if the run has removed it meanwhile."""
    saved, state, note = store.snapshot(name), VERIFIED if verify else COMPLETE, ""
    try:
        manifest = saved.verify(content=verify)
    except RemoteError:  # which says nothing about the snapshot
        raise
    except (CorruptError, OSError) as error:
        state, note = DAMAGED, str(error)
    if not store.exists(name):
        return None
    if manifest is None:
        size = sum(size or 0 for size in saved.sizes(Manifest(0, {}, {})).values())
        return Snapshot(name, None, None, size, state, note, links)
    about = manifest.about
    notes = [note, *(f"{key}: {about[key]}" for key in ("error", "not bit-exact", "left out") if key in about)]
    epoch = about["epoch"] if isinstance(about.get("epoch"), int) else None
    size = sum(size for size, _ in manifest.files.values())
    return Snapshot(name, manifest.iteration, epoch, size, state, "; ".join(filter(None, notes)), links)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's parameters: the shape of each by its name, ``None`` if it was not known at the start."""

    name: str
    class_name: str
    shapes: dict[str, tuple[int, ...] | None]
    frozen: frozenset[str]

    def count(self, *, trainable: bool = False) -> int:
        """Return the number of elements of the parameters, or only of those that need a gradient."""
        shapes = [shape for name, shape in self.shapes.items() if not (trainable and name in self.frozen)]
        return sum(math.prod(shape) for shape in shapes if shape is not None)


def _model(name: str, content: dict[str, Any]) -> Model:
    parameters, frozen = content.get("parameters"), content.get("frozen")
    shapes = {key: _shape(text) for key, text in parameters.items()} if isinstance(parameters, dict) else {}
    names = [path for path in frozen if isinstance(path, str)] if isinstance(frozen, list) else []
    return Model(name, str(content.get("class", "")), shapes, frozenset(names))


def _shape(text: Any) -> tuple[int, ...] | None:
    if text == "scalar":
        return ()
    if isinstance(text, str) and re.fullmatch(r"\d{1,15}(x\d{1,15}){0,20}", text):
        return tuple(map(int, text.split("x")))
    return None


@dataclass(frozen=True, slots=True)
class Profile:
    """The seconds of each phase of an iteration, as `Profiler` writes them when a run ends."""

    iterations: int
    seconds: dict[str, float]


def _read_profile(directory: Path) -> Profile | None:
    content = _read_object(directory, "profile.json") or {}
    iterations, seconds = content.get("iterations"), content.get("seconds")
    if type(iterations) is not int or not 0 < iterations < 1 << 60 or not isinstance(seconds, dict):
        return None
    known = {name: value for name, value in seconds.items() if type(value) in (int, float) and 0 < value < 1e12}
    return Profile(iterations, known)


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph behind a reported value, as `dump_graph` writes it."""

    name: str  # of its file
    inputs: dict[str, list[str]]  # of each node but the leaves, in the order of the forward, all by their labels
    picture: bytes | None  # the SVG that Graphviz has drawn


def _read_graph(directory: Path, files: list[str]) -> Graph | None:
    """Read the first of the graphs that the run has written."""
    stems = [name.removesuffix(".json") for name in sorted(files) if name.endswith(".json")]
    for stem in [*(stem for stem in stems if f"{stem}.svg" in files), _GRAPH.removesuffix(".json")]:
        content = _read_object(directory, f"{stem}.json")
        try:
            inputs = _inputs(content or {})
        except (AttributeError, LookupError, TypeError, ValueError):  # another file of that name
            continue
        picture = inside(directory, f"{stem}.svg")
        is_shown = picture is not None and picture.stat().st_size < _LARGEST_PICTURE
        return Graph(f"{stem}.json", inputs, picture.read_bytes() if picture is not None and is_shown else None)
    return None


def _inputs(content: dict[str, Any]) -> dict[str, list[str]]:
    labels = []
    for index, node in enumerate(content["nodes"]):
        detail = f"#{index}" if node["kind"] == "operation" else tuple(node["shape"])
        labels.append(f"{node['label']} {detail}")
    inputs: dict[str, list[str]] = {}
    for source, target in content["edges"]:
        inputs.setdefault(labels[target], []).append(labels[source])
    return dict(reversed(inputs.items()))
