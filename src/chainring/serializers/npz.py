"""State in one npz file, which NumPy and Chainer read too; nothing is pickled or unpickled.

The file is a zip of ``.npy`` arrays whose names are the paths of the state: ``predictor/l1/weight``. A file of nothing but
such arrays, wherever it comes from, is read as tensors; arrays of a dtype that torch lacks, such as strings, stay arrays.
All that a plain array cannot say is in one more entry, ``chainring.json``: UTF-8 text as an array of bytes, present only
where it is needed. It is a JSON object of

    "version"   1
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
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from chainring._files import atomic_write, below_home, parse_strict
from chainring._messages import list_names
from chainring.serializers._values import Array, as_array, decode_arrays, encode, find_dtypes, require_dtype
from chainring.serializers.protocol import DictionaryDeserializer, DictionarySerializer, is_module, state_entries, unwrap

_JSON = "chainring.json"
_VERSION = 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NATIVE_DTYPES = {
    np.dtype(code).str: torch.from_numpy(np.zeros(0, code)).dtype
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
_DTYPES_NUMPY_LACKS = find_dtypes([
    "bfloat16", "complex32", "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
])  # fmt: skip
_NONE = (
    b"\x80\x03cnumpy.core.multiarray\n_reconstruct\nq\0cnumpy\nndarray\nq\x01K\0\x85q\x02C\x01bq\x03\x87q\x04Rq\x05(K\x01)"
    b"cnumpy\ndtype\nq\x06X\x02\0\0\0O8q\x07\x89\x88\x87q\x08Rq\t(K\x03X\x01\0\0\0|q\nNNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK?tq\x0bb\x89]q\x0cNatq\rb.",
    b"\x80\x04\x95\x86\0\0\0\0\0\0\0\x8c\x15numpy.core.multiarray\x94\x8c\x0c_reconstruct\x94\x93\x94\x8c\x05numpy\x94\x8c"
    b"\x07ndarray\x94\x93\x94K\0\x85\x94C\x01b\x94\x87\x94R\x94(K\x01)h\x03\x8c\x05dtype\x94\x93\x94\x8c\x02O8\x94\x89\x88\x87"
    b"\x94R\x94(K\x03\x8c\x01|\x94NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?t\x94b\x89]\x94Nat\x94b.",
)
"""What NumPy writes for ``numpy.array(None)``, which Chainer saves for ``None``: recognized by its bytes, not unpickled."""
_LONGEST_NONE = 512
_SHOWN = 5  # names in a message
_LARGEST, _LARGEST_RATIO = 2**28, 64  # bytes of an unpacked file in any case, and beyond that as many times its size
_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, OSError, RuntimeError),
    *(MemoryError, zipfile.BadZipFile, zlib.error),
)


def save_npz(file: str | os.PathLike[str] | IO[bytes], obj: Any, compression: bool = True) -> None:
    """Save a model or any object that has state as one npz file, which is complete or absent.

    The file is flushed and then renamed, so an existing file is either replaced completely or stays as it is.

    Example::

        save_npz("mlp.npz", model)
        load_npz("mlp.npz", model)

    Args:
        file: a path, used as it is (no ``.npz`` is appended), or a file open for binary writing, which is written in
            place.
        obj: an object with ``serialize``, or ``state_dict`` and ``load_state_dict``.
        compression: True to compress the arrays; without compression the file is larger and written many times faster.

    Raises:
        TypeError: ``obj`` has no state, or contains a value that could not be restored; the error names its path.
        ValueError: ``file`` is a folder or a device.
        FileNotFoundError: its folder does not exist.
    """
    serializer = DictionarySerializer()
    serializer.visit("", unwrap(obj))
    arrays = _to_arrays(serializer.target)
    target: contextlib.AbstractContextManager[IO[bytes]]
    if isinstance(file, (str, os.PathLike)):
        path = Path(os.path.realpath(below_home(file)))  # what a link points to is replaced, not the link
        if path.exists() and not path.is_file():
            raise ValueError(
                f"an npz file is a regular file, and {path} is a folder or a device: name a file, or pass one open"
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in: make it first")
        target = atomic_write(path, durable=True)
    else:
        target = contextlib.nullcontext(file)
    method = zipfile.ZIP_DEFLATED if compression else zipfile.ZIP_STORED
    with target as stream, zipfile.ZipFile(stream, "w", method) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:  # dated 1980: equal state, equal file
                np.lib.format.write_array(member, array, allow_pickle=False)


IgnoreNames = str | Callable[[str], Any] | Sequence[str | Callable[[str], Any]] | None


def load_npz(
    file: str | os.PathLike[str] | IO[bytes],
    obj: Any,
    path: str = "",
    strict: bool = True,
    *,
    ignore_names: IgnoreNames = None,
) -> None:
    """Load an npz file of `save_npz` or Chainer into an object of the same kind. Nothing is ever unpickled.

    A value that Chainer saved is returned in the type of the value that the object passes: a number, a bool, a string, a
    list, an array, which is filled, or a tensor. If the object passes ``None``, it gets a tensor.

    Args:
        file: a path, or a file open for binary reading that can seek.
        obj: the object to load into.
        path: the part of the file that belongs to ``obj``, such as ``"updater/model:main/predictor/"``.
        strict: True if a missing or unexpected entry is an error; otherwise missing entries stay as they are.
        ignore_names: the entries that stay as they are, whether or not the file has them: a name, a function that returns
            true for such a name, or a list of these. A name is the full one in the file, including ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an npz file, or damaged, or a snapshot, which `chainring.serializers.load` loads; or it has
            nothing under ``path``; or an array in it is pickled, or has another shape than that of the object; or
            ``ignore_names`` has another form.
        KeyError: with ``strict``, an entry is missing. A module raises PyTorch's ``RuntimeError``.
        TypeError: the object passes a value of a type that cannot hold the value that Chainer saved.
    """
    is_list = isinstance(ignore_names, (list, tuple, set, frozenset))
    rules: list[Any] = [] if ignore_names is None else list(ignore_names) if is_list else [ignore_names]  # type: ignore[arg-type]
    if invalid := [rule for rule in rules if not isinstance(rule, str) and not callable(rule)]:
        raise ValueError(
            f"ignore_names is a name, a function that takes a name, or a list of such; got {invalid[0]!r}. A name is that "
            'of an entry in the file, such as "predictor/l1/weight"'
        )
    opened: contextlib.AbstractContextManager[IO[bytes]]
    if isinstance(file, (str, os.PathLike)):
        file = below_home(file)
        label = repr(os.fspath(file))
        if os.path.isdir(file):
            raise ValueError(
                f"{label} is a folder, as snapshots are: load it with chainring.serializers.load, not with load_npz"
            )
        if not os.path.exists(file):
            raise FileNotFoundError(f"there is no npz file {label}; save_npz writes under the very name that it is given")
        opened = open(file, "rb")  # noqa: SIM115 - it is entered below
    else:
        label, opened = repr(getattr(file, "name", "the open file")), contextlib.nullcontext(file)
    obj, start = unwrap(obj), path.strip("/")
    prefix = f"{start}/" if start else ""
    with opened as stream, _archive(stream, label) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        state, untyped = _read(archive, names, prefix, label)
    if start and not state:
        raise ValueError(f"{label} has nothing under {path!r}; it holds {list_names(names, _SHOWN)}")
    if strict and is_module(obj):  # say where in the file it is, if it is elsewhere; PyTorch would list every name
        paths = [name.replace(".", "/") for name in state_entries(obj)]
        elsewhere = sorted({name.removesuffix(paths[0]) for name in names if paths and name.endswith(f"/{paths[0]}")})
        if elsewhere and not any(prefix + path in state for path in paths):
            there = list_names(elsewhere, _SHOWN)
            raise ValueError(f"{label} has no such model under {prefix!r}; pass one of these as path: {there}")

    def is_ignored(name: str) -> bool:
        return any(name == rule if isinstance(rule, str) else bool(rule(name)) for rule in rules)

    _NpzDeserializer(state, untyped, is_ignored, strict).visit(start, obj)


def read_arrays(path: Path, is_meant: Callable[[list[str]], bool]) -> dict[str, Array | None] | None:
    """Return the arrays of an npz file by name, ``None`` where it has the ``None`` of Chainer.

    Returns ``None`` for any other file, for one that `save_npz` has described, and where ``is_meant`` of the names is false.

    Raises:
        ValueError: it is damaged, would become much larger than it is, or has a pickled array.
    """
    label = repr(os.fspath(path))
    with path.open("rb") as stream:
        try:
            archive = _archive(stream, label)
        except ValueError:
            return None
        with archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if _JSON in names or not is_meant(names):
                return None
            size = sum(member.file_size for member in archive.infolist())
            if size > max(_LARGEST, _LARGEST_RATIO * path.stat().st_size):
                raise ValueError(f"{label} would become {size:,} bytes, many times its size: use load_npz if you trust it")
            return {name: _array(archive, name, label) for name in names}


class _NpzDeserializer(DictionaryDeserializer):
    """Loads from the entries of a file; an array without a description becomes what the object declares."""

    def __init__(self, source: Mapping[str, Any], untyped: Set[str], ignored: Callable[[str], bool], strict: bool) -> None:
        super().__init__(source, strict)
        self._untyped = untyped
        self._ignores = ignored

    def __call__(self, key: str, value: Any) -> Any:
        path = self._path + key
        if self._ignores is not None and self._ignores(path):
            self._asked.add(path)
            return value
        plain = "/".join(filter(None, path.split("/")))  # Chainer drops slashes at both ends of a key
        if path not in self.source and plain in self.source:
            self._asked.add(plain)
            return self._restore(plain, value)
        return super().__call__(key, value)

    def _restore(self, path: str, value: Any) -> Any:
        saved = self.source[path]
        if path not in self._untyped or value is None or saved is None:
            return super()._restore(path, value)
        if isinstance(value, np.ndarray):
            return _fill_array(path, value, saved)
        if isinstance(value, (bool, int, float, str, list, tuple, np.generic)):
            return _as_declared(path, value, np.asarray(saved))
        return super()._restore(path, value)


def _fill_array(path: str, value: Array, saved: Any) -> Array:
    """Copy a saved array into that of the object, which may have another dtype that holds the same values."""
    array = as_array(saved)
    if array is None or array.shape != value.shape:
        raise ValueError(
            f"{path!r} has the shape {list(saved.shape)} in the file, and the object has an array of shape "
            f"{list(value.shape)}: make it of the saved shape, or None, in place of which a tensor comes back"
        )
    with np.errstate(all="ignore"):
        cast = array.astype(value.dtype, copy=False) if np.can_cast(array.dtype, value.dtype, "same_kind") else None
    if cast is None or not np.array_equal(cast, array, equal_nan=cast.dtype.kind in "fc"):
        raise TypeError(
            f"{path!r} is of {array.dtype}, which an array of {value.dtype} does not hold; make it {array.dtype}"
        )
    if not value.flags.writeable:
        return cast.copy()
    np.copyto(value, cast)
    return value


def _as_declared(path: str, value: Any, array: Array) -> Any:
    """Return a saved array as a number, string or list of the class of ``value``, as far as NumPy calls the cast safe."""
    cls = type(value)
    if isinstance(value, (list, tuple)):
        items = array.tolist()
        if isinstance(items, list):
            return cls(items)
    elif array.ndim == 0:
        is_int = array.dtype.kind in "iu" and issubclass(cls, int) and cls is not bool
        is_text = array.dtype.kind == "U" and isinstance(value, str)
        is_safe = array.dtype.kind in "biuf" and not isinstance(value, str) and np.can_cast(array.dtype, cls, "safe")
        if is_text or is_int or is_safe:
            return cls(array[()])
    raise TypeError(
        f"{path!r} is an array of {array.dtype} and shape {list(array.shape)} in the file, which {cls.__name__} does not "
        f"hold exactly; give a value of the saved type to serializer(key, value)"
    )


def _to_arrays(state: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a file by name, one of which says in JSON what arrays cannot."""
    values, kept = encode(state, native_arrays=True)
    arrays, descriptions = dict(kept), dict[str, Any]()
    for name, tensor in kept.items():
        if not isinstance(tensor, Tensor):
            continue
        description, dtype = dict[str, Any](), str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype not in _NATIVE_DTYPES.values() and dtype not in _DTYPES_NUMPY_LACKS:
            raise TypeError(f"{name}: an npz file has no {tensor.dtype}; convert it to a dtype that holds its values")
        if not tensor.is_contiguous():
            description["order"] = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in _DTYPES_NUMPY_LACKS:
            description["dtype"] = dtype
            host = host.view(_INTEGERS[host.itemsize])
        arrays[name] = host.numpy()
        if description:
            descriptions[name] = description
    values = {path: value for path, value in values.items() if value != {"$tensor": path}}
    if values or descriptions:
        parts = [name for name in arrays if name not in state]
        document = {"version": _VERSION, "values": values, "tensors": descriptions, "parts": parts}
        arrays[_JSON] = np.frombuffer(json.dumps(document, allow_nan=False).encode(), np.uint8)
    return arrays


def _archive(stream: IO[bytes], label: str) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ValueError(
            f"{label} is not an npz file, which is a zip of .npy arrays, or it is truncated or damaged ({error}). What "
            "chainring.serializers.save wrote is loaded with chainring.serializers.load"
        ) from error
    members = archive.namelist()
    invalid = [name for name in members if not name.endswith(".npy")]
    if invalid or len(set(members)) < len(members):
        raise ValueError(
            f"{label} is a zip but not an npz file, whose entries are .npy arrays, each once: it has "
            f"{list_names(invalid or members, _SHOWN)}. What torch.save wrote is loaded with "
            "torch.load(file, weights_only=True)"
        )
    return archive


def _read(archive: zipfile.ZipFile, names: Sequence[str], prefix: str, label: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values under ``prefix`` by whole path, and the paths of arrays without a description."""
    text = None if _JSON not in names else np.asarray(_array(archive, _JSON, label)).tobytes()
    read = {name: _array(archive, name, label) for name in names if name.startswith(prefix) and name != _JSON}
    arrays = {name: array for name, array in read.items() if array is not None}
    try:
        document: Any = (
            {"version": _VERSION, "values": {}, "tensors": {}, "parts": []} if text is None else parse_strict(text)
        )
        if document["version"] != _VERSION:
            raise ValueError(f"it is of version {document['version']}, and this Chainring reads {_VERSION}")
        values = {path: value for path, value in document["values"].items() if path.startswith(prefix)}
        descriptions, parts = document["tensors"], frozenset(document["parts"])
        tensors = {name: _to_tensor(array, descriptions.get(name, {})) for name, array in arrays.items()}
        state = {name: value for name, value in (read | tensors).items() if name not in parts and name not in values}
        untyped = frozenset(name for name in state if name in arrays and name not in descriptions)
        return state | decode_arrays(values, tensors, arrays), untyped
    except _DAMAGED as error:
        raise _damaged(label, f"its {_JSON} is not as save_npz writes it", error) from error


def _to_tensor(array: Array, description: Mapping[str, Any]) -> Any:
    """Return the tensor that was stored as an array, or the array itself where torch lacks its dtype."""
    native = array.dtype.newbyteorder("=")
    if native.str not in _NATIVE_DTYPES:
        return array
    tensor = torch.from_numpy(array.astype(native, copy=False))
    if "dtype" in description:
        require_dtype(description["dtype"])
        dtype = _DTYPES_NUMPY_LACKS[description["dtype"]]
        if dtype.itemsize != tensor.itemsize:  # a view would change the shape
            raise ValueError(f"{tensor.dtype} cannot hold the bits of {dtype}")
        tensor = tensor.view(dtype)
    if "order" in description:
        order = description["order"]
        tensor = tensor.permute(order).contiguous().permute([order.index(i) for i in range(len(order))])
    return tensor


def _array(archive: zipfile.ZipFile, name: str, label: str) -> Array | None:
    """Return an array of the file; ``None`` if it is the ``None`` that Chainer saves."""
    try:
        if archive.getinfo(f"{name}.npy").file_size < _LONGEST_NONE:
            header, _, body = archive.read(f"{name}.npy").partition(b"\n")
            body = body.replace(b"\x87\0\0\0\0\0\0\0\x8c\x16numpy._core", b"\x86\0\0\0\0\0\0\0\x8c\x15numpy.core")  # NumPy 2
            if header.startswith(b"\x93NUMPY\x01\0") and b"'shape': ()" in header and body in _NONE:
                return None
        with archive.open(f"{name}.npy") as member:
            array: Array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):  # which also compares the checksum
                raise ValueError("there is more in it than its shape says")
            return array
    except _DAMAGED as error:
        if "allow_pickle" in str(error):
            raise ValueError(
                f"{name!r} in {label} is an array of Python objects, which NumPy pickles, and unpickling can run any code. "
                "Save numbers there, or load a part without it by its path"
            ) from error
        raise _damaged(label, f"{name!r} cannot be read", error) from error


def _damaged(label: str, what: str, error: BaseException) -> ValueError:
    return ValueError(f"npz file {label} is truncated or damaged: {what} ({error}). Copy it again, or load an earlier one")
