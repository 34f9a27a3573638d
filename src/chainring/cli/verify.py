"""``chainring verify PATH``: compare saved files with their checksums."""

from __future__ import annotations

import argparse
from typing import Any

from chainring._places.base import StoredFile
from chainring._runs.locate import describe_file, describe_foreign_file, locate
from chainring.cli._common import add_command, print_json, printable
from chainring.serializers import _safetensors
from chainring.serializers._store import CorruptError, NewerFormat, SavedSnapshot

_HELP = """
Read every byte of a snapshot or of a model's file, and compare it with the
checksums that were written with it. In the directory of a run all snapshots
are verified, also those after a damaged one.

examples:
  chainring verify result                      all snapshots of a run
  chainring verify result/mlp.model            the file of a model
  chainring verify s3://bucket/run             the same in an object store
  chainring verify result && rsync -a result elsewhere:

exit status:
  0  every byte is what was written
  1  a snapshot or the file is damaged
  2  there is nothing to verify, or a newer version wrote it"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "verify", run, "compare every byte of saved files with their checksums", _HELP)
    paths = "a snapshot, the directory of a run, for all of its snapshots, or the file of a model"
    parser.add_argument("path", metavar="PATH", help=paths)


def run(options: argparse.Namespace) -> None:
    """Verify each snapshot, also those after a damaged one, print the results, and raise the errors as one."""
    located = locate(options.path)
    checked: list[dict[str, Any]] = []
    errors = []
    for saved in [located] if isinstance(located, StoredFile) else located:
        try:
            checked.append({"path": saved.path, "sound": True, **_verify(saved), "error": None})
        except CorruptError as error:
            sound = None if isinstance(error, NewerFormat) else False
            checked.append({"path": saved.path, "sound": sound, "error": str(error)})
            errors.append(error)
    if options.json:
        print_json({"sound": not errors, "checked": checked})
    else:
        for facts in checked:
            if facts["sound"]:
                print(f"{printable(facts['path'])} {_verdict(facts)}")
    if errors:
        error_class = NewerFormat if all(isinstance(error, NewerFormat) for error in errors) else CorruptError
        raise error_class("\n".join(map(printable, errors)))


def _verdict(facts: dict[str, Any]) -> str:
    size = f"{facts['bytes']:,} bytes"
    if "iteration" in facts:
        return f"is what was written: iteration {facts['iteration']}, {facts['files']} files, {size}"
    if facts["has_checksum"]:
        return f"is what was written: {facts['tensors']} tensors, {size}"
    return f"can be read, and has no checksum: another program wrote it: {facts['tensors']} tensors, {size}"


def _verify(saved: SavedSnapshot | StoredFile) -> dict[str, Any]:
    """Return the facts about a snapshot or a file; raise a `CorruptError` where it is damaged."""
    if isinstance(saved, SavedSnapshot):
        manifest = saved.verify()
        size = sum(size for size, _ in manifest.files.values())
        return {"iteration": manifest.iteration, "files": len(manifest.files), "bytes": size}
    if describe_foreign_file(saved) is not None:
        raise ValueError(f"{saved.path} is {describe_file(saved)}")
    try:
        tensors, has_checksum = _safetensors.verify_file(saved)
    except ValueError as error:
        raise CorruptError(str(error)) from error
    return {"tensors": tensors, "bytes": saved.size, "has_checksum": has_checksum}
