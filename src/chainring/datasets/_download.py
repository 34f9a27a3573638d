"""RemoteFiles: files from the network, downloaded once, verified, and cached in one directory."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from tqdm import tqdm

from chainring._files import atomic_write

_VARIABLE = "CHAINRING_DATASET_ROOT"
_TIMEOUT = 30.0  # seconds without a byte


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a dataset on the network: their names, mirrors and checksums.

    Args:
        name: the subdirectory of the files in the cache directory.
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

        They are kept in ``$CHAINRING_DATASET_ROOT/<name>``, by default in ``~/.cache/chainring/<name>``. If several
        processes call this, one downloads and the others wait. Files that exist are only read.

        Returns:
            The path of each file, by its name.

        Raises:
            OSError: no mirror provided a file; the message lists every missing file, where to put it and its SHA-256. Or
                the directory is not writable.
        """
        root = Path(os.environ.get(_VARIABLE) or "~/.cache/chainring").expanduser()
        directory = root / self.name
        paths = {name: directory / name for name in self.sha256}
        if not self._missing(paths):
            return paths
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / ".lock").open("ab")  # it stays: a new file of this name would not be locked
        except OSError as error:
            raise OSError(
                f"datasets are kept in a directory that can be written, and {directory} cannot ({error}): set the "
                f"environment variable {_VARIABLE} to another"
            ) from error
        import filelock  # for those who download

        with lock:
            filelock.lock_descriptor(lock.fileno())
            for name in self._missing(paths):  # another process may have downloaded some meanwhile
                self._download_file(name, paths)
        return paths

    def _missing(self, paths: Mapping[str, Path]) -> list[str]:
        return [name for name, path in paths.items() if _sha256(path) != self.sha256[name]]

    def _download_file(self, name: str, paths: Mapping[str, Path]) -> None:
        failures = []
        for mirror in self.mirrors:
            url = f"{mirror.rstrip('/')}/{name}"
            try:
                return _download(url, paths[name], self.sha256[name])
            except _MirrorError as error:
                failures.append(f"  {url}: {error}")
        raise OSError(
            f"{name} could not be downloaded:\n"
            + "\n".join(failures)
            + "\nRun again when there is a network. Or put these files there yourself:\n"
            + "\n".join(f"  {paths[name]}  (SHA-256 {self.sha256[name]})" for name in self._missing(paths))
            + f"\nTo keep datasets in another directory, set the environment variable {_VARIABLE}."
        )


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _MirrorError(Exception):
    """A mirror did not give the file."""


class _ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which outlives the bar."""

    monitor_interval = 0


def _download(url: str, path: Path, sha256: str) -> None:
    """Download a file; one that is cut or has another SHA-256 never takes the place of ``path``."""
    try:
        response = urlopen(url, timeout=_TIMEOUT)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise _MirrorError(str(error)) from error
    digest, total = hashlib.sha256(), response.length
    bar = _ProgressBar(total=total, desc=path.name, unit="B", unit_scale=True, disable=None)
    with response, bar, atomic_write(path) as file:
        while True:
            try:
                chunk = response.read(1 << 16)
            except (OSError, HTTPException) as error:  # only of reading: a full disk is not an error of the mirror
                raise _MirrorError(f"the connection was cut ({error})") from error
            if not chunk:
                break
            file.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
        if total is not None and file.tell() < total:
            raise _MirrorError(f"the connection was cut after {file.tell()} of {total} bytes")
        if digest.hexdigest() != sha256:
            raise _MirrorError(f"this file has the SHA-256 {digest.hexdigest()}")
