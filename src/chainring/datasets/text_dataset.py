"""TextDataset: the lines of text files, read on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from chainring._random import Indices
from chainring.datasets.base import DatasetMixin


class TextDataset(DatasetMixin):
    r"""Example i is line i of a text file, without its line end; with several files, the tuple of their lines i.

    The constructor finds where lines start (8 bytes per line are kept), and each example is read from the disk on demand,
    so a file may be larger than the memory. No file stays open: the dataset can be pickled, and shared by forked
    processes and threads. The files must not change while the dataset is in use.

    Lines end with ``"\n"`` or ``"\r\n"``. Empty lines are examples too; ``filter_func=str.strip`` leaves them out.

    Args:
        paths: a file, or several with as many lines each, such as sentences and their translations.
        encoding: of all files; a line must end with the byte 0x0A (not so in UTF-16).
        filter_func: called at construction with one line of each file; the lines for which it returns a false value are
            left out.

    Raises:
        ValueError: there is no path, files have different numbers of lines, or the encoding is unknown or unsuitable.
        OSError: a file cannot be read.
        UnicodeDecodeError: a line is not in the encoding; raised when it is read.

    Example::

        dataset = TextDataset(["train.en", "train.de"], filter_func=lambda en, de: en and de)
        en, de = dataset[0]
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        encoding: str = "utf-8",
        filter_func: Callable[..., Any] | None = None,
    ) -> None:
        if filter_func is not None and not callable(filter_func):
            raise TypeError(f"filter_func is a function of one line of each file, got {type(filter_func).__name__}")
        try:
            newlines = "\n\n".encode(encoding)
        except LookupError as error:
            raise ValueError(f"encoding is the name of one of Python's codecs, got {encoding!r}") from error
        if not newlines.endswith(b"\n\n"):  # a byte order mark may come before them
            rule = f"an encoding ends lines with the byte 0x0A, and {encoding!r} does not"
            raise ValueError(f"{rule}; convert the file to UTF-8")
        self._is_single = isinstance(paths, (str, os.PathLike))
        sequence: Sequence[Any] = [paths] if self._is_single else list(paths)  # type: ignore[arg-type]
        if not sequence:
            raise ValueError("a TextDataset needs at least one file, got none")
        self.paths = [os.fspath(path) for path in sequence]
        self.encoding = encoding
        self._offsets = [_find_lines(path) for path in self.paths]
        counts = {path: len(offsets) - 1 for path, offsets in zip(self.paths, self._offsets, strict=True)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"several files must have the same number of lines, got {counts}")
        self._selected: Indices | None = None  # the indices of the lines that the filter has kept
        if filter_func is not None:
            with ExitStack() as stack:
                files = [stack.enter_context(open(path, "rb")) for path in self.paths]
                rows = enumerate(zip(*files, strict=True))
                self._selected = np.flatnonzero([bool(filter_func(*self._decode(index, lines))) for index, lines in rows])

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1 if self._selected is None else len(self._selected)

    def get_example(self, i: int) -> str | tuple[str, ...]:
        index = i if self._selected is None else int(self._selected[i])
        lines = []
        for path, offsets in zip(self.paths, self._offsets, strict=True):
            start, stop, size = offsets[[index, index + 1, -1]].tolist()
            # Opened again for each line, which takes some microseconds: an open file's position would be shared by forks.
            with open(path, "rb", buffering=0) as file:
                current_size = os.fstat(file.fileno()).st_size
                file.seek(start)
                lines.append(file.read(stop - start))
            if current_size != size:
                raise ValueError(
                    f"{path} has {current_size} bytes and had {size} when its lines were counted: a file must not "
                    "change under a TextDataset; make the dataset again"
                )
        texts = self._decode(index, lines)
        return texts[0] if self._is_single else tuple(texts)

    def _decode(self, index: int, lines: Sequence[bytes]) -> list[str]:
        texts = []
        for path, line in zip(self.paths, lines, strict=True):
            try:
                texts.append(line.removesuffix(b"\n").removesuffix(b"\r").decode(self.encoding))
            except UnicodeDecodeError as error:
                error.add_note(f"in line {index + 1} of {path}")
                raise
        return texts


def _find_lines(path: str) -> Indices:
    """Return the offsets at which the lines of a file start; the last one is the file's size."""
    starts, size = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + (size + 1))
            size += len(chunk)
    offsets = np.concatenate(starts)
    return offsets if offsets[-1] == size else np.append(offsets, size)  # the last line may have no end
