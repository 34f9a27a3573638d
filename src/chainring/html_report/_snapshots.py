"""The snapshots in the directory of a run, each with its state."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from chainring.serializers.manifest import MANIFEST, CorruptError, Manifest, look
from chainring.serializers.manifest import verify as verify_bytes
from chainring.serializers.store import Store
from chainring.training._directory import pattern_of

VERIFIED, COMPLETE, DAMAGED = "verified", "complete", "damaged"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot.

    Attributes:
        name: of its directory.
        iteration: ``None`` where its manifest cannot be read.
        epoch: completed epochs, as the manifest says, if it does.
        size: bytes of its files.
        state: ``"verified"``, ``"complete"`` (names and sizes agree, the bytes were not read), or ``"damaged"``.
        note: what is wrong with it, or what its manifest notes.
        links: the fixed names that lead to it, such as ``best``.
    """

    name: str
    iteration: int | None
    epoch: int | None
    size: int
    state: str
    note: str
    links: list[str]


def read_snapshots(directory: Path, templates: Iterable[str], *, verify: bool) -> list[Snapshot]:
    """The snapshots, the newest first, after those whose manifest cannot be read.

    Args:
        directory: of the run.
        templates: names of what the run writes. A directory so named that has no manifest is a damaged snapshot.
        verify: whether every byte is read.
    """
    store = Store(directory)
    patterns = [pattern for template in templates if (pattern := _pattern(template)) is not None]
    links: dict[str, list[str]] = {}
    for name in sorted(os.listdir(directory)):
        if not name.startswith(".") and (target := store.linked(name)) is not None:
            links.setdefault(target, []).append(name)
    found = []
    for name, manifest in store.listing():
        is_own = (directory / name / MANIFEST).is_file() or any(pattern.fullmatch(name) for pattern in patterns)
        if is_own and (snapshot := _snapshot(directory / name, manifest, links.get(name, []), verify)) is not None:
            found.append(snapshot)
    return found


def _pattern(template: str) -> re.Pattern[str] | None:
    """The names of snapshots that a template stands for; a name without fields is that of a link or of a file."""
    try:
        return pattern_of(template) if "{" in template else None
    except ValueError:  # a person may have edited the list
        return None


def _snapshot(path: Path, manifest: Manifest | None, links: list[str], verify: bool) -> Snapshot | None:
    """The snapshot, or ``None`` if the run has removed it meanwhile."""
    state, note = VERIFIED if verify else COMPLETE, ""
    try:
        manifest = verify_bytes(path) if verify else look(path)
    except (CorruptError, OSError) as error:
        state, note = DAMAGED, str(error)
    if not path.is_dir():
        return None
    if manifest is None:
        return Snapshot(path.name, None, None, _size(path), state, note, links)
    epoch = manifest.about.get("epoch")
    notes = [
        note,
        *(f"{key}: {manifest.about[key]}" for key in ("error", "not bit-exact", "left out") if key in manifest.about),
    ]
    size = sum(size for size, _ in manifest.files.values())
    return Snapshot(
        path.name,
        manifest.iteration,
        epoch if isinstance(epoch, int) else None,
        size,
        state,
        "; ".join(filter(None, notes)),
        links,
    )


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir() if file.is_file())
