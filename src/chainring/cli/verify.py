"""``chainring verify DIR``: whether a snapshot still is what was written."""

from __future__ import annotations

import argparse
from typing import Any

from chainring.cli._snapshot import find
from chainring.serializers.manifest import verify


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="read every byte of a snapshot and compare it with its checksums",
        description="Reads every byte of a snapshot and compares it with its checksums. Exit status 1 means damage.",
    )
    parser.add_argument("directory", metavar="DIR", help="a snapshot, or the directory of a run, whose newest is read")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Verifies the snapshot and says so."""
    directory = find(options.directory)
    manifest = verify(directory)
    total = sum(size for size, _ in manifest.files.values())
    print(f"{directory} is what was written: iteration {manifest.iteration}, {len(manifest.files)} files, {total:,} bytes")
