"""The files of a run, at a path or an address, read to compare them with those of another; nothing in them is trusted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from chainring._files import from_json, is_url, parse_strict, read_regular
from chainring.serializers._checkpoint import STATE, opened_state
from chainring.serializers._store import MANIFEST, Place, Store, find_snapshot, open_file, open_store
from chainring.training._ledger import MAGIC, Ledger
from chainring.training._run_directory import RECORD, parse_record

_LOG = "log.jsonl"
_LEDGER = "recorder.bin"
_LARGEST_LOG = 1 << 32  # bytes
_SETTING = re.compile(r"updater/settings/.*|updater/iterator:[^/]*/(size|batch_size)")
_SPEEDS = {"Throughput": "throughput", "SystemMetrics": "system"}  # what reports them, and its default name


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a log.

    Attributes:
        after: the iteration of the row before, 0 if there is none: the means are of the iterations after it.
        iteration: that with which its interval ends.
        values: all of it by key.
    """

    after: int
    iteration: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What there is of a run.

    Attributes:
        place: where it is, as it was given.
        record: the content of run.json, empty if there is none.
        logs: by the name of the file the rows.
        ledger: the record of a `Recorder`.
        store: its snapshots.
        snapshots: the names of those of the trainer by iteration, without those that were taken because of an error.
    """

    place: str
    record: Mapping[str, Any]
    logs: Mapping[str, list[Row]]
    ledger: Ledger | None
    store: Store
    snapshots: Mapping[int, str]

    @property
    def last(self) -> int:
        """The last iteration that it is known to have reached."""
        rows = [log[-1].iteration for log in self.logs.values() if log]
        recorded = [] if self.ledger is None else list(map(int, self.ledger.iterations[-1:]))
        return max([0, *rows, *recorded, *self.snapshots])

    @property
    def ranks(self) -> int | None:
        """The number of ranks that trained it, ``None`` if it is not known."""
        ranks = self.record.get("ranks")
        return ranks if isinstance(ranks, int) else None

    def is_speed(self, key: str) -> bool:
        """Return whether a value is a time, a speed, or a use of memory, which no two runs share."""
        plan = self.record.get("plan")
        entries = plan.get("extensions") if isinstance(plan, dict) else None
        entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        names = {str(entry.get("name")) for entry in entries if str(entry.get("class")) in _SPEEDS} or set(_SPEEDS.values())
        return key == "elapsed_time" or key.split("/")[0] in names

    def saved_settings(self) -> dict[str, Any]:
        """Return the settings of the updater and the sizes of data and batches, from the last snapshot that can be read."""
        for name in reversed([*self.snapshots.values()]):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # damaged, or removed
                saved = self.store.snapshot(name)
                values = parse_strict(saved.open(STATE, saved.read_manifest()).read_all())["state"]
                return {".".join(key.split("/")): value for key, value in values.items() if _SETTING.fullmatch(key)}
        return {}

    @contextlib.contextmanager
    def opened(self, iteration: int) -> Iterator[dict[str, Any]]:
        """Open the snapshot of an iteration: its flat state, of which `read_stored` reads the tensors.

        Raises:
            CorruptError: it is not what was written.
            OSError: it cannot be read, or the run has removed it.
        """
        with opened_state(self.store.snapshot(self.snapshots[iteration])) as state:
            yield state


@contextlib.contextmanager
def read_run_files(place: Place) -> Iterator[RunFiles]:
    """Read a run, which may have ended, been killed, or still be running; files of one in an object store are copied.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is not what was written.
        OSError: one cannot be read.
    """
    given = os.fspath(place)
    require_no_snapshot(given)
    store = open_store(given if is_url(given) else os.path.realpath(given))
    with contextlib.ExitStack() as stack:
        directory = Path(os.path.realpath(given))
        if is_url(given):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chainring-diff-")))
        try:
            found = _read(given, directory, store)
        except ValueError as error:  # about a file that was copied
            raise ValueError(str(error).replace(str(directory), given.rstrip("/"))) from error
        if not (found.record or found.logs or found.ledger or found.snapshots):
            raise FileNotFoundError(f"{given} holds no run: no {RECORD}, no {_LOG}, no {_LEDGER} and no snapshot")
        yield found


def _read(given: str, directory: Path, store: Store) -> RunFiles:
    if is_url(given):
        fetch_run(given, directory)
    record = _read_record(directory / RECORD)
    logs = {name: _read_log(directory / name) for name in _log_names(record) if (directory / name).is_file()}
    return RunFiles(given, record, logs, _read_ledger(directory, record), store, _find_snapshots(store))


def require_no_snapshot(given: str) -> None:
    """Refuse a snapshot in the place of a run.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: it is a snapshot.
    """
    if not is_url(given):
        if not os.path.isdir(given):
            raise FileNotFoundError(f"there is no directory {given or repr(given)}; give that of a run, its out")
        is_snapshot, above = os.path.exists(os.path.join(given, MANIFEST)), os.path.dirname(os.path.realpath(given))
    else:
        above, _, name = given.rstrip("/").rpartition("/")
        is_snapshot = bool(name) and not above.endswith("/") and find_snapshot(given).exists()
    if is_snapshot:
        raise ValueError(f"{given} is a snapshot; give its run, such as {above}")


def fetch_run(url: str, directory: Path) -> None:
    """Copy the record, the logs with their media, and what was recorded, of a run in an object store."""
    fetch_files(url, [RECORD], directory)
    record = _read_record(directory / RECORD)
    media = [name for name in record.get("files", ()) if name.endswith(".media.jsonl") and _is_inside(name)]
    fetch_files(url, dict.fromkeys([*_log_names(record), *_ledger_names(record), *media]), directory)


def fetch_files(url: str, names: Iterable[str], directory: Path) -> None:
    """Copy what is there of these files."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(open_file(f"{url.rstrip('/')}/{name}").read_all())


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return parse_record(path) if os.path.lexists(path) else {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _log_names(record: Mapping[str, Any]) -> list[str]:
    """Return the files of rows that a run lists, and the one of the default name; none that lies elsewhere."""
    files = set(record.get("files", ()))
    names = sorted(name for name in files if name.endswith(".jsonl") and name.removesuffix(".jsonl") in files)
    return [name for name in dict.fromkeys([_LOG, *names]) if _is_inside(name)]


def _is_inside(name: str) -> bool:
    return "\0" not in name and not name.startswith("/") and ".." not in PurePosixPath(name).parts


def _read_log(path: Path) -> list[Row]:
    """Return the rows of a log; a last line without its end is being written, or was cut by a kill."""
    *lines, _ = read_regular(path, _LARGEST_LOG).split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        after = rows[-1].iteration if rows else 0
        try:
            values = from_json(json.loads(line))
        except (ValueError, RecursionError):
            values = None
        iteration = values.get("iteration") if isinstance(values, dict) else None
        if type(iteration) is not int or not after <= iteration < 1 << 62:
            raise ValueError(
                f"{path}: line {number} is not a row that a log has after iteration {after}; the file is damaged"
            )
        rows.append(Row(after, iteration, values))
    return rows


def _read_ledger(directory: Path, record: Mapping[str, Any]) -> Ledger | None:
    """Return what was recorded, also in a file of another name."""
    for name in _ledger_names(record):
        path = directory / name
        if path.is_file() and (name == _LEDGER or path.open("rb").read(len(MAGIC)) == MAGIC):
            return Ledger.read(path)
    return None


def _ledger_names(record: Mapping[str, Any]) -> list[str]:
    names = [name for name in record.get("files", ()) if name.endswith(".bin") and "{" not in name and _is_inside(name)]
    return list(dict.fromkeys([_LEDGER, *names]))


def _find_snapshots(store: Store) -> dict[int, str]:
    try:
        listing = store.listing()
    except FileNotFoundError:
        return {}
    found = {
        manifest.iteration: name for name, manifest in listing if manifest is not None and "error" not in manifest.about
    }
    return dict(sorted(found.items()))
