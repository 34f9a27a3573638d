"""``chainring inspect DIR``: what a snapshot holds."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from safetensors import safe_open

from chainring.cli._snapshot import find, printable
from chainring.serializers.manifest import look

_NOTES = ("error", "not bit-exact", "left out")
_BITS = {"BOOL": 8, "F4": 4, "C64": 64}


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="what a snapshot holds: iteration, epoch, versions, and every tensor with its shape and dtype",
        description="Shows what a snapshot holds. Only its manifest and the heads of its files are read; "
        "`chainring verify` reads every byte.",
    )
    parser.add_argument("directory", metavar="DIR", help="a snapshot, or the directory of a run, whose newest is shown")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints what the snapshot holds."""
    about = describe(find(options.directory))
    if options.json:
        print(json.dumps(about, indent=1))
        return
    print(
        f"{about['directory']}: iteration {about['iteration']}"
        + (f", epoch {printable(about['epoch'])}" if about["epoch"] else "")
    )
    if about["versions"]:
        print("written with " + ", ".join(printable(f"{name} {version}") for name, version in about["versions"].items()))
    for note, text in about["notes"].items():
        print(f"{printable(note)}: {printable(text)}")
    rows = [
        (printable(t["name"]), t["dtype"], "x".join(map(str, t["shape"])) or "scalar", f"{t['bytes']:,}")
        for t in about["tensors"]
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for row in rows:
        print(f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}")
    print(f"{len(rows)} tensors, {sum(t['bytes'] for t in about['tensors']):,} bytes; files of {about['bytes']:,} bytes")


def describe(directory: Path) -> dict[str, Any]:
    """Iteration, epoch, versions, files and tensors of a snapshot, as plain values."""
    manifest = look(directory)
    tensors = []
    for file in sorted(manifest.files):
        if file.endswith(".safetensors"):
            tensors += _tensors_of(directory / file)
    versions = manifest.about.get("versions")
    return {
        "directory": str(directory),
        "iteration": manifest.iteration,
        "epoch": manifest.about.get("epoch"),
        "versions": versions if isinstance(versions, dict) else {},
        "notes": {key: manifest.about[key] for key in _NOTES if key in manifest.about},
        "bytes": sum(size for size, _ in manifest.files.values()),
        "files": {name: size for name, (size, _) in sorted(manifest.files.items())},
        "tensors": tensors,
    }


def _tensors_of(path: Path) -> list[dict[str, Any]]:
    found = []
    try:
        with safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                shape, dtype = list(part.get_shape()), part.get_dtype()
                bits = _BITS.get(dtype) or int("".join(filter(str.isdigit, dtype.partition("_")[0])))
                found.append({"name": name, "dtype": dtype, "shape": shape, "bytes": math.prod(shape) * bits // 8})
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}; `chainring verify` tells whether it is damaged") from error
    return found
