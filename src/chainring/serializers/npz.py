"""State in one npz file, which NumPy and Chainer read too; nothing is pickled or unpickled.

The file is a zip of ``.npy`` arrays whose names are the paths of the state: ``predictor/l1/weight``. A file of nothing but
such arrays, wherever it comes from, is read as tensors; arrays of a kind that torch lacks, such as strings, stay arrays.
All that a plain array cannot say is in one more entry, ``chainring.json``: UTF-8 text as an array of bytes, present only
where it is needed. It holds ``version``, ``parts`` (names of arrays that are no path of their own: what lies inside lists
and dicts) and ``values``, from path to value. A value there is JSON, where a dict with one of these keys stands for:

    {"$array": name}                     a tensor; with "dtype" its dtype, of which the array has the bits as integers; with
                                         "order" its dimensions from the widest stride to the narrowest (channels_last)
    {"$array": name, "as": "array"}      a NumPy array; with "as": "scalar" a NumPy scalar
    {"$tuple": [...]}  {"$complex": [real, imag]}  {"$bytes": base64}  {"$float": "inf", "-inf" or "nan"}
    {"$dict": [[key, value], ...]}       a dict with keys that are no strings; so too "$counter", "$ordered"
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from chainring._files import atomic_write
from chainring._naming import unwrap
from chainring.serializers.base import DictionaryDeserializer, DictionarySerializer, has_state, serialize_method

PLAIN = "chainring.json"
Array = np.ndarray[Any, Any]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_TORCH_HAS = {
    np.dtype(kind).str: torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
_NUMPY_LACKS = {
    name: getattr(torch, name)
    for name in (
        "bfloat16", "complex32", "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
}  # fmt: skip
_MADE_FROM: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$complex": lambda parts: complex(*parts),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$float": float,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$ordered": OrderedDict,
}
_PAIRS = {dict: "$dict", Counter: "$counter", OrderedDict: "$ordered"}


class Sorted:
    """State sorted into ``arrays``, from name to array, one of which says in JSON what arrays cannot."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.arrays: dict[str, Array] = {}
        self._paths, self._path = state.keys(), ""
        values = {}
        for path, value in state.items():
            self._path = path
            encoded = self._encoded(value, path)
            if encoded != {"$array": path}:
                values[path] = encoded
        if values:
            parts = [name for name in self.arrays if name not in state]
            text = json.dumps({"version": 1, "parts": parts, "values": values}, allow_nan=False)
            self.arrays[PLAIN] = np.frombuffer(text.encode(), np.uint8)

    def _encoded(self, value: Any, name: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is complex:
            return {"$complex": [self._encoded(part, name) for part in (value.real, value.imag)]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind in (list, tuple):
            items = [self._encoded(item, f"{name}/{i}") for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in _PAIRS:
            return self._pairs(value, name)
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if kind is np.ndarray or isinstance(value, np.generic):
            return {**self._kept(np.asarray(value), name), "as": "array" if kind is np.ndarray else "scalar"}
        raise _not_kept(name, kind.__name__)

    def _pairs(self, value: Mapping[Any, Any], name: str) -> dict[str, Any]:
        pairs = [[self._encoded(key, name), self._encoded(item, f"{name}/{key}")] for key, item in value.items()]
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: item for key, item in pairs}  # noqa: C416  (dict() of lists is not typed)
        return {_PAIRS[type(value)]: pairs}

    def _tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        marks: dict[str, Any] = {}
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (
            tensor.layout != torch.strided
            or tensor.is_meta
            or not (tensor.dtype in _TORCH_HAS.values() or dtype in _NUMPY_LACKS)
        ):
            raise _not_kept(name, f"tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
        if not tensor.is_contiguous():
            marks["order"] = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in _NUMPY_LACKS:
            marks["dtype"] = dtype
            host = host.view(_INTEGERS[host.itemsize])
        return {**self._kept(host.numpy(), name), **marks}

    def _kept(self, array: Array, name: str) -> dict[str, str]:
        described = np.lib.format.dtype_to_descr(array.dtype)
        if array.dtype.hasobject or np.lib.format.descr_to_dtype(described) != array.dtype:
            raise _not_kept(name, f"array of dtype {array.dtype}")
        while name in self.arrays or name == PLAIN or "\0" in name or (name in self._paths and name != self._path):
            name = name.replace("\0", "") + "_"  # a zip cuts names at zeros
        self.arrays[name] = array
        return {"$array": name}


def _not_kept(name: str, kind: str) -> TypeError:
    return TypeError(
        "an npz file keeps numbers, strings, bytes, None, dense tensors, arrays, and lists, tuples and dicts of such; "
        f"{name.removeprefix('/')!r} is of type {kind}: save what it is made of"
    )


class Plain:
    """What the JSON entry of a file says; of a file without one, nothing.

    Attributes:
        parts: the arrays that are no path of their own.
        values: from path to encoded value.
    """

    def __init__(self, entry: Array | None) -> None:
        content: Any = {"version": 1, "parts": [], "values": {}} if entry is None else json.loads(entry.tobytes())
        if content["version"] != 1:
            raise ValueError(f"its {PLAIN} is of version {content['version']}, and this Chainring reads version 1")
        self.parts: frozenset[str] = frozenset(content["parts"])
        self.values: dict[str, Any] = dict(content["values"])


def decoded(plain: Any, read: Callable[[str], Array]) -> Any:
    """The value that was encoded as ``plain``, whose arrays ``read`` gets by name."""
    if isinstance(plain, list):
        return [decoded(item, read) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$array" in plain:
        return _from_array(read(plain["$array"]), plain)
    mark = next((key for key in plain if key.startswith("$")), None)
    if mark is None:
        return {key: decoded(item, read) for key, item in plain.items()}
    return _MADE_FROM[mark](decoded(plain[mark], read))


def _from_array(array: Array, marks: Mapping[str, Any]) -> Any:
    if "as" in marks:
        return array if marks["as"] == "array" else array[()]
    tensor = as_tensor(array)
    if "dtype" in marks:
        dtype = _NUMPY_LACKS[marks["dtype"]]
        if dtype.itemsize != tensor.itemsize:  # a view would change the shape
            raise ValueError(f"{tensor.dtype} cannot hold the bits of {dtype}")
        tensor = tensor.view(dtype)
    if "order" in marks:
        order = marks["order"]
        tensor = tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])
    return tensor


def as_tensor(array: Array) -> Any:
    """The array as a tensor, or as it is where torch lacks its dtype."""
    native = array.dtype.newbyteorder("=")
    if native.str not in _TORCH_HAS:
        return array
    return torch.from_numpy(array.astype(native, copy=False))


_DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    OSError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def save_npz(file: Any, obj: Any, compression: bool = True) -> None:
    """Saves a model or any object that has state as one npz file, which is complete or absent.

    It is written beside, synced to the disk and renamed once, so a file that is there already is replaced whole or stays.

    Args:
        file: a path, taken as it is (no ``.npz`` is appended), or a file open for binary writing, which is written in place.
        obj: what has ``serialize``, or ``state_dict`` and ``load_state_dict``.
        compression: whether the arrays are deflated; without it the file is larger and written many times faster.

    Raises:
        TypeError: ``obj`` has no state, or a value in it is of a kind that could not be put back; its path is named.
        ValueError: ``file`` is a folder or a device.
        FileNotFoundError: its folder does not exist.
    """
    serializer = DictionarySerializer()
    serializer.visit("", unwrap(obj))
    arrays = Sorted({path.removeprefix("/"): value for path, value in serializer.target.items()}).arrays
    if hasattr(file, "write"):
        _write(file, arrays, compression)
        return
    path = Path(os.path.realpath(file))  # what a link points to is replaced, not the link
    if path.exists() and not path.is_file():
        raise ValueError(f"an npz file is a regular file, and {path} is a folder or a device: name a file, or pass one open")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in: make it first")
    with atomic_write(path, durable=True) as stream:
        _write(stream, arrays, compression)


def load_npz(file: Any, obj: Any, path: str = "", strict: bool = True) -> None:
    """Loads what `save_npz` or Chainer saved into an object of the same kind. Nothing is ever unpickled.

    Args:
        file: a path, or a file open for binary reading that can seek.
        obj: what to load into.
        path: the part of the file that belongs to ``obj``, as in ``"updater/model:main/predictor/"``.
        strict: whether a missing or unexpected entry is an error; else what is missing stays as it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no npz file, or damaged, or a snapshot, which `chainring.serializers.load` loads; or it has
            nothing under ``path``; or an array in it is pickled.
        KeyError: with ``strict``, an entry is missing. A module raises PyTorch's ``RuntimeError``.
    """
    obj, start = unwrap(obj), path.strip("/")
    with _opened(file) as (stream, label), _archive(stream, label) as archive:
        state = _read(archive, f"{start}/" if start else "", label)
        if start and not state:
            raise ValueError(f"{label} has nothing under {path!r}; it holds {_shown(_names(archive))}")
        if strict:
            _require_some(state, _names(archive), obj, f"{start}/" if start else "", label)
    source = {f"/{key}": value for key, value in state.items()}
    DictionaryDeserializer(source, strict).visit(f"/{start}" if start else "", obj)


def _write(stream: IO[bytes], arrays: Mapping[str, Array], compression: bool) -> None:
    method = zipfile.ZIP_DEFLATED if compression else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:  # dated 1980: equal state, equal file
                np.lib.format.write_array(member, array, allow_pickle=False)


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[tuple[IO[bytes], str]]:
    """The file and what to call it in an error."""
    if hasattr(file, "read"):
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
            f"{label} is no npz file, which is a zip of .npy arrays. "
            "What chainring.serializers.save wrote is loaded with chainring.serializers.load"
        ) from error
    members = archive.namelist()
    strange = [name for name in members if not name.endswith(".npy")]
    if strange or len(set(members)) < len(members):
        raise ValueError(
            f"{label} is a zip but no npz file: its entries are .npy arrays, each once, "
            f"and it has {_shown(strange or members)}. "
            "What torch.save wrote is loaded with torch.load(file, weights_only=True)"
        )
    return archive


def _names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _read(archive: zipfile.ZipFile, prefix: str, label: str) -> dict[str, Any]:
    """What the file holds under ``prefix``, by whole path."""
    names = _names(archive)
    entry = _array(archive, PLAIN, label) if PLAIN in names else None
    arrays = {name: _array(archive, name, label) for name in names if name.startswith(prefix) and name != PLAIN}
    try:
        plain = Plain(entry)
        values = {path: value for path, value in plain.values.items() if path.startswith(prefix)}
        state = {name: as_tensor(array) for name, array in arrays.items() if name not in plain.parts and name not in values}
        return {**state, **{path: decoded(value, arrays.__getitem__) for path, value in values.items()}}
    except (*_DAMAGED, RecursionError) as error:
        raise _damaged(label, f"its {PLAIN} is not as save_npz writes it", error) from error


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


def _require_some(state: Mapping[str, Any], names: Sequence[str], obj: Any, start: str, label: str) -> None:
    """Says where in the file a model is that is not where it is looked for; PyTorch would list every name there is."""
    if serialize_method(obj) is not None or not (hasattr(obj, "named_parameters") and has_state(obj)):
        return
    own = [name.replace(".", "/") for name in obj.state_dict()]
    if own and not any(start + name in state for name in own):
        found = sorted({name.removesuffix(own[0]) for name in names if name.endswith(f"/{own[0]}")})
        if found:
            raise ValueError(f"{label} has no such model under {start!r}; pass one of these as path: {_shown(found)}")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
