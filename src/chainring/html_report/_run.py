"""What a run has left in its directory, read into plain values; nothing in it is trusted, and nothing is unpickled."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainring.html_report._logs import Log, inside, read_logs
from chainring.html_report._snapshots import Snapshot, read_snapshots
from chainring.serializers.manifest import MANIFEST
from chainring.training import _record

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
            f"{directory} is no directory of a run: it has no {_record.NAME}, no log.jsonl and no snapshot; "
            'give the out= of the Trainer, "result" by default'
        )
    return Run(directory, record, trouble, logs, snapshots, _read_profile(directory), _read_graph(directory, files))


def _read_record(directory: Path) -> tuple[dict[str, Any], str | None]:
    path = inside(directory, _record.NAME)
    if path is None:
        return {}, None
    try:
        return _record.parsed(path), None
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
