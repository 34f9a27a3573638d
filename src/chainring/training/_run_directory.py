"""The directory of a run: who writes there, what happens to earlier files, its record ``run.json`` and its settings."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from chainring import _random, _version
from chainring._files import (
    DirectoryLock,
    below_home,
    flush,
    is_url,
    make_numbered_directory,
    open_regular,
    read_regular,
    replace_file,
    set_aside,
    set_rows_aside,
    temporary_path,
    to_json,
)
from chainring._messages import info, list_names, warn
from chainring._progress import Trainer
from chainring.serializers._store import Snapshots
from chainring.serializers.protocol import announce_change, name_cleaner
from chainring.training._digests import checksum
from chainring.training._ledger import MAGIC, Ledger, cut_back
from chainring.training.triggers.base import describe

RECORD = "run.json"
CONTROL = "control.jsonl"
"""The file of what `chainring.control` commands; the run only reads it."""
_FORMAT = 1
_TYPES = {"config": dict, "versions": dict, "files": list, "starts": list, "commands": list}
_RECORDED = ("argv", "git_commit", "device", "threads", "ranks", "config", "versions", "seeds", "optimizers", "models")
_ROWS = {"starts": {}, "commands": {"id": str, "iteration": int, "command": str}}
_MAX_SHOWN = 6
_ARCHIVES = ("previous", "abandoned")
_DIGITS = frozenset("0123456789")
_COUNTS = {"iteration": _DIGITS, "epoch": _DIGITS, "epoch_detail": _DIGITS | frozenset(".e+-")}
_LARGEST_RECORD = 16 << 20  # bytes
_MAX_FIELDS = 1000  # of all names in a record
_DEEPEST = 20  # containers in one another, of settings
_LOOK = 1.0  # seconds between two looks at the file of commands

_runs = itertools.count(1)  # of this process


def resolve_out(out: str) -> tuple[str, str | None]:
    """Return the absolute path of ``out``, which is, or can become, a directory to write to; nothing is created.

    Of an address in an object store it is that of a directory on this machine; then return the address too.
    """
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f'out is the path of a directory, such as "result"; got {out!r} of type {type(out).__name__}')
    if is_url(out):
        from chainring._places.remote import find_out  # which few programs need

        return find_out(out)
    path = Path(below_home(out)).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(f"out must be a directory, and {existing} is not a directory; choose another out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"out must be a writable directory, and {existing} is not; choose another out")
    return (path if isinstance(out, Path) else str(path)), None  # a Path that is given stays one


class RunDirectory:
    """The directory in which a run writes; a `BlockingIOError` is raised while another run writes there.

    The processes that were ``lost`` are no others, each given by its number and its host.

    It is created, and unfinished files of killed runs are removed. What a run has saved is never deleted here, only moved.
    Until it is released, a thread looks for commands, and will ``tell`` of them.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        store: Snapshots,
        tell: Callable[[], None],
        lost: Collection[tuple[int, str]] = (),
    ) -> None:
        self.path, self._store = Path(out), store
        try:
            os.makedirs(out, exist_ok=True)
            probe = temporary_path(self.path)
            probe.touch(exist_ok=False)
            probe.unlink(missing_ok=True)  # a run that begins here at the same time sweeps it
        except OSError as error:
            rule = f"out must be a writable directory ({error.strerror}); choose another out"
            raise OSError(error.errno, rule, os.fspath(out)) from None
        self._unlock = DirectoryLock(out, lost).release
        try:
            store.files.sweep(store.folders_of)
        except BaseException:
            self._unlock()
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(tell,), name="chainring-control", daemon=True)
        self._thread.start()

    def _look(self, tell: Callable[[], None]) -> None:
        """Tell, once a second at most, that the file of commands has changed; nobody waits for this."""
        files, seen = self._store.files, None
        if not files.is_local and self._ended.wait(_LOOK):  # a request that a short run does without
            return
        while True:
            with suppress(OSError, ValueError):  # there is none, or the store does not answer
                status = os.lstat(self.path / CONTROL) if files.is_local else None
                state = (status.st_mtime_ns, status.st_size, status.st_ino) if status else (files.open(CONTROL).size,)
                if state != seen:
                    tell()
                seen = state
            if self._ended.wait(_LOOK):
                return

    def release(self) -> None:
        """Let others write there."""
        self._ended.set()
        if self._store.files.is_local:  # a store may take its time to answer
            self._thread.join()
        self._unlock()

    def abandon(self, written: Mapping[str, float | None], iteration: int) -> str:
        """Move the snapshots of later iterations to ``abandoned/<n>``; return in words what was moved.

        The files beside them, such as the log, are copied there, because the run will cut them back.
        """
        later = [name for name, saved_at in written.items() if saved_at is not None and saved_at > iteration]
        if not later:
            return ""
        # Links go first, so that none is left dangling when the process is killed in between.
        links = [name for name, target in self._store.files.links().items() if name in written and target in later]
        later = list(dict.fromkeys([*links, *later]))
        files = [name for name in written if (self.path / name).is_file() and name not in later]
        return f"{list_names(later, _MAX_SHOWN)} moved to {self.move(later, 'abandoned', copies=files)}"

    def cut_back(self, names: Iterable[str], iteration: int) -> None:
        """Remove the rows of later iterations from files that no extension continues, which else would cut them back.

        With a negative iteration all rows are those of another run, and the files are moved to ``abandoned/<n>``.
        """
        for name in names:
            path, kept = self.path / name, None
            if iteration < 0:
                set_rows_aside(path)
                continue
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # of another format, or changed by hand
                with open(open_regular(path), "rb") as file:
                    content = file.read()
                if content.startswith(MAGIC):
                    kept = cut_back(content, path, iteration)
                elif name.endswith(".jsonl"):
                    lines = content.splitlines(keepends=True)
                    kept = b"".join(line for line in lines if json.loads(line)["iteration"] <= iteration)
                elif content.startswith(b"["):
                    rows = json.loads(content)
                    earlier = [row for row in rows if row["iteration"] <= iteration]
                    kept = json.dumps(earlier, indent=4).encode() if len(earlier) < len(rows) else None
            if kept is not None and kept != content:
                replace_file(path, kept)
                info(f"resumed at iteration {iteration}: the later rows of {name} removed, which no extension continues")

    def digest_examples(self) -> None:
        """Add to the record a digest of the examples of all iterations that a `Recorder` has recorded, if there is one."""
        with suppress(OSError, ValueError):  # of a record or a recorder that is damaged
            record = parse_record(self.path / RECORD)
            for path in (self.path / name for name in record["files"] if name.endswith(".bin") and "{" not in name):
                with open(open_regular(path), "rb") as file:
                    if file.read(len(MAGIC)) != MAGIC:
                        continue
                ledger = Ledger.read(path)
                if len(ledger.iterations):
                    digest = hashlib.sha256(ledger.batches.astype("<u8").tobytes()).hexdigest()
                    last = int(ledger.iterations[-1])
                    record["examples"] = {"count": len(ledger.iterations), "last": last, "digest": digest}
                    replace_file(self.path / RECORD, json.dumps(record, indent=1) + "\n")
                return

    def find(self, templates: Collection[str]) -> dict[str, float | None]:
        """Return the names that runs have written, with the iteration of a snapshot (infinite if damaged), or ``None``."""
        manifests, links = dict(self._store.listing(copies=False)), self._store.files.links()
        iterations: dict[str, float | None] = {}
        present = {*os.listdir(self.path), *manifests, *links}
        names = sorted(name for name in present if not name.startswith(".") and name not in _ARCHIVES)
        for name in names:
            matches = [match for template in templates if (match := match_name(template, name))]
            manifest = manifests.get(name)
            if manifest is not None and (matches or "series" in manifest.about):
                iterations[name] = manifest.iteration
            elif matches:
                told = (match.iteration for match in matches if match.iteration is not None)
                iterations[name] = next(told, math.inf if name in manifests else None)
        iterations |= {name: None for name in names if name not in iterations and links.get(name) in iterations}
        for template in templates:
            folder = template.partition("{")[0].rpartition("/")[0]
            if folder and not os.path.isabs(template) and ".." not in Path(template).parts:
                tops = [self.path / parent for parent in (Path(folder), *Path(folder).parents[:-1])]
                if not any(map(Path.is_symlink, tops)):  # no link to a folder is followed
                    paths = (Path(where, file) for where, _, files in os.walk(tops[0]) for file in files)
                    below = sorted(path.relative_to(self.path).as_posix() for path in paths)
                    iterations |= {name: match.iteration for name in below if (match := match_name(template, name))}
        return iterations

    def move(self, names: list[str], archives: str, copies: Iterable[str] = ()) -> str:
        """Move files and snapshots to ``<archives>/<n>``, and copy others there; return where that is."""
        archive = make_numbered_directory(self.path / archives)
        folder = f"{archives}/{archive.name}"
        for name in (*copies, *names):
            (archive / name).parent.mkdir(parents=True, exist_ok=True)
        for name in copies:
            shutil.copy2(self.path / name, archive / name)
        for name in names:
            if os.path.lexists(self.path / name):
                os.rename(self.path / name, archive / name)
            else:
                self._store.move(name, folder)
        flush(archive)
        flush(self.path)
        return f"{self._store}/{folder}"


class NameMatch(NamedTuple):
    """A name that fits a pattern, with the iteration that it tells, if the template has one."""

    iteration: int | None


def match_name(template: str, name: str) -> NameMatch | None:
    """Return a match, with its first iteration, if a template such as ``snapshot_iter_{.updater.iteration}`` names this.

    Fields that count, iterations and epochs, stand for digits. Any other field stands for any text, unless the template
    consists of it alone, which would then match every name. A regular expression made of a template from anywhere could
    backtrack without end, so names are compared field by field.

    Raises:
        ValueError: the template is not a format string.
    """
    parts = [(literal, field and field.rpartition(".")[2]) for literal, field, _, _ in Formatter().parse(template)]
    others = None if any(literal for literal, _ in parts) else frozenset[str]()
    ends: dict[int, str | None] = {0: None}  # where the parts so far may end, with the digits of the iteration
    for literal, field in parts:
        starts = {end + len(literal): digits for end, digits in ends.items() if name.startswith(literal, end)}
        if field is None:
            ends = starts
            continue
        ends, allowed = {}, _COUNTS.get(field, others)
        for start, digits in starts.items():
            for end in range(start + 1, len(name) + 1):
                if end in ends or (allowed is not None and name[end - 1] not in allowed):
                    break  # from an earlier start, the field has gone on from here as far as it may
                ends[end] = name[start:end] if field == "iteration" and digits is None else digits
    digits = ends.get(len(name))
    return NameMatch(None if digits is None else int(digits)) if len(name) in ends else None


def read_record(directory: Path, *, moves_damaged: bool = False) -> dict[str, Any]:
    """Return the record of the run in this directory; empty if there is none that can be read.

    A damaged one is warned about, and moved to ``abandoned/<n>`` by the run that ``moves_damaged``.
    """
    path = directory / RECORD
    try:
        return parse_record(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        moved = set_aside(path) if moves_damaged else None
        warn(f"{path} is skipped{f' and moved to {moved}' if moved else ''}: {error}")
        return {}


def parse_record(path: Path) -> dict[str, Any]:
    """Return the record in this file; raise a `ValueError` if a person has edited it into something else."""
    try:
        record = json.loads(read_regular(path, _LARGEST_RECORD))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"it is not a record of format {_FORMAT}")
    entries = {"commands": [], **record}  # which few runs have
    wrong = {key for key, cls in _TYPES.items() if not isinstance(entries.get(key), cls)}
    for key, types in _ROWS.items() if not wrong else ():
        rows = entries[key]
        if not all(isinstance(row, dict) and all(isinstance(row.get(k), cls) for k, cls in types.items()) for row in rows):
            wrong.add(key)
    if wrong or not all(isinstance(name, str) for name in record["files"]):
        raise ValueError(f"these entries are not of the type that was written: {sorted(wrong) or ['files']}")
    if sum(field is not None for name in record["files"] for _, field, *_ in Formatter().parse(name)) > _MAX_FIELDS:
        raise ValueError(f"its files have more than {_MAX_FIELDS} fields")
    return record


def write_record(
    trainer: Trainer,
    earlier: Mapping[str, Any],
    files: Iterable[str],
    changes: Mapping[str, list[Any]],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add this start to the record of the earlier run, empty if it is a new one; print the settings that have changed.

    The record names all that the run writes by ``files``, which are templates; ``changes`` are those of the loaded state.
    ``notes`` say why the run has begun again by itself.
    """
    settings = _settings_of(trainer)
    inexact = "the run continues, and may differ in the last bits"
    kinds = {  # by the first name of a path: how it is called, and what a change means
        "config": ("config ", "the new value holds"),
        "versions": ("version of ", inexact),
        "git_commit": ("git_commit", "the code of now runs"),
        "device": ("device", inexact),
        "threads": ("threads", inexact),
    }
    before, now = (dict(leaf for kind in kinds for leaf in leaves(kind, record.get(kind))) for record in (earlier, settings))
    changed = {}
    for path in dict.fromkeys([*before, *now]) if earlier else ():
        if (old := before.get(path)) != (new := now.get(path)):
            kind, _, name = path.partition(".")
            changed[path] = [old, new]
            announce_change(kinds[kind][0] + name, old, new, kinds[kind][1])
    logs = (entry.extension for entry in trainer.entries if getattr(entry.extension, "is_postprocessed", False))
    postprocessed = sorted(name for log in logs for name in log.writes)
    generators = {} if earlier else _random.get_rng_state(trainer.updater)
    # What repeats the run is that with which it has begun; a later start tells only where it had something else.
    needs, needed = settings["reproduction"], earlier.get("reproduction")
    needed = needed if isinstance(needed, dict) else needs
    others = [name for name, value in needs.items() if name not in ("source", "run") and needed.get(name) != value]
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "iteration": trainer.updater.iteration,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": settings["argv"],
        "changed": changed | as_json(changes),
        **({"differs": others} if others else {}),
        **({"postprocessed": postprocessed} if postprocessed else {}),
        **({} if earlier else {"generators": {name: checksum(state) for name, state in generators.items()}}),
        **({} if earlier else {"run": secrets.token_hex(8)}),  # by which commands know it
        **notes,
    }
    begun = {"reproduction": needed, "files": sorted(files), "starts": [*earlier.get("starts", ()), start]}
    commands = {"commands": earlier["commands"]} if earlier.get("commands") else {}
    record = {"format": _FORMAT, **settings, **begun, **commands}
    replace_file(Path(trainer.out) / RECORD, json.dumps(record, indent=1) + "\n")


def leaves(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested containers by their paths; a list of plain values is one value."""
    if isinstance(value, dict) and value and depth < _DEEPEST:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}", item, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from leaves(f"{path}[{index}]", item, depth + 1)
    elif value != {}:
        yield path, value


def mixtures_of(trainer: Trainer) -> dict[str, Any]:
    """Return the mixtures by the names of the iterators that give their examples, or pack their documents."""
    sources = {name: getattr(each, "source", each) for name, each in trainer.updater.get_all_iterators().items()}
    return {name: source for name, source in sources.items() if hasattr(source, "change_weights")}


def _settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of a run as JSON values."""
    from chainring.training._provenance import provenance, withhold  # which nothing needs before a run

    updater, code = trainer.updater, provenance()
    iterators, device = updater.get_all_iterators(), getattr(updater, "device", None)
    seeds = {name: iterator.seed for name, iterator in iterators.items() if hasattr(iterator, "seed")}
    models = {}
    for name, model in updater.get_all_models().items():
        clean = name_cleaner(model)
        parameters = {clean(path).replace(".", "/"): parameter for path, parameter in model.named_parameters()}
        lazy = "not known before the first update"
        shapes = {path: lazy if is_lazy(p) else "x".join(map(str, p.shape)) or "scalar" for path, p in parameters.items()}
        frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
        models[name] = {"class": type(model).__name__, "parameters": shapes, "frozen": frozen}
    extensions = [
        {
            "name": entry.name,
            "class": type(entry.extension).__name__,
            "priority": entry.priority,
            "trigger": describe(entry.trigger),
            "before_training": entry.invoke_before_training,
            "observes": entry.observe is not None,
        }
        for entry in sorted(trainer.entries, key=lambda entry: entry.is_snapshot)  # in the order in which they run
    ]
    machine = {
        "device": _version.device_name(device if isinstance(device, torch.device) else None),
        "threads": torch.get_num_threads(),
        "ranks": trainer.comm.world.size,
    }
    mixtures = {name: mixture.sources.names for name, mixture in mixtures_of(trainer).items()}
    return {
        **({"mixtures": mixtures} if mixtures else {}),
        **withhold(json.dumps({"config": as_json(trainer.config), "argv": sys.argv})),
        "git_commit": code["source"]["commit"],
        "versions": _version.versions(),
        **machine,
        "seeds": as_json({"torch": torch.initial_seed(), "iterators": seeds}),
        "optimizers": as_json(getattr(updater, "constructed", {})),
        "models": models,
        "plan": {"stop_trigger": describe(trainer.stop_trigger), "extensions": extensions},
        "reproduction": {
            **code,
            "python": _version.versions()["python"],
            **machine,
            "virtual_ranks": as_json(getattr(updater, "virtual_ranks", None)),
            "run": next(_runs),
        },
    }


def as_json(value: Any) -> Any:
    """Return a value as JSON has it, or as a text that is the same in every process if JSON has no such type."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=repr)
    if hasattr(value, "__qualname__"):  # the text of a class or a function has its address, which is new each time
        return ".".join(filter(None, (value.__module__, value.__qualname__)))
    return json.loads(json.dumps(to_json(value), default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other))))


class Change(NamedTuple):
    """A setting in which two runs, or two ranks, differ; ``None`` where one of them has none."""

    path: str
    value: Any
    other: Any


class Settings(dict[str, Any]):
    """Settings by path, such as ``config.lr``."""

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Settings:
        """Return those that the record of a run has, with those that a resume has changed."""
        settings = cls(leaf for name in _RECORDED for leaf in leaves(name, record.get(name)))
        plan, needed = record.get("plan"), record.get("reproduction")
        if isinstance(needed, dict):
            settings |= [leaf for name in ("distributions", "environment") for leaf in leaves(name, needed.get(name))]
        if isinstance(plan, dict):
            settings["plan.stop_trigger"] = plan.get("stop_trigger")
            entries = plan.get("extensions")
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict):
                    text = f"{entry.get('class')} with {entry.get('trigger')}, priority {entry.get('priority')}"
                    settings[f"plan.{entry.get('name')}"] = text
        for command in record.get("commands", ()):
            if "refused" not in command:
                settings.setdefault(f"commanded after iteration {command['iteration']}", []).append(command["command"])
        for start in record.get("starts", ()):
            changed = start.get("changed")
            for name, values in changed.items() if isinstance(changed, dict) else ():
                settings[f"{name}, changed at iteration {start.get('iteration')}"] = values
        return settings

    def differences(self, other: Mapping[str, Any]) -> list[Change]:
        """Return the settings in which another run differs."""
        pairs = (Change(path, self.get(path), other.get(path)) for path in dict.fromkeys([*self, *other]))
        return [pair for pair in pairs if pair.value != pair.other]
