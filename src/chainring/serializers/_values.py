"""Values as JSON that gives the very same values and types back, with tensors kept apart.

Plain JSON turns the ``int`` keys of a ``Counter`` into strings, after which a ``MultiStepLR`` never decays. So a value for
which JSON has no word is an object of one key, its tag:

    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}  {"$size": [...]}            containers
    {"$dict": [[key, value], ...]}  {"$ordered_dict": ...}  {"$counter": ...}              with keys of any type
    {"$int": hexadecimal}  {"$float": "inf", "-inf" or "nan"}  {"$complex": [real, imaginary]}
    {"$bytes": base64}  {"$bytearray": base64}  {"$numpy": [dtype, base64]}                a scalar of NumPy
    {"$tensor": name}  {"$array": [dtype, shape, name]}                                    kept in another file, by name
    {"$here": 0}                          a tensor whose name is the path of this place: where most have theirs

These tags are all there are: nothing is ever imported, called or unpickled by a name that a file holds.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring._distributed.sharding import is_sharded
from chainring._files import parse_strict
from chainring.serializers._restoring import StoredTensor

FORMAT = 1
MAX_DEPTH = 100  # containers within containers; deeper than any state, far below what recursion can bear

Array = np.ndarray[Any, Any]

_LARGEST_INT = 2**53  # other readers of JSON round beyond it, and Python refuses more than 4300 digits
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}|[<>][mM]8(\[\d{0,9}[a-zA-Z]{1,7}\])?")
_ARRAYS_AS_TENSORS = set(map(np.dtype, "?bhilqBHILQefdFD"))
_KEYS = (str, int, bool, float, complex, bytes, type(None), tuple, frozenset, np.generic)
_RESERVED_NAMES = ("__metadata__", "chainring.json")  # of safetensors, and of npz files


def encode(state: Mapping[str, Any]) -> tuple[bytes, dict[str, Tensor]]:
    """Return the JSON document of ``state`` and the tensors to which it refers, by name.

    Values are numbers of Python and NumPy, strings, bytes, ``None``, tensors, arrays, and lists, tuples, sets, dicts,
    ``OrderedDict`` and ``Counter`` of them, with any of the plain ones as keys. A tensor is named by its path, one
    within a container by a path below it. Tensors are not copied, and need no gradient; arrays are copied.

    Raises:
        TypeError: a value that could not be restored; the message names its path and type.
    """
    values, tensors = encode_values(state)
    return to_text(values), {name: tensor.detach() for name, tensor in tensors.items()}


def to_text(values: Mapping[str, Any]) -> bytes:
    """Return the JSON document of values that `encode_values` has encoded."""
    return json.dumps({"format": FORMAT, "state": values}, allow_nan=False, separators=(",", ":")).encode()


def encode_values(state: Mapping[str, Any], native_arrays: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Do as `encode` does, with values as JSON types; ``native_arrays`` keeps arrays of NumPy beside the tensors."""
    encoder = _Encoder(state, native_arrays)
    return {path: encoder.value(path, value, 0) for path, value in state.items()}, encoder.tensors


def find_tensors(values: Iterable[Any], depth: int = 0) -> list[Tensor] | None:
    """Return the tensors in values and their containers, but for sets and keys; ``None`` if they are not all plain."""
    # hot path: "stop for a snapshot" in benchmarks/growth.py
    if depth > MAX_DEPTH:
        return None
    found: list[Tensor] = []
    for value in values:
        cls = type(value)
        if cls in _TENSORS:
            found.append(value)
        elif cls in _CONTAINERS:
            below = find_tensors(value if cls is list or cls is tuple else value.values(), depth + 1)
            if below is None:
                return None
            found += below
        elif isinstance(value, Tensor):
            return None
    return found


def decode(text: bytes, tensors: Mapping[str, Tensor | StoredTensor]) -> dict[str, Any]:
    """Return the state that `encode` was given. Tensors come out of ``tensors`` as they are, arrays are copies.

    Raises:
        ValueError: the text is not what `encode` writes, or refers to a tensor that ``tensors`` lacks.
    """
    document = parse_strict(text)
    if not isinstance(document, dict) or document.keys() != {"format", "state"} or not isinstance(document["state"], dict):
        raise ValueError('state must be a JSON object of "format" and "state"; this is not a state file of a snapshot')
    if type(document["format"]) is not int or document["format"] != FORMAT:
        raise ValueError(f"state has format {document['format']!r}, this version reads {FORMAT}: load it with a newer one")
    return decode_values(document["state"], tensors)


def decode_values(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor | StoredTensor], arrays: Mapping[str, Array] | None = None
) -> dict[str, Any]:
    """Return the state that `encode_values` was given, with arrays out of ``arrays`` where they were handed over as such.

    Raises:
        ValueError: the values are not what `encode_values` returns, or refer to a tensor or array that is missing.
    """
    decoder = _Decoder(tensors, arrays)
    return {path: decoder.value(path, value, 0) for path, value in values.items()}


class _Encoder:
    """Walks over values and collects the tensors on its way."""

    def __init__(self, state: Mapping[str, Any], native_arrays: bool) -> None:
        for path in state:
            if type(path) is not str:
                raise TypeError(f"a path of state is a str, not {path!r}; give it another key")
        self.tensors: dict[str, Any] = {}
        self._paths = state.keys()
        self._native_arrays = native_arrays

    def value(self, path: str, value: Any, depth: int) -> Any:
        cls = type(value)
        if cls in _TENSORS:  # hot path: "stop for a snapshot" in benchmarks/growth.py, as most values are tensors there
            return self._tensor(path, value, depth)
        if depth > MAX_DEPTH:
            raise TypeError(f"{path}: {cls.__name__} is more than {MAX_DEPTH} containers deep, or holds itself; flatten it")
        if value is None or cls in (bool, str):
            return value
        if cls in _SCALARS:
            return _SCALARS[cls](value)
        if cls is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.value(f"{path}/{key}", item, depth + 1) for key, item in value.items()}
        if cls is list:
            return self._items(path, value, depth)
        if cls in _SEQUENCE_TAGS:
            return {_SEQUENCE_TAGS[cls]: self._items(path, value, depth)}
        if cls in _MAPPING_TAGS:
            return {_MAPPING_TAGS[cls]: [self._pair(path, key, item, depth) for key, item in value.items()]}
        if isinstance(value, Tensor):  # of a subclass
            return self._tensor(path, value, depth)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(path, value, depth)
        raise TypeError(_refusal(path, value))

    def _items(self, path: str, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.value(f"{path}/{i}", item, depth + 1) for i, item in enumerate(values)]

    def _pair(self, path: str, key: Any, item: Any, depth: int) -> list[Any]:
        below = _path_below(path, key)
        if not isinstance(key, _KEYS):
            raise TypeError(f"{below}: a key of type {type(key).__name__} cannot be saved; make it a number, str or tuple")
        return [self.value(below, key, depth + 1), self.value(below, item, depth + 1)]

    def _tensor(self, path: str, tensor: Tensor, depth: int) -> dict[str, Any]:
        is_refused = type(tensor) not in _TENSORS and not is_sharded(tensor)
        if is_refused or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            description = f"{type(tensor).__name__} of layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}"
            raise TypeError(f"{path}: a {description} cannot be saved; save a plain tensor, to_dense() or dequantize()")
        name = self._keep(path, tensor, depth)
        return {"$here": 0} if name == path and not self._native_arrays else {"$tensor": name}

    def _numpy(self, path: str, value: Any, depth: int) -> dict[str, Any]:
        has_plain_dtype = _NUMPY_DTYPE.fullmatch(value.dtype.str) is not None
        if type(value) is np.ndarray and (has_plain_dtype or (self._native_arrays and not value.dtype.hasobject)):
            name = self._keep(path, value if self._native_arrays else _as_tensor(value), depth)
            return {"$array": [value.dtype.str, list(value.shape), name]}
        if isinstance(value, (np.str_, np.bytes_)) and type(value) is value.dtype.type:  # item() would drop zeros at the end
            plain = "".join(value) if isinstance(value, np.str_) else bytes(list(value))
            return {"$numpy": [value.dtype.kind, self.value(path, plain, depth)]}
        if type(value) is value.dtype.type and has_plain_dtype:
            return {"$numpy": [value.dtype.str, _to_base64(value.tobytes())]}
        raise TypeError(_refusal(path, value))

    def _keep(self, path: str, tensor: Tensor | Array, depth: int) -> str:
        """Keep a tensor under a name that no other tensor has, which is its path wherever that is possible."""
        name = path.replace("\0", "")  # a zip cuts names at zeros
        while name in self.tensors or name in _RESERVED_NAMES or (name in self._paths and (depth > 0 or name != path)):
            name += "~"  # as in {"a": {"b": x}, "a/b": y}
        self.tensors[name] = tensor
        return name


class _Decoder:
    """Walks over JSON types that may come from anywhere, and restores values."""

    def __init__(self, tensors: Mapping[str, Tensor | StoredTensor], arrays: Mapping[str, Array] | None) -> None:
        self._tensors, self._arrays = tensors, arrays

    def value(self, path: str, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"{path}: nested more than {MAX_DEPTH} deep, as no state is; the file is damaged")
        if isinstance(value, list):
            return [self.value(f"{path}/{i}", item, depth + 1) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if not any(key.startswith("$") for key in value):
            return {key: self.value(f"{path}/{key}", item, depth + 1) for key, item in value.items()}
        tag, content = next(iter(value.items()))
        if len(value) != 1 or tag not in _TAGS:
            raise ValueError(f"{path}: {', '.join(value)[:80]} is not a tag that this version reads; use a newer one")
        try:
            return self._tagged(path, tag, content, depth)
        except (TypeError, KeyError, IndexError, OverflowError) as error:
            raise ValueError(f"{path}: {tag} does not hold what it should; the file is damaged") from error

    def _tagged(self, path: str, tag: str, content: Any, depth: int) -> Any:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.value(path, _expect(content, list), depth))
        if tag in _MAPPINGS:
            pairs = [self._pair(path, _expect(pair, list, 2), depth + 1) for pair in _expect(content, list)]
            if len(mapping := dict(pairs)) != len(pairs):
                raise ValueError(f"{path}: a key occurs twice; the file is damaged")
            return _MAPPINGS[tag](mapping)
        if tag == "$tensor":
            return self._tensor(path, content)
        if tag == "$here" and content == 0:
            return self._tensor(path, path)
        if tag == "$array":
            return self._array(path, *_expect(content, list, 3))
        if tag == "$numpy":
            dtype, item = _expect(content, list, 2)
            if dtype in ("U", "S"):
                text = self.value(path, item, depth)
                return np.str_(_expect(text, str)) if dtype == "U" else np.bytes_(_expect(text, bytes))
            return np.frombuffer(_from_base64(item), _numpy_dtype(dtype), count=1)[0]
        if tag == "$complex":
            real, imaginary = (_expect(self.value(path, item, depth), float) for item in _expect(content, list, 2))
            return complex(real, imaginary)
        return _SCALAR_TAGS[tag](content)

    def _pair(self, path: str, pair: list[Any], depth: int) -> tuple[Any, Any]:
        key = self.value(path, pair[0], depth)
        return key, self.value(_path_below(path, key), pair[1], depth)

    def _tensor(self, path: str, name: Any) -> Any:
        if _expect(name, str) not in self._tensors:
            raise ValueError(f"{path}: its tensor {name!r} is missing; the snapshot's tensor files are not complete")
        return self._tensors[name]

    def _array(self, path: str, dtype_text: Any, shape: Any, name: Any) -> Any:
        sizes = [_expect(size, int) for size in _expect(shape, list)]

        def check(array: Array) -> Array:
            if array.dtype.str != dtype_text or list(array.shape) != sizes:
                raise ValueError(f"{path}: {name!r} is not an array of {dtype_text} and shape {shape}; the file is damaged")
            return array

        if self._arrays is not None:
            return check(self._arrays[_expect(name, str)])
        dtype = _numpy_dtype(dtype_text)

        def convert(tensor: Tensor) -> Array:
            array = tensor.cpu().numpy().copy(order="K")
            return check(array if dtype in _ARRAYS_AS_TENSORS else array.view(dtype).reshape(sizes))

        tensor: Any = self._tensor(path, name)
        return tensor.converted(convert) if isinstance(tensor, StoredTensor) else convert(tensor)


def _path_below(path: str, key: Any) -> str:
    return f"{path}/{key:x}" if type(key) is int and abs(key) >= _LARGEST_INT else f"{path}/{key}"


def _as_tensor(array: Array) -> Tensor:
    """Return a copy of an array as a tensor, of its bytes where PyTorch lacks the dtype."""
    if array.dtype in _ARRAYS_AS_TENSORS:
        return torch.from_numpy(np.array(array, order="K"))
    return torch.from_numpy(np.array(array, order="C").reshape(-1).view(np.uint8))


def _refusal(path: str, value: Any) -> str:
    dtype = f" of dtype {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""
    name = f"{type(value).__module__}.{type(value).__qualname__}{dtype}"
    return (
        f"{path}: {name} cannot be saved. State is made of numbers, str, bytes, None, tensors, arrays, and lists, tuples, "
        "sets and dicts of them: save what it is made of, and build it again when loading"
    )


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": str(value)}


def _restored_float(word: Any) -> float:
    if _expect(word, str) in ("inf", "-inf", "nan"):
        return float(word)
    raise ValueError(f"$float holds {word[:40]!r}, which is neither infinity nor NaN; the file is damaged")


def _to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _from_base64(content: Any) -> bytes:
    return base64.b64decode(_expect(content, str), validate=True)


def _expect(value: Any, cls: Any, length: int | None = None) -> Any:
    if type(value) is not cls or (length is not None and len(value) != length):
        raise TypeError(f"expected a {cls.__name__} of length {length or 'any'}, found a {type(value).__name__}")
    return value


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.fullmatch(_expect(text, str)):
        raise ValueError(f"{text[:40]!r} is not a dtype of numbers, dates or strings; the file is damaged")
    return np.dtype(text)  # type: ignore[no-any-return]


_TENSORS = (Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, list, tuple, OrderedDict)
_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if abs(value) < _LARGEST_INT else {"$int": hex(value)},
    float: _float,
    bytes: lambda value: {"$bytes": _to_base64(value)},
    bytearray: lambda value: {"$bytearray": _to_base64(value)},
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
}
_SCALAR_TAGS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda word: int(_expect(word, str), 16),
    "$float": _restored_float,
    "$bytes": _from_base64,
    "$bytearray": lambda word: bytearray(_from_base64(word)),
}
_SEQUENCES: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$size": torch.Size}
_MAPPINGS: dict[str, Any] = {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}
_SEQUENCE_TAGS = {cls: tag for tag, cls in _SEQUENCES.items()}
_MAPPING_TAGS = {cls: tag for tag, cls in _MAPPINGS.items()}
_TAGS = {*_SCALAR_TAGS, *_SEQUENCES, *_MAPPINGS, "$tensor", "$here", "$array", "$numpy", "$complex"}
