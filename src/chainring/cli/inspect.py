"""``chainring inspect PATH`` and ``chainring verify PATH``: what a snapshot or a model's file holds, and if it is sound."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chainring._files import below_home, is_url
from chainring._messages import list_names, printable
from chainring._places.base import StoredFile
from chainring._runs.finished import FinishedRun, as_mapping, describe_file, describe_foreign_file, is_model, locate
from chainring.cli._common import add_command, show
from chainring.serializers._safetensors import read_entries, verify_file
from chainring.serializers._store import THINNED, CorruptError, NewerFormat, SavedSnapshot, Thinned, split
from chainring.training._run_directory import read_record

_NOTES = ("error", "not bit-exact", "left out")
_MIN_WIDTH = 60
_INSPECT = """
Show what a snapshot holds: the iteration, the versions that wrote it, and
each tensor with its dtype, shape and bytes; and which devices of the run have
computed wrong, if audits found any. Only manifest and headers are read;
`chainring verify` reads every byte.

examples:
  chainring inspect result                  the newest snapshot of a run
  chainring inspect result/snapshot_iter_150 | grep optimizer
  chainring inspect --json result | jq .iteration
  chainring inspect s3://bucket/run         the same in an object store

exit status:
  0  it is shown
  1  the snapshot is damaged
  2  there is no snapshot"""
_VERIFY = """
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
    parser = add_command(commands, "inspect", _inspect, "show what a snapshot holds: versions, tensors, bytes", _INSPECT)
    parser.add_argument("path", metavar="PATH", help="a snapshot, a run, for its newest snapshot, or the file of a model")
    parser = add_command(commands, "verify", _verify, "compare every byte of saved files with their checksums", _VERIFY)
    parser.add_argument("path", metavar="PATH", help="a snapshot, a run, for all of its snapshots, or the file of a model")


def _inspect(options: argparse.Namespace) -> None:
    located = locate(options.path)
    if isinstance(located, StoredFile):
        if not is_model(located):
            raise FileNotFoundError(f"{located.path} is {describe_file(located)}")
        tensors = _tensors_of(located)
        lines = [f"{printable(located.path)}: the file of a model", *_table(tensors, located.size)]
        show(options, {"file": located.path, "bytes": located.size, "tensors": tensors}, lines)
        return
    saved, *others = located
    try:
        manifest = saved.verify(content=False)
    except Thinned as error:
        manifest = error.manifest
    files = [saved.open(name, manifest) for name in sorted(manifest.files) if name.endswith(".safetensors")]
    code = None if is_url(options.path) else _describe_code(Path(below_home(options.path)))
    sizes = {name: size for name, (size, _) in sorted(manifest.files.items())}
    about: dict[str, Any] = {
        "directory": saved.path, "iteration": manifest.iteration, "epoch": manifest.about.get("epoch"),
        "versions": as_mapping(manifest.about.get("versions")), "code": code,
        "notes": {key: manifest.about[key] for key in _NOTES if key in manifest.about}, "faults": [], "commands": [],
        "bytes": sum(sizes.values()), "files": sizes, "tensors": [tensor for file in files for tensor in _tensors_of(file)],
    }  # fmt: skip
    from chainring.training._control import describe_entry  # which few runs need

    with suppress(OSError, ValueError):  # it was saved elsewhere than in a run
        run = FinishedRun(str(split(saved.path)[0]))
        about["faults"], commands = run.faults(), run.record.get("commands", ())
        done = [entry for entry in commands if "refused" not in entry and entry["iteration"] <= manifest.iteration]
        about["commands"] = done
    epoch = f", epoch {about['epoch']}" if about["epoch"] else ""
    lines = [f"{saved.path}: iteration {about['iteration']}{epoch}"]
    if about["versions"]:
        lines.append("written with " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    if THINNED in manifest.about:
        about["thinned"] = manifest.about[THINNED]
        lines += [str(Thinned(saved.path, manifest)), *(f"  {path}  {text}" for path, text in about["thinned"].items())]
    if others:
        lines.append(f"also there: {list_names([other.name for other in others], 3)}")
    lines += [f"code: {code}; `chainring reproduce` makes the run again"] if code else []
    lines += [f"{note}: {text}" for note, text in about["notes"].items()]
    lines += [f"found by an audit of the run: {fault}" for fault in about["faults"]]
    lines += [f"commanded: {describe_entry(entry)}" for entry in about["commands"]]
    show(options, about, [*map(printable, lines), *_table(about["tensors"], about["bytes"])])


def _describe_code(run: Path) -> str | None:
    """Return in words of which code a run is, if this is the directory of one that says so."""
    source = as_mapping(as_mapping(read_record(run).get("reproduction")).get("source"))
    if not source.get("script"):
        return None
    commit, changes = str(source.get("commit") or "")[:12], " with changes" if source.get("difference") else ""
    return f"{source['script']}, " + (f"commit {commit}{changes}" if commit else "in no repository")


def _table(tensors: Sequence[Mapping[str, Any]], size: int) -> Iterator[str]:
    """Yield a line for each tensor, on a terminal no wider than that: the middle of a long name is left out."""
    rows = [
        (printable(t["name"]), t["dtype"], "x".join(map(str, t["shape"])) or "scalar", f"{t['bytes']:,}") for t in tensors
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    if sys.stdout.isatty():
        widths[0] = min(widths[0], max(_MIN_WIDTH, shutil.get_terminal_size().columns) - sum(widths[1:]) - 8)
    for name, dtype, shape, count in rows:
        if len(name) > widths[0]:  # its beginning names the owner, its end the tensor
            start = (widths[0] - 3) // 2
            name = f"{name[:start]}...{name[len(name) - (widths[0] - 3 - start) :]}"
        yield f"  {name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {count:>{widths[3]}}"
    yield f"{len(rows)} tensors, {sum(t['bytes'] for t in tensors):,} bytes; files of {size:,} bytes"


def _tensors_of(file: StoredFile) -> list[dict[str, Any]]:
    try:
        return [
            {"name": name, "dtype": entry["dtype"], "shape": entry["shape"], "bytes": end - start}
            for name, entry in sorted(read_entries(file)[1].items())
            for start, end in [entry["data_offsets"]]
        ]
    except (ValueError, OSError) as error:
        raise ValueError(f"{file.path} cannot be read: {error}; `chainring verify` tells whether it is damaged") from error


def _verify(options: argparse.Namespace) -> None:
    """Verify each snapshot, also those after a damaged one, print the results, and raise the errors as one."""
    located = locate(options.path)
    checked: list[dict[str, Any]] = []
    lines, errors = [], []
    for saved in [located] if isinstance(located, StoredFile) else located:
        try:
            facts, verdict = _verified(saved)
        except CorruptError as error:
            sound = None if isinstance(error, NewerFormat) else False
            checked.append({"path": saved.path, "sound": sound, "error": str(error)})
            errors.append(error)
        else:
            checked.append({"path": saved.path, "sound": True, **facts, "error": None})
            lines.append(f"{printable(saved.path)} {verdict}")
    show(options, {"sound": not errors, "checked": checked}, lines)
    if errors:
        error_class = NewerFormat if all(isinstance(error, NewerFormat) for error in errors) else CorruptError
        raise error_class("\n".join(map(printable, errors)))


def _verified(saved: SavedSnapshot | StoredFile) -> tuple[dict[str, Any], str]:
    """Return the facts about a snapshot or a file, and in words; raise a `CorruptError` where it is damaged."""
    if isinstance(saved, SavedSnapshot):
        try:
            manifest = saved.verify()
        except Thinned as error:
            iteration = error.manifest.iteration
            words = f"was thinned: it has the digests of iteration {iteration}, which `chainring replay` makes again"
            return {"thinned": iteration}, words
        count, size = len(manifest.files), sum(size for size, _ in manifest.files.values())
        words = f"is what was written: iteration {manifest.iteration}, {count} files, {size:,} bytes"
        return {"iteration": manifest.iteration, "files": count, "bytes": size}, words
    if describe_foreign_file(saved) is not None:
        raise ValueError(f"{saved.path} is {describe_file(saved)}")
    try:
        tensors, has_checksum = verify_file(saved)
    except ValueError as error:
        raise CorruptError(str(error)) from error
    words = "is what was written" if has_checksum else "can be read, and has no checksum: another program wrote it"
    facts = {"tensors": tensors, "bytes": saved.size, "has_checksum": has_checksum}
    return facts, f"{words}: {tensors} tensors, {saved.size:,} bytes"
