"""What lies at a path or an address: a run, a snapshot or a file; and if it is none of them, what to give instead."""

from __future__ import annotations

import os
from contextlib import suppress

from chainring._files import is_url
from chainring._places.base import MANIFEST, StoredFile
from chainring.serializers._safetensors import is_pickle
from chainring.serializers._store import (
    Place,
    SavedSnapshot,
    explain_absence,
    find_snapshot,
    has_name,
    open_file,
    open_store,
    split,
)
from chainring.training._run_directory import RECORD

_ASCII = frozenset(b"\t\n\r") | frozenset(range(32, 127))


def locate(place: Place) -> StoredFile | list[SavedSnapshot]:
    """Return a file, a snapshot alone, or all snapshots of a run, the newest first; an error tells what to give instead."""
    given = os.fspath(place)
    if not given:
        raise ValueError("the path is empty; give a snapshot, or the directory of a run, such as result")
    if not is_url(given) or has_name(given):
        saved = find_snapshot(given)
        if saved.exists():
            return [saved]
        if is_url(given) and saved.name != split(given)[1]:  # a link to nothing
            raise explain_absence(given)
        if is_url(given) or os.path.isfile(given):
            with suppress(FileNotFoundError):
                return open_file(given)
    if is_url(given) or os.path.isdir(given):
        run = open_store(given)
        if names := run.names():
            return [run.snapshot(name) for name in names]
    raise explain_absence(given)


def describe_file(file: StoredFile) -> str:
    """Return words for a file that is not a snapshot, with a remedy."""
    above = file.path.rpartition("/")[0] or "."
    for snapshot in (above, above.rpartition("/")[0]):
        if is_file(f"{snapshot}/{MANIFEST}"):
            return f"one file of the snapshot {snapshot}; give " + ("its address" if is_url(snapshot) else "the directory")
    if is_model(file):
        return "the file of a model, not a snapshot: `chainring inspect` and `chainring verify` take it"
    return describe_foreign_file(file) or f"not a snapshot, which has a {MANIFEST}, nor the file of a model"


def describe_foreign_file(file: StoredFile) -> str | None:
    """Return words for a file that Chainring neither writes nor opens; ``None`` if it may be a model's, sound or not."""
    if is_pickle(file):
        return (
            "a file such as torch.save or NumPy write, which is not opened, because a pickle can run code. In Python, "
            "chainring.serializers.load(path, model) reads its tensors alone, and serializers.save writes them again"
        )
    start = bytes(file.read(0, min(8, file.size)).numpy())
    if len(start) == 8 and _ASCII.issuperset(start):  # as a length of a safetensors header it would be beyond any disk
        run = file.path.rpartition("/")[0] or "."
        remedy = f"; to look at the run it belongs to, give {run}" if is_file(f"{run}/{RECORD}") else ""
        return f"text, not a model{remedy}"
    return None


def is_model(file: StoredFile) -> bool:
    """Return whether a file begins as safetensors does: the length of a header, and the header."""
    start = bytes(file.read(0, min(9, file.size)).numpy())
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= file.size


def is_file(place: str) -> bool:
    """Return whether there is a regular file at a path or an address."""
    if is_url(place) and not has_name(place):
        return False
    try:
        open_file(place)
    except (OSError, ValueError):
        return False
    return True
