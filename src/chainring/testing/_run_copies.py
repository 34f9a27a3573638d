"""Copies of runs in object stores for replays: the files of a run, and the snapshot with which a replay begins."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from chainring._files import is_url
from chainring._messages import warn
from chainring.serializers._store import (
    MANIFEST,
    CorruptError,
    DirectorySnapshot,
    Manifest,
    Place,
    SavedSnapshot,
    Store,
    format_manifest,
    open_store,
)
from chainring.testing._replaying import require_run, saved_trainers
from chainring.testing._run_files import fetch_files, fetch_run, require_no_snapshot
from chainring.training._run_directory import RECORD


def local_run(place: Place, directory: Path) -> tuple[Path, Store]:
    """Return the directory of a run and its snapshots; of one at an address the directory has copies of its files.

    Raises:
        FileNotFoundError: there is no run.
        NoReplay: it is a snapshot.
        ValueError: it is a snapshot in an object store.
    """
    given = os.fspath(place)
    if not is_url(given):
        run = require_run(place)
        return run, open_store(run)
    require_no_snapshot(given)
    store = open_store(given)
    fetch_run(given, directory)
    if not (directory / RECORD).exists() and next(saved_trainers(store), None) is None:
        raise FileNotFoundError(f"{given} holds no run: neither {RECORD} nor a snapshot")
    return directory, store


def copy_nearest(store: Store, directory: Path, latest: int) -> None:
    """Copy the latest sound snapshot of a run in an object store, up to an iteration, with the files that belong to it."""
    for saved, manifest, _ in saved_trainers(store, latest):
        if saved.is_local or (directory / saved.name).exists():
            return
        try:
            _copy(saved, manifest, directory)
        except FileNotFoundError:  # removed by the run, which continues
            continue
        except CorruptError as error:
            warn(f"snapshot {saved} is skipped: {error}")
            continue
        fetch_files(store.place, manifest.beside, directory)
        return


def _copy(saved: SavedSnapshot, manifest: Manifest, directory: Path) -> None:
    target, draft = directory / saved.name, directory / ".copied"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    total = sum(size for size, _ in manifest.files.values())
    title = f"copy {saved.name}"
    with tqdm(desc=title, total=total, unit="B", unit_scale=True, delay=2.0, file=sys.stderr, disable=None) as bar:
        for name, (size, _) in manifest.files.items():
            saved.open(name, manifest).copy_to(draft / name)
            bar.update(size)
    (draft / MANIFEST).write_bytes(format_manifest(replace(manifest, folder="")))
    DirectorySnapshot(draft).verify()
    draft.rename(target)
