"""Which snapshot a path on the command line means, and what it is if it means none."""

from __future__ import annotations

from pathlib import Path

from chainring.cli._kind import refusal
from chainring.serializers.manifest import MANIFEST
from chainring.serializers.store import Store


def find(directory: str) -> Path:
    """The snapshot itself, or the newest of those in the directory of a run, see `snapshots`."""
    return snapshots(directory)[0]


def snapshots(directory: str) -> list[Path]:
    """The snapshot itself, or all in the directory of a run, the newest first.

    Raises:
        FileNotFoundError: there is neither; the error says what there is, and what to give.
        CorruptError: it is a snapshot that has lost its manifest.
    """
    path = Path(directory)
    if directory and (path / MANIFEST).exists():
        return [path]
    names = Store(path).names() if directory and path.is_dir() else []
    if not names:
        raise refusal(directory)
    return [path / name for name in names]


def printable(text: object) -> str:
    """Text out of a file that may come from anywhere, without what would steer the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))
