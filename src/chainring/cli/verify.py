"""``chainring verify PATH``: whether what was saved still is what was written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from chainring.cli._common import add_command, add_json, kind_of_file, print_json, printable, snapshots, what_is_foreign
from chainring.serializers import _safetensors
from chainring.serializers._store import CorruptError, NewerFormat, verify

_DESCRIPTION = """
Reads every byte of what was saved and compares it with the checksums that were
written with it. Of the directory of a run, all snapshots are read, also those after
a damaged one."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "verify",
        purpose="compare every byte of what was saved with its checksums",
        description=_DESCRIPTION,
        examples=[
            "chainring verify result                      all snapshots of a run",
            "chainring verify result/mlp.model            the file of a model",
            "chainring verify result && rsync -a result elsewhere:",
        ],
        status=[
            "all is what was written",
            "something is damaged",
            "there is nothing to verify, or a newer version wrote it",
        ],
    )
    what = "a snapshot, the directory of a run, all of whose snapshots are read, or the file of a model"
    parser.add_argument("path", metavar="PATH", help=what)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Verifies each snapshot and says so.

    Raises:
        CorruptError: one of them is damaged; those after it have been read too.
        NewerFormat: none is, and one is of a newer format.
    """
    path = Path(options.path)
    looked = [_look_at_file(path)] if path.is_file() else [_look_at(directory) for directory in snapshots(options.path)]
    if options.json:
        sound = all(error is None for _, error in looked)
        print_json({"sound": sound, "checked": [{**facts, "error": error and str(error)} for facts, error in looked]})
    else:
        for facts, error in looked:
            if error is None:
                print(_sentence(facts))
    errors = [error for _, error in looked if error is not None]
    if errors:
        kind = NewerFormat if all(isinstance(error, NewerFormat) for error in errors) else CorruptError
        raise kind("\n".join(map(printable, errors)))


Looked = tuple[dict[str, Any], CorruptError | None]
"""What is known of a snapshot or a file, and what is wrong with it."""


def _look_at(directory: Path) -> Looked:
    facts: dict[str, Any] = {"path": str(directory)}
    try:
        manifest = verify(directory)
    except CorruptError as error:
        return {**facts, "sound": None if isinstance(error, NewerFormat) else False}, error
    size = sum(size for size, _ in manifest.files.values())
    return {**facts, "sound": True, "iteration": manifest.iteration, "files": len(manifest.files), "bytes": size}, None


def _look_at_file(path: Path) -> Looked:
    if what_is_foreign(path) is not None:
        raise ValueError(f"{path} is {kind_of_file(path)}")
    try:
        has_checksum = _safetensors.verify_checksum(path)
        tensors = len(_safetensors.read(path))
    except ValueError as error:
        return {"path": str(path), "sound": False}, CorruptError(str(error))
    facts = {"path": str(path), "sound": True, "tensors": tensors, "bytes": path.stat().st_size}
    return {**facts, "has_checksum": has_checksum}, None


def _sentence(facts: dict[str, Any]) -> str:
    size = f"{facts['bytes']:,} bytes"
    if "iteration" in facts:
        said = f"is what was written: iteration {facts['iteration']}, {facts['files']} files, {size}"
    elif facts["has_checksum"]:
        said = f"is what was written: {facts['tensors']} tensors, {size}"
    else:
        said = f"can be read, and has no checksum: another program wrote it: {facts['tensors']} tensors, {size}"
    return f"{printable(facts['path'])} {said}"
