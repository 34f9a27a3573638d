"""TextDataset: the lines of text files, read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from chainring._random import Indices
from chainring.datasets.base import DatasetMixin

_CHUNK = 1 << 20


class TextDataset(DatasetMixin):
    r"""Example i is line i of a text file, without its line end; of several files, the tuple of their lines i.

    Construction finds where lines start (8 bytes a line are kept), and an example is read from the disk when it is asked
    for, so a file may be larger than the memory. No file stays open: the dataset can be pickled, and shared by forked
    processes and threads. Files must not change meanwhile.

    Lines end with ``"\n"`` or ``"\r\n"``. Empty lines are examples too; ``filter_func=str.strip`` leaves them out.

    Args:
        paths: a file, or several with as many lines each, such as sentences and their translations.
        encoding: of all files, one in which a line ends with the byte 0x0A (UTF-16 is none).
        filter_func: called once, at construction, with one line of each file; where it returns something false, the
            lines are no example.

    Raises:
        ValueError: there is no path, files have different numbers of lines, or the encoding is unknown or unsuitable.
        OSError: a file cannot be read.
        UnicodeDecodeError: a line is not in the encoding; raised for the example, or by the filter at construction.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        encoding: str = "utf-8",
        filter_func: Callable[..., Any] | None = None,
    ) -> None:
        if filter_func is not None and not callable(filter_func):
            raise TypeError(f"filter_func is a function of one line of each file, got {type(filter_func).__name__}")
        _check_encoding(encoding)
        self._is_single = isinstance(paths, (str, os.PathLike))
        listed: Sequence[Any] = [paths] if self._is_single else list(paths)  # type: ignore[arg-type]
        if not listed:
            raise ValueError("a TextDataset needs at least one file, got none")
        self.paths = [os.fspath(path) for path in listed]
        self.encoding = encoding
        self._files = [_find_lines(path) for path in self.paths]
        counts = {file.path: len(file.starts) - 1 for file in self._files}
        if len(set(counts.values())) > 1:
            raise ValueError(f"several files must have the same number of lines, got {counts}")
        self._numbers: Indices | None = None  # the lines that are examples, where a filter leaves some out
        if filter_func is not None:
            self._numbers = np.flatnonzero([bool(filter_func(*parts)) for parts in self._all_lines()])

    def __len__(self) -> int:
        return len(self._files[0].starts) - 1 if self._numbers is None else len(self._numbers)

    def get_example(self, i: int) -> Any:
        number = i if self._numbers is None else int(self._numbers[i])
        parts = tuple([_text(file.line(number), self.encoding, file.path, number) for file in self._files])
        return parts[0] if self._is_single else parts

    def _all_lines(self) -> Iterator[list[str]]:
        with ExitStack() as stack:
            files = [stack.enter_context(open(path, "rb")) for path in self.paths]
            for number, lines in enumerate(zip(*files, strict=True)):
                yield [_text(line, self.encoding, path, number) for line, path in zip(lines, self.paths, strict=True)]


@dataclass(frozen=True)
class _File:
    """A file, and where each of its lines starts; the last number is the file's size."""

    path: str
    starts: Indices

    def line(self, number: int) -> bytes:
        start, stop, size = int(self.starts[number]), int(self.starts[number + 1]), int(self.starts[-1])
        # Opened anew for each line, which takes some microseconds: an open file's position would be shared by forks.
        descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            now = os.fstat(descriptor).st_size
            data = os.pread(descriptor, stop - start, start)
        finally:
            os.close(descriptor)
        if now != size or len(data) != stop - start:
            raise ValueError(
                f"{self.path} has {now} bytes and had {size} when its lines were counted: a file must not change under a "
                "TextDataset; make the dataset anew"
            )
        return data


def _text(line: bytes, encoding: str, path: str, number: int) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding)
    except UnicodeDecodeError as error:
        error.add_note(f"in line {number + 1} of {path}")
        raise


def _find_lines(path: str) -> _File:
    starts, size = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + (size + 1))
            size += len(chunk)
    joined = np.concatenate(starts)
    return _File(path, joined if joined[-1] == size else np.append(joined, size))  # the last line may have no end


def _check_encoding(encoding: str) -> None:
    try:
        newlines = "\n\n".encode(encoding)
    except LookupError as error:
        raise ValueError(f"encoding is the name of one of Python's codecs, got {encoding!r}") from error
    if not newlines.endswith(b"\n\n"):  # a byte order mark may come before them
        raise ValueError(f"an encoding ends lines with the byte 0x0A, and {encoding!r} does not; convert the file to UTF-8")
