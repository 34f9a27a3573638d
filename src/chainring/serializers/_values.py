"""Typed JSON: plain values as text that gives the very same values and types back, with tensors kept apart.

Plain JSON turns the ``int`` keys of a ``Counter`` into strings, after which a ``MultiStepLR`` never decays. So what JSON
has no word for is an object of one key that names its kind: ``{"$tuple": [1, 2]}``, ``{"$counter": [[80, 1]]}``,
``{"$float": "inf"}``, ``{"$tensor": "model/weight"}``. The kinds are the ones written out here: nothing is ever
imported, called or unpickled by a name that a file holds.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from chainring._distributed.sharding import is_sharded

FORMAT = 1
MAX_DEPTH = 100  # containers within containers; deeper than any state, far below what recursion can bear

_PLAIN_INT = 2**53  # beyond it other readers of JSON round, and beyond 4300 digits Python refuses
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}|[<>][mM]8(\[\d{0,9}[a-zA-Z]{1,7}\])?")
_ARRAYS_AS_TENSORS = set(map(np.dtype, "?bhilqBHILQefdFD"))
_KEYS = (str, int, bool, float, complex, bytes, type(None), tuple, frozenset, np.generic)


def encode(state: Mapping[str, Any]) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The JSON text of ``state`` and the tensors that it refers to, by name.

    Values are numbers of Python and NumPy, strings, bytes, ``None``, tensors, arrays, and lists, tuples, sets, dicts,
    ``OrderedDict`` and ``Counter`` of them, with any of the plain ones as keys. A tensor is named by its path, one
    within a container by a path below it. Tensors are handed over as they are, not copied; arrays are copied.

    Raises:
        TypeError: a value that could not be restored; the message names its path and type.
    """
    encoder = _Encoder(state)
    values = {path: encoder.value(path, value, 0) for path, value in state.items()}
    return json.dumps({"format": FORMAT, "state": values}, allow_nan=False).encode(), encoder.tensors


def decode(text: bytes, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state that `encode` was given. Tensors come out of ``tensors`` as they are, arrays are copies.

    Raises:
        ValueError: the text is not what `encode` writes, or refers to a tensor that ``tensors`` lacks.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _finite, "parse_float": _finite}
    try:
        document = json.loads(text.decode("utf-8"), **hooks)
    except RecursionError:
        raise ValueError(f"state is nested more than {MAX_DEPTH} deep; the file is damaged") from None
    if not isinstance(document, dict) or document.keys() != {"format", "state"} or not isinstance(document["state"], dict):
        raise ValueError('state must be a JSON object of "format" and "state"; this is no state file of a snapshot')
    if type(document["format"]) is not int or document["format"] != FORMAT:
        raise ValueError(f"state has format {document['format']!r}, this version reads {FORMAT}: load it with a newer one")
    decoder = _Decoder(tensors)
    return {path: decoder.value(path, value, 0) for path, value in document["state"].items()}


class _Encoder:
    """Walks over values and collects the tensors on its way."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        for path in state:
            if type(path) is not str or not _is_text(path):
                raise TypeError(f"a path of state is a str that UTF-8 can hold, not {path!r}; give it another key")
        self.tensors: dict[str, torch.Tensor] = {}
        self._paths = state.keys()

    def value(self, path: str, value: Any, depth: int) -> Any:
        kind = type(value)
        if depth > MAX_DEPTH:
            raise TypeError(
                f"{path}: {kind.__name__} lies more than {MAX_DEPTH} containers deep, or holds itself; flatten it"
            )
        if value is None or kind is bool:
            return value
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind is dict and all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return {key: self.value(f"{path}/{key}", item, depth + 1) for key, item in value.items()}
        if kind is list:
            return self._items(path, value, depth)
        if kind in _SEQUENCE_TAGS:
            return {_SEQUENCE_TAGS[kind]: self._items(path, value, depth)}
        if kind in _MAPPING_TAGS:
            return {_MAPPING_TAGS[kind]: [self._pair(path, key, item, depth) for key, item in value.items()]}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(path, value, depth)}
        if kind is np.ndarray and _has_plain_dtype(value):
            return {"$array": [value.dtype.str, list(value.shape), self._array(path, value, depth)]}
        if isinstance(value, np.generic) and kind is value.dtype.type:
            if isinstance(value, (np.str_, np.bytes_)):  # item() and tobytes() drop zeros at the end
                plain = "".join(value) if isinstance(value, np.str_) else bytes(list(value))
                return {"$numpy": [value.dtype.kind, self.value(path, plain, depth)]}
            if _has_plain_dtype(value):
                return {"$numpy": [value.dtype.str, _base64(value.tobytes())]}
        raise TypeError(_refusal(path, value))

    def _items(self, path: str, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.value(f"{path}/{i}", item, depth + 1) for i, item in enumerate(values)]

    def _pair(self, path: str, key: Any, item: Any, depth: int) -> list[Any]:
        below = f"{path}/{key:x}" if type(key) is int and abs(key) >= _PLAIN_INT else f"{path}/{key}"
        if not isinstance(key, _KEYS):
            raise TypeError(f"{below}: a key of type {type(key).__name__} cannot be saved; make it a number, str or tuple")
        return [self.value(below, key, depth + 1), self.value(below, item, depth + 1)]

    def _tensor(self, path: str, tensor: torch.Tensor, depth: int) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_sharded(tensor):
            raise TypeError(f"{path}: {type(tensor).__name__} cannot be saved; save the plain tensor that it wraps")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            what = f"layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}"
            raise TypeError(f"{path}: a Tensor of {what} cannot be saved; save to_dense(), dequantize() or a filled one")
        return self._named(path, tensor.detach(), depth)

    def _array(self, path: str, array: np.ndarray[Any, Any], depth: int) -> str:
        if array.dtype in _ARRAYS_AS_TENSORS:
            return self._named(path, torch.from_numpy(np.array(array, order="K")), depth)
        flat = np.array(array, order="C").reshape(-1)
        return self._named(path, torch.from_numpy(flat.view(np.uint8)), depth)

    def _named(self, path: str, tensor: torch.Tensor, depth: int) -> str:
        name = path.encode("utf-8", "backslashreplace").decode()
        while name in self.tensors or (depth > 0 and name in self._paths):  # {"a": {"b": x}, "a/b": y}
            name += "~"
        self.tensors[name] = tensor
        return name


class _Decoder:
    """Walks over what JSON read, which may come from anywhere, and restores values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def value(self, path: str, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"{path}: nested more than {MAX_DEPTH} deep; no snapshot is: the file is damaged")
        if isinstance(value, list):
            return [self.value(f"{path}/{i}", item, depth + 1) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if not any(key.startswith("$") for key in value):
            return {key: self.value(f"{path}/{key}", item, depth + 1) for key, item in value.items()}
        tag, content = next(iter(value.items()))
        if len(value) != 1 or tag not in _TAGS:
            raise ValueError(f"{path}: {', '.join(value)[:80]} is no kind of value that this version reads; use a newer one")
        try:
            return self._tagged(path, tag, content, depth)
        except (TypeError, KeyError, IndexError, OverflowError) as error:
            raise ValueError(f"{path}: {tag} holds what it cannot; the file is damaged") from error

    def _tagged(self, path: str, tag: str, content: Any, depth: int) -> Any:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.value(path, _list(content), depth))
        if tag in _MAPPINGS:
            pairs = [self.value(path, _list(pair, 2), depth) for pair in _list(content)]
            restored = dict(pairs)
            if len(restored) != len(pairs):
                raise ValueError(f"{path}: a key occurs twice; the file is damaged")
            return _MAPPINGS[tag](restored)
        if tag == "$tensor":
            return self._tensor(path, content)
        if tag == "$array":
            return self._array(path, *_list(content, 3))
        if tag == "$numpy":
            kind, item = _list(content, 2)
            if kind in ("U", "S"):
                text = self.value(path, item, depth)
                return np.str_(_typed(text, str)) if kind == "U" else np.bytes_(_typed(text, bytes))
            return np.frombuffer(_bytes(item), _numpy_dtype(kind), count=1)[0]
        if tag == "$complex":
            real, imaginary = (_typed(self.value(path, part, depth), float) for part in _list(content, 2))
            return complex(real, imaginary)
        return _SCALAR_TAGS[tag](content)

    def _tensor(self, path: str, name: Any) -> torch.Tensor:
        if _typed(name, str) not in self._tensors:
            raise ValueError(f"{path}: its tensor {name!r} is missing; the snapshot's tensor files are not complete")
        return self._tensors[name]

    def _array(self, path: str, kind: Any, shape: Any, name: Any) -> np.ndarray[Any, Any]:
        dtype, sizes = _numpy_dtype(kind), [_typed(size, int) for size in _list(shape)]
        array = self._tensor(path, name).cpu().numpy().copy(order="K")
        if dtype not in _ARRAYS_AS_TENSORS:
            array = array.view(dtype).reshape(sizes)
        if array.dtype != dtype or list(array.shape) != sizes:
            raise ValueError(f"{path}: tensor {name!r} is no array of {kind} and shape {shape}; the file is damaged")
        return array


def _refusal(path: str, value: Any) -> str:
    what = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (np.ndarray, np.generic)):
        what += f" of dtype {value.dtype}"
    return (
        f"{path}: {what} cannot be saved. State is made of numbers, str, bytes, None, tensors, arrays, and lists, tuples, "
        "sets and dicts of them: save what it is made of, and build it anew when loading"
    )


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value).hex()  # a NaN has a sign and a payload
    return {"$float": next((word for word in ("inf", "-inf", "nan") if struct.pack(">d", float(word)).hex() == bits), bits)}


def _restored_float(word: Any) -> float:
    if word in ("inf", "-inf", "nan"):
        return float(word)
    value: float = struct.unpack(">d", bytes.fromhex(_typed(word, str)))[0] if len(word) == 16 else 0.0
    if math.isfinite(value):
        raise ValueError(f"$float holds {word[:40]!r}, which is no infinity or NaN; the file is damaged")
    return value


def _str(value: str) -> Any:
    return value if _is_text(value) else {"$text": _base64(value.encode("utf-8", "surrogatepass"))}


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(content: Any) -> bytes:
    return base64.b64decode(_typed(content, str), validate=True)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is kind:
        return value
    raise TypeError(f"expected a {kind.__name__}, found a {type(value).__name__}")


def _list(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list or length not in (None, len(value)):
        raise TypeError(f"expected a list, of {length} where that is a number, found a {type(value).__name__}")
    return value


def _has_plain_dtype(value: Any) -> bool:
    return _NUMPY_DTYPE.fullmatch(value.dtype.str) is not None


def _numpy_dtype(kind: Any) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.fullmatch(_typed(kind, str)):
        raise ValueError(f"{kind[:40]!r} is no dtype of numbers, dates or strings; the file is damaged")
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated[:80]!r} occurs twice; the file is damaged")
    return found


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:40]} is no finite number; the file is damaged")
    return value


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if abs(value) < _PLAIN_INT else {"$int": hex(value)},
    float: _float,
    str: _str,
    bytes: lambda value: {"$bytes": _base64(value)},
    bytearray: lambda value: {"$bytearray": _base64(value)},
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
}
_SCALAR_TAGS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda word: int(_typed(word, str), 16),
    "$float": _restored_float,
    "$text": lambda word: _bytes(word).decode("utf-8", "surrogatepass"),
    "$bytes": _bytes,
    "$bytearray": lambda word: bytearray(_bytes(word)),
}
_SEQUENCES: dict[str, Callable[[Any], Any]]
_SEQUENCES = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$size": torch.Size}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}
_SEQUENCE_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}
_MAPPING_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_TAGS = {*_SCALAR_TAGS, *_SEQUENCES, *_MAPPINGS, "$tensor", "$array", "$numpy", "$complex"}
