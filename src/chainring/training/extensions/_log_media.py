"""The images, texts and histograms of a log, in a file beside its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainring._files import AppendOnly, open_regular, set_rows_aside
from chainring.reporting.media import Media, media_from_json, media_to_json
from chainring.serializers.protocol import AbstractSerializer, Deserializer, Serializer

if TYPE_CHECKING:
    from chainring.reporting.reporter import Reporter

_ROW = re.compile(rb'{"row": (\d+), ')  # how a line begins


class LogMedia:
    """Collects what is reported until the next row of a log, and appends it as one line to a file beside the log.

    A line has the number of its row, counted from 0, the counters, and what was reported by key. The file is made with the
    first line.
    """

    def __init__(self, filename: str | None) -> None:
        self._filename = filename
        self.waiting: dict[str, Media] = {}
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
        self.waiting[key] = media

    def write(self, row: int, counters: Mapping[str, Any]) -> dict[str, Media]:
        """Append what has waited to the file, as that of a row; return it."""
        media, self.waiting = self.waiting, {}
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
        waiting = serializer("waiting", {key: media_to_json(item) for key, item in self.waiting.items()})
        size, crc = serializer("file", [self._file.size, self._file.crc])
        if isinstance(serializer, Deserializer):
            self.waiting = {key: media_from_json(item) for key, item in waiting.items()}
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
