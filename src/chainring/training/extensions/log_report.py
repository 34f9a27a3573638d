"""LogReport: the means of reported values, one row for each interval, and the file that contains the rows."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chainring import _random
from chainring._files import AppendOnly, atomic_write, from_json, is_regular, make_folder, set_rows_aside, to_json
from chainring._messages import warn
from chainring.reporting.media import Media
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training.extension import Extension
from chainring.training.extensions._log_media import LogMedia
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.writers.base import COUNTERS, Record, Run

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


Row = dict[str, Any]

_SMALL = 1_000_000  # bytes up to which the array is replaced after each row, and the rows stay in memory
_SECONDS = 30.0  # between two replacements of a larger array


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
        listed = None if keys is None else key_list("keys", keys)
        self._keys = listed or []
        self._means = IntervalMeans(listed)
        self._postprocess = postprocess
        self._filename = filename
        self._rows = _Rows(filename)
        self._media = LogMedia(None if filename is None else f"{filename}.media.jsonl")
        self._writers = _checked_writers(writers)
        names = list(self.writes)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"a log and its writers must write different files; more than one would write {twice}")
        self._open: list[RecordWriter] = []
        self._working: list[RecordWriter] = []

    @property
    def log(self) -> list[dict[str, Any]]:
        return self._rows.all

    def rows_from(self, number: int) -> list[dict[str, Any]]:
        """Return the rows from a number on, counted from 0, without reading the file if they are in memory."""
        return self._rows.since(number)

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
        out, is_main = Path(trainer.out), trainer.comm.is_main
        if is_main:
            self._media.begin(trainer.reporter, out, is_rehearsing=trainer.is_rehearsing)
        self._rows.begin(out, writes=is_main)
        rows = self.log if self._writers and is_main else []
        media = self._media.of_rows() if rows else {}
        records = tuple(_record(row, media.get(index)) for index, row in enumerate(rows))
        # A rehearsal or a replay leaves the writers alone: what they show to others could not be put back.
        is_alone = trainer.is_rehearsing or trainer.is_replaying
        self._open = list(self._writers) if is_main and not is_alone else []
        self._working = list(self._open)
        self._call_writers("begin", Run(out, dict(trainer.config), trainer.updater.iteration, records))

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
        media = self._media.write(len(self._rows), counters) if self._media.waiting else {}
        self._rows.append(row)
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
                warn(f"{failure}. Training continues, and so do the log and the other writers")

    def finalize(self) -> None:
        self._media.close()
        self._rows.close()
        for writer in self._open:
            try:
                with _random.preserve_host_rng():
                    writer.close()
            except Exception as error:
                warn(f"{type(writer).__name__} failed to close: {type(error).__name__}: {error}")
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
        self._stored, self._stored_count = AppendOnly(), 0  # the rows that are in a file alone
        self._recent: list[Row] = []  # those after them
        self._file: AppendOnly | None = None  # with all rows, once the run has begun to write it
        self._array = Path()
        self._written: str | None = None  # the name of the file that has these rows, and is cut back to them
        # To replace the array of a long log takes a hundredth of the time at most, however often snapshots are taken.
        self._replaced_at = -math.inf
        self._pause = 0.0  # until it may be replaced at a snapshot
        self._is_stale = False

    def __len__(self) -> int:
        return self._stored_count + len(self._recent)

    @property
    def all(self) -> list[Row]:
        """All rows. Those that are in a file alone are read; if that has been damaged or removed, there is a warning."""
        if not self._stored_count:
            return self._recent
        if (text := self._stored.read()) is None:
            self._stored.warn_of_loss(_describe_loss(self._stored_count))
            return list(self._recent)
        return [*_parse(text), *self._recent]

    def since(self, number: int) -> list[Row]:
        """Return the rows from a number on, counted from 0, without reading the file if they are in memory."""
        return self._recent[number - self._stored_count :] if number >= self._stored_count else self.all[number:]

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
        self._file = replace(self._stored)
        if not self._file.begin(path, b"".join(map(_line, self._recent)), loss=_describe_loss(self._stored_count)):
            self._stored, self._stored_count = AppendOnly(), 0
        self._stored.path = path
        self._replace_array()
        if self._file.size - self._stored.size > _SMALL:
            self._keep_in_file(self._file)

    def _keep_in_memory(self) -> None:
        self._recent, self._stored, self._stored_count = self.all, AppendOnly(), 0

    def append(self, row: Row) -> None:
        """Add a row, and write it."""
        self._recent.append(row)
        if self._file is None:
            return
        self._file.append(_line(row))
        self._is_stale = True
        if self._file.size <= _SMALL or time.monotonic() >= self._replaced_at + max(_SECONDS, self._pause):
            self._replace_array()
        if self._file.size - self._stored.size > _SMALL:
            self._keep_in_file(self._file)

    def _keep_in_file(self, file: AppendOnly) -> None:
        self._stored, self._stored_count, self._recent = replace(file), len(self), []

    def close(self) -> None:
        """Bring the array up to date."""
        if self._is_stale:
            self._replace_array()

    def _replace_array(self) -> None:
        began, file = time.monotonic(), self._file
        if file is None or file.path is None or not is_regular(file.path) or os.path.getsize(file.path) < file.size:
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
            if self._is_stale and time.monotonic() >= self._replaced_at + self._pause:
                self._replace_array()
            file = AppendOnly() if self._file is None else self._file
            if (state := file.state(serializer.directory, serializer.refer)) is None:
                rows = self.all
            else:
                in_file = [*state, len(self)]
        rows, in_file = serializer("log", rows), serializer("file", in_file)
        self._written = serializer("written", self._written)
        if not isinstance(serializer, Serializer):
            self._stored, self._stored_count, self._recent = AppendOnly(), 0, list(rows or ())
            if rows is None and in_file is not None:
                self._find(AppendOnly.restore(in_file, serializer.directory), count=in_file[3])
            if not serializer.comm.is_main:  # now, because rank 0 writes the file as soon as all have loaded
                self._keep_in_memory()

    def _find(self, stored: AppendOnly, count: int) -> None:
        """Find the rows in the file beside a snapshot, up to its length at the time of the snapshot."""
        if stored.size > _SMALL and stored.is_intact():
            self._stored, self._stored_count = stored, count
        elif stored.size <= _SMALL and (text := stored.read()) is not None:
            self._recent = _parse(text)
        else:
            self._written = None
            stored.warn_of_loss(_describe_loss(count))


def _line(row: Row) -> bytes:
    return (json.dumps(to_json(row), default=str, allow_nan=False) + "\n").encode()


def _parse(text: bytes) -> list[Row]:
    return [from_json(json.loads(line)) for line in text.splitlines()]


def _describe_loss(count: int) -> str:
    return "the log continues without its earlier rows" + (f", {count} of them" if count else "")


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


def _checked_writers(writers: Iterable[RecordWriter]) -> list[RecordWriter]:
    listed = list(writers) if isinstance(writers, Iterable) else [writers]
    for writer in listed:
        if isinstance(writer, type) or not all(callable(getattr(writer, name, None)) for name in ("write", "close")):
            raise TypeError(f"writers is a list of Writers, each with write(record) and close(); got {writers!r}")
    return listed
