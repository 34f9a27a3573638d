"""What an npz file is made of: state as named arrays, one of which says in JSON what arrays cannot; `npz` says how."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
