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
    results = [_verify_file(located)] if isinstance(located, StoredFile) else list(map(_verify_snapshot, located))
    if options.json:
        sound = all(error is None for _, error in results)
        print_json({"sound": sound, "checked": [{**facts, "error": error and str(error)} for facts, error in results]})
    else:
        for facts, error in results:
            if error is None:
                print(_sentence(facts))
    errors = [error for _, error in results if error is not None]
    if errors:
        error_class = NewerFormat if all(isinstance(error, NewerFormat) for error in errors) else CorruptError
        raise error_class("\n".join(map(printable, errors)))


_Result = tuple[dict[str, Any], CorruptError | None]
"""The facts about a snapshot or a file, and the error found in it."""


def _verify_snapshot(saved: SavedSnapshot) -> _Result:
    try:
        manifest = saved.verify()
    except CorruptError as error:
        return {"path": saved.path, "sound": None if isinstance(error, NewerFormat) else False}, error
    facts = {"path": saved.path, "sound": True, "iteration": manifest.iteration, "files": len(manifest.files)}
    return {**facts, "bytes": sum(size for size, _ in manifest.files.values())}, None


def _verify_file(file: StoredFile) -> _Result:
    if describe_foreign_file(file) is not None:
        raise ValueError(f"{file.path} is {describe_file(file)}")
    try:
        tensors, has_checksum = _safetensors.verify_file(file)
    except ValueError as error:
        return {"path": file.path, "sound": False}, CorruptError(str(error))
    facts = {"path": file.path, "sound": True, "tensors": tensors, "bytes": file.size}
    return {**facts, "has_checksum": has_checksum}, None


def _sentence(facts: dict[str, Any]) -> str:
    size = f"{facts['bytes']:,} bytes"
    if "iteration" in facts:
        verdict = f"is what was written: iteration {facts['iteration']}, {facts['files']} files, {size}"
    elif facts["has_checksum"]:
        verdict = f"is what was written: {facts['tensors']} tensors, {size}"
    else:
        verdict = f"can be read, and has no checksum: another program wrote it: {facts['tensors']} tensors, {size}"
    return f"{printable(facts['path'])} {verdict}"
