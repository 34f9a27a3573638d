"""``chainring verify PATH``: whether what was saved still is what was written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from chainring.cli._snapshot import printable, snapshots
from chainring.serializers import seal, tensor_file
from chainring.serializers.manifest import CorruptError, verify


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="read every byte of what was saved and compare it with its checksums",
        description="Reads every byte of what was saved and compares it with its checksums. Exit status 1 means damage.",
    )
    what = "a snapshot, the directory of a run, all of whose snapshots are read, or the file of a model"
    parser.add_argument("path", metavar="PATH", help=what)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Verifies each snapshot and says so.

    Raises:
        CorruptError: one of them is damaged; those after it have been read too.
    """
    path = Path(options.path)
    if path.is_file():
        _verify_file(path)
        return
    damaged = []
    for directory in snapshots(options.path):
        try:
            manifest = verify(directory)
        except CorruptError as error:
            damaged.append(str(error))
            continue
        size, count = sum(size for size, _ in manifest.files.values()), len(manifest.files)
        shown = printable(directory)
        print(f"{shown} is what was written: iteration {manifest.iteration}, {count} files, {size:,} bytes")
    if damaged:
        raise CorruptError("\n".join(map(printable, damaged)))


def _verify_file(path: Path) -> None:
    try:
        is_sealed = seal.check_seal(path)
        tensors = tensor_file.read(path)
    except ValueError as error:
        raise CorruptError(str(error)) from error
    said = "is what was written" if is_sealed else "can be read, and has no checksum: another program wrote it"
    print(f"{path} {said}: {len(tensors)} tensors, {path.stat().st_size:,} bytes")
