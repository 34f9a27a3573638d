"""What a page shows of a run, as plain values; nothing in its files is trusted, and nothing is unpickled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from chainring._files import from_json, read_regular
from chainring._places.base import RemoteError
from chainring._runs.finished import LOG, FinishedRun
from chainring.html_report._log import MAX_ROWS, MAX_SIZE, Log, LogFile, read_media
from chainring.serializers._store import CorruptError, Manifest, Place, Snapshots
from chainring.training._run_directory import RECORD, NamePattern

_LARGEST_FILE = 4 << 20  # bytes of a profile or a graph; those that Chainring writes are smaller
_LARGEST_PICTURE = 300_000  # bytes of an SVG inside the page
_NOTES = ("notes.md", "notes.txt")  # that a person may write into the directory of a run
_MAX_NOTES = 20_000  # bytes

VERIFIED, COMPLETE, DAMAGED = "verified", "complete", "damaged"


@dataclass(frozen=True, slots=True)
class Run:
    """What a page shows of a run."""

    name: str
    record: dict[str, Any] = field(default_factory=dict)  # run.json, empty if there is none
    record_error: str | None = None  # why run.json could not be read
    logs: list[Log] = field(default_factory=list)  # in the order of their names, after the one of the default name
    snapshots: list[Snapshot] = field(default_factory=list)  # the newest first
    profile: Profile | None = None
    graph: Graph | None = None
    notes: str = ""  # of a person

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


@dataclass(frozen=True, slots=True)
class Readers:
    """How much of the logs of a run is kept, and by the names of the files what has been read of them before."""

    max_rows: int = MAX_ROWS  # as they were written
    max_media: int = MAX_SIZE  # characters
    files: dict[str, LogFile] = field(default_factory=dict)

    @classmethod
    def of_page(cls, number_of_runs: int) -> Readers:
        """Return those of a run on a page of so many: beside others it has no rows, but the last."""
        return cls() if number_of_runs == 1 else cls(max_rows=1, max_media=MAX_SIZE // number_of_runs)


def read_run(place: Place, *, verify: bool = True, with_snapshots: bool = True, readers: Readers | None = None) -> Run:
    """Read a run at a path or an address, which may still be running, and its snapshots; see `write`.

    Of a run at an address what a page shows, but for its snapshots, is copied meanwhile.
    """
    source, snapshots = FinishedRun(place), []
    logs = _read_logs(source, Readers() if readers is None else readers)
    is_run = bool(logs) or source.file(RECORD) is not None
    if with_snapshots or not is_run:
        snapshots = _read_snapshots(source.store, source.files, verify=verify)
    if not is_run and not snapshots:
        raise FileNotFoundError(
            f"{place} is not the directory of a run: it has no {RECORD}, no {LOG} and no snapshot; "
            'give the out= of the Trainer, "result" by default'
        )
    error = source.record_error
    record = dict(source.record) if error is None else {}
    profile, graph = _read_profile(source), _read_graph(source)
    return Run(source.name, record, error, logs, snapshots, profile, graph, _read_notes(source))


def _read_logs(source: FinishedRun, readers: Readers) -> list[Log]:
    logs = []
    for name in source.log_names:
        if (path := source.file(name)) is not None:
            log = readers.files.setdefault(name, LogFile(path, name, readers.max_rows)).read()
            media = source.file(f"{name.removesuffix('.jsonl')}.media.jsonl")
            logs.append(log if media is None else replace(log, media=read_media(media, log.count, readers.max_media)))
    return logs


def _read_notes(source: FinishedRun) -> str:
    paths = filter(None, map(source.file, _NOTES))
    return "\n\n".join(path.read_bytes()[:_MAX_NOTES].decode("utf-8", "replace").strip() for path in paths)


def _read_object(source: FinishedRun, name: str) -> dict[str, Any]:
    """Return the object in a file of JSON, an empty one if there is none."""
    path = source.file(name)
    try:
        content = {} if path is None else from_json(json.loads(read_regular(path, _LARGEST_FILE)))
    except (ValueError, RecursionError):
        content = {}
    return content if isinstance(content, dict) else {}


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


def _read_snapshots(store: Snapshots, templates: Iterable[str], *, verify: bool) -> list[Snapshot]:
    """Read the snapshots: first those whose manifest cannot be read, then the newest, and so on."""
    # A directory without a manifest is a damaged snapshot if the run writes what has such a name.
    patterns = []
    for template in templates:
        with suppress(ValueError):  # a person may have edited the list
            patterns += [NamePattern(template)] if "{" in template else []  # else it is the name of a link or of a file
    links: dict[str, list[str]] = {}
    for name, target in sorted(store.links().items()):
        if not name.startswith("."):
            links.setdefault(target, []).append(name)
    snapshots = []
    for name, manifest in store.listing():
        if store.snapshot(name).exists() or any(pattern.match(name) for pattern in patterns):
            snapshot = _read_snapshot(store, name, manifest, links.get(name, []), verify)
            snapshots += [] if snapshot is None else [snapshot]
    return snapshots


def _read_snapshot(
    store: Snapshots, name: str, manifest: Manifest | None, links: list[str], verify: bool
) -> Snapshot | None:
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


def _read_profile(source: FinishedRun) -> Profile | None:
    content = _read_object(source, "profile.json")
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


def _read_graph(source: FinishedRun) -> Graph | None:
    """Read the first of the graphs that the run has written, those with a picture before that of the default name."""
    stems = [name.removesuffix(".json") for name in sorted(source.files) if name.endswith(".json")]
    for stem in [*(stem for stem in stems if f"{stem}.svg" in source.files), "cg"]:
        inputs: dict[str, list[str]] = {}
        try:
            content = _read_object(source, f"{stem}.json")
            labels = []
            for index, node in enumerate(content["nodes"]):
                detail = f"#{index}" if node["kind"] == "operation" else tuple(node["shape"])
                labels.append(f"{node['label']} {detail}")
            for start, end in content["edges"]:
                inputs.setdefault(labels[end], []).append(labels[start])
        except (AttributeError, LookupError, TypeError, ValueError):  # another file of that name
            continue
        picture = source.file(f"{stem}.svg")
        is_shown = picture is not None and picture.stat().st_size < _LARGEST_PICTURE
        return Graph(f"{stem}.json", dict(reversed(inputs.items())), picture.read_bytes() if picture and is_shown else None)
    return None
