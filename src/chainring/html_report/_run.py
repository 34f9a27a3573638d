"""What a page shows of a run, as plain values; nothing in its files is trusted, and nothing is unpickled."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from chainring._files import from_json, is_url, read_regular
from chainring._places.base import MANIFEST, RemoteError
from chainring._runs.finished import FinishedRun, as_mapping
from chainring.html_report._log import MAX_ROWS, Log, LogFile
from chainring.serializers._store import CorruptError, Place, Snapshots, Thinned
from chainring.training._advice import advise
from chainring.training._run_directory import match_name

_LARGEST_FILE = 4 << 20  # bytes of a profile or a graph; those that Chainring writes are smaller
_LARGEST_PICTURE = 300_000  # bytes of an SVG inside the page
_NOTES = ("notes.md", "notes.txt")  # that a person may write into the directory of a run
_MAX_NOTES = 20_000  # bytes
_MAX_SIZE = 8 << 20  # characters of the images and texts on a page
_MAX_SHOWN = 24  # images, texts or histograms of a key
_MAX_KEYS = 100  # of them
_MAX_TEXT = 4_000
_MAX_BINS = 1_000
_PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]{32,}={0,2}")  # the Base64 of a PNG file

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
    rank_seconds: RankSeconds | None = None
    graph: Graph | None = None
    notes: str = ""  # of a person
    faults: Sequence[str] = ()  # of devices, which audits have found

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts and the rollbacks, which have a reason."""
        return list(self.record.get("starts", ()))

    @property
    def commands(self) -> list[dict[str, Any]]:
        """What `chainring.control` has commanded, refused or not."""
        return list(self.record.get("commands", ()))

    @property
    def rollbacks(self) -> int:
        """The number of times that the run went back to a snapshot by itself, without a start."""
        return sum("rollback" in start for start in self.starts)

    @property
    def advice(self) -> str | None:
        """Where the time went and what to do first, in one line; ``None`` where the times tell nothing worth saying."""
        times = None if self.rank_seconds is None else self.rank_seconds.times
        if times is None and str(self.record.get("device", "")).startswith("cpu"):  # elsewhere work goes on beside
            times = self.profile
        return None if times is None else advise(times.seconds, times.iterations)

    @property
    def models(self) -> list[Model]:
        models = []
        for name, content in as_mapping(self.record.get("models")).items():
            model = as_mapping(content)
            shapes = {path: shape_of(text) for path, text in as_mapping(model.get("parameters")).items()}
            frozen = model.get("frozen")
            names = frozenset(map(str, frozen if isinstance(frozen, list) else ()))
            models.append(Model(name, str(model.get("class", "")), shapes, names))
        return models


def shape_of(text: object) -> tuple[int, ...] | None:
    """Return the shape of a parameter that stands in a record, such as ``"8x4"``; ``None`` if it is not known."""
    is_shape = isinstance(text, str) and re.fullmatch(r"\d{1,15}(x\d{1,15}){0,20}", text)
    return tuple(map(int, str(text).split("x"))) if is_shape else () if text == "scalar" else None


def runs_in(places: Sequence[Place]) -> tuple[list[Place], list[Place]]:
    """Return the runs at these paths and directly below them, and the paths where there is none; an address is a run."""
    runs: list[Place] = []
    others: list[Place] = []
    for place in places:
        if is_url(place) or _is_run(Path(place)):
            runs.append(place)
        elif Path(place).is_dir() and (inside := sorted(filter(_is_run, Path(place).iterdir()))):
            runs += map(str, inside)
        else:
            others.append(place)
    return runs, others


def _is_run(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(FinishedRun.open(path))
    return False


def read_run(place: Place, *, verify: bool = True, number_of_runs: int = 1, files: dict[str, LogFile] | None = None) -> Run:
    """Read a run at a path or an address, which may still be running, for a page of so many runs; see `write`.

    Beside others it has the last rows of its logs alone, and no snapshots. Of one at an address what a page shows, but for
    its snapshots, is copied meanwhile. ``files`` are its logs, as far as they have been read before.
    """
    source, logs = FinishedRun.open(place), []
    files = {} if files is None else files
    for name in source.log_names:
        if (path := source.file(name)) is not None:
            log = files.setdefault(name, LogFile(path, name, MAX_ROWS if number_of_runs == 1 else 1)).read()
            media = source.file(f"{name.removesuffix('.jsonl')}.media.jsonl")
            size = _MAX_SIZE // number_of_runs
            logs.append(log if media is None else replace(log, media=_read_media(media, log.count, size)))
    snapshots = _read_snapshots(source.store, source.files, verify) if number_of_runs == 1 else []
    error = source.record_error
    record = dict(source.record) if error is None else {}
    notes = [path.read_bytes()[:_MAX_NOTES] for path in map(source.file, _NOTES) if path is not None]
    text = "\n\n".join(note.decode("utf-8", "replace").strip() for note in notes)
    profile, rank_seconds = _profile_of(_read_object(source, "profile.json")), _read_rank_seconds(source)
    faults = source.faults() if number_of_runs == 1 else []
    return Run(source.name, record, error, logs, snapshots, profile, rank_seconds, _read_graph(source), text, faults)


def _read_object(source: FinishedRun, name: str) -> dict[str, Any]:
    """Return the object in a file of JSON, an empty one if there is none."""
    path = source.file(name)
    try:
        return {} if path is None else as_mapping(from_json(json.loads(read_regular(path, _LARGEST_FILE))))
    except (ValueError, RecursionError):
        return {}


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


def _read_snapshots(store: Snapshots, templates: Iterable[str], verify: bool) -> list[Snapshot]:
    """Read the snapshots: first those whose manifest cannot be read, then the newest, and so on."""
    # A directory without a manifest is a damaged snapshot if the run writes what has such a name.
    patterns = [template for template in templates if "{" in template]  # any other is the name of a link or of a file
    links: dict[str, list[str]] = {}
    for name, target in sorted(store.files.links().items()):
        if not name.startswith("."):
            links.setdefault(target, []).append(name)
    snapshots = []
    for name, manifest in store.listing():
        saved, state, note = store.snapshot(name), VERIFIED if verify else COMPLETE, ""
        if not saved.exists() and not any(match_name(pattern, name) for pattern in patterns):
            continue
        try:
            manifest = saved.verify(content=verify)
        except RemoteError:  # which says nothing about the snapshot
            raise
        except Thinned as error:
            state, note = "thinned", str(error)
        except (CorruptError, OSError) as error:
            state, note = DAMAGED, str(error)
        if not store.files.exists(name):  # the run has removed it meanwhile
            continue
        iteration, epoch = None, None
        if manifest is None:
            size = sum(size or 0 for file, size in store.files.sizes(name).items() if file != MANIFEST)
        else:
            about, iteration = manifest.about, manifest.iteration
            epoch = about["epoch"] if isinstance(about.get("epoch"), int) else None
            size = sum(size for size, _ in manifest.files.values())
            notes = [f"{key}: {about[key]}" for key in ("error", "not bit-exact", "left out") if key in about]
            note = "; ".join(filter(None, [note, *notes]))
        snapshots.append(Snapshot(name, iteration, epoch, size, state, note, links.get(name, [])))
    return snapshots


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


@dataclass(frozen=True, slots=True)
class Profile:
    """The seconds of each phase of some iterations, as `Profiler` and `RankTimes` write them."""

    iterations: int
    seconds: dict[str, float]


def _profile_of(content: dict[str, Any]) -> Profile | None:
    iterations, seconds = content.get("iterations"), content.get("seconds")
    return Profile(iterations, _known_seconds(seconds)) if _is_count(iterations) and iterations else None


def _known_seconds(content: Any) -> dict[str, float]:
    return {name: value for name, value in as_mapping(content).items() if type(value) in (int, float) and 0 < value < 1e12}


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """The seconds in an update by stage, of each rank, as `RankTimes` writes them at each report."""

    iteration: int
    ranks: list[dict[str, float]]
    times: Profile | None  # of rank 0, in all reports

    @property
    def longest(self) -> float:
        """Those of the rank that takes the most, with its waiting."""
        return max(sum(stages.values()) for stages in self.ranks)


def _read_rank_seconds(source: FinishedRun) -> RankSeconds | None:
    content = _read_object(source, "rank_times.json")
    iteration, ranks = content.get("iteration"), content.get("ranks")
    if not _is_count(iteration) or not isinstance(ranks, list):
        return None
    known = [_known_seconds(stages) for stages in ranks]
    return RankSeconds(iteration, known, _profile_of(content)) if any(known) else None


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


@dataclass(frozen=True, slots=True)
class Shown:
    """An image, a text or a histogram at the iteration of its row; two of the three are ``None``."""

    iteration: Any
    png: str | None = None  # in Base64
    size: tuple[int, int] = (0, 0)  # of an image, its width and height
    text: str | None = None
    bars: list[float] | None = None  # the height of each bin of a histogram, the highest 1
    summary: str = ""


@dataclass(slots=True)
class Series:
    """What is shown of what was reported under one key, evenly spaced and the oldest first, and how many rows have it."""

    key: str
    shown: list[Shown] = field(default_factory=list)
    count: int = 0
    stride: int = 1  # between those that are kept, of which one in two goes when there are too many
    newest: Shown | None = None

    def add(self, shown: Shown) -> None:
        self.newest = shown
        if self.count % self.stride == 0:
            self.shown.append(shown)
        if len(self.shown) > 2 * _MAX_SHOWN:  # of an odd number the last stays too
            self.shown, self.stride = self.shown[::2], 2 * self.stride
        self.count += 1


def _read_media(path: Path, number_of_rows: int, max_size: int) -> list[Series]:
    """Read what belongs to the rows of a log, of many some; a line that is damaged, or of no row, is left out."""
    series: dict[str, Series] = {}
    with open(path, "rb") as file:
        for line in file:
            try:
                row: Any = json.loads(line) if line.endswith(b"\n") else None  # else it was cut, or is being written
                number, content = row["row"], row["media"]
            except (ValueError, RecursionError, LookupError, TypeError):
                continue
            if type(number) is not int or not 0 <= number < number_of_rows or not isinstance(content, dict):
                continue
            for key, item in content.items():
                shown = _shown(row.get("iteration"), item)
                if shown is not None and (key in series or len(series) < _MAX_KEYS):
                    series.setdefault(key, Series(key)).add(shown)
    for of_key in series.values():
        if of_key.newest is not None and of_key.newest is not of_key.shown[-1]:
            of_key.shown.append(of_key.newest)
        of_key.shown = _spread(of_key.shown, _MAX_SHOWN)
    sizes = {key: _size(of_key.shown) for key, of_key in series.items()}
    while sum(sizes.values()) > max_size:
        largest = max(sizes, key=sizes.__getitem__)
        shown_there = series[largest].shown
        series[largest].shown = _spread(shown_there, len(shown_there) - 1)
        sizes[largest] = _size(series[largest].shown)
    return list(series.values())


def _spread(shown: list[Shown], number: int) -> list[Shown]:
    """Return so many, evenly spaced: the newest, and the oldest if there are two."""
    if len(shown) <= number:
        return shown
    if number < 2:
        return shown[len(shown) - number :]
    return [shown[round(i * (len(shown) - 1) / (number - 1))] for i in range(number)]


def _size(shown: list[Shown]) -> int:
    return sum(len(item.png or item.text or "") for item in shown)


def _shown(iteration: Any, item: Any) -> Shown | None:
    """Return an item of a row as it is shown; ``None`` if no run has written it."""
    match item:
        case {"kind": "image", "png": str(png)} if _PNG.fullmatch(png):
            width, height = struct.unpack_from(">II", base64.b64decode(png[:40]), 16)
            return Shown(iteration, png=png, size=(width, height), summary=f"{width} x {height}")
        case {"kind": "text", "text": str(text)}:
            length = f" ({len(text):,} characters)" if len(text) > _MAX_TEXT else ""
            return Shown(iteration, text=text[:_MAX_TEXT].encode("utf-8", "backslashreplace").decode(), summary=length)
        case {"kind": "histogram", "counts": list(counts), "edges": list(edges)} if (
            len(counts) <= _MAX_BINS
            and all(map(_is_count, counts))
            and all(isinstance(edge, (int, float)) and abs(edge) <= sys.float_info.max for edge in edges)
        ):
            words = [f"{sum(counts):,} values" + (f" from {edges[0]:.4g} to {edges[-1]:.4g}" if edges else "")]
            names = {"nan": "NaN", "positive_infinity": "positive infinity", "negative_infinity": "negative infinity"}
            apart = {word: item.get(name) for name, word in names.items()}
            words += [f"{count:,} {word}" for word, count in apart.items() if _is_count(count) and count]
            highest = max(counts, default=0) or 1
            return Shown(iteration, bars=[count / highest for count in counts], summary=", ".join(words))
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 60
