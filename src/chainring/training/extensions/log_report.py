"""LogReport: the means of reported values, one row for each interval, and the file that contains the rows."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from chainring import _random
from chainring._distributed.communicator import Communicator, RanksLost
from chainring._files import (
    AppendOnly,
    atomic_write,
    from_json,
    is_regular,
    make_folder,
    open_regular,
    set_rows_aside,
    to_json,
)
from chainring._messages import warn
from chainring.reporting.media import Media, media_from_json, media_to_json
from chainring.reporting.reporter import Reporter
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer, Deserializer, Serializer
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.writers.base import COUNTERS, Record, Run

Row = dict[str, Any]

_SMALL = 1_000_000  # bytes up to which the array is replaced after each row, and the rows stay in memory
_SECONDS = 30.0  # between two replacements of a larger array
_LOST_ROWS = "the log continues without its earlier rows, {} of them"


class RecordWriter(Protocol):
    """A receiver of rows: a `Writer`, or any object with its two methods."""

    def write(self, record: Record, /) -> None: ...

    def close(self) -> None: ...


class LogReport(Extension):
    """Averages every reported value over an interval, and writes a row when its trigger fires.

    In every iteration it reads the values that were reported before it runs. Means are weighted with the weights of the
    updates; an iteration without a key does not count for its mean. What is no single number, such as a vector, has no
    mean, of which there is a warning. A row contains the means, then ``epoch``, ``iteration`` and ``elapsed_time``. It is
    appended to ``<filename>.jsonl`` at once; ``<filename>`` contains all rows as a JSON array, where NaN and infinities are
    the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Values reported before training, such as those of an
    evaluation with ``invoke_before_training=True``, are a row of iteration 0. The last image, text and histogram of each
    key in an interval are stored with its row, in ``<filename>.media.jsonl``.

    Example::

        trainer.extend(extensions.LogReport(writers=[CsvWriter()]), trigger=(100, "iteration"))
        trainer.run()
        trainer.get_extension(LogReport).log[-1]["main/loss"]

    Args:
        keys: the keys to average; ``None`` takes all.
        trigger: when a row is written. ``extend(LogReport(), trigger=t)`` means the same and takes precedence.
        postprocess: called with each row before it is stored; it may change the row.
        filename: the name of the files in the trainer's ``out``; ``None`` writes no file.
        writers: further destinations of the rows, opened by rank 0. If one fails, there is a warning, and it gets no more.

    Attributes:
        log: a list of the rows so far, including those of the runs before a resume. If the log is larger than 1 MB, it is
            read from the file at each access; `rows_from` reads only the last rows.

    Raises:
        ValueError: two writers would write the same file.
    """

    skip_on_resume = True
    writes: Sequence[str] = ()
    watched_keys: Sequence[str] = ()

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
        listed: list[RecordWriter] = list(writers) if isinstance(writers, Iterable) else [writers]
        for writer in listed:
            if isinstance(writer, type) or not all(callable(getattr(writer, name, None)) for name in ("write", "close")):
                raise TypeError(f"writers is a list of Writers, each with write(record) and close(); got {writers!r}")
        self.trigger = get_trigger(trigger)
        averaged = None if keys is None else key_list("keys", keys)
        self.watched_keys = [key for key in averaged or () if key not in COUNTERS]
        self._means = IntervalMeans(averaged, says=True)
        self._postprocess, self.is_postprocessed = postprocess, postprocess is not None
        self._filename = filename
        self._rows = _Rows(filename)
        self._media = _Media(None if filename is None else f"{filename}.media.jsonl")
        self._writers = listed
        self._open: list[RecordWriter] = []
        self._working: list[RecordWriter] = []
        self._has_told = False  # the row whose call is made again, since ranks were lost
        files = [] if filename is None else [filename, f"{filename}.jsonl", f"{filename}.media.jsonl"]
        self.writes = names = [*files, *(name for writer in listed for name in getattr(writer, "writes", ()))]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"a log and its writers must write different files; more than one would write {twice}")

    @property
    def log(self) -> list[dict[str, Any]]:
        return self._rows.all

    def rows_from(self, number: int) -> list[dict[str, Any]]:
        """Return the rows from a number on, counted from 0, without reading the file if they are in memory."""
        return self._rows.since(number)

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return () if self._filename is None else (self._filename,)

    def initialize(self, trainer: Trainer) -> None:
        out, is_main = Path(trainer.out), trainer.comm.is_main
        if is_main or trainer.comm.survives:  # any rank may have to go on with the files
            self._media.begin(trainer, out if is_main else None)
        self._rows.begin(out, writes=is_main)
        # A rehearsal or a replay leaves the writers alone: what they show to others could not be put back.
        is_alone = trainer.is_rehearsing or trainer.is_replaying
        self._open = list(self._writers) if is_main and not is_alone else []
        self._working = list(self._open)
        if self._open:
            rows = self.log
            media = self._media.of_rows() if rows else {}
            records = tuple(_record(row, media.get(index)) for index, row in enumerate(rows))
            for writer in self._open:
                self._call(writer, "begin", Run(out, dict(trainer.config), trainer.updater.iteration, records))

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def observe_start(self, trainer: Trainer) -> None:
        """Write a row of iteration 0, separate from the first interval."""
        if self._has_told:  # ranks were lost when all had the row
            self._has_told = False
        elif means := self._means.take(trainer):
            self._write(trainer, means, trainer.elapsed_time)

    def __call__(self, trainer: Trainer) -> None:
        if self._has_told:  # ranks were lost when all had the row
            self._has_told = False
            return
        seconds, interval = trainer.elapsed_time, copy.copy(self._means)
        try:
            self._write(trainer, self._means.end(trainer), seconds)
        except RanksLost:
            if not self._has_told:  # the interval is still open
                self._means = interval
            raise

    def _write(self, trainer: Trainer, means: dict[str, float], seconds: float) -> None:
        counters = {"epoch": trainer.updater.epoch, "iteration": trainer.updater.iteration}
        row: dict[str, Any] = {**means, **counters, "elapsed_time": seconds}
        if self._postprocess is not None:
            self._postprocess(row)
        loss: RanksLost | None = None
        if trainer.comm.survives:
            row, loss = self._tell(trainer.comm, row)
        media = self._media.write(self._rows.count, counters) if self._media.waiting else {}
        self._rows.append(row)
        for writer in self._working:
            self._call(writer, "write", _record({**row, **counters}, media))
        if loss is not None:
            self._has_told = True
            raise loss

    def _tell(self, comm: Communicator, row: Row) -> tuple[Row, RanksLost | None]:
        """Give each rank the row of rank 0, and return it, and a loss of ranks after which all that are left have it.

        Rank 0 writes it when all have it, since each may have to go on with the files.
        """
        told = comm.gather_object((row, self._media.waiting) if comm.is_main else list(self._media.waiting))
        row, self._media.waiting = told[0]
        for rank, keys in enumerate(told[1:], 1):
            if missing := sorted(self._media.waiting.keys() - set(keys)):
                raise ValueError(
                    "with create_communicator(survive=True) any rank may have to go on with the log, and rank "
                    f"{rank} has not reported {missing[0]!r}: report images, texts and histograms on every rank"
                )
        try:
            comm.barrier()
        except RanksLost as loss:
            return row, loss
        return row, None

    def _call(self, writer: RecordWriter, method: str, *arguments: Run | Record) -> None:
        """Call a method of a writer, the last one if it fails; random numbers that it draws do not change the run."""
        try:
            with _random.preserve_host_rng():
                if call := getattr(writer, method, None):
                    call(*arguments)
        except Exception as error:
            self._working = [other for other in self._working if other is not writer]
            failure = f"{type(writer).__name__} failed in {method}() and gets no more rows: {type(error).__name__}: {error}"
            warn(f"{failure}. Training continues, and so do the log and the other writers")

    def finalize(self) -> None:
        self._media.close()
        self._rows.update_array()
        for writer in self._open:
            self._call(writer, "close")
        self._open = []

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._rows.serialize(serializer)
        self._means.serialize(serializer)
        self._media.serialize(serializer["media"])


class _Rows:
    """The rows of a log: each is appended to ``<filename>.jsonl`` at once; ``<filename>`` has all of them as a JSON array.

    The array is replaced by a rename, after each row while it is small, and every 30 seconds beyond that. Up to 1 MB the
    rows are in memory too; without a file all are.
    """

    def __init__(self, filename: str | None) -> None:
        self._filename = filename
        self.count = 0
        self._stored = AppendOnly()  # the rows that are in a file alone
        self._recent: list[Row] = []  # those after them
        self._file = AppendOnly()  # with all rows, once the run has begun to write it
        self._array = Path()
        self._written: str | None = None  # the name of the file that has these rows, and is cut back to them
        # To replace the array of a long log takes a hundredth of the time at most, however often snapshots are taken.
        self._replaced_at = -math.inf
        self._pause = 0.0  # until it may be replaced at a snapshot
        self._is_stale = False

    @property
    def all(self) -> list[Row]:
        """All rows. Those that are in a file alone are read; if that has been damaged or removed, there is a warning."""
        if not self._stored.size:
            return self._recent
        if (text := self._stored.read()) is None:
            self._stored.warn_of_loss(_LOST_ROWS.format(self.count - len(self._recent)))
            return list(self._recent)
        return [*_parse(text), *self._recent]

    def since(self, number: int) -> list[Row]:
        """Return the rows from a number on, counted from 0, without reading the file if they are in memory."""
        stored = self.count - len(self._recent)
        return self._recent[number - stored :] if number >= stored else self.all[number:]

    def begin(self, out: Path, *, writes: bool) -> None:
        """Go on in the files in ``out``, or in memory where this rank ``writes`` none."""
        earlier, self._written = self._written, self._filename
        if self._filename is None or not writes:
            self._keep_in_memory()
            return
        self._array, path = out / self._filename, out / f"{self._filename}.jsonl"
        make_folder(out, Path(self._filename).parent)
        if earlier != self._filename:
            set_rows_aside(path)
        self._file, loss = replace(self._stored), _LOST_ROWS.format(self.count - len(self._recent))
        rows = b"".join(map(_line, self._recent))
        if not self._file.begin(path, rows, loss=loss):
            self._stored, self.count = AppendOnly(), len(self._recent)
        self._stored.path = path
        self._is_stale = True
        self.update_array()

    def _keep_in_memory(self) -> None:
        self._recent, self._stored = self.all, AppendOnly()
        self.count = len(self._recent)

    def append(self, row: Row) -> None:
        self._recent.append(row)
        self.count += 1
        if self._file.path is None:
            return
        self._file.append(_line(row))
        self._is_stale = True
        if self._file.size <= _SMALL or time.monotonic() >= self._replaced_at + max(_SECONDS, self._pause):
            self.update_array()
        if self._file.size - self._stored.size > _SMALL:
            self._stored, self._recent = replace(self._file), []

    def update_array(self) -> None:
        began, file = time.monotonic(), self._file
        if not self._is_stale or file.path is None:
            return
        if not is_regular(file.path) or os.path.getsize(file.path) < file.size:
            return  # a person has removed it or cut it off: the array stays as it was
        with atomic_write(self._array) as array:
            array.write(b"[\n" if file.size else b"[")
            for chunk in replace(file, size=max(file.size - 1, 0)).chunks():  # without the last end of a line
                array.write(chunk.replace(b"\n", b",\n"))
            array.write(b"\n]\n" if file.size else b"]\n")
        self._replaced_at, self._is_stale = time.monotonic(), False
        self._pause = 100 * (self._replaced_at - began)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the rows; a snapshot beside their file has its length instead, and their number."""
        rows = in_file = None
        if isinstance(serializer, Serializer):
            if time.monotonic() >= self._replaced_at + self._pause:
                self.update_array()
            if (state := self._file.state(serializer.directory, serializer.refer)) is None:
                rows = self.all
            else:
                in_file = [*state, self.count]
        rows, in_file = serializer("log", rows), serializer("file", in_file)
        self._written = serializer("written", self._written)
        if isinstance(serializer, Serializer):
            return
        self._recent, self._stored, stored_count = list(rows or ()), AppendOnly(), 0
        if rows is None and in_file is not None:
            stored = AppendOnly.restore(in_file, serializer.directory)
            if stored.size > _SMALL and stored.is_intact():
                self._stored, stored_count = stored, in_file[3]
            elif stored.size <= _SMALL and (text := stored.read()) is not None:
                self._recent = _parse(text)
            else:
                self._written = None
                stored.warn_of_loss(_LOST_ROWS.format(in_file[3]))
        self.count = stored_count + len(self._recent)
        if not serializer.comm.is_main:  # now, because rank 0 writes the file as soon as all have loaded
            self._keep_in_memory()


def _line(row: Row) -> bytes:
    return (json.dumps(to_json(row), default=str, allow_nan=False) + "\n").encode()


def _parse(text: bytes) -> list[Row]:
    return [from_json(json.loads(line)) for line in text.splitlines()]


def _record(row: Mapping[str, Any], media: Mapping[str, Media] | None) -> Record:
    """Return the record of a row; a counter that ``postprocess`` has removed is 0."""
    values = {key: value for key, value in row.items() if key not in COUNTERS}
    return Record(row.get("epoch", 0), row.get("iteration", 0), row.get("elapsed_time", 0.0), values, media or {})


def key_list(argument: str, keys: Iterable[str]) -> list[str]:
    """Return the keys as a list; raise a `TypeError` if they are not an iterable of strings."""
    if isinstance(keys, str):
        raise TypeError(f"{argument} is an iterable of keys, got the string {keys!r}; write [{keys!r}]")
    listed = list(keys) if isinstance(keys, Iterable) else None
    if listed is None or not all(isinstance(key, str) for key in listed):
        raise TypeError(f'{argument} is an iterable of keys, such as ["epoch", "main/loss"]; got {keys!r}')
    return listed


_MEDIA_ROW = re.compile(rb'{"row": (\d+), ')  # how a line begins


class _Media:
    """Collects what is reported until the next row of a log, and appends it as one line to a file beside the log.

    A line has the number of its row, counted from 0, the counters, and what was reported by key.
    """

    def __init__(self, filename: str | None) -> None:
        self._filename = filename
        self.waiting: dict[str, Media] = {}
        self._reporter: Reporter | None = None
        self._file = AppendOnly()

    def begin(self, trainer: Trainer, out: Path | None) -> None:
        """Listen to what is reported, and cut the file in ``out`` back to the earlier rows; another rank has it without."""
        self._reporter = trainer.reporter
        self._reporter.media_watchers += (self._add,)
        if trainer.is_rehearsing:  # in a scratch directory
            self._file = AppendOnly()
        self._file.keeps = trainer.url is not None  # another rank 0 may find an older state of an object
        if self._filename is not None and out is not None:
            self._file.path = path = out / self._filename
            if self._file.size:
                self._file.begin(path, loss="the log continues without the images, texts and histograms of its earlier rows")
            else:
                set_rows_aside(path)

    def _add(self, key: str, media: Media) -> None:
        self.waiting[key] = media

    def write(self, row: int, counters: Mapping[str, Any]) -> dict[str, Media]:
        """Append what has waited to the file, as that of a row; return it."""
        media, self.waiting = self.waiting, {}
        if self._filename is not None:
            content = {"row": row, **counters, "media": {key: media_to_json(item) for key, item in media.items()}}
            self._file.append((json.dumps(content, allow_nan=False) + "\n").encode())
        return media

    def of_rows(self) -> dict[int, Mapping[str, Media]]:
        """Return the media of earlier rows by row number, read from the file when they are asked for."""
        media: dict[int, Mapping[str, Media]] = {}
        start = 0
        if self._file.path is not None and self._file.size:
            with open(open_regular(self._file.path), "rb") as file:
                for line in file:
                    if match := _MEDIA_ROW.match(line):
                        media[int(match[1])] = _StoredMedia(self._file.path, start)
                    start += len(line)
        return media

    def close(self) -> None:
        if self._reporter is not None:
            watchers = self._reporter.media_watchers
            self._reporter.media_watchers = tuple(watcher for watcher in watchers if watcher != self._add)
            self._reporter = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load what waits, and the length and the checksum of the file."""
        if isinstance(serializer, Serializer) and self._file.path is not None and self._file.size:
            serializer.refer(self._file.path)
        waiting = serializer("waiting", {key: media_to_json(item) for key, item in self.waiting.items()})
        size, crc = serializer("file", [self._file.size, self._file.crc])
        if isinstance(serializer, Deserializer):
            self.waiting = {key: media_from_json(item) for key, item in waiting.items()}
            is_same = (self._file.size, self._file.crc) == (size, crc)  # in this process, which may have followed it
            self._file = AppendOnly(None, size, crc, self._file.content if is_same else bytearray())


class _StoredMedia(Mapping[str, Media]):
    """What a row has in the file, read when it is asked for."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start  # of its line

    def _read(self) -> dict[str, Any]:
        with open(open_regular(self._path), "rb") as file:
            file.seek(self._start)
            media: dict[str, Any] = json.loads(file.readline())["media"]
        return media

    def __getitem__(self, key: str) -> Media:
        return media_from_json(self._read()[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())
