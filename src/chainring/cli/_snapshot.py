"""Which snapshot a directory on the command line means."""

from __future__ import annotations

from pathlib import Path

from chainring.serializers.manifest import MANIFEST
from chainring.serializers.store import Store


def find(directory: str) -> Path:
    """The snapshot itself, or the newest of those in the directory of a run, see `snapshots`."""
    return snapshots(directory)[0]


def snapshots(directory: str) -> list[Path]:
    """The snapshot itself, or all in the directory of a run, the newest first.

    Raises:
        FileNotFoundError: there is neither.
    """
    path = Path(directory)
    if (path / MANIFEST).exists():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}")
    names = Store(path).names()
    if not names:
        raise FileNotFoundError(f"{directory} is no snapshot and holds none: neither has a {MANIFEST}")
    return [path / name for name in names]


def printable(text: object) -> str:
    """Text out of a file that may come from anywhere, without what would steer the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))
