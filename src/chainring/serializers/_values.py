"""Values of saved state: copied, compared, given back as an object declares them, and as JSON with tensors kept apart.

Plain JSON turns the ``int`` keys of a ``Counter`` into strings, after which a ``MultiStepLR`` never decays. So a value for
which JSON has no word is an object of one key, its tag:

    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}  {"$size": [...]}            containers
    {"$dict": [[key, value], ...]}  {"$ordered_dict": ...}  {"$counter": ...}              with keys of any type
    {"$deque": [maxlen, [...]]}
    {"$int": hexadecimal}  {"$float": "inf", "-inf" or "nan"}  {"$complex": [real, imaginary]}  {"$dtype": name of torch's}
    {"$bytes": base64}  {"$bytearray": base64}  {"$numpy": [dtype, base64]}                a scalar of NumPy
    {"$tensor": name}  {"$array": [dtype, shape, name]}                                    kept in another file, by name
    {"$here": 0}                          a tensor whose name is the path of this place: where most have theirs

These tags are all there are: nothing is ever imported, called or unpickled by a name that a file holds.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import re
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._distributed.sharding import empty_shard_like, is_sharded, is_summand, shard_like, to_full, to_local
from chainring._files import parse_strict

K = TypeVar("K")

_SINCE = {"float8_e8m0fnu": "2.7", "float4_e2m1fn_x2": "2.8"}
"""The version of torch with which a dtype came."""
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
SCALARS = (*_NUMBERS, str)


def to_type_of(value: Any, saved: Any) -> Any:
    """Return a saved number or string in the type of ``value``, or unchanged if that type cannot represent it exactly.

    It may be in an array without dimensions, in which Chainer keeps it. A tensor, on which the object computes, stays one.
    """
    cls, is_text = type(value), isinstance(value, str)
    if isinstance(saved, np.ndarray) and not saved.ndim:
        converted = to_type_of(value, saved[()])
        return converted if type(converted) is cls else copy_value(saved)
    is_same_kind = isinstance(saved, str) if is_text else isinstance(saved, _NUMBERS) and not is_text
    if type(saved) is cls or not is_same_kind or np.timedelta64 in (cls, type(saved)):
        return copy_value(saved)
    try:
        with warnings.catch_warnings(action="error", category=DeprecationWarning):  # as NumPy before 2.0 says what it cuts
            converted = cls(saved)
        is_exact = repr(type(saved)(converted)) == repr(saved)
    except (TypeError, ValueError, OverflowError, DeprecationWarning):
        return saved
    return converted if is_exact else saved


def fill(value: Tensor | np.ndarray[Any, Any], saved: Any) -> bool:
    """Copy saved numbers into a tensor or array; return False, and leave it, if its shape or dtype is another one."""
    if isinstance(value, np.ndarray):
        array = as_array(saved)
        is_filled = type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject and value.flags.writeable
        if array is None or not is_filled or (value.shape, value.dtype) != (array.shape, array.dtype):
            return False
        np.copyto(value, array)
        return True
    if is_lazy(value) or value.is_meta or value.layout is not torch.strided:
        return False
    try:
        tensor = torch.from_numpy(np.array(saved, order="K")) if isinstance(saved, np.ndarray) else saved
        if not isinstance(tensor, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            return False
        with torch.no_grad():
            value.copy_(shard_like(tensor, value))
    except (TypeError, ValueError, RuntimeError):  # PyTorch lacks the dtype; or it is expanded, or of inference mode
        return False
    return True


def as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array as it is and a tensor as an array; ``None`` for anything else, and where NumPy lacks the dtype."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, np.ndarray) else None
    try:
        array: np.ndarray[Any, Any] = to_full(value.detach()).cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError):
        return None
    return array


def is_same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal, also where they are arrays or tensors, or hold such."""
    if first is second:
        return True
    if isinstance(first, (Tensor, np.ndarray)) or isinstance(second, (Tensor, np.ndarray)):
        arrays = as_array(first), as_array(second)
        is_float = isinstance(first, Tensor) and isinstance(second, Tensor) and first.is_floating_point()
        if is_float and arrays[0] is None and first.dtype == second.dtype:
            arrays = as_array(first.float()), as_array(second.float())  # of bfloat16, say, which NumPy lacks
        return type(first) is type(second) and arrays[0] is not None and np.array_equal(arrays[0], arrays[1])  # type: ignore[arg-type]
    if isinstance(first, (list, tuple, deque)) and isinstance(second, (list, tuple, deque)):
        return len(first) == len(second) and all(map(is_same_value, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_same_value(value, second[key]) for key, value in first.items())
    return bool(first == second)


def is_same_tensor(first: Any, second: Any) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if first is second:
        return True
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or is_lazy(first) or is_lazy(second):
        return False
    return is_sharded(first) == is_sharded(second) and view_of(to_local(first)) == view_of(to_local(second))


def copy_value(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy that shares no memory with ``value``; tensors leave their graph, keep dtype, device and strides.

    A tensor that stands in several places of ``value``, such as the learning rate of two groups, is one in the copy too.
    """
    memo = {} if memo is None else memo
    if hasattr(value, "detach"):
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone()
        return memo[id(value)]
    if type(value) in (list, tuple):
        return type(value)(copy_value(item, memo) for item in value)
    if type(value) is deque:
        return deque((copy_value(item, memo) for item in value), value.maxlen)
    if type(value) is dict:
        return {key: copy_value(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def move(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device, unless that has no memory."""
    if isinstance(value, Tensor) and device.type != "meta":
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(move(item, device) for item in value)
    if type(value) is dict:
        return {key: move(item, device) for key, item in value.items()}
    return value


def find_aliases(tensors: Mapping[K, Tensor]) -> dict[K, K]:
    """Return the key of the first tensor that is the same view of the same memory, by key: its own unless it is tied."""
    addresses = list(map(Tensor.data_ptr, tensors.values()))
    if len(set(addresses)) == len(addresses):
        return dict(zip(tensors, tensors, strict=True))
    counts = Counter(addresses)
    first: dict[Any, K] = {}
    return {
        name: first.setdefault(address if counts[address] == 1 else view_of(tensors[name]), name)
        for name, address in zip(tensors, addresses, strict=True)
    }


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    memory = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.storage_offset())
    return (*memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


@dataclass(eq=False)
class StoredTensor:
    """A tensor in the files of a snapshot, which is read on demand."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Sequence[int] | None
    origin: Any  # the tensors of its snapshot, which read it for the ranks that load together
    convert: Callable[[Tensor], Any] | None = None  # makes of it the value that was saved, such as an array

    def __deepcopy__(self, memo: object) -> StoredTensor:
        return self

    def fits(self, value: Any) -> bool:
        """Return whether the tensor can be read into an existing value without changing a number."""
        if not isinstance(value, Tensor) or self.convert is not None or is_lazy(value) or value.is_meta:
            return False
        if value.layout is not torch.strided or (tuple(value.shape), value.dtype) != (self.shape, self.dtype):
            return False
        local = to_local(value)
        is_expanded = any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))
        return not (is_expanded or local.is_inference() or is_summand(value) or type(local) not in (Tensor, nn.Parameter))

    def empty(self, like: Any = None) -> Tensor:
        """Return a tensor to read it into, sharded as one of the same shape."""
        if is_sharded(like) and tuple(like.shape) == self.shape and self.convert is None and not is_summand(like):
            return empty_shard_like(like, self.dtype)  # type: ignore[no-any-return]
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def read_stored(saved: Any, current: Any = None, likes: Mapping[Any, Any] | None = None) -> Any:
    """Return a saved value with the tensors in it read.

    Each is read into that in the same place of ``current`` if it fits, else into a new one, which is sharded as the tensor
    of ``likes`` to which its first key belongs. What is the same memory twice, as tied parameters are, is read once.
    """
    targets: dict[tuple[Any, ...], tuple[StoredTensor, Tensor]] = {}
    new: dict[tuple[int, int], Tensor] = {}

    def choose(stored: StoredTensor, keys: tuple[Any, ...]) -> StoredTensor:
        target = current
        for key in keys:
            target = target.get(key) if isinstance(target, dict) else None
        if not stored.fits(target):
            like = likes.get(keys[0]) if likes and keys else None
            target = new.get((id(stored), id(like)))
            if target is None:
                target = new[id(stored), id(like)] = stored.empty(like)
        targets[keys] = stored, target
        return stored

    def take(stored: StoredTensor, keys: tuple[Any, ...]) -> Any:
        tensor = targets[keys][1]
        return tensor if stored.convert is None else stored.convert(tensor)

    _replace_stored(saved, choose, ())
    if not targets:
        return saved
    views = {(id(stored), view_of(to_local(target))): (stored, target) for stored, target in targets.values()}
    next(iter(targets.values()))[0].origin.read(list(views.values()))
    return _replace_stored(saved, take, ())


def _replace_stored(value: Any, function: Callable[[StoredTensor, tuple[Any, ...]], Any], keys: tuple[Any, ...]) -> Any:
    if isinstance(value, StoredTensor):
        return function(value, keys)
    if type(value) in (list, tuple, deque):
        items = [_replace_stored(item, function, (*keys, i)) for i, item in enumerate(value)]
        return deque(items, value.maxlen) if type(value) is deque else type(value)(items)
    if isinstance(value, dict) and value:
        replaced = copy.copy(value)
        for key, item in value.items():  # by update, a Counter would add
            replaced[key] = _replace_stored(item, function, (*keys, key))
        return replaced
    return value


def find_dtypes(names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return those of the named dtypes that this torch has."""
    return {name: getattr(torch, name) for name in names if name not in _SINCE or hasattr(torch, name)}


def require_dtype(name: object) -> None:
    """Raise a ``ValueError`` if this torch lacks a dtype that a later one has."""
    if name in _SINCE and not hasattr(torch, str(name)):
        since = _SINCE[str(name)]
        rule = f"it holds {name}, which came with torch {since}, and this is {torch.__version__}"
        raise ValueError(f"{rule}: read it with torch {since} or newer")


FORMAT = 1
MAX_DEPTH = 100  # containers within containers; deeper than any state, far below what recursion can bear

Array = np.ndarray[Any, Any]

_LARGEST_INT = 2**53  # other readers of JSON round beyond it, and Python refuses more than 4300 digits
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,8}|[<>][mM]8(\[\d{0,9}[a-zA-Z]{1,7}\])?")
_ARRAYS_AS_TENSORS = set(map(np.dtype, "?bhilqBHILQefdFD"))
_KEYS = (str, int, bool, float, complex, bytes, type(None), tuple, frozenset, np.generic)
_RESERVED_NAMES = ("__metadata__", "chainring.json")  # of safetensors, and of npz files


def encode(state: Mapping[str, Any], native_arrays: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of ``state`` as JSON types, and the tensors to which they refer, by name.

    Values are numbers of Python and NumPy, strings, bytes, ``None``, tensors, arrays, dtypes of torch, and lists, tuples,
    sets, deques, dicts, ``OrderedDict`` and ``Counter`` of them, with any of the plain ones as keys. A tensor is named by
    its path, one within a container by a path below it. Tensors are not copied; arrays are, unless ``native_arrays`` keeps
    them as such.

    Raises:
        TypeError: a value that could not be restored; the message names its path and type.
    """
    for path in state:
        if type(path) is not str:
            raise TypeError(f"a path of state is a str, not {path!r}; give it another key")
    encoder = _Encoder(state.keys(), native_arrays)
    return {path: encoder.value(path, value, 0) for path, value in state.items()}, encoder.tensors


def digest_value(path: str, value: Any) -> bytes:
    """Return 64 bits of everything in a value, by which ranks see whether they have the same."""
    values, tensors = encode({path: value})
    hasher = hashlib.blake2b(to_text(values), digest_size=8)
    for tensor in tensors.values():
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hasher.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def to_text(values: Mapping[str, Any]) -> bytes:
    """Return the JSON document of values that `encode` has encoded."""
    return json.dumps({"format": FORMAT, "state": values}, allow_nan=False, separators=(",", ":")).encode()


def decode(text: bytes, tensors: Mapping[str, Tensor | StoredTensor]) -> dict[str, Any]:
    """Return the state of a document of `to_text`. Tensors come out of ``tensors`` as they are, arrays are copies.

    Raises:
        ValueError: the text is another one, or refers to a tensor that ``tensors`` lacks.
    """
    document = parse_strict(text)
    if not isinstance(document, dict) or document.keys() != {"format", "state"} or not isinstance(document["state"], dict):
        raise ValueError('state must be a JSON object of "format" and "state"; this is not a state file of a snapshot')
    if type(document["format"]) is not int or document["format"] != FORMAT:
        raise ValueError(f"state has format {document['format']!r}, this version reads {FORMAT}: load it with a newer one")
    decoder = _Decoder(tensors, None)
    return {path: decoder.value(path, value, 0) for path, value in document["state"].items()}


def decode_arrays(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor | StoredTensor], arrays: Mapping[str, Array]
) -> dict[str, Any]:
    """Return the state that `encode` was given, with the arrays that were kept as such."""
    decoder = _Decoder(tensors, arrays)
    return {path: decoder.value(path, value, 0) for path, value in values.items()}


@dataclass
class _Encoder:
    """Walks over values and collects the tensors on its way."""

    paths: Set[str]
    native_arrays: bool
    tensors: dict[str, Any] = field(default_factory=dict)

    def value(self, path: str, value: Any, depth: int) -> Any:
        cls = type(value)
        if cls in TENSORS:  # hot path: "stop for a snapshot" in benchmarks/growth.py, as most values are tensors there
            return self._tensor(path, value, depth)
        if depth > MAX_DEPTH:
            raise TypeError(f"{path}: {cls.__name__} is more than {MAX_DEPTH} containers deep, or holds itself; flatten it")
        if value is None or cls in (bool, str):
            return value
        if cls in _SCALARS:
            return _SCALARS[cls](value)
        if cls is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.value(f"{path}/{key}", item, depth + 1) for key, item in value.items()}
        if cls is list or cls in _SEQUENCE_TAGS:
            items = [self.value(f"{path}/{i}", item, depth + 1) for i, item in enumerate(value)]
            return items if cls is list else {_SEQUENCE_TAGS[cls]: items}
        if cls is deque:
            return {"$deque": [value.maxlen, self.value(path, list(value), depth)]}
        if cls in _MAPPING_TAGS:
            pairs = []
            for key, item in value.items():
                below = _path_below(path, key)
                if not isinstance(key, _KEYS):
                    raise TypeError(
                        f"{below}: a key of type {type(key).__name__} cannot be saved; make it a number, str or tuple"
                    )
                pairs.append([self.value(below, key, depth + 1), self.value(below, item, depth + 1)])
            return {_MAPPING_TAGS[cls]: pairs}
        if isinstance(value, Tensor):  # of a subclass
            return self._tensor(path, value, depth)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(path, value, depth)
        raise TypeError(_refusal(path, value))

    def _tensor(self, path: str, tensor: Tensor, depth: int) -> dict[str, Any]:
        is_refused = type(tensor) not in TENSORS and not (is_sharded(tensor) and type(to_local(tensor)) in TENSORS)
        if is_refused or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            description = f"{type(tensor).__name__} of layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}"
            raise TypeError(f"{path}: a {description} cannot be saved; save a plain tensor, to_dense() or dequantize()")
        name = self._keep(path, tensor, depth)
        return {"$here": 0} if name == path and not self.native_arrays else {"$tensor": name}

    def _numpy(self, path: str, value: Any, depth: int) -> dict[str, Any]:
        has_plain_dtype = _NUMPY_DTYPE.fullmatch(value.dtype.str) is not None
        if type(value) is np.ndarray and (has_plain_dtype or (self.native_arrays and not value.dtype.hasobject)):
            name = self._keep(path, value if self.native_arrays else _as_tensor(value), depth)
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
        while name in self.tensors or name in _RESERVED_NAMES or (name in self.paths and (depth > 0 or name != path)):
            name += "~"  # as in {"a": {"b": x}, "a/b": y}
        try:
            _ = name.isascii() or name.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{path!a}: a tensor cannot be saved under a key with a lone surrogate; rename it") from None
        self.tensors[name] = tensor
        return name


@dataclass
class _Decoder:
    """Walks over JSON types that may come from anywhere, and restores values."""

    tensors: Mapping[str, Tensor | StoredTensor]
    arrays: Mapping[str, Array] | None

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
            mapping: dict[Any, Any] = {}
            for pair in _expect(content, list):
                key = self.value(path, _expect(pair, list, 2)[0], depth + 1)
                if key in mapping:
                    raise ValueError(f"{path}: a key occurs twice; the file is damaged")
                mapping[key] = self.value(_path_below(path, key), pair[1], depth + 1)
            return _MAPPINGS[tag](mapping)
        if tag == "$tensor" or (tag == "$here" and content == 0):
            return self._tensor(path, path if tag == "$here" else content)
        if tag == "$deque":
            maxlen, items = _expect(content, list, 2)
            return deque(self.value(path, _expect(items, list), depth), None if maxlen is None else _expect(maxlen, int))
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
        if tag == "$float" and _expect(content, str) not in ("inf", "-inf", "nan"):
            raise ValueError(f"$float holds {content[:40]!r}, which is neither infinity nor NaN; the file is damaged")
        return _SCALAR_TAGS[tag](content)

    def _tensor(self, path: str, name: Any) -> Any:
        if _expect(name, str) not in self.tensors:
            raise ValueError(f"{path}: its tensor {name!r} is missing; the snapshot's tensor files are not complete")
        return self.tensors[name]

    def _array(self, path: str, dtype_text: Any, shape: Any, name: Any) -> Any:
        sizes = [_expect(size, int) for size in _expect(shape, list)]

        def check(array: Array) -> Array:
            if array.dtype.str != dtype_text or list(array.shape) != sizes:
                raise ValueError(f"{path}: {name!r} is not an array of {dtype_text} and shape {shape}; the file is damaged")
            return array

        if self.arrays is not None:
            return check(self.arrays[_expect(name, str)])
        dtype = _numpy_dtype(dtype_text)

        def convert(tensor: Tensor) -> Array:
            array = tensor.cpu().numpy().copy(order="K")
            return check(array if dtype in _ARRAYS_AS_TENSORS else array.view(dtype).reshape(sizes))

        tensor: Any = self._tensor(path, name)
        return replace(tensor, convert=convert) if isinstance(tensor, StoredTensor) else convert(tensor)


def _dtype(name: Any) -> torch.dtype:
    require_dtype(_expect(name, str))
    return _expect(getattr(torch, name, None), torch.dtype)  # type: ignore[no-any-return]


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
        f"{path}: {name} cannot be saved. State is made of numbers, str, bytes, None, tensors, arrays, dtypes, and lists, "
        "tuples, sets, deques and dicts of them: save what it is made of, and build it again when loading"
    )


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": str(value)}


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


TENSORS = (Tensor, torch.nn.Parameter)
_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: value if abs(value) < _LARGEST_INT else {"$int": hex(value)},
    float: _float,
    bytes: lambda value: {"$bytes": _to_base64(value)},
    bytearray: lambda value: {"$bytearray": _to_base64(value)},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
}
_SCALAR_TAGS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda word: int(_expect(word, str), 16),
    "$float": float,
    "$bytes": _from_base64,
    "$bytearray": lambda word: bytearray(_from_base64(word)),
    "$dtype": _dtype,
}
_SEQUENCES: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$size": torch.Size}
_MAPPINGS: dict[str, Any] = {"$dict": dict, "$ordered_dict": OrderedDict, "$counter": Counter}
_SEQUENCE_TAGS = {cls: tag for tag, cls in _SEQUENCES.items()}
_MAPPING_TAGS = {cls: tag for tag, cls in _MAPPINGS.items()}
_TAGS = {*_SCALAR_TAGS, *_SEQUENCES, *_MAPPINGS, "$tensor", "$here", "$array", "$numpy", "$complex", "$deque"}
