"""A file that grows at its end, and that a resumed run cuts back to what it had when its snapshot was taken."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chainring._files import atomic_write, is_regular, open_regular, set_aside, write_error
from chainring._messages import info, warn

_CHUNK = 1 << 20  # bytes that are read at once


@dataclass(slots=True)
class AppendOnly:
    """What a run has appended to a file, or will: the file, the number of bytes, and their CRC-32.

    A snapshot beside the file has these three in place of the bytes: it does not grow with the file. More bytes may follow
    in the file, of updates after the snapshot, or a tail that the next write replaces.

    Attributes:
        path: the file; ``None`` if the bytes are in ``content``, as those of a run in memory are.
        size: the number of bytes.
        crc: their CRC-32.
        content: bytes that are in no file yet.
    """

    path: Path | None = None
    size: int = 0
    crc: int = 0
    content: bytes = b""

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return bytes that are in no file yet."""
        return cls(None, len(content), zlib.crc32(content), content)

    @classmethod
    def restore(cls, state: list[Any], directory: Path | None) -> Self:
        """Return what `state` described, beside a snapshot that is now in ``directory``."""
        name, size, crc, *_ = state
        return cls((directory or Path()) / Path(name).name, size, crc)

    def state(self, directory: Path | None, refer: Callable[[Path], None]) -> list[Any] | None:
        """Return name, size and CRC-32 for a snapshot in the directory of the file, which refers to it; else ``None``."""
        if self.path is None or directory is None or directory.resolve() != self.path.parent.resolve():
            return None
        refer(self.path)
        return [self.path.name, self.size, self.crc]

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, as far as they are there."""
        if self.path is None:
            yield self.content
            return
        # The path may be a link, of a file that a person has moved: the checksum tells whose bytes it leads to.
        with suppress(OSError), open(open_regular(Path(os.path.realpath(self.path))), "rb") as file:
            left = self.size
            while chunk := file.read(min(left, _CHUNK)):
                left -= len(chunk)
                yield chunk

    def is_intact(self) -> bool:
        """Return whether the bytes are those that were written."""
        size = crc = 0
        for chunk in self.chunks():
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return (size, crc) == (self.size, self.crc)

    def read(self) -> bytes | None:
        """Return the bytes; ``None`` if they are not those that were written."""
        content = b"".join(self.chunks())
        return content if (len(content), zlib.crc32(content)) == (self.size, self.crc) else None

    def warn_of_loss(self, loss: str) -> None:
        """Warn that the bytes are not those that were written; ``loss`` says what goes on without which."""
        warn(
            f"{loss}: {self.path} does not begin with the {self.size} bytes that it had when the snapshot was taken; move a "
            "snapshot together with the files beside it",
        )

    def begin(self, path: Path, more: bytes = b"", *, loss: str) -> bool:
        """Go on in the file at ``path``, with these bytes and ``more``. Return False, with a warning, if these are lost.

        A file that begins with all of them is cut back to them. Anything else of that name is set aside, and a new file is
        made.
        """
        whole = AppendOnly(path, self.size + len(more), zlib.crc32(more, self.crc))
        is_lost = False
        if not is_regular(path) or not whole.is_intact():
            if is_lost := not self.is_intact():
                self.warn_of_loss(loss)
                whole = AppendOnly(path, len(more), zlib.crc32(more))
            with atomic_write(path) as file:
                for chunk in () if is_lost else self.chunks():
                    file.write(chunk)
                file.write(more)
                set_rows_aside(path)
        with open(open_regular(path, os.O_RDWR), "r+b") as file:
            file.truncate(whole.size)
        self.path, self.size, self.crc, self.content = path, whole.size, whole.crc, b""
        return not is_lost

    def append(self, content: bytes) -> None:
        """Append bytes. A file that is not there is made: a person may have removed it."""
        self.write_tail(content)
        self.size, self.crc = self.size + len(content), zlib.crc32(content, self.crc)

    def write_tail(self, content: bytes) -> None:
        """Write bytes at the end that do not count yet: the next write replaces them.

        Raises:
            OSError: there is something that is not a file of this name alone, see `open_regular`; or they could not be
                written.
        """
        assert self.path is not None
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            with open(descriptor, "r+b") as file:
                file.seek(min(self.size, os.fstat(descriptor).st_size))
                file.write(content)
                file.truncate()
        except OSError as error:
            raise write_error(error, self.path) from error


def set_rows_aside(path: Path) -> None:
    """Move a file with rows of another run to ``abandoned/<n>`` beside it, and say so."""
    if (destination := set_aside(path)) is not None:
        info(f"{path} holds rows that this run does not continue: moved to {destination}")
