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
_TRIES = 3  # of one mirror, where the connection is cut
_CHUNK = 1 << 16


class _MirrorError(Exception):
    """A mirror did not give the file; ``again`` says whether asking it again may help."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


class _Bar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which outlives the bar."""

    monitor_interval = 0


@dataclass(frozen=True)
class RemoteFiles:
    """Files that belong together: what they are called, where they can be had, and how to know them.

    Args:
        name: the directory of the files, below the one where datasets are kept.
        mirrors: addresses that a file name is put behind, in the order in which they are tried.
        sha256: the SHA-256 of each file, in hexadecimal, by the file's name.

    Raises:
        ValueError: there is no mirror, a name is no plain file name, or a SHA-256 is not 64 hexadecimal digits.
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
        """Where each file is, by its name; files that are missing or damaged are downloaded first.

        They are kept in ``$CHAINRING_DATASET_ROOT/<name>``, by default in ``~/.cache/chainring/<name>``. A download
        that was cut goes on where it stopped, also in the next process; of several processes one downloads and the
        others wait. Files that are all there are only read.

        Raises:
            OSError: no mirror gave a file; the message lists every file that is missing, where to put it and its
                SHA-256. Or the directory cannot be written.
        """
        folder = _root() / self.name
        paths = {name: folder / name for name in self.sha256}
        missing = self._missing(paths)
        if missing:
            with _locked(folder):
                for name in self._missing(missing):  # another process may have brought some meanwhile
                    self._fetch(name, paths)
        return paths

    def _missing(self, paths: Mapping[str, Path]) -> dict[str, Path]:
        return {name: path for name, path in paths.items() if _sha256(path) != self.sha256[name]}

    def _fetch(self, name: str, paths: Mapping[str, Path]) -> None:
        part = paths[name].with_name(f"{name}.part")
        failures = []
        for mirror in self.mirrors:
            url = f"{mirror.rstrip('/')}/{name}"
            try:
                _complete(url, part, self.sha256[name])
            except _MirrorError as error:
                failures.append(f"  {url}: {error}")
            else:
                # No fsync: a file that a power cut tears has another SHA-256, and is downloaded anew.
                os.replace(part, paths[name])
                return
        raise OSError(
            f"{name} could not be downloaded:\n"
            + "\n".join(failures)
            + "\nRun again when there is a network: it goes on where this stopped. Or put these files there yourself:\n"
            + "\n".join(f"  {path}  (SHA-256 {self.sha256[name]})" for name, path in self._missing(paths).items())
            + f"\nTo keep datasets in another directory than {_root()}, set the environment variable {_VARIABLE}."
        )


def _root() -> Path:
    return Path(os.environ.get(_VARIABLE) or "~/.cache/chainring").expanduser()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the directory, and holds it against other processes and threads; waits until it is free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise OSError(
            f"datasets are kept in a directory that can be written, and {folder} is none ({error}): set the environment "
            f"variable {_VARIABLE} to another"
        ) from error
    # The file stays: unlinked, it could be locked by one process while another locks a new one of the same name.
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str | None:
    """The SHA-256 of a file, ``None`` where there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(url: str, part: Path, sha256: str) -> None:
    """Downloads what a part file lacks, as often as that helps, until it has the SHA-256."""
    for tries_left in reversed(range(_TRIES)):
        if _sha256(part) == sha256:  # the process before was killed between the last byte and the rename
            return
        try:
            resumed = _continue(url, part)
            digest = _sha256(part)
            if digest == sha256:
                return
            part.unlink()
            # What was there before may be the wrong half, so the file deserves another try from its first byte.
            raise _MirrorError(f"this file has the SHA-256 {digest}", again=resumed)
        except _MirrorError as error:
            if not (error.again and tries_left):
                raise


def _continue(url: str, part: Path) -> bool:
    """Writes the rest of a file behind the part, or the whole file anew; says whether there was a part to go on from."""
    start = part.stat().st_size if part.is_file() else 0
    with _opened(url, start, part) as response:
        resumed = start > 0 and response.status == 206
        missing = response.length  # None where the server does not say it
        if resumed:
            given = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if given is None or int(given[1]) != start:
                part.unlink()
                raise _MirrorError(f"asked for the bytes from {start}, it sent others", again=True)
            if given[2] != "*":
                missing = int(given[2]) - start
        start = start if resumed else 0
        with open(part, "ab" if resumed else "wb", opener=_open_no_link) as file:
            total = None if missing is None else start + missing
            with _Bar(total=total, initial=start, desc=part.stem, unit="B", unit_scale=True, disable=None) as bar:
                for chunk in _chunks(response):
                    file.write(chunk)
                    bar.update(len(chunk))
            size = file.tell()
    if total is not None and size < total:
        raise _MirrorError(f"the connection was cut after {size} of {total} bytes", again=True)
    return resumed


def _open_no_link(path: str, flags: int) -> int:
    """Open a file whose name is known beforehand, because the next process goes on with it; a link planted there fails."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _opened(url: str, start: int, part: Path) -> HTTPResponse:
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        return cast(HTTPResponse, urlopen(request, timeout=_TIMEOUT))
    except HTTPError as error:
        error.close()
        if error.code == 416:  # the part is as long as the file or longer, and is not the file
            part.unlink()
        raise _MirrorError(f"HTTP {error.code} {error.reason}", again=error.code == 416) from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise _MirrorError(str(reason), again=False) from error


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The bytes as they come. Only reading is guarded: that a disk is full is no fault of the mirror."""
    while True:
        try:
            chunk = response.read1(_CHUNK)  # read would drop what came just before a cut
        except (OSError, HTTPException) as error:
            raise _MirrorError(f"the connection was cut ({error})", again=True) from error
        if not chunk:
            return
        yield chunk
