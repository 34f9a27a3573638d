"""Directories of other libraries, with the weights of a model, alone or with the state of a run.

They are those of Hugging Face's ``save_pretrained`` and ``Trainer``, of Accelerate's ``save_state``, and of
``torch.distributed.checkpoint``, whose metadata is a pickle, which is read without running anything in it.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from chainring.serializers import _safetensors
from chainring.serializers._values import find_dtypes, require_dtype
from chainring.serializers.foreign.content import (
    Entries,
    ForeignCheckpoint,
    SavedOptimizer,
    count,
    is_entries,
    to_entries,
    to_optimizer,
)
from chainring.serializers.foreign.files import PATHS, from_dictionary, read_torch

_STATE = "trainer_state.json"
T = TypeVar("T")


def read(directory: Path) -> ForeignCheckpoint | None:
    """Return what a directory holds; ``None`` if it is of no library that is known here."""
    readers = (_read_distributed, _read_accelerate, _read_hugging_face)
    return next((checkpoint for read_one in readers if (checkpoint := read_one(directory)) is not None), None)


def _read_hugging_face(directory: Path) -> ForeignCheckpoint | None:
    """Return what a directory of ``Trainer`` or ``save_pretrained`` holds; ``None`` if it is another."""
    if (weights := _read_weights(directory)) is None:
        return None
    names = {path.name for path in directory.iterdir()}
    kind = "a checkpoint of Hugging Face's Trainer" if _STATE in names else "a model of save_pretrained"
    checkpoint = ForeignCheckpoint(kind, {"main": weights[0]}, is_ordered=weights[1])
    taken = {_STATE, "optimizer.pt", "scheduler.pt", "scaler.pt"}
    checkpoint.left = sorted(name for name in names - taken if not name.startswith(("model", "pytorch_model")))
    if _STATE not in names:
        return checkpoint
    if (optimizer := _read_optimizer(directory, "optimizer.pt")) is not None:
        checkpoint.optimizers = {"main": optimizer}
    if (scheduler := _read_torch(directory, "scheduler.pt")) is not None:
        checkpoint.schedulers = [scheduler]
    checkpoint.scaler = _read_torch(directory, "scaler.pt")
    state = _read_json(directory, _STATE) or {}
    checkpoint.iteration = count(state.get("global_step"), f"{directory / _STATE}: 'global_step'")
    epoch = state.get("epoch")
    if isinstance(epoch, (int, float)) and 0 <= epoch < 2**53:
        checkpoint.epoch = math.floor(epoch)
        checkpoint.fraction = epoch - checkpoint.epoch
    return checkpoint


def _read_accelerate(directory: Path) -> ForeignCheckpoint | None:
    """Return what a directory of ``save_state`` holds; ``None`` if it is another."""
    names = {path.name for path in directory.iterdir()}
    if not names & {"optimizer.bin", "random_states_0.pkl"}:
        return None
    models = _read_numbered("model", lambda name: _read_weights(directory, name))
    if not models:
        raise ValueError(
            f"{directory} is a state of Accelerate without the weights of a model, such as FSDP and DeepSpeed write "
            "in directories of their own: save it with a full state dict, or load the directory of the model alone"
        )
    entries = {name: weights for name, (weights, _) in models.items()}
    are_ordered = all(is_ordered for _, is_ordered in models.values())
    checkpoint = ForeignCheckpoint("a state of Accelerate", entries, is_ordered=are_ordered)
    checkpoint.optimizers = _read_numbered("optimizer", lambda name: _read_optimizer(directory, f"{name}.bin"))
    schedulers = _read_numbered("scheduler", lambda name: _read_torch(directory, f"{name}.bin"))
    checkpoint.schedulers, checkpoint.scaler = list(schedulers.values()), _read_torch(directory, "scaler.pt")
    taken = ("model", "pytorch_model", "optimizer", "scheduler", "scaler")
    checkpoint.left = sorted(name for name in names if not name.startswith(taken))
    return checkpoint


def _read_numbered(role: str, read_named: Callable[[str], T | None]) -> dict[str, T]:
    """Return what is read of each of a role, such as ``optimizer`` and ``optimizer_1``, by name; one alone is ``main``."""
    contents: dict[str, T] = {}
    for name in (f"{role}_{index}" if index else role for index in itertools.count()):
        if (content := read_named(name)) is None:
            break
        contents[name] = content
    return {"main": contents[role]} if len(contents) == 1 else contents


def _read_torch(directory: Path, name: str) -> Any:
    """Return the content of a file of ``torch.save`` in a directory, ``None`` if it is not there."""
    path = _find_inside(directory, name)
    if path is None:
        return None
    if (content := read_torch(path)) is None:
        raise ValueError(f"{path} holds nothing: it is damaged, or of another program")
    return content


def _read_optimizer(directory: Path, name: str) -> SavedOptimizer | None:
    state = _read_torch(directory, name)
    return None if state is None else to_optimizer(state, str(directory / name))


def _find_inside(directory: Path, name: str) -> Path | None:
    """Return the path of a regular file of a directory, ``None`` if it has none of that name.

    A link may lead to another file of the directory, or to the ``blobs`` of Hugging Face's cache, which lie two above.
    """
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name or "\\" in name:
        raise ValueError(f"{directory} names the file {name!r:.80}, which is not in it: use another copy")
    path = directory / name
    if not os.path.lexists(path):
        return None
    root, real = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if real.parent not in (root, root.parent.parent / "blobs"):
        raise ValueError(f"{path} is a link to {real}, which is not in {directory}: copy the file there")
    if not real.is_file():
        raise ValueError(f"{path} is not a regular file: use another copy")
    return real


def _read_json(directory: Path, name: str) -> dict[str, Any] | None:
    """Return the object of a file of JSON in a directory, ``None`` if it is not there."""
    path = _find_inside(directory, name)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text("utf-8"), parse_constant=lambda word: None)  # which is not finite
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found


def _read_weights(directory: Path, stem: str = "model") -> tuple[Entries, bool] | None:
    """Return parameters and buffers, and whether their order is that of the model; ``None`` if there are none."""
    for name, is_of_torch in ((f"{stem}.safetensors", False), (f"pytorch_{stem}.bin", True)):  # whose order is kept
        if (path := _find_inside(directory, name)) is not None:
            return _read_entries(path, is_of_torch), is_of_torch
        index = _read_json(directory, f"{name}.index.json")
        if index is None:
            continue
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{directory} has an index without 'weight_map': it is damaged")
        files: dict[str, Entries] = {}
        for file in dict.fromkeys(weight_map.values()):
            path = _find_inside(directory, file)
            if path is None:
                raise ValueError(f"{directory} lacks {file}, which its index names: copy it there")
            files[file] = _read_entries(path, is_of_torch)
        if missing := [key for key, file in weight_map.items() if key not in files[file]]:
            raise ValueError(
                f"{directory} is damaged: {missing[0]!r} is not in {weight_map[missing[0]]}, where its index says"
            )
        return {key: files[file][key] for key, file in weight_map.items()}, is_of_torch
    return None


def _read_entries(path: Path, is_of_torch: bool) -> Entries:
    content = read_torch(path) if is_of_torch else _safetensors.read(path)
    if is_of_torch and not is_entries(content):
        raise ValueError(f"{path} holds no state dict: it is damaged, or of another program")
    return to_entries(content, str(path))


# --- directories of torch.distributed.checkpoint: beside the metadata each value lies in a file, as torch.save writes it ---

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_CLASSES = {
    *((f"{_MODULE}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_MODULE}.metadata", name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *(("torch.distributed._shard.sharded_tensor.metadata", name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_MODULE}.filesystem", "_StorageInfo"),
}
"""The classes of which torch's writer makes metadata. Of each only the attributes are kept, in a `_Record`."""
_DTYPES = find_dtypes([
    "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
])  # fmt: skip
_Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]
_Span = tuple[str, int, int]
_DEEPEST = 100  # dictionaries in one another


class _Entry(NamedTuple):
    """A value of the saved dictionary: a tensor of a size in chunks, each with its offsets and sizes, or any other."""

    path: tuple[Any, ...]
    dtype: Any = None
    size: tuple[int, ...] = ()
    chunks: _Chunks | None = None


def _read_distributed(directory: Path) -> ForeignCheckpoint | None:
    """Return what such a directory holds; ``None`` if it is another."""
    path = _find_inside(directory, _METADATA)
    if path is None:
        return None
    try:
        entries, spans = _parse(path)
    except Exception as error:  # a damaged pickle raises whatever its parts raise
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error!s:.500}") from error
    files = _Files(directory, spans)
    content: dict[Any, Any] = {}
    for key, entry in entries.items():
        below = content
        for parent in entry.path[:-1]:
            below = below.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ValueError(f"the metadata are damaged: {parent!r:.80} is a value, and has values below it")
        below[entry.path[-1]] = files.read(key, None) if entry.chunks is None else files.read_tensor(key, entry)
    found = from_dictionary(f"a directory of {_MODULE}", _restore_containers(content), str(directory))
    if found is None:
        has = ", ".join(map(str, list(content)[:9]))
        raise ValueError(f"{directory} is of {_MODULE}, and has no state dict of a model: it has {has}")
    return found


class _Record:
    """The attributes of an object in the metadata."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class _MetadataReader(pickle._Unpickler):
    """An unpickler in Python, whose memory grows with what was read alone, and which makes records, sizes and dtypes."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return type(name, (_Record,), {})  # a class for this place alone: nothing in the file can change another
        if module == "torch":
            require_dtype(name)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if (module, name) == ("torch.serialization", "_get_layout") or f"{module}.{name}" in PATHS:
            return lambda *parts: "/".join(part for part in parts if isinstance(part, str))
        raise ValueError(f"it names {module}.{name}, which torch's writer never does: use a copy from a place you trust")

    def get_extension(self, code: int) -> Any:
        raise ValueError("it names a class by a number, as torch's writer never does")

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()  # type: ignore[misc]

    def _check_keys(self, keys: list[Any]) -> None:
        """Refuse a key that could take for ever to hash, such as a tuple of tuples of tuples."""
        if not all(isinstance(key, (str, int, _Record)) for key in keys):
            raise ValueError("it has a key that is neither text nor a number")

    def _refuse(self) -> NoReturn:
        raise ValueError("it has an instruction that torch's writer never uses")

    dispatch.update({pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems})
    for _code in (pickle.DICT, pickle.FROZENSET, pickle.ADDITEMS):  # which hash what is in them
        dispatch[_code[0]] = _refuse


def _parse(path: Path) -> tuple[dict[str, _Entry], dict[tuple[str, Any], _Span]]:
    """Return the entries of the saved dictionary by key, and where each chunk lies: by key and offsets, file and span."""
    with path.open("rb") as file:
        metadata = _MetadataReader(file).load()
    tensors, data, paths = (metadata.get(name) for name in ("state_dict_metadata", "storage_data", "planner_data"))
    if not isinstance(tensors, dict) or not isinstance(data, dict):
        raise ValueError("it is not that of a checkpoint")
    entries = {}
    for key, record in tensors.items():
        keys = paths.get(key, (key,)) if isinstance(paths, dict) else (key,)
        if not isinstance(keys, tuple) or not all(type(key_below) in (str, int) for key_below in keys):
            raise ValueError("it has a key that is neither text nor a number")
        if len(keys) > _DEEPEST:
            raise ValueError("it has dictionaries in dictionaries without end")
        entries[key] = _Entry(keys)
        if record.get("chunks") is not None:
            properties = record.get("properties")
            dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
            chunks = [(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))) for chunk in record.get("chunks")]
            entries[key] = _Entry(keys, dtype, _sizes(record.get("size")), chunks)
    spans = {}
    for index, info in data.items():
        name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if info.get("transform_descriptors"):
            raise ValueError("its files are transformed, such as compressed, by an extension of the writer: save it without")
        if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
            raise ValueError("it has an entry without a place")
        offsets = index.get("offset")
        spans[index.get("fqn"), None if offsets is None else _sizes(offsets)] = name, offset, length
    return entries, spans


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**62 for size in value):
        raise ValueError("it has a size that is none")
    return value


class _Files:
    """The files beside the metadata. No part of them is read twice, so that the memory grows with their size alone."""

    def __init__(self, directory: Path, spans: Mapping[tuple[str, Any], _Span]) -> None:
        self._directory, self._spans = directory, spans
        self._paths = {name: _find_inside(directory, name) for name in {name for name, _, _ in spans.values()}}
        self._left = sum(path.stat().st_size for path in self._paths.values() if path is not None)

    def read_tensor(self, key: str, entry: _Entry) -> Tensor:
        """Return a tensor that its chunks make up."""
        assert entry.chunks is not None
        are_inside = all(
            len(offsets) == len(sizes) == len(entry.size)
            and all(start + size <= whole for start, size, whole in zip(offsets, sizes, entry.size, strict=True))
            for offsets, sizes in entry.chunks
        )
        if not are_inside or sum(math.prod(sizes) for _, sizes in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"{self._directory} is damaged: the chunks of {key!r:.80} do not make one tensor of its size")
        parts = []
        for offsets, sizes in entry.chunks:
            part = self.read(key, offsets if (key, offsets) in self._spans else None)
            if not isinstance(part, Tensor) or tuple(part.shape) != sizes or part.dtype != entry.dtype:
                raise ValueError(
                    f"{self._directory} is damaged: a chunk of {key!r:.80} has another size or dtype than it says"
                )
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        # NaN where chunks overlap, so that others are missing; zero in integers.
        full = torch.full(entry.size, math.nan if entry.dtype.is_floating_point else 0, dtype=entry.dtype)
        for part, (offsets, sizes) in zip(parts, entry.chunks, strict=True):
            full[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = part
        return full

    def read(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        """Return a value, or the chunk of a tensor that has these offsets."""
        if (key, offsets) not in self._spans:
            raise ValueError(f"{self._directory} is damaged: its metadata do not say where {key!r:.80} is")
        name, offset, length = self._spans[key, offsets]
        path = self._paths[name]
        if path is None:
            raise ValueError(f"{self._directory} lacks {name!r:.80}, which its metadata name: copy it there")
        self._left -= length
        if offset < 0 or length < 0 or offset + length > os.path.getsize(path) or self._left < 0:
            raise ValueError(f"{path} is damaged, or cut off: {key!r:.80} does not lie in it. Use another copy")
        with path.open("rb") as file:
            file.seek(offset)
            return read_torch(io.BytesIO(file.read(length)), f"{path}: {key!r:.80}")


def _restore_containers(value: Any) -> Any:
    """Return a dictionary with the lists, the numbers and the empty states that the writer has flattened away."""
    if not isinstance(value, dict):
        return value
    value = {key: _restore_containers(item) for key, item in value.items()}
    if value and list(value) == list(range(len(value))):
        return list(value.values())
    if value and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value):
        return _restore_optimizer(value)
    if "param_groups" in value:
        state = value.get("state", {})
        is_numbered = isinstance(state, dict) and all(isinstance(key, str) and key.isdecimal() for key in state)
        value["state"] = {int(key): entries for key, entries in state.items()} if is_numbered else state
    return value


def _restore_optimizer(value: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer of which every entry and setting has the name of its parameter."""
    state: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, item in value.items():
        role, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        (state if role == "state" else settings).setdefault(name, {})[entry] = item
    groups: list[dict[str, Any]] = []
    for name, of_name in settings.items():
        same = next((group for group in groups if {**group, "params": None} == {**of_name, "params": None}), None)
        if same is None:
            groups.append(same := {**of_name, "params": []})
        same["params"].append(name)
    return {"state": state, "param_groups": groups}
