"""Converters: from a list of examples to tensors on a device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_device", "concat_examples", "to_device"]

Device = int | str | torch.device | None
Converter = Callable[[Any, torch.device | None], Any]
"""``converter(batch, device)`` makes tensors of a batch of examples."""

Padding = float | tuple[Any, ...] | Mapping[Any, Any] | None
"""A number; or a tuple or mapping with a padding for each item of the examples."""


def concat_examples(batch: Sequence[Any] | Mapping[str, Any], device: Device = None, padding: Padding = None) -> Any:
    """Stack the examples of a batch into tensors with a new first dimension.

    The first example decides the structure: tuples give a tuple of tensors, mappings a dict, anything else one tensor
    (a list is the data of an array). Python floats become float32, or float64 if that is torch's default dtype, integers
    int64, booleans bool; arrays and tensors keep their dtype. A batch that already holds columns is passed through: a
    `Batch` of them, a mapping, a dataclass, a class of attrs, or a tuple with an array in it.

    Args:
        batch: a list of examples, all of the same structure.
        device: the device of the tensors; ``None`` leaves them where they are.
        padding: the value with which arrays of different shapes are padded at their ends to the largest shape. One number
            for all, or a tuple or mapping with one for each item of an example.

    Returns:
        A tensor, or a tuple or dict of tensors.

    Raises:
        ValueError: the batch is empty; or examples differ in structure or, without ``padding``, in shape.
        TypeError: an example contains something that is not a number, such as a string.

    Example::

        x, t = concat_examples([(np.zeros(2, np.float32), 1), (np.ones(2, np.float32), 2)])
        x.shape, t  # (torch.Size([2, 2]), tensor([1, 2]))
    """
    columns = getattr(batch, "columns", None)
    if device is None and type(columns) is tuple:
        # hot path: "an iteration with no extension" of benchmarks/overhead.py. Columns are nearly always tensors or arrays.
        tensors = []
        for x in columns:
            is_array = type(x) is np.ndarray and x.dtype.kind in "biufc"
            tensors.append(x if type(x) is Tensor else _to_tensor(x) if is_array else _move(None, x))
        return tuple(tensors)
    target = as_device(device)
    if columns is not None:
        return _move(target, columns)
    if isinstance(batch, Mapping) or (isinstance(batch, tuple) and _holds_array(batch)) or field_names(batch):
        return _move(target, batch)
    if len(batch) == 0:
        raise ValueError("a batch needs at least one example, got none")
    return _move(target, _collate(batch, padding, "example"))


def _holds_array(x: Any) -> bool:
    if isinstance(x, (tuple, list, Mapping)):
        return any(map(_holds_array, x.values() if isinstance(x, Mapping) else x))
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def to_device(device: Device, x: Any) -> Any:
    """Move every tensor in ``x`` to ``device``, also within tuples, lists, mappings and records; arrays become tensors.

    A record is a dataclass or a class of attrs. One with a method ``to`` is asked to move itself.

    Args:
        device: ``None`` leaves tensors where they are.
        x: a tensor, an array, an object with ``to(device)``, or a container of such. Anything else is returned as it is.

    Returns:
        A container of the same structure.

    Raises:
        ValueError, TypeError: those of `as_device`.
    """
    return _move(as_device(device), x)


def field_names(value: Any) -> list[str]:
    """Return the names of the fields of a dataclass or a class of attrs; none for anything else."""
    if isinstance(value, type):
        return []
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    return names or [attribute.name for attribute in getattr(type(value), "__attrs_attrs__", ())]


def with_fields(record: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a record with other values, also of a frozen one."""
    record = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


def device_scope(device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context in which tensors that are made on "cuda" without an index are made on this device."""
    if device is None or device.index is None or device.type == "cpu":
        return nullcontext()
    scope = getattr(torch.get_device_module(device), "device", None)
    return nullcontext() if scope is None else scope(device.index)  # Apple's has one device


def as_device(device: Device) -> torch.device | None:
    """Return the device that a setting names.

    Example::

        as_device("auto")  # device(type='cuda', index=0), or device(type='cpu') without an accelerator
        as_device(-1)  # device(type='cpu')

    Args:
        device: ``None``, a negative integer (the CPU), the index of an accelerator, a string or a ``torch.device``.
            ``"auto"`` is the accelerator (CUDA, MPS, XPU, ...) if this machine has one, otherwise the CPU; after a call
            of `create_communicator`, it is the device of this rank.

    Returns:
        The device; ``None`` for ``None``.

    Raises:
        ValueError: this machine does not have the accelerator, or PyTorch does not know the name.
        TypeError: ``device`` is not a device.
    """
    if device is None or isinstance(device, torch.device):
        return device
    if is_auto(device):
        return _auto.choose()
    if isinstance(device, str):
        return _named(device)
    if isinstance(device, bool) or not isinstance(device, (int, np.integer)):
        raise TypeError(
            f'a device is None, an integer, a string such as "auto" or "cuda:0", or a torch.device, got {device!r}'
        )
    if device < 0:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if device >= count:
        rule = f"device {device} is the index of an accelerator, and this machine has {count}"
        raise ValueError(f'{rule}; -1 is the CPU, and "auto" is what there is')
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, int(device))


def _named(device: str) -> torch.device:
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f'device {device!r} is none that PyTorch knows: "cpu", "cuda", "cuda:0", "mps" or "xpu" are; "auto" takes the '
            "accelerator if there is one, else the CPU"
        ) from None
    if named.type == "cuda" and not (named.index or 0) < (count := torch.cuda.device_count()):  # before a model is moved
        raise ValueError(
            f"device {str(named)!r} is not there: PyTorch finds {count} GPUs, and finds none if it is built without CUDA; "
            'device="auto" takes a GPU if there is one, else the CPU'
        )
    return named


def is_auto(device: Device) -> bool:
    """Return True if the setting leaves the choice of a device to Chainring."""
    return isinstance(device, str) and device == "auto"


class _Auto:
    """What ``"auto"`` is in this process: the device of this rank, once a communicator knows it; and what it was before."""

    device_of_rank: torch.device | None = None
    chosen: torch.device | None = None

    def choose(self) -> torch.device:
        if self.device_of_rank is not None:
            return self.device_of_rank
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            self.chosen = torch.device("cpu")
        else:
            self.chosen = torch.device(accelerator.type, torch.accelerator.current_device_index())
        return self.chosen


_auto = _Auto()


def set_device_of_rank(device: torch.device, is_one_of_several: bool) -> None:
    """Set the device that ``"auto"`` stands for from now on; one of several ranks must not have taken another before."""
    if is_one_of_several and _auto.device_of_rank is None and _auto.chosen not in (None, device):
        raise RuntimeError(
            f'device="auto" is the device of the rank, which is {device}, and became {_auto.chosen} before the rank was '
            "known; call create_communicator() before the iterators, updaters and extensions that take a device"
        )
    _auto.device_of_rank = device


def _move(device: torch.device | None, x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        x = _to_tensor(x)
    if isinstance(x, Tensor):
        # A copy to CUDA may continue while the host prepares what follows. In the other direction nothing would wait for it,
        # and the host would read a tensor that is not there yet; MPS reads a source that was freed (pytorch#189690).
        return x if device is None or x.device == device else x.to(device, non_blocking=device.type == "cuda")
    moves_itself = callable(getattr(x, "to", None)) and not isinstance(x, (list, Mapping))
    if isinstance(x, tuple) and not moves_itself:  # as a PackedSequence, of which a part stays on the host
        moved = [_move(device, item) for item in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    if isinstance(x, list):
        return [_move(device, item) for item in x]
    if isinstance(x, Mapping):
        return {key: _move(device, item) for key, item in x.items()}
    if moves_itself:
        return x if device is None else x.to(device)
    values = {name: getattr(x, name) for name in field_names(x) if hasattr(x, name)}
    moved_values = {name: _move(device, value) for name, value in values.items()}
    return with_fields(x, moved_values) if any(values[name] is not moved_values[name] for name in values) else x


def _collate(values: Sequence[Any], padding: Padding, path: str) -> Any:
    """Stack the values that the examples have at ``path``, such as "item 1 of example", which is named in errors."""
    # hot path: "images, Pillow" of benchmarks/data.py. Where all values have one type, nothing is asked of each of them.
    first, types = values[0], set(map(type, values))
    if types == {np.ndarray} and padding is None:
        try:
            stacked = np.stack(values)
        except ValueError:  # of different shapes
            stacked = None
        if stacked is not None and stacked.dtype.kind in "fiub":
            return _to_tensor(stacked)
    if types == {int}:
        return torch.tensor(values, dtype=torch.int64)
    if isinstance(first, tuple):
        length = len(first)
        if types != {tuple} or set(map(len, values)) != {length}:
            rule = f"a tuple of {length}"
            _require_all(values, lambda value: isinstance(value, tuple) and len(value) == length, rule, path)
        paddings = _split_padding(padding, range(length), tuple, path)
        items = [_collate([value[i] for value in values], paddings[i], f"item {i} of {path}") for i in range(length)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if isinstance(first, Mapping):
        keys = list(first)
        key_set = set(keys)
        rule = f"a mapping with the keys {keys}"
        _require_all(values, lambda value: isinstance(value, Mapping) and set(value) == key_set, rule, path)
        paddings = _split_padding(padding, keys, Mapping, path)
        return {key: _collate([value[key] for value in values], paddings[key], f"{key!r} of {path}") for key in keys}
    if type(first) in (float, int, bool):  # to a dtype that holds all: of floats, else int64, else bool
        _require_all(values, lambda value: isinstance(value, (float, int, np.number, np.bool_)), "a number", path)
        if any(isinstance(value, (float, np.floating)) for value in values):
            return torch.tensor(values, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        is_bool = all(isinstance(value, (bool, np.bool_)) for value in values)
        return torch.tensor(values, dtype=torch.bool if is_bool else torch.int64)
    _require_all(values, lambda value: not isinstance(value, (tuple, Mapping)), "an array", path)
    arrays = [value if isinstance(value, Tensor) else _to_array(value, path, i) for i, value in enumerate(values)]
    if padding is not None:
        return _collate_padded(arrays, padding, path)
    shape = tuple(arrays[0].shape)
    remedy = "pass padding= to fill up"
    _require_all(arrays, lambda array: tuple(array.shape) == shape, f"of shape {shape}", path, remedy)
    if all(isinstance(array, Tensor) for array in arrays):
        return torch.stack(arrays)
    return _to_tensor(np.stack([np.asarray(array) for array in arrays]))


def _collate_padded(arrays: list[Any], padding: Padding, path: str) -> Tensor:
    shapes = [tuple(array.shape) for array in arrays]
    dims = len(shapes[0])
    remedy = "padding fills up sizes, not dimensions"
    _require_all(arrays, lambda array: len(array.shape) == dims, f"of {dims} dimensions", path, remedy)
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    tensors = [array if isinstance(array, Tensor) else _to_tensor(array) for array in arrays]
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    if not isinstance(padding, (float, int, np.number)):
        raise TypeError(f"padding of {path} is a number, got {padding!r}; a tuple or mapping is for examples that are such")
    if not (dtype.is_floating_point or dtype.is_complex) and torch.tensor(padding).to(dtype).item() != padding:
        raise ValueError(
            f"padding {padding!r} does not fit into the {dtype} of {path}; use another, or floats in the dataset"
        )
    padded = torch.full((len(tensors), *largest), padding, dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(padded, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _split_padding(padding: Padding, keys: Iterable[Any], cls: type, path: str) -> Any:
    """Return the padding of each key: from ``padding`` if it has one for each, else the same for all."""
    if not isinstance(padding, (tuple, Mapping)):
        return dict.fromkeys(keys, padding)
    keys = list(keys)
    if not isinstance(padding, cls) or len(padding) != len(keys):
        raise ValueError(f"padding must be one number or one for each item of {path} ({keys}), got {padding!r}")
    return padding


def _to_array(value: Any, path: str, index: int) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{path} {index} is a ragged list: {error}") from None
    if array.dtype.hasobject or array.dtype.kind in "USV":
        raise TypeError(
            f"tensors are made of numbers, and {path} {index} is {_describe(value)}; "
            "turn it into numbers in the dataset (TransformDataset), or pass a converter= of your own"
        )
    if isinstance(value, list):  # Python numbers, which become what torch makes of them
        floats = np.float64 if torch.get_default_dtype() == torch.float64 else np.float32
        array = array.astype({"f": floats, "i": np.int64}.get(array.dtype.kind, array.dtype))
    return array


def _to_tensor(array: Any) -> Tensor:
    """Return a tensor over an array's memory, copied if torch needs it writable or in native byte order."""
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
    except (TypeError, ValueError):  # another byte order, or negative strides
        pass
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except TypeError:
        raise TypeError(f"torch has no dtype for arrays of {array.dtype}; convert them in the dataset") from None


def _require_all(values: Sequence[Any], holds: Callable[[Any], bool], rule: str, path: str, remedy: str = "") -> None:
    for i, value in enumerate(values):
        if not holds(value):
            remedy = remedy or "make the examples alike, or pass a converter of your own"
            raise ValueError(f"{path} 0 is {rule}, so all must be; that of example {i} is {_describe(value)}; {remedy}")


def _describe(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {list(value)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {value!r:.60}"
