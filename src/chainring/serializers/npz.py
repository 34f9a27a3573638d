"""State in one npz file, which NumPy and Chainer read too; nothing is pickled or unpickled.

The file is a zip of ``.npy`` arrays whose names are the paths of the state: ``predictor/l1/weight``. A file of nothing but
such arrays, wherever it comes from, is read as tensors; arrays of a dtype that torch lacks, such as strings, stay arrays.
All that a plain array cannot say is in one more entry, ``chainring.json``: UTF-8 text as an array of bytes, present only
where it is needed. It is a JSON object of

    "version"   2; version 1 had tags of its own, and is read too
    "values"    from path to value, in the tags of `chainring.serializers._values`
    "tensors"   from the name of a tensor to what its array does not say: "dtype", of which the array has the bits as
                integers; "order", its dimensions from the widest stride to the narrowest (channels_last)
    "parts"     names of arrays that are not a path of their own, because they lie inside lists and dicts
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from chainring._files import atomic_write, parse_strict
from chainring._naming import unwrap
from chainring.serializers._values import Array, decode_values, encode_values
from chainring.serializers.base import DictionaryDeserializer, DictionarySerializer, has_state, serialize_method

_JSON = "chainring.json"
_VERSION = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NATIVE_DTYPES = {
    np.dtype(code).str: torch.from_numpy(np.zeros(0, code)).dtype
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
_DTYPES_NUMPY_LACKS = {
    name: getattr(torch, name)
    for name in (
        "bfloat16", "complex32", "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
}  # fmt: skip
_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, OSError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


def save_npz(file: str | os.PathLike[str] | IO[bytes], obj: Any, compression: bool = True) -> None:
    """Save a model or any object that has state as one npz file, which is complete or absent.

    It is written by one rename after a flush, so a file that is there already is replaced whole or stays.

    Example::

        save_npz("mlp.npz", model)
        load_npz("mlp.npz", model)

    Args:
        file: a path, taken as it is (no ``.npz`` is appended), or a file open for binary writing, which is written in place.
        obj: what has ``serialize``, or ``state_dict`` and ``load_state_dict``.
        compression: whether the arrays are deflated; without it the file is larger and written many times faster.

    Raises:
        TypeError: ``obj`` has no state, or a value in it could not be restored; its path is named.
        ValueError: ``file`` is a folder or a device.
        FileNotFoundError: its folder does not exist.
    """
    serializer = DictionarySerializer()
    serializer.visit("", unwrap(obj))
    arrays = _to_arrays(serializer.target)
    if not isinstance(file, (str, os.PathLike)):
        _write(file, arrays, compression)
        return
    path = Path(os.path.realpath(file))  # what a link points to is replaced, not the link
    if path.exists() and not path.is_file():
        raise ValueError(f"an npz file is a regular file, and {path} is a folder or a device: name a file, or pass one open")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in: make it first")
    with atomic_write(path, durable=True) as stream:
        _write(stream, arrays, compression)


def load_npz(file: str | os.PathLike[str] | IO[bytes], obj: Any, path: str = "", strict: bool = True) -> None:
    """Load what `save_npz` or Chainer saved into an object of the same kind. Nothing is ever unpickled.

    Args:
        file: a path, or a file open for binary reading that can seek.
        obj: what to load into.
        path: the part of the file that belongs to ``obj``, as in ``"updater/model:main/predictor/"``.
        strict: whether a missing or unexpected entry is an error; else what is missing stays as it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an npz file, or damaged, or a snapshot, which `chainring.serializers.load` loads; or it has
            nothing under ``path``; or an array in it is pickled.
        KeyError: with ``strict``, an entry is missing. A module raises PyTorch's ``RuntimeError``.
    """
    obj, start = unwrap(obj), path.strip("/")
    prefix = f"{start}/" if start else ""
    with _opened(file) as (stream, label), _archive(stream, label) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        state = _read(archive, names, prefix, label)
        if start and not state:
            raise ValueError(f"{label} has nothing under {path!r}; it holds {_shown(names)}")
        if strict and serialize_method(obj) is None and hasattr(obj, "named_parameters") and has_state(obj):
            _require_some(state, names, obj, prefix, label)
    DictionaryDeserializer(state, strict).visit(start, obj)


def _to_arrays(state: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a file by name, one of which says in JSON what arrays cannot."""
    values, kept = encode_values(state, native_arrays=True)
    arrays, descriptions = {}, {}
    for name, value in kept.items():
        arrays[name], description = _to_array(name, value) if isinstance(value, Tensor) else (value, {})
        if description:
            descriptions[name] = description
    values = {path: value for path, value in values.items() if value != {"$tensor": path}}
    if values or descriptions:
        parts = [name for name in arrays if name not in state]
        document = {"version": _VERSION, "values": values, "tensors": descriptions, "parts": parts}
        arrays[_JSON] = np.frombuffer(json.dumps(document, allow_nan=False).encode(), np.uint8)
    return arrays


def _to_array(name: str, tensor: Tensor) -> tuple[Array, dict[str, Any]]:
    """Return a tensor as an array, and what the array does not say."""
    description: dict[str, Any] = {}
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in _NATIVE_DTYPES.values() and dtype not in _DTYPES_NUMPY_LACKS:
        raise TypeError(f"{name}: an npz file has no {tensor.dtype}; convert it to a dtype that holds its values")
    if not tensor.is_contiguous():
        description["order"] = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    host = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    if dtype in _DTYPES_NUMPY_LACKS:
        description["dtype"] = dtype
        host = host.view(_INTEGERS[host.itemsize])
    return host.numpy(), description


def _write(stream: IO[bytes], arrays: Mapping[str, Array], compression: bool) -> None:
    method = zipfile.ZIP_DEFLATED if compression else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:  # dated 1980: equal state, equal file
                np.lib.format.write_array(member, array, allow_pickle=False)


@contextlib.contextmanager
def _opened(file: str | os.PathLike[str] | IO[bytes]) -> Iterator[tuple[IO[bytes], str]]:
    """Open a file, and say how an error names it."""
    if not isinstance(file, (str, os.PathLike)):
        yield file, repr(getattr(file, "name", "the open file"))
        return
    label = repr(os.fspath(file))
    if os.path.isdir(file):
        raise ValueError(
            f"{label} is a folder, as snapshots are: load it with chainring.serializers.load, not with load_npz"
        )
    if not os.path.exists(file):
        raise FileNotFoundError(f"there is no npz file {label}; save_npz writes under the very name that it is given")
    with open(file, "rb") as stream:
        yield stream, label


def _archive(stream: IO[bytes], label: str) -> zipfile.ZipFile:
    start = stream.tell()
    begins_as_zip = stream.read(4) == b"PK\x03\x04"
    stream.seek(start)
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        if begins_as_zip:
            raise _damaged(label, "it begins as one and has no proper end", error) from error
        raise ValueError(
            f"{label} is not an npz file, which is a zip of .npy arrays. "
            "What chainring.serializers.save wrote is loaded with chainring.serializers.load"
        ) from error
    members = archive.namelist()
    strange = [name for name in members if not name.endswith(".npy")]
    if strange or len(set(members)) < len(members):
        raise ValueError(
            f"{label} is a zip but not an npz file, whose entries are .npy arrays, each once: it has "
            f"{_shown(strange or members)}. What torch.save wrote is loaded with torch.load(file, weights_only=True)"
        )
    return archive


def _read(archive: zipfile.ZipFile, names: Sequence[str], prefix: str, label: str) -> dict[str, Any]:
    """Return what the file holds under ``prefix``, by whole path."""
    document = {"version": _VERSION, "values": {}, "tensors": {}, "parts": []}
    text = _array(archive, _JSON, label).tobytes() if _JSON in names else json.dumps(document).encode()
    arrays = {name: _array(archive, name, label) for name in names if name.startswith(prefix) and name != _JSON}
    try:
        return _from_arrays(parse_strict(text), arrays, prefix)
    except _DAMAGED as error:
        raise _damaged(label, f"its {_JSON} is not as save_npz writes it", error) from error


def _from_arrays(document: Any, arrays: Mapping[str, Array], prefix: str) -> dict[str, Any]:
    """Return the state of which `_to_arrays` made a document and arrays, as far as it lies under ``prefix``."""
    values = {path: value for path, value in document["values"].items() if path.startswith(prefix)}
    if document["version"] == 1:
        descriptions: dict[str, Any] = {}
        values = {path: _from_version_1(value, arrays, descriptions) for path, value in values.items()}
    elif document["version"] == _VERSION:
        descriptions = document["tensors"]
    else:
        raise ValueError(f"its {_JSON} is of version {document['version']}, and this Chainring reads up to {_VERSION}")
    parts = frozenset(document["parts"])
    tensors = {name: _to_tensor(array, descriptions.get(name, {})) for name, array in arrays.items()}
    state = {name: tensor for name, tensor in tensors.items() if name not in parts and name not in values}
    return state | decode_values(values, tensors, arrays)


def _from_version_1(value: Any, arrays: Mapping[str, Array], descriptions: dict[str, Any]) -> Any:
    """Return a value in the tags of today, and put what is said of its tensors into ``descriptions``."""
    if isinstance(value, list):
        return [_from_version_1(item, arrays, descriptions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$array" not in value:
        tags = {"$ordered": "$ordered_dict"}
        return {tags.get(key, key): _from_version_1(item, arrays, descriptions) for key, item in value.items()}
    name = value["$array"]
    if value.get("as") == "array":
        return {"$array": [arrays[name].dtype.str, list(arrays[name].shape), name]}
    if value.get("as") == "scalar":
        return encode_values({name: arrays[name][()]})[0][name]
    descriptions[name] = value
    return {"$tensor": name}


def _to_tensor(array: Array, description: Mapping[str, Any]) -> Any:
    """Return the tensor that was stored as an array, or the array itself where torch lacks its dtype."""
    native = array.dtype.newbyteorder("=")
    if native.str not in _NATIVE_DTYPES:
        return array
    tensor = torch.from_numpy(array.astype(native, copy=False))
    if "dtype" in description:
        dtype = _DTYPES_NUMPY_LACKS[description["dtype"]]
        if dtype.itemsize != tensor.itemsize:  # a view would change the shape
            raise ValueError(f"{tensor.dtype} cannot hold the bits of {dtype}")
        tensor = tensor.view(dtype)
    if "order" in description:
        order = description["order"]
        tensor = tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])
    return tensor


def _array(archive: zipfile.ZipFile, name: str, label: str) -> Array:
    try:
        with archive.open(f"{name}.npy") as member:
            array: Array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):  # which also compares the checksum
                raise ValueError("there is more in it than its shape says")
            return array
    except _DAMAGED as error:
        if "allow_pickle" in str(error):
            raise ValueError(
                f"{name!r} in {label} is an array of Python objects, which NumPy pickles, and unpickling can run any code; "
                "Chainer writes None so. Save numbers there, or load a part without it by its path"
            ) from error
        raise _damaged(label, f"{name!r} cannot be read", error) from error


def _damaged(label: str, what: str, error: BaseException) -> ValueError:
    return ValueError(f"npz file {label} is truncated or damaged: {what} ({error}). Copy it again, or load an earlier one")


def _require_some(state: Mapping[str, Any], names: Sequence[str], model: Any, start: str, label: str) -> None:
    """Raise an error that says where in the file a model is, if it is elsewhere; PyTorch would list every name."""
    paths = [name.replace(".", "/") for name in model.state_dict()]
    if paths and not any(start + path in state for path in paths):
        found = sorted({name.removesuffix(paths[0]) for name in names if name.endswith(f"/{paths[0]}")})
        if found:
            raise ValueError(f"{label} has no such model under {start!r}; pass one of these as path: {_shown(found)}")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
