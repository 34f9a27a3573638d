"""Values of saved state: copied, compared, read from the files of a snapshot, and given back as an object declares them."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._distributed.sharding import empty_shard_like, is_sharded, is_summand, shard_like, to_full, to_local

K = TypeVar("K")

_SINCE = {"float8_e8m0fnu": "2.7", "float4_e2m1fn_x2": "2.8"}
"""The version of torch with which a dtype came."""
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
SCALARS = (*_NUMBERS, str)


def to_type_of(value: Any, saved: Any) -> Any:
    """Return a saved number or string in the type of ``value``, or unchanged if that type cannot represent it exactly."""
    cls, is_text = type(value), isinstance(value, str)
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
        if array is None or type(value) not in (np.ndarray, np.memmap) or value.dtype.hasobject or not value.flags.writeable:
            return False
        if (value.shape, value.dtype) != (array.shape, array.dtype):
            return False
        np.copyto(value, array)
        return True
    tensor = as_tensor(saved)
    if tensor is None or is_lazy(value) or value.is_meta or value.layout is not torch.strided:
        return False
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    try:
        with torch.no_grad():
            value.copy_(shard_like(tensor, value))
    except RuntimeError:  # it must not be written to: it is expanded, or was made in inference mode
        return False
    return True


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor as it is and an array as a tensor; ``None`` for anything else, and where PyTorch lacks the dtype."""
    if not isinstance(value, np.ndarray):
        return value if isinstance(value, Tensor) else None
    try:
        return torch.from_numpy(np.array(value, order="K"))
    except (TypeError, ValueError):
        return None


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
        return type(first) is type(second) and arrays[0] is not None and np.array_equal(arrays[0], arrays[1])  # type: ignore[arg-type]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
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
    if type(value) is dict:
        return {key: copy_value(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def move(value: Any, device: torch.device | None) -> Any:
    """Return a value with its tensors on an accelerator, if that is given."""
    if device is None or device.type in ("cpu", "meta"):
        return value
    if isinstance(value, Tensor):
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


class StoredTensor:
    """A tensor in the files of a snapshot, which is read on demand."""

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: Any, origin: TensorReader) -> None:
        self.name, self.dtype, self.shape, self.strides = name, dtype, shape, strides
        self.origin = origin
        self.convert: Callable[[Tensor], Any] | None = None  # makes of it the value that was saved, such as an array

    def __deepcopy__(self, memo: object) -> StoredTensor:
        return self

    def converted(self, convert: Callable[[Tensor], Any]) -> StoredTensor:
        """Return a value that is made of this tensor."""
        other = copy.copy(self)
        other.convert = convert
        return other

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


class TensorReader(Protocol):
    """Reads the tensors of a snapshot, perhaps together with other ranks."""

    def read(self, targets: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Read each of these into a tensor of its shape and dtype, which may be sharded."""

    def conclude(self) -> None:
        """Read for the other ranks until none of them needs it."""


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
    if type(value) in (list, tuple):
        return type(value)(_replace_stored(item, function, (*keys, i)) for i, item in enumerate(value))
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
    """Do nothing, unless a value was saved in a dtype that this torch lacks and a later one has.

    Raises:
        ValueError: it was.
    """
    if name in _SINCE and not find_dtypes([str(name)]):
        rule = f"it holds {name}, which came with torch {_SINCE[str(name)]}, and this is {torch.__version__}"
        raise ValueError(f"{rule}: read it with torch {_SINCE[str(name)]} or newer")


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection during the block, in which many lasting objects are created.

    Python looks for cycles each time that enough objects were made, among all of them: of states with many tensors that
    takes half of the time.
    """
    # hot path: "stop for a snapshot" in benchmarks/growth.py
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
