"""LogReport: the means of reported values, one row for each interval, and the file that the rows are kept in."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chainring import _random
from chainring._files import append, from_json, make_folder, open_regular, replace_file, to_json
from chainring._media import Media, media_from_json, media_to_json
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.base import AbstractSerializer, Deserializer, Serializer
from chainring.training.extension import Extension
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.writers._common import set_rows_aside
from chainring.writers.base import COUNTERS, Record, Run, Writer

if TYPE_CHECKING:
    from chainring.reporting.reporter import Reporter
    from chainring.training.trainer import Trainer

_SMALL = 1_000_000  # bytes up to which the array is replaced after each row
_SECONDS = 30.0  # between two replacements of a larger array
_ROW = re.compile(rb'{"row": (\d+), ')  # how a line of the file of images, texts and histograms begins


class RecordWriter(Protocol):
    """A receiver of rows: a `Writer`, or any object with its two methods."""

    def write(self, record: Record, /) -> None: ...

    def close(self) -> None: ...


class LogReport(Extension):
    """Averages every reported value over an interval, and writes a row when its trigger fires.

    It observes each iteration what has been reported when its turn comes. Means are weighted as the updates are; a key
    that was not reported in an iteration does not count as zero there. A row has the means, then ``epoch``,
    ``iteration`` and ``elapsed_time``. It is appended to ``<filename>.jsonl`` at once; ``<filename>`` is all rows as a
    JSON array. What was reported before training, such as an evaluation with ``invoke_before_training=True``, is a row of
    iteration 0. NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` there.

    The last image, text and histogram of each key of an interval are kept with its row, in ``<filename>.media.jsonl``.

    Example::

        trainer.extend(extensions.LogReport(writers=[CsvWriter()]), trigger=(100, "iteration"))
        trainer.run()
        trainer.get_extension("LogReport").log[-1]["main/loss"]

    Args:
        keys: the keys to average; ``None`` takes all.
        trigger: when a row is written. ``extend(LogReport(), trigger=t)`` means the same and takes precedence.
        postprocess: called with each row before it is stored; it may change it.
        filename: of the files in the trainer's ``out``; ``None`` writes no file.
        writers: further destinations of the rows; rank 0 opens them. One that fails is warned about and gets no more rows.

    Attributes:
        log: the rows so far, those of the runs before a resume included.

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
        self.log: list[dict[str, Any]] = []
        self._means = IntervalMeans(None if keys is None else key_list("keys", keys))
        self._postprocess = postprocess
        self._filename = filename
        self._media = _MediaLog(None if filename is None else f"{filename}.media.jsonl")
        self._writers = _checked_writers(writers)
        names = list(self.writes)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"a log and its writers write files of different names; more than one would write {twice}")
        self._open: list[RecordWriter] = []
        self._working: list[RecordWriter] = []
        self._file: LogFile | None = None
        self._written: str | None = None  # the file that holds these rows, and is cut back to them

    @property
    def writes(self) -> Sequence[str]:
        name = self._filename
        files = () if name is None else (name, f"{name}.jsonl", f"{name}.media.jsonl")
        return (*files, *(name for writer in self._writers for name in getattr(writer, "writes", ())))

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return () if self._filename is None else (self._filename,)

    def initialize(self, trainer: Trainer) -> None:
        if trainer.comm.rank == 0:
            self._media.begin(trainer.reporter, Path(trainer.out), is_rehearsing=trainer.is_rehearsing)
        records = tuple(_record(row, self._media.of_row(index)) for index, row in enumerate(self.log))
        run = Run(Path(trainer.out), dict(trainer.config), trainer.updater.iteration, records)
        if self._filename is not None and trainer.comm.rank == 0:
            self._file = LogFile(self._filename)
            if self._written != self._filename:
                set_rows_aside(run.out / f"{self._filename}.jsonl")
            self._file.begin(replace(run, records=[_record(row, whole=True) for row in self.log]))
        self._written = self._filename
        # A rehearsal leaves the writers alone: what they show to others could not be put back.
        self._open = [] if trainer.comm.rank != 0 or trainer.is_rehearsing else list(self._writers)
        self._working = list(self._open)
        self._call_writers("begin", run)

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def observe_start(self, trainer: Trainer) -> None:
        """Write a row of iteration 0, apart from the first interval."""
        if means := self._means.take(trainer):
            self._write(trainer, means)

    def __call__(self, trainer: Trainer) -> None:
        self._write(trainer, self._means.end(trainer))

    def _write(self, trainer: Trainer, means: dict[str, float]) -> None:
        counters = {"epoch": trainer.updater.epoch, "iteration": trainer.updater.iteration}
        row: dict[str, Any] = {**means, **counters, "elapsed_time": trainer.elapsed_time}
        if self._postprocess is not None:
            self._postprocess(row)
        media = self._media.write(len(self.log), counters)
        self.log.append(row)
        if self._file is not None:
            self._file.write(_record(row, whole=True))
        self._call_writers("write", _record({**row, **counters}, media))

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
                warnings.warn(f"{failure}. Training goes on, and so do the log and the other writers", stacklevel=2)

    def finalize(self) -> None:
        self._media.close()
        if self._file is not None:
            self._file.close()
        for writer in self._open:
            try:
                writer.close()
            except Exception as error:
                warnings.warn(f"{type(writer).__name__} failed to close: {type(error).__name__}: {error}", stacklevel=2)
        self._open = []

    def serialize(self, serializer: AbstractSerializer) -> None:
        rows: list[dict[str, Any]] | None = self.log
        checksum = None
        if self._file is not None and isinstance(serializer, Serializer):
            self._file.flush()
            # In a snapshot beside the file its length is enough: otherwise a log of n rows would be written n times.
            if serializer.directory is not None and serializer.directory.resolve() == self._file.path.parent.resolve():
                serializer.refer(self._file.path)
                rows, checksum = None, [self._file.path.name, self._file.size, self._file.crc]
        rows, checksum = serializer("log", rows), serializer("file", checksum)
        self._written = serializer("written", self._written)
        if not isinstance(serializer, Serializer):
            is_in_file = rows is None and checksum is not None
            self.log = self._read(serializer.directory, *checksum) if is_in_file else rows or []
        self._means.serialize(serializer)
        self._media.serialize(serializer["media"])

    def _read(self, directory: Path | None, name: str, size: int, crc: int) -> list[dict[str, Any]]:
        """Return the rows of the file beside a snapshot, up to its length at the time of the snapshot."""
        path = (directory or Path()) / Path(name).name
        text = _head(path, size)
        if text is not None and len(text) == size and zlib.crc32(text) == crc:
            return [from_json(json.loads(line)) for line in text.splitlines()]
        self._written = None
        warnings.warn(
            f"the log goes on without its earlier rows: {path} does not begin with the {size} bytes that it had "
            "when the snapshot was taken; move a snapshot together with the files beside it",
            stacklevel=2,
        )
        return []


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

    def __init__(self, filename: str) -> None:
        self.writes = (filename, f"{filename}.jsonl")
        self._array, self.path = map(Path, self.writes)
        self._lines: list[str] = []
        self.size = self.crc = 0  # of the file of lines: its length in bytes, and its CRC-32
        self._replaced_at = -math.inf
        self._is_stale = False

    def begin(self, run: Run) -> None:
        """Begin with the rows of the run that is continued: the file is cut back to them, or set aside if it has others."""
        self._array, self.path = (run.out / name for name in self.writes)
        self._lines = [_line(record.values) for record in run.records]
        text = "".join(self._lines).encode()
        make_folder(run.out, Path(self.writes[1]).parent)
        if _head(self.path, len(text)) != text:
            set_rows_aside(self.path)
            replace_file(self.path, text)
        os.truncate(self.path, len(text))
        self.size, self.crc = len(text), zlib.crc32(text)
        self._replace_array()

    def write(self, record: Record) -> None:
        line = _line(record.values)
        text = line.encode()
        append(self.path, text)
        self._lines.append(line)
        self.size, self.crc = self.size + len(text), zlib.crc32(text, self.crc)
        self._is_stale = True
        if self.size <= _SMALL or time.monotonic() - self._replaced_at >= _SECONDS:
            self._replace_array()

    def flush(self) -> None:
        """Bring the array up to date."""
        if self._is_stale:
            self._replace_array()

    close = flush

    def _replace_array(self) -> None:
        body = ",\n".join(line.rstrip("\n") for line in self._lines)
        replace_file(self._array, f"[\n{body}\n]\n" if body else "[]\n")
        self._replaced_at, self._is_stale = time.monotonic(), False


def _head(path: Path, size: int) -> bytes | None:
    with contextlib.suppress(OSError), open(open_regular(path), "rb") as file:
        return file.read(size)
    return None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(to_json(row), default=str, allow_nan=False) + "\n"


class _MediaLog:
    """Collects what is reported until the next row of a log, and appends it as one line to a file beside the log.

    A line has the number of its row, counted from 0, the counters, and what was reported by key. The file is made with the
    first line. When a run goes on from a snapshot, it is cut back to the lines that it had then.
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
            warnings.warn(
                f"the log goes on without the images, texts and histograms of its earlier rows: {path} does not begin "
                f"with the {self._size} bytes that it had when the snapshot was taken; move a snapshot together with "
                "the files beside it",
                stacklevel=2,
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
