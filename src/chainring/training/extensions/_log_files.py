"""The files of a log: its rows, and the images, texts and histograms that were reported with them."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainring._append_only import AppendOnly, set_rows_aside
from chainring._files import atomic_write, from_json, is_regular, make_folder, open_regular, to_json
from chainring._media import Media, media_from_json, media_to_json
from chainring.serializers.protocol import AbstractSerializer, Deserializer, Serializer

if TYPE_CHECKING:
    from chainring.reporting.reporter import Reporter

Row = dict[str, Any]

_SMALL = 1_000_000  # bytes up to which the array is replaced after each row, and the rows stay in memory
_SECONDS = 30.0  # between two replacements of a larger array
_ROW = re.compile(rb'{"row": (\d+), ')  # how a line of the file of images, texts and histograms begins


class LogRows:
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
        self._forget_many()

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
        self._forget_many()

    def _forget_many(self) -> None:
        """Let go of the rows in memory when there are many; the file has them."""
        assert self._file is not None
        if self._file.size - self._stored.size > _SMALL:
            self._stored, self._stored_count, self._recent = replace(self._file), len(self), []

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


class LogMedia:
    """Collects what is reported until the next row of a log, and appends it as one line to a file beside the log.

    A line has the number of its row, counted from 0, the counters, and what was reported by key. The file is made with the
    first line.
    """

    def __init__(self, filename: str | None) -> None:
        self._filename = filename
        self._waiting: dict[str, Media] = {}
        self._reporter: Reporter | None = None
        self._file = AppendOnly()

    def begin(self, reporter: Reporter, out: Path, *, is_rehearsing: bool) -> None:
        """Listen to a reporter, and cut the file in ``out`` back to the earlier rows."""
        self._reporter = reporter
        reporter.media_watchers += (self._add,)
        if is_rehearsing:  # in a scratch directory
            self._file = AppendOnly()
        if self._filename is None:
            return
        path = out / self._filename
        self._file.path = path
        if not self._file.size:
            set_rows_aside(path)
        else:
            self._file.begin(path, loss="the log continues without the images, texts and histograms of its earlier rows")

    def _add(self, key: str, media: Media) -> None:
        self._waiting[key] = media

    def write(self, row: int, counters: Mapping[str, Any]) -> dict[str, Media]:
        """Append what has waited to the file, as that of a row; return it."""
        media, self._waiting = self._waiting, {}
        if media and self._file.path is not None:
            content = {"row": row, **counters, "media": {key: media_to_json(item) for key, item in media.items()}}
            self._file.append((json.dumps(content, allow_nan=False) + "\n").encode())
        return media

    def of_rows(self) -> dict[int, Mapping[str, Media]]:
        """Return what earlier rows have, by their number; it is read from the file when it is asked for."""
        media: dict[int, Mapping[str, Media]] = {}
        start = 0
        if self._file.path is not None and self._file.size:
            with open(open_regular(self._file.path), "rb") as file:
                for line in file:
                    if match := _ROW.match(line):
                        media[int(match[1])] = _StoredMedia(self._file.path, start)
                    start += len(line)
        return media

    def close(self) -> None:
        """Listen no more."""
        if self._reporter is not None:
            watchers = self._reporter.media_watchers
            self._reporter.media_watchers = tuple(watcher for watcher in watchers if watcher != self._add)
            self._reporter = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load what waits, and the length and the checksum of the file."""
        if isinstance(serializer, Serializer) and self._file.path is not None and self._file.size:
            serializer.refer(self._file.path)
        waiting = serializer("waiting", {key: media_to_json(item) for key, item in self._waiting.items()})
        size, crc = serializer("file", [self._file.size, self._file.crc])
        if isinstance(serializer, Deserializer):
            self._waiting = {key: media_from_json(item) for key, item in waiting.items()}
            self._file = AppendOnly(None, size, crc)


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
