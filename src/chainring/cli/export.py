"""``chainring export DIR PLACE --format FORMAT``: write the plain model of a snapshot, for others to read."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from chainring._files import flush, is_url, temporary_path
from chainring._messages import printable
from chainring._places.base import StoredFile
from chainring._runs.finished import describe_file, is_file, locate
from chainring.cli._common import add_command, show
from chainring.serializers._loading import model_prefix, opened_state
from chainring.serializers._saving import replacing, save_tensors
from chainring.serializers._store import SavedSnapshot, find_snapshot, open_file
from chainring.serializers._values import find_aliases, read_stored

_MODEL = "updater/model:"
_FORMATS = {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors"}  # by the suffix of the file
_AVERAGE = re.compile("extensions/([^/]+)/model/")  # of an ExponentialMovingAverage
MAX_FILE = 5 * 10**9  # bytes of a file of the format of Hugging Face
_HELP = """
Write the model of a snapshot with the names of its state_dict, without the
code of the model. What is read is verified first, a snapshot on a disk as a
whole. What exists is not overwritten. The formats:

  safetensors  one file, which any reader of the format opens
  torch        one file, for torch.load(file, weights_only=True)
  hf           a directory of safetensors with an index, for from_pretrained;
               put the config.json of the model beside it
  dcp          a directory, for torch.distributed.checkpoint.load

examples:
  chainring export result mlp.safetensors      the newest snapshot of a run
  chainring export result/best gen.pt --model gen
  chainring export result average.pt --model ExponentialMovingAverage
  chainring export s3://bucket/run mlp.safetensors     from an object store
  chainring export --json result mlp.safetensors | jq .tensors

exit status:
  0  it is written
  1  the snapshot is damaged
  2  there is no snapshot or no such model, or PLACE exists"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "export", run, "write the model of a snapshot for other programs", _HELP)
    parser.add_argument("directory", metavar="DIR", help="a snapshot, or the directory of a run, for its newest snapshot")
    parser.add_argument("place", metavar="PLACE", help="the file to write; for hf and dcp the directory")
    text = "name of the model, where there are several, or of the extension that averages it (default: main)"
    parser.add_argument("--model", metavar="NAME", help=text)
    formats = ("dcp", "hf", "safetensors", "torch")
    parser.add_argument("--format", choices=formats, help="default: torch for .pt and .pth, else safetensors")


def run(options: argparse.Namespace) -> None:
    located, target = locate(options.directory), options.place
    of_suffix = _FORMATS.get(os.path.splitext(target)[1].lower())
    form = options.format or of_suffix or "safetensors"
    if of_suffix not in (None, form):
        raise ValueError(f"{target} has the suffix of the format {of_suffix}, and --format is {form}; change one of them")
    if isinstance(located, StoredFile):
        raise FileNotFoundError(f"{options.directory} is {describe_file(located)}")
    saved = located[0]
    if is_url(target) and form in ("hf", "dcp"):
        raise ValueError(f"{form} is a directory, which is written to the disk; give a path, and copy it to {target}")
    require_new(target)
    model, tensors, left_out = read_model(saved, options.model)
    write_model(target, form, tensors)
    files = sorted(Path(target).iterdir()) if os.path.isdir(target) else [target]
    facts = {"file": target, "format": form, "bytes": sum(open_file(file).size for file in files)}
    facts |= {"directory": saved.path, "model": model, "tensors": sorted(tensors)}
    show_written(options, facts, [f"{target}: {len(tensors)} tensors of {saved}"], str(saved), left_out)


def require_new(target: str) -> None:
    """Raise FileExistsError if there is anything at a path or an address."""
    if is_file(target) or find_snapshot(target).exists() if is_url(target) else os.path.lexists(target):
        raise FileExistsError(f"{target} exists and is not overwritten; give another name")


def read_model(saved: SavedSnapshot, name: str | None) -> tuple[str, dict[str, Tensor], list[str]]:
    """Return the name of a model in a snapshot, by default of the only or the main one, its tensors, and what is left out.

    An average of a model has the name of its extension. A snapshot without frozen parameters has left these out.
    """
    module_state = saved.read_manifest().about.get("own state of modules")  # beside parameters and buffers
    left_out = set(map(str, module_state)) if isinstance(module_state, list) else set()
    with opened_state(saved) as whole:
        state = {key: value for key, value in whole.items() if key not in left_out}
        names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
        averages = sorted({match[1] for key in state if (match := _AVERAGE.match(key))} - {*names})
        if name is None and len(names) > 1 and "main" not in names:
            raise ValueError(f"{saved} has several models; name one by --model: {', '.join(names)}")
        prefix = f"{_MODEL}{name}/" if name else model_prefix(state, saved)
        prefix = f"extensions/{name}/model/" if name in averages else prefix
        stored = {key: value for key, value in state.items() if prefix and key.startswith(prefix)}
        entries = {key.removeprefix(prefix).replace("/", "."): value for key, value in read_stored(stored).items()}
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    if not tensors:
        has = f"it has {', '.join(names + averages)}" if names else "`chainring inspect` lists what it has"
        raise ValueError(f"{saved} has no model {name or 'of an updater'}; {has}")
    own_name = name if name and name in averages else prefix.removeprefix(_MODEL).rstrip("/")
    return own_name, tensors, sorted(key for key, value in entries.items() if value is None)


def show_written(
    options: argparse.Namespace, facts: Mapping[str, Any], lines: list[str], source: str, left_out: list[str]
) -> None:
    """Print what was written, and first which parameters of a source are not in it."""
    if left_out:
        text = f"{source} was taken with frozen=False: {len(left_out)} parameters are not in it, such as {left_out[0]}"
        lines = [text, *lines]
    show(options, {**facts, "left_out": left_out}, map(printable, lines))


def write_model(target: str, form: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a path or an address in one of the formats."""
    if not is_url(target):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        save_tensors(target, tensors)
    elif form == "torch":
        with replacing(target) as file:
            torch.save(tensors, file)
    elif form == "hf":
        with _new_directory(target) as directory:
            _write_hf(directory, tensors)
    else:
        from torch.distributed.checkpoint.state_dict_saver import save  # half a second, for this format alone

        with warnings.catch_warnings(), _new_directory(target) as directory:
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)|TypedStorage is")  # as is meant
            save(tensors, checkpoint_id=directory)


def _write_hf(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors of at most 5 GB and their index; a tied tensor once, under its first name, as it is read there."""
    first = find_aliases(tensors)
    files: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name in (name for name in tensors if first[name] == name or not tensors[name].numel()):
        tensor = tensors[name].contiguous()
        if files[-1] and size + tensor.nbytes > MAX_FILE:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    weight_map = {}
    for number, stored in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(stored, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(stored, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


@contextmanager
def _new_directory(target: str) -> Iterator[Path]:
    """Give a directory that gets its name when it is complete and on the disk."""
    directory = Path(target)
    temporary = temporary_path(directory.parent)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        os.rename(temporary, directory)
        flush(directory.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
