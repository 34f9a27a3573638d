"""LogReport: the means of reported values, one row for each interval, and the file that contains the rows."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chainring import _random
from chainring._files import append, atomic_write, from_json, is_regular, make_folder, open_regular, to_json
from chainring._media import Media, media_from_json, media_to_json
from chainring._messages import warn
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer, Deserializer, Serializer
from chainring.training.extension import Extension
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.writers._common import set_rows_aside
from chainring.writers.base import COUNTERS, Record, Run, Writer

if TYPE_CHECKING:
    from chainring.reporting.reporter import Reporter
    from chainring.training.trainer import Trainer

_SMALL = 1_000_000  # bytes up to which the array is replaced after each row, and the rows stay in memory
_CHUNK = 1 << 20  # bytes that are read at once
_SECONDS = 30.0  # between two replacements of a larger array
_ROW = re.compile(rb'{"row": (\d+), ')  # how a line of the file of images, texts and histograms begins


class RecordWriter(Protocol):
    """A receiver of rows: a `Writer`, or any object with its two methods."""

    def write(self, record: Record, /) -> None: ...

    def close(self) -> None: ...


class LogReport(Extension):
    """Averages every reported value over an interval, and writes a row when its trigger fires.

    In every iteration it reads the values that were reported before it runs. Means are weighted with the weights of the
    updates; an iteration in which a key was not reported does not count for its mean. A row contains the means, then
    ``epoch``, ``iteration`` and ``elapsed_time``. It is appended to ``<filename>.jsonl`` at once; ``<filename>`` contains
    all rows as a JSON array. Up to 1 MB, the rows are also kept in memory; `log` reads those of a longer log from the
    file. Values reported before training, for example by an evaluation with ``invoke_before_training=True``, are written
    as a row of iteration 0. In the files, NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``.

    The last image, text and histogram of each key in an interval are stored with its row, in ``<filename>.media.jsonl``.

    Example::

        trainer.extend(extensions.LogReport(writers=[CsvWriter()]), trigger=(100, "iteration"))
        trainer.run()
        trainer.get_extension(LogReport).log[-1]["main/loss"]

    Args:
        keys: the keys to average; ``None`` takes all.
        trigger: when a row is written. ``extend(LogReport(), trigger=t)`` means the same and takes precedence.
        postprocess: called with each row before it is stored; it may change the row.
        filename: the name of the files in the trainer's ``out``; ``None`` writes no file.
        writers: further destinations of the rows; rank 0 opens them. If one fails, there is a warning, and it gets no
            more rows.

    Attributes:
        log: a list of the rows so far, including those of the runs before a resume. If the log is larger than 1 MB, it is
            read from the file at each access; `rows_from` reads only the last rows.

    Raises:
        TypeError: the keys, the file name, a writer or the trigger has the wrong type, or ``postprocess`` cannot be called.
        ValueError: the trigger's unit or period is invalid, or two would write the same file.
    """

    skip_on_resume = True

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        trigger: TriggerLike = (1, "epoch"),
        postprocess: Callable[[dict[str, Any]], None] | None = None,
        filename: str | None = "log",
        writers: Iterable[RecordWriter] = (),
    ) -> None:
        if postprocess is not None and not callable(postprocess):
            raise TypeError(f"postprocess is a function of a row, got {postprocess!r}")
        if filename is not None and (not isinstance(filename, str) or not filename):
            raise TypeError(f'filename is a name in out, such as "log", or None for no file; got {filename!r}')
        self.trigger = get_trigger(trigger)
        self._rows: list[dict[str, Any]] = []  # those after the stored ones
        self._stored: StoredRows | None = None
        listed = None if keys is None else key_list("keys", keys)
        self._keys = listed or []
        self._means = IntervalMeans(listed)
        self._postprocess = postprocess
        self._filename = filename
        self._media = _MediaLog(None if filename is None else f"{filename}.media.jsonl")
        self._writers = _checked_writers(writers)
        names = list(self.writes)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"a log and its writers must write different files; more than one would write {twice}")
        self._open: list[RecordWriter] = []
        self._working: list[RecordWriter] = []
        self._file: LogFile | None = None
        self._written: str | None = None  # the file that holds these rows, and is cut back to them

    @property
    def log(self) -> list[dict[str, Any]]:
        return self._rows if self._stored is None else [*self._stored.read(), *self._rows]

    @property
    def _count(self) -> int:
        return len(self._rows) + (0 if self._stored is None else self._stored.count)

    def rows_from(self, number: int) -> list[dict[str, Any]]:
        """Return the rows from a number on, counted from 0, without reading the file if they are in memory."""
        if self._stored is not None and number >= self._stored.count:
            return self._rows[number - self._stored.count :]
        return self.log[number:]

    @property
    def writes(self) -> Sequence[str]:
        name = self._filename
        files = () if name is None else (name, f"{name}.jsonl", f"{name}.media.jsonl")
        return (*files, *(name for writer in self._writers for name in getattr(writer, "writes", ())))

    @property
    def watched_keys(self) -> Sequence[str]:
        return [key for key in self._keys if key not in COUNTERS]

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return () if self._filename is None else (self._filename,)

    def initialize(self, trainer: Trainer) -> None:
        if trainer.comm.is_main:
            self._media.begin(trainer.reporter, Path(trainer.out), is_rehearsing=trainer.is_rehearsing)
        rows = self.log if self._writers and trainer.comm.is_main else []
        records = tuple(_record(row, self._media.of_row(index)) for index, row in enumerate(rows))
        run = Run(Path(trainer.out), dict(trainer.config), trainer.updater.iteration, records)
        if self._filename is not None and trainer.comm.is_main:
            self._file = LogFile(self._filename)
            if self._written != self._filename:
                set_rows_aside(run.out / f"{self._filename}.jsonl")
            self._file.begin(replace(run, records=[_record(row, whole=True) for row in self._rows]), self._stored)
            self._stored = self._file.stored
            self._store_rows()
        else:
            self._rows, self._stored = self.log, None
        self._written = self._filename
        # A rehearsal or a replay leaves the writers alone: what they show to others could not be put back.
        is_alone = trainer.is_rehearsing or trainer.is_replaying
        self._open = [] if not trainer.comm.is_main or is_alone else list(self._writers)
        self._working = list(self._open)
        self._call_writers("begin", run)

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def observe_start(self, trainer: Trainer) -> None:
        """Write a row of iteration 0, separate from the first interval."""
        if means := self._means.take(trainer):
            self._write(trainer, means)

    def __call__(self, trainer: Trainer) -> None:
        self._write(trainer, self._means.end(trainer))

    def _write(self, trainer: Trainer, means: dict[str, float]) -> None:
        counters = {"epoch": trainer.updater.epoch, "iteration": trainer.updater.iteration}
        row: dict[str, Any] = {**means, **counters, "elapsed_time": trainer.elapsed_time}
        if self._postprocess is not None:
            self._postprocess(row)
        media = self._media.write(self._count, counters)
        self._rows.append(row)
        if self._file is not None:
            self._file.write(_record(row, whole=True))
            self._store_rows()
        self._call_writers("write", _record({**row, **counters}, media))

    def _store_rows(self) -> None:
        """Let go of the rows in memory when there are many; the file has them."""
        assert self._file is not None
        if self._file.size - (0 if self._stored is None else self._stored.size) > _SMALL:
            self._stored = StoredRows(self._file.path, self._file.size, self._file.crc, self._count)
            self._rows = []

    def _call_writers(self, method: str, argument: Run | Record) -> None:
        """Call a method of each working writer. Random numbers that its service draws do not change the run."""
        for writer in list(self._working):
            try:
                with _random.preserve_host_rng():
                    if call := getattr(writer, method, None):
                        call(argument)
            except Exception as error:
                self._working.remove(writer)
                failure = f"{type(writer).__name__} failed and gets no more rows: {type(error).__name__}: {error}"
                warn(f"{failure}. Training continues, and so do the log and the other writers")

    def finalize(self) -> None:
        self._media.close()
        if self._file is not None:
            self._file.close()
        for writer in self._open:
            try:
                with _random.preserve_host_rng():
                    writer.close()
            except Exception as error:
                warn(f"{type(writer).__name__} failed to close: {type(error).__name__}: {error}")
        self._open = []

    def serialize(self, serializer: AbstractSerializer) -> None:
        rows: list[dict[str, Any]] | None = None
        in_file = None
        directory, file = serializer.directory, self._file
        if isinstance(serializer, Serializer):
            if file is not None:
                file.flush()
            # In a snapshot beside the file its length is enough: otherwise a log of n rows would be written n times.
            if file is not None and directory is not None and directory.resolve() == file.path.parent.resolve():
                serializer.refer(file.path)
                in_file = [file.path.name, file.size, file.crc, self._count]
            else:
                rows = self.log
        rows, in_file = serializer("log", rows), serializer("file", in_file)
        self._written = serializer("written", self._written)
        if not isinstance(serializer, Serializer):
            self._rows, self._stored = list(rows or ()), None
            if rows is None and in_file is not None:
                self._find_rows((directory or Path()) / Path(in_file[0]).name, *in_file[1:])
            if not serializer.comm.is_main:  # now, because rank 0 writes the file as soon as all have loaded
                self._rows, self._stored = self.log, None
        self._means.serialize(serializer)
        self._media.serialize(serializer["media"])

    def _find_rows(self, path: Path, size: int, crc: int, count: int | None = None) -> None:
        """Find the rows in the file beside a snapshot, up to its length at the time of the snapshot."""
        stored = StoredRows(path, size, crc, count or 0)
        if (lines := stored.lines()) is None:
            self._written = None
            _warn_of_loss(stored)
        elif size <= _SMALL:
            self._rows = stored.read()
        else:  # earlier versions did not save the number
            self._stored = stored if count is not None else replace(stored, count=lines)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows at the beginning of a file of lines: their length in bytes, the CRC-32 of these, and their number."""

    path: Path
    size: int
    crc: int
    count: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, as far as they are there."""
        # The path may be a link, of a log that a person has moved: the checksum tells whose rows it leads to.
        with contextlib.suppress(OSError), open(open_regular(Path(os.path.realpath(self.path))), "rb") as file:
            left = self.size
            while chunk := file.read(min(left, _CHUNK)):
                left -= len(chunk)
                yield chunk

    def lines(self) -> int | None:
        """Return the number of lines, ``None`` if the bytes are not those that were written."""
        size = crc = lines = 0
        for chunk in self.chunks():
            size, crc, lines = size + len(chunk), zlib.crc32(chunk, crc), lines + chunk.count(b"\n")
        return lines if (size, crc) == (self.size, self.crc) else None

    def read(self) -> list[dict[str, Any]]:
        """Return the rows; none, with a warning, if the file has been damaged or removed."""
        text = b"".join(self.chunks())
        if len(text) == self.size and zlib.crc32(text) == self.crc:
            return [from_json(json.loads(line)) for line in text.splitlines()]
        _warn_of_loss(self)
        return []


def _warn_of_loss(stored: StoredRows) -> None:
    number = f", {stored.count} of them" if stored.count else ""
    warn(
        f"the log continues without its earlier rows{number}: {stored.path} does not begin with the {stored.size} bytes "
        "that it had when the snapshot was taken; move a snapshot together with the files beside it",
    )


def _record(row: Mapping[str, Any], media: Mapping[str, Media] | None = None, *, whole: bool = False) -> Record:
    """Return the record of a row; its values are the means, or the ``whole`` row. A removed counter is 0."""
    values = row if whole else {key: value for key, value in row.items() if key not in COUNTERS}
    return Record(row.get("epoch", 0), row.get("iteration", 0), row.get("elapsed_time", 0.0), values, media or {})


def key_list(argument: str, keys: Iterable[str]) -> list[str]:
    """Return the keys as a list; raise a `TypeError` if they are not an iterable of strings."""
    if isinstance(keys, str):
        raise TypeError(f"{argument} is an iterable of keys, got the string {keys!r}; write [{keys!r}]")
    listed = list(keys) if isinstance(keys, Iterable) else None
    if listed is None or not all(isinstance(key, str) for key in listed):
        raise TypeError(f'{argument} is an iterable of keys, such as ["epoch", "main/loss"]; got {keys!r}')
    return listed


def _checked_writers(writers: Iterable[RecordWriter]) -> list[RecordWriter]:
    listed = list(writers) if isinstance(writers, Iterable) else [writers]
    for writer in listed:
        if isinstance(writer, type) or not all(callable(getattr(writer, name, None)) for name in ("write", "close")):
            raise TypeError(f"writers is a list of Writers, each with write(record) and close(); got {writers!r}")
    return listed


class LogFile(Writer):
    """Appends each row to ``<filename>.jsonl`` at once, and keeps all rows in ``<filename>`` as a JSON array.

    The array is replaced by a rename, after each row while it is small, and every 30 seconds beyond that. The values of a
    record are the whole row, because the ``postprocess`` of a `LogReport` may have moved or removed the counters.
    """

    # To replace the array of a long log takes a hundredth of the time at most, however often snapshots are taken.
    def __init__(self, filename: str) -> None:
        self.writes = (filename, f"{filename}.jsonl")
        self._array, self.path = map(Path, self.writes)
        self.size = self.crc = 0  # of the file of lines: its length in bytes, and its CRC-32
        self.stored: StoredRows | None = None  # those that were stored when it began, as they lie in this file
        self._replaced_at = -math.inf
        self._pause = 0.0  # until it may be replaced at a snapshot
        self._is_stale = False

    def begin(self, run: Run, stored: StoredRows | None = None) -> None:
        """Open the file with the ``stored`` rows and the records of the run: it is truncated to them, or moved away."""
        self._array, self.path = (run.out / name for name in self.writes)
        text = "".join(_line(record.values) for record in run.records).encode()
        make_folder(run.out, Path(self.writes[1]).parent)
        if stored is not None and stored.lines() is None:
            _warn_of_loss(stored)
            stored = None
        start = StoredRows(self.path, 0, 0, 0) if stored is None else stored
        here = replace(start, path=self.path)
        self.size, self.crc = start.size + len(text), zlib.crc32(text, start.crc)
        if not is_regular(self.path) or replace(here, size=self.size, crc=self.crc).lines() is None:
            with atomic_write(self.path) as file:
                for chunk in start.chunks():
                    file.write(chunk)
                file.write(text)
                set_rows_aside(self.path)
        with open(open_regular(self.path, os.O_RDWR), "r+b") as file:
            file.truncate(self.size)
        self._replace_array()
        self.stored = None if stored is None else here

    def write(self, record: Record) -> None:
        text = _line(record.values).encode()
        append(self.path, text)
        self.size, self.crc = self.size + len(text), zlib.crc32(text, self.crc)
        self._is_stale = True
        if self.size <= _SMALL or time.monotonic() >= self._replaced_at + max(_SECONDS, self._pause):
            self._replace_array()

    def flush(self) -> None:
        """Bring the array up to date for a snapshot, unless that was done just now."""
        if self._is_stale and time.monotonic() >= self._replaced_at + self._pause:
            self._replace_array()

    def close(self) -> None:
        """Bring the array up to date."""
        if self._is_stale:
            self._replace_array()

    def _replace_array(self) -> None:
        began = time.monotonic()
        if not is_regular(self.path) or os.path.getsize(self.path) < self.size:
            return  # a person has removed it or cut it off: the array stays as it was
        with atomic_write(self._array) as file:
            file.write(b"[\n" if self.size else b"[")
            without_last_end = StoredRows(self.path, max(self.size - 1, 0), 0, 0)
            for chunk in without_last_end.chunks():
                file.write(chunk.replace(b"\n", b",\n"))
            file.write(b"\n]\n" if self.size else b"]\n")
        self._replaced_at, self._is_stale = time.monotonic(), False
        self._pause = 100 * (self._replaced_at - began)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(to_json(row), default=str, allow_nan=False) + "\n"


class _MediaLog:
    """Collects what is reported until the next row of a log, and appends it as one line to a file beside the log.

    A line has the number of its row, counted from 0, the counters, and what was reported by key. The file is made with the
    first line. When a run continues from a snapshot, it is cut back to the lines that it had then.
    """

    def __init__(self, filename: str | None) -> None:
        self.filename = filename
        self._waiting: dict[str, Media] = {}
        self._reporter: Reporter | None = None
        self._path: Path | None = None
        self._size = self._crc = 0  # of the lines in the file: their length in bytes, and their CRC-32
        self._places: dict[int, tuple[int, int]] = {}  # where the line of a row begins, and its length

    def begin(self, reporter: Reporter, out: Path, *, is_rehearsing: bool) -> None:
        """Listen to a reporter, and cut the file in ``out`` back to the earlier rows."""
        self._reporter = reporter
        reporter.media_watchers += (self._add,)
        self._path, self._places = None if self.filename is None else out / self.filename, {}
        if is_rehearsing:  # in a scratch directory
            self._size = self._crc = 0
        elif self._path is not None:
            self._cut(self._path)

    def _cut(self, path: Path) -> None:
        """Cut the file back to the lines that a snapshot knows; move it away if it does not begin with them."""
        places = _cut_lines(path, self._size, self._crc) if self._size else None
        if places is not None:
            self._places = places
            return
        if self._size:
            warn(
                f"the log continues without the images, texts and histograms of its earlier rows: {path} does not begin "
                f"with the {self._size} bytes that it had when the snapshot was taken; move a snapshot together with "
                "the files beside it",
            )
        self._size = self._crc = 0
        if os.path.lexists(path):
            set_rows_aside(path)

    def _add(self, key: str, media: Media) -> None:
        self._waiting[key] = media

    def write(self, row: int, counters: Mapping[str, Any]) -> dict[str, Media]:
        """Append what has waited to the file, as that of a row; return it."""
        media, self._waiting = self._waiting, {}
        if media and self._path is not None:
            content = {"row": row, **counters, "media": {key: media_to_json(item) for key, item in media.items()}}
            line = (json.dumps(content, allow_nan=False) + "\n").encode()
            append(self._path, line)
            self._places[row] = self._size, len(line)
            self._size, self._crc = self._size + len(line), zlib.crc32(line, self._crc)
        return media

    def of_row(self, row: int) -> Mapping[str, Media]:
        """Return what an earlier row has; it is read from the file when it is asked for."""
        place = self._places.get(row)
        return {} if place is None or self._path is None else _StoredMedia(self._path, *place)

    def close(self) -> None:
        """Listen no more."""
        if self._reporter is not None:
            watchers = self._reporter.media_watchers
            self._reporter.media_watchers = tuple(watcher for watcher in watchers if watcher != self._add)
            self._reporter = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load what waits, and the length and the checksum of the file."""
        if isinstance(serializer, Deserializer) and not any(serializer.paths()):
            return  # saved by a version without images, texts and histograms
        if isinstance(serializer, Serializer) and self._path is not None and self._size:
            serializer.refer(self._path)
        waiting = serializer("waiting", {key: media_to_json(item) for key, item in self._waiting.items()})
        self._size, self._crc = serializer("file", [self._size, self._crc])
        if isinstance(serializer, Deserializer):
            self._waiting = {key: media_from_json(item) for key, item in waiting.items()}


class _StoredMedia(Mapping[str, Media]):
    """What a row in the file has, read when it is asked for."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._place = path, start, length

    def _read(self) -> dict[str, Any]:
        path, start, length = self._place
        with open(open_regular(path), "rb") as file:
            file.seek(start)
            media: dict[str, Any] = json.loads(file.read(length))["media"]
        return media

    def __getitem__(self, key: str) -> Media:
        return media_from_json(self._read()[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def _cut_lines(path: Path, size: int, crc: int) -> dict[int, tuple[int, int]] | None:
    """Cut off all but these bytes; return where the line of each row begins and its length, ``None`` if it has others."""
    places, start, found = {}, 0, 0
    with contextlib.suppress(OSError), open(open_regular(path, os.O_RDWR), "r+b") as file:
        while start < size and (line := file.readline()):
            if match := _ROW.match(line):
                places[int(match[1])] = start, len(line)
            start, found = start + len(line), zlib.crc32(line, found)
        if (start, found) == (size, crc):
            file.truncate(size)
            return places
    return None
