"""Directories with the weights of a model under the names that Hugging Face's libraries give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chainring._files import parse_strict
from chainring.serializers import _safetensors
from chainring.serializers.foreign.archive import is_regular_file, read_torch_file
from chainring.serializers.foreign.content import Entries, is_entries, to_entries

_LARGEST_JSON = 100_000_000  # bytes


def find_inside(directory: Path, name: str) -> Path | None:
    """Return the path of a regular file of a directory, ``None`` if it has none of that name.

    A link may lead to another file of the directory, or to the ``blobs`` of Hugging Face's cache, which lie two above.

    Raises:
        ValueError: the name or a link leads elsewhere, or it is not a regular file.
    """
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name or "\\" in name:
        raise ValueError(f"{directory} names the file {name!r:.80}, which is not in it: use another copy")
    path = directory / name
    if not os.path.lexists(path):
        return None
    root, real = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if real.parent not in (root, root.parent.parent / "blobs"):
        raise ValueError(f"{path} is a link to {real}, which is not in {directory}: copy the file there")
    if not is_regular_file(real):
        raise ValueError(f"{path} is not a regular file: use another copy")
    return real


def read_json(directory: Path, name: str) -> dict[str, Any] | None:
    """Return the object of a file of JSON in a directory, ``None`` if it is not there.

    Raises:
        ValueError: it is none, or not such a file.
    """
    path = find_inside(directory, name)
    if path is None:
        return None
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has more than {_LARGEST_JSON:,} bytes, and a description is small: use another copy")
    try:
        found = parse_strict(
            path.read_bytes().replace(b"NaN", b"null").replace(b"-Infinity", b"null").replace(b"Infinity", b"null")
        )
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found


def read_weights(directory: Path, stem: str = "model") -> tuple[Entries, bool] | None:
    """Return parameters and buffers, and whether their order is that of the model; ``None`` if there are none.

    Raises:
        ValueError: a file is damaged, missing, or elsewhere.
    """
    for name, read in ((f"{stem}.safetensors", _read_safetensors), (f"pytorch_{stem}.bin", _read_bin)):
        is_ordered = read is _read_bin
        if (path := find_inside(directory, name)) is not None:
            return read(path), is_ordered
        index = read_json(directory, f"{name}.index.json")
        if index is not None:
            return _read_sharded(directory, index, read), is_ordered
    return None


def _read_sharded(directory: Path, index: dict[str, Any], read: Any) -> Entries:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{directory} has an index without 'weight_map': it is damaged")
    files: dict[str, Entries] = {}
    for name in dict.fromkeys(weight_map.values()):
        path = find_inside(directory, name)
        if path is None:
            raise ValueError(f"{directory} lacks {name}, which its index names: copy it there")
        files[name] = read(path)
    if missing := [name for name, file in weight_map.items() if name not in files[file]]:
        raise ValueError(f"{directory} is damaged: {missing[0]!r} is not in {weight_map[missing[0]]}, where its index says")
    return {name: files[file][name] for name, file in weight_map.items()}


def _read_safetensors(path: Path) -> Entries:
    return to_entries(_safetensors.read(path), str(path))


def _read_bin(path: Path) -> Entries:
    content = read_torch_file(path)
    if not is_entries(content):
        raise ValueError(f"{path} holds no state dict: it is damaged, or of another program")
    return to_entries(content, str(path))
