"""``chainring export DIR FILE``: the plain model out of a snapshot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch import Tensor

from chainring.cli._snapshot import find
from chainring.serializers import seal
from chainring.serializers.saving import only_model, read_state


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "export",
        help="write the model of a snapshot as one safetensors file",
        description="Writes the model of a snapshot as one safetensors file with the names of its state_dict, which any "
        "reader of the format opens. A file that is there is not written over.",
    )
    parser.add_argument("directory", metavar="DIR", help="a snapshot, or the directory of a run, whose newest is taken")
    parser.add_argument("file", metavar="FILE", help="the file to write")
    parser.add_argument("--model", metavar="NAME", help="which model, where there are several; by default main")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Writes the file."""
    directory = find(options.directory)
    state = read_state(directory)
    prefix = f"updater/model:{options.model}/" if options.model else only_model(state, directory)
    found = {key.removeprefix(prefix).replace("/", "."): value for key, value in state.items() if key.startswith(prefix)}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if not prefix or not tensors:
        raise ValueError(
            f"{directory} has no model {options.model or 'of an updater'}; `chainring inspect` lists what it has"
        )
    left_out = sorted(name for name, value in found.items() if value is None)
    if left_out:
        print(f"{directory} was taken with frozen=False: {len(left_out)} parameters are not in it, such as {left_out[0]}")
    Path(options.file).parent.mkdir(parents=True, exist_ok=True)
    seal.write_sealed(options.file, tensors)
    print(f"{options.file}: {len(tensors)} tensors of {directory}")
