"""LogReport: the means of what was reported, a row an interval."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainring import _random
from chainring._files import numbered, plain, replace, restored
from chainring._messages import info
from chainring.reporting.summary import DictSummary
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.extension import Extension
from chainring.training.triggers import get_trigger
from chainring.writers.base import Record, Run

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


_OFTEN = 1_000_000  # bytes up to which the array is replaced after each row
_SELDOM = 30.0  # seconds between two replacements beyond that


class LogFile:
    """Writes the rows of a log so that both files are valid whenever they are opened.

    The array is replaced by a rename, after each row while it is small and every 30 s when it is not.

    Args:
        path: of the array; the lines go to the same with ``.jsonl``.

    Attributes:
        lines: the file of the lines.
    """

    def __init__(self, path: Path) -> None:
        self._array = path
        self.lines = path.with_name(path.name + ".jsonl")
        self._texts: list[str] = []
        self._size = 0
        self._crc = 0
        self._replaced_at = -math.inf
        self._stale = False

    def open(self, rows: Sequence[Mapping[str, Any]], keep: bool = False) -> None:
        """Begins with the rows of the run that is continued: what its file holds beyond them is cut off.

        A file that does not begin with them, or that is to be kept, is moved to ``abandoned/<n>`` beside it.
        """
        self._texts = [_line(row) for row in rows]
        text = "".join(self._texts).encode()
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        if keep or not self._begins_with(text):
            self._set_aside()
            replace(self.lines, text)
        os.truncate(self.lines, len(text))
        self._size, self._crc = len(text), zlib.crc32(text)
        self.replace_array()

    def _begins_with(self, text: bytes) -> bool:
        try:
            with open(self.lines, "rb") as file:
                return file.read(len(text)) == text
        except FileNotFoundError:
            return False

    def _set_aside(self) -> None:
        if self.lines.exists() and self.lines.stat().st_size:
            place = numbered(self.lines.parent / "abandoned") / self.lines.name
            os.rename(self.lines, place)
            info(f"{self.lines} holds rows that this run does not continue: moved to {place}")

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the lines at once, and to the array when it is due."""
        line = _line(row)
        with open(self.lines, "ab") as file:
            file.write(line.encode())
        self._texts.append(line)
        self._size += len(line.encode())
        self._crc = zlib.crc32(line.encode(), self._crc)
        self._stale = True
        if self._size <= _OFTEN or time.monotonic() - self._replaced_at >= _SELDOM:
            self.replace_array()

    def replace_array(self) -> None:
        """Brings the array up to date."""
        body = ",\n".join(text.rstrip("\n") for text in self._texts)
        replace(self._array, f"[\n{body}\n]\n".encode() if body else b"[]\n")
        self._replaced_at, self._stale = time.monotonic(), False

    def flush(self) -> None:
        """Brings the array up to date if it is not."""
        if self._stale:
            self.replace_array()

    @property
    def checksum(self) -> list[Any]:
        """The name of the lines' file, its length in bytes, and its CRC-32."""
        return [self.lines.name, self._size, self._crc]


def key_list(name: str, keys: Any) -> list[str]:
    """The keys of a log's columns.

    Raises:
        TypeError: they are no iterable of strings, or a single string.
    """
    if isinstance(keys, str):
        raise TypeError(f"{name} is an iterable of keys, got the string {keys!r}; write [{keys!r}]")
    listed = list(keys) if isinstance(keys, Iterable) else None
    if listed is None or not all(isinstance(key, str) for key in listed):
        raise TypeError(f'{name} is an iterable of keys, such as ["epoch", "main/loss"]; got {keys!r}')
    return listed


def read_rows(path: Path, size: int, crc: int) -> list[dict[str, Any]] | None:
    """The rows in the first ``size`` bytes of a file of lines, or ``None`` where these are not what was written."""
    try:
        with open(path, "rb") as file:
            text = file.read(size)
    except OSError:
        return None
    if len(text) != size or zlib.crc32(text) != crc:
        return None
    return [restored(json.loads(line)) for line in text.splitlines()]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), default=str, allow_nan=False) + "\n"


class LogReport(Extension):
    """Averages every reported value over an interval, and writes a row when its trigger fires.

    It observes each iteration what has been reported when its turn comes. Means are weighted as the updates are; a key
    that was not reported in an iteration does not count as zero there. A row has the means, then ``epoch``,
    ``iteration`` and ``elapsed_time``. It is appended to ``<filename>.jsonl`` at once; ``<filename>`` is all rows as a
    JSON array. NaN and infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` there.

    Args:
        keys: the keys to average; ``None`` takes all.
        trigger: when a row is written. ``extend(LogReport(), trigger=t)`` means the same and comes first.
        postprocess: called with each row before it is stored; it may change it.
        filename: of the files in the trainer's ``out``; ``None`` writes none.
        writers: further places for the rows; rank 0 opens them. One that fails is warned about and left out from then on.

    Attributes:
        log: the rows so far, those of the runs before a resume included.

    Raises:
        TypeError: the keys, the file name, a writer or the trigger is of another kind, or ``postprocess`` cannot be called.
        ValueError: the trigger's unit or period is none, or two would write the same file.
    """

    skip_on_resume = True

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        trigger: Any = (1, "epoch"),
        postprocess: Callable[[dict[str, Any]], None] | None = None,
        filename: str | None = "log",
        writers: Iterable[Any] = (),
    ) -> None:
        if postprocess is not None and not callable(postprocess):
            raise TypeError(f"postprocess is a function of a row, got {postprocess!r}")
        if filename is not None and (not isinstance(filename, str) or not filename):
            raise TypeError(f'filename is a name in out, such as "log", or None for no file; got {filename!r}')
        self.trigger = get_trigger(trigger)
        self.log: list[dict[str, Any]] = []
        self._keys = None if keys is None else key_list("keys", keys)
        self._postprocess = postprocess
        self._filename = filename
        self._writers = _checked(writers)
        self._check_names()
        self._open: list[Any] = []
        self._working: list[Any] = []
        self._summary = DictSummary()
        self._file: LogFile | None = None
        self._written: str | None = None  # the file that holds these rows, and is cut back to them

    def initialize(self, trainer: Trainer) -> None:
        if self._filename is not None and trainer.comm.rank == 0:
            self._file = LogFile(Path(trainer.out) / self._filename)
            self._file.open(self.log, keep=self._written != self._filename)
        self._written = self._filename
        # A rehearsal leaves the writers alone: what they show to others could not be put back.
        opens = trainer.comm.rank == 0 and not trainer.is_rehearsing
        self._open = list(self._writers) if opens else []
        self._working = list(self._open)
        records = tuple(_record(row) for row in self.log) if opens else ()
        self._tell("begin", Run(Path(trainer.out), dict(trainer.config), trainer.updater.iteration, records))

    def observe(self, trainer: Trainer) -> None:
        observation = trainer.observation
        if self._keys is not None:
            observation = {key: observation[key] for key in self._keys if key in observation}
        self._summary.add(observation, getattr(trainer.updater, "weight", 1))

    def __call__(self, trainer: Trainer) -> None:
        means, self._summary = self._summary.over(trainer.comm).compute_mean(), DictSummary()
        updater = trainer.updater
        row: dict[str, Any] = {
            **means,
            "epoch": updater.epoch,
            "iteration": updater.iteration,
            "elapsed_time": trainer.elapsed_time,
        }
        if self._postprocess is not None:
            self._postprocess(row)
        self.log.append(row)
        if self._file is not None:
            self._file.append(row)
        self._tell("write", _record({**row, "epoch": updater.epoch, "iteration": updater.iteration}))

    def _tell(self, method: str, message: Run | Record) -> None:
        """Calls a method of each writer that works. The services behind them may draw random numbers; the run sees none."""
        for writer in list(self._working):
            try:
                with _random.preserve_host_rng():
                    getattr(writer, method, _nothing)(message)
            except Exception as error:
                self._working.remove(writer)
                what = f"{type(writer).__name__} failed and gets no more rows: {type(error).__name__}: {error}"
                warnings.warn(f"{what}. Training goes on, and so do the log and the other writers", stacklevel=2)

    def finalize(self) -> None:
        if self._file is not None:
            self._file.flush()
        for writer in self._open:
            try:
                writer.close()
            except Exception as error:
                warnings.warn(f"{type(writer).__name__} failed to close: {type(error).__name__}: {error}", stacklevel=2)
        self._open = []

    @property
    def writes(self) -> Sequence[str]:
        own = () if self._filename is None else (self._filename, f"{self._filename}.jsonl")
        return (*own, *(name for writer in self._writers for name in getattr(writer, "writes", ())))

    def _check_names(self) -> None:
        names = list(self.writes)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"a log and its writers write files of different names; more than one would write {twice}")

    def serialize(self, serializer: AbstractSerializer) -> None:
        is_saving = isinstance(serializer, Serializer)
        rows: list[dict[str, Any]] | None = self.log
        lines = None
        if self._file is not None and isinstance(serializer, Serializer):
            self._file.flush()
            # In a snapshot that lies beside the file its length will do: a log of n rows would be written n times.
            if serializer.directory is not None and serializer.directory.resolve() == self._file.lines.parent.resolve():
                serializer.refer(self._file.lines)
                rows, lines = None, self._file.checksum
        rows, lines = serializer("log", rows), serializer("file", lines)
        self._written = serializer("written", self._written)
        if not is_saving:
            self.log = self._read(serializer.directory, *lines) if rows is None and lines is not None else rows or []
        self._summary.serialize(serializer["summary"])

    def _read(self, directory: Path | None, name: str, size: int, crc: int) -> list[dict[str, Any]]:
        """The rows in the file beside a snapshot, up to where it was when the snapshot was taken."""
        path = (directory or Path()) / Path(name).name
        rows = read_rows(path, size, crc)
        if rows is None:
            self._written = None
            warnings.warn(
                f"the log goes on without its earlier rows: {path} does not begin with the {size} bytes that it had "
                "when the snapshot was taken; move a snapshot together with the files beside it",
                stacklevel=2,
            )
        return rows or []


def _record(row: Mapping[str, Any]) -> Record:
    own = {"epoch": 0, "iteration": 0, "elapsed_time": 0.0}  # a row whose postprocess took them out goes on without
    values = {key: value for key, value in row.items() if key not in own}
    return Record(**{key: row.get(key, missing) for key, missing in own.items()}, values=values)


def _nothing(*_: Any) -> None:
    return None


def _checked(writers: Any) -> list[Any]:
    rule = "writers is a list of Writers, each with write(record) and close()"
    if isinstance(writers, str) or not isinstance(writers, Iterable):
        raise TypeError(f"{rule}; got {writers!r}")
    listed = list(writers)
    for writer in listed:
        if isinstance(writer, type) or not all(callable(getattr(writer, name, None)) for name in ("write", "close")):
            raise TypeError(f"{rule}; {writer!r} is none")
    return listed
