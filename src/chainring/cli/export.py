"""``chainring export DIR FILE``: write the plain model of a snapshot."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from chainring.cli._common import add_command, print_json, printable, snapshots
from chainring.serializers._checkpoint import model_prefix, read_state, save_tensors
from chainring.serializers._store import read_manifest

_MODEL = "updater/model:"
_HELP = """
Write the model of a snapshot as one safetensors file with the names of its
state_dict, which any reader of the format opens. The snapshot is verified
first. An existing file is not overwritten.

examples:
  chainring export result mlp.safetensors      the newest snapshot of a run
  chainring export result/best gen.safetensors --model gen
  chainring export --json result mlp.safetensors | jq .tensors

exit status:
  0  the file is written
  1  the snapshot is damaged
  2  there is no snapshot or no such model, or the file exists"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "export", run, "write the model of a snapshot as one safetensors file", _HELP)
    parser.add_argument("directory", metavar="DIR", help="a snapshot, or the directory of a run, for its newest snapshot")
    parser.add_argument("file", metavar="FILE", help="the file to write")
    parser.add_argument("--model", metavar="NAME", help="name of the model, where there are several (default: main)")


def run(options: argparse.Namespace) -> None:
    """Write the file."""
    directory, file = snapshots(options.directory)[0], Path(options.file)
    if os.path.lexists(file):
        raise FileExistsError(f"{file} exists and is not overwritten; give another name")
    own = read_manifest(directory).about.get("own state of modules")  # beside parameters and buffers
    beside = set(map(str, own)) if isinstance(own, list) else set()
    state = {key: value for key, value in read_state(directory).items() if key not in beside}
    names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
    if options.model is None and len(names) > 1 and "main" not in names:
        raise ValueError(f"{directory} has several models; name one by --model: {', '.join(names)}")
    prefix = f"{_MODEL}{options.model}/" if options.model else model_prefix(state, directory)
    found = {key.removeprefix(prefix).replace("/", "."): value for key, value in state.items() if key.startswith(prefix)}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if not prefix or not tensors:
        has = f"it has {', '.join(names)}" if names else "`chainring inspect` lists what it has"
        raise ValueError(f"{directory} has no model {options.model or 'of an updater'}; {has}")
    left_out = sorted(name for name, value in found.items() if value is None)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(file, tensors)
    if options.json:
        model = prefix.removeprefix(_MODEL).rstrip("/")
        facts = {"file": str(file), "bytes": file.stat().st_size, "directory": str(directory), "model": model}
        print_json({**facts, "tensors": sorted(tensors), "left_out": left_out})
        return
    if left_out:
        taken = f"{directory} was taken with frozen=False: {len(left_out)} parameters are not in it, such as {left_out[0]}"
        print(printable(taken))
    print(printable(f"{file}: {len(tensors)} tensors of {directory}"))
