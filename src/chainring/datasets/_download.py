"""RemoteFiles: files from the network, downloaded once, checked, and kept below one directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

_VARIABLE = "CHAINRING_DATASET_ROOT"
_TIMEOUT = 30.0  # seconds without a byte
_TRIES = 3  # of one mirror, if the connection is cut


@dataclass(frozen=True)
class RemoteFiles:
    """Files that belong together: their names, their mirrors and their checksums.

    Args:
        name: the directory of the files, below the one where datasets are kept.
        mirrors: base URLs, in the order in which they are tried.
        sha256: the SHA-256 of each file, in hexadecimal, by the file's name.

    Raises:
        ValueError: there is no mirror, a name is not a plain file name, or a SHA-256 is not 64 hexadecimal digits.

    Example::

        files = RemoteFiles("words", ("https://example.org/words",), {"en.txt": "9f86d0..."})  # all 64 digits
        path = files.download()["en.txt"]
    """

    name: str
    mirrors: tuple[str, ...]
    sha256: Mapping[str, str]

    def __post_init__(self) -> None:
        if isinstance(self.mirrors, str) or not self.mirrors:
            raise ValueError(f"mirrors is a tuple of at least one address, got {self.mirrors!r}")
        for name in (self.name, *self.sha256):
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"a name is of letters, digits, '_', '.' and '-', and starts with no dot, got {name!r}")
        for name, digest in self.sha256.items():
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"a SHA-256 is 64 hexadecimal digits in lower case, got {digest!r} for {name}")

    def download(self) -> dict[str, Path]:
        """Download the files that are missing or damaged.

        They are kept in ``$CHAINRING_DATASET_ROOT/<name>``, by default in ``~/.cache/chainring/<name>``. A download
        that was cut continues where it stopped, also in the next process; of several processes one downloads and the
        others wait. If all files are there they are only read.

        Returns:
            The path of each file, by its name.

        Raises:
            OSError: no mirror gave a file; the message lists every file that is missing, where to put it and its
                SHA-256. Or the directory cannot be written.
        """
        directory = _root() / self.name
        paths = {name: directory / name for name in self.sha256}
        missing = self._missing(paths)
        if missing:
            with _lock(directory):
                for name in self._missing(missing):  # another process may have downloaded some meanwhile
                    self._download_file(name, paths)
        return paths

    def _missing(self, paths: Mapping[str, Path]) -> dict[str, Path]:
        return {name: path for name, path in paths.items() if _sha256(path) != self.sha256[name]}

    def _download_file(self, name: str, paths: Mapping[str, Path]) -> None:
        partial = paths[name].with_name(f"{name}.part")
        failures = []
        for mirror in self.mirrors:
            url = f"{mirror.rstrip('/')}/{name}"
            try:
                _complete(url, partial, self.sha256[name])
            except _MirrorError as error:
                failures.append(f"  {url}: {error}")
            else:
                # No fsync: a file that a power cut tears has another SHA-256, and is downloaded again.
                os.replace(partial, paths[name])
                return
        raise OSError(
            f"{name} could not be downloaded:\n"
            + "\n".join(failures)
            + "\nRun again when there is a network: it continues where this stopped. Or put these files there yourself:\n"
            + "\n".join(f"  {path}  (SHA-256 {self.sha256[name]})" for name, path in self._missing(paths).items())
            + f"\nTo keep datasets in another directory than {_root()}, set the environment variable {_VARIABLE}."
        )


def _root() -> Path:
    return Path(os.environ.get(_VARIABLE) or "~/.cache/chainring").expanduser()


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Make the directory, and lock it against other processes and threads; waits until it is free."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("ab")
    except OSError as error:
        raise OSError(
            f"datasets are kept in a directory that can be written, and {directory} cannot ({error}): set the environment "
            f"variable {_VARIABLE} to another"
        ) from error
    # The file stays: unlinked, it could be locked by one process while another locks a new one of the same name.
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file, or ``None`` if there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _MirrorError(Exception):
    """A mirror did not give the file; ``retry`` is true if another request may help."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


def _complete(url: str, partial: Path, sha256: str) -> None:
    """Download what a partial file lacks, in a few requests, until it has the SHA-256."""
    for tries_left in reversed(range(_TRIES)):
        if _sha256(partial) == sha256:  # an earlier process was killed between the last byte and the rename
            return
        try:
            resumed = _append(url, partial)
            digest = _sha256(partial)
            if digest == sha256:
                return
            partial.unlink()
            # If it was resumed, its first half may be the wrong one, so the file is tried again from its first byte.
            raise _MirrorError(f"this file has the SHA-256 {digest}", retry=resumed)
        except _MirrorError as error:
            if not (error.retry and tries_left):
                raise


class _ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which outlives the bar."""

    monitor_interval = 0


def _append(url: str, partial: Path) -> bool:
    """Append the rest of a file to the partial one, or write the whole file; return whether it was resumed."""
    start = partial.stat().st_size if partial.is_file() else 0
    with _open(url, start, partial) as response:
        missing = response.length  # None if the server does not say it
        resumed = start > 0 and response.status == 206
        if resumed:
            content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if content_range is None or int(content_range[1]) != start:
                partial.unlink()
                raise _MirrorError(f"asked for the bytes from {start}, it sent others", retry=True)
            if content_range[2] != "*":
                missing = int(content_range[2]) - start
        start = start if resumed else 0
        total = None if missing is None else start + missing
        with (
            open(partial, "ab" if resumed else "wb", opener=_open_no_link) as file,
            _ProgressBar(total=total, initial=start, desc=partial.stem, unit="B", unit_scale=True, disable=None) as bar,
        ):
            for chunk in _read_chunks(response):
                file.write(chunk)
                bar.update(len(chunk))
            size = file.tell()
    if total is not None and size < total:
        raise _MirrorError(f"the connection was cut after {size} of {total} bytes", retry=True)
    return resumed


def _open_no_link(path: str, flags: int) -> int:
    """Open a file whose name is known beforehand, because the next process continues it; a link planted there fails."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _open(url: str, start: int, partial: Path) -> HTTPResponse:
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        return cast(HTTPResponse, urlopen(request, timeout=_TIMEOUT))
    except HTTPError as error:
        error.close()
        if error.code == 416:  # the partial file is as long as the file or longer, and is not the file
            partial.unlink()
        raise _MirrorError(f"HTTP {error.code} {error.reason}", retry=error.code == 416) from error
    except (OSError, HTTPException) as error:
        raise _MirrorError(str(error.reason if isinstance(error, URLError) else error), retry=False) from error


def _read_chunks(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the bytes as they come. Only reading is guarded: a full disk is not an error of the mirror."""
    try:
        while chunk := response.read1(1 << 16):  # read would drop what came just before a cut
            yield chunk
    except (OSError, HTTPException) as error:
        raise _MirrorError(f"the connection was cut ({error})", retry=True) from error
