"""From a list of examples to tensors on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Device = int | str | torch.device | None


def as_device(device: Device) -> torch.device | None:
    """What a device setting means: ``None`` nothing, a negative integer the host, another that accelerator.

    Raises:
        ValueError: an accelerator is asked for and this machine has none, or not that one.
        TypeError: the setting is of another kind.
    """
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, str):
        return torch.device(device)
    if isinstance(device, bool) or not isinstance(device, (int, np.integer)):
        raise TypeError(f'a device is None, an integer, a string such as "cuda:0" or a torch.device, got {device!r}')
    if device < 0:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if device >= count:
        raise ValueError(f"device {device} is the accelerator of that number, and this machine has {count}; -1 is the host")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, int(device))


def to_device(device: Device, x: Any) -> Any:
    """Moves every tensor in ``x`` to ``device``; tuples, lists and mappings are entered, arrays become tensors.

    Args:
        device: ``None`` leaves tensors where they are.
        x: a tensor, an array, an object with ``to(device)``, or a container of such. Anything else is returned as it is.
    """
    return _moved(as_device(device), x)


def _moved(device: torch.device | None, x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        x = _tensor(x)
    if isinstance(x, Tensor):
        return x if device is None or x.device == device else _sent(device, x)
    if isinstance(x, tuple):
        moved = [_moved(device, item) for item in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    if isinstance(x, list):
        return [_moved(device, item) for item in x]
    if isinstance(x, Mapping):
        return {key: _moved(device, item) for key, item in x.items()}
    return x.to(device) if device is not None and hasattr(x, "to") else x


def _left(x: Any) -> Any:
    """A column of a batch where it is: an array, nearly always, which becomes a tensor over its memory."""
    if type(x) is np.ndarray and x.flags.writeable:
        try:
            return torch.from_numpy(x)
        except (TypeError, ValueError):  # of no numbers, or in an order of bytes or strides that torch does not have
            pass
    return _moved(None, x)


def _sent(device: torch.device, x: Tensor) -> Tensor:
    # To CUDA the copy may go on while the host prepares what follows. On the way back nothing would wait for it, and the
    # host would read a tensor that is not there yet; MPS reads a source that was freed meanwhile (pytorch#189690).
    return x.to(device, non_blocking=device.type == "cuda")


def concat_examples(batch: Sequence[Any], device: Device = None, padding: Any = None) -> Any:
    """Makes one tensor of each part of the examples, stacked along a new first dimension.

    The first example decides the form: examples that are tuples give a tuple of tensors, mappings a dict, anything else
    one tensor (a list is the data of an array). Python floats become float32, integers int64, booleans bool; arrays and
    tensors keep their dtype. A batch that already holds columns is passed through.

    Args:
        batch: the examples, all of the same structure.
        device: where the tensors go; ``None`` leaves them where they are.
        padding: fills arrays of different shapes up to the largest, at their ends. One number for all, or a tuple or
            mapping with one for each part.

    Raises:
        ValueError: the batch is empty; or examples differ in structure, or without ``padding`` in shape.
        TypeError: an example holds something that is no number, such as a string.
    """
    columns = getattr(batch, "columns", None)
    if device is None and type(columns) is tuple:  # in nearly every iteration, so with few calls
        return tuple(map(_left, columns))
    target = as_device(device)
    if columns is not None:
        return _moved(target, columns)
    if len(batch) == 0:
        raise ValueError("a batch needs at least one example, got none")
    return _moved(target, _joined(batch, padding, "example"))


def _joined(parts: Sequence[Any], padding: Any, where: str) -> Any:
    """Joins the same part of every example; ``where`` says which part, for errors."""
    first = parts[0]
    if isinstance(first, tuple):
        length = len(first)
        _require(parts, lambda part: isinstance(part, tuple) and len(part) == length, f"a tuple of {length}", where)
        pads = _paddings(padding, range(len(first)), tuple, where)
        joined = [_joined([part[i] for part in parts], pads[i], f"part {i} of {where}") for i in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    if isinstance(first, Mapping):
        keys = list(first)
        known = set(keys)
        rule = f"a mapping with the keys {keys}"
        _require(parts, lambda part: isinstance(part, Mapping) and set(part) == known, rule, where)
        pads = _paddings(padding, keys, Mapping, where)
        return {key: _joined([part[key] for part in parts], pads[key], f"{key!r} of {where}") for key in keys}
    if type(first) in (float, int, bool):
        return _numbers(parts, where)
    _require(parts, lambda part: not isinstance(part, (tuple, Mapping)), "an array", where)
    arrays = [part if isinstance(part, Tensor) else _array(part, where, number) for number, part in enumerate(parts)]
    if padding is not None:
        return _padded(arrays, padding, where)
    shape = tuple(arrays[0].shape)
    _require(arrays, lambda part: tuple(part.shape) == shape, f"of shape {shape}", where, "pass padding= to fill up")
    if all(isinstance(array, Tensor) for array in arrays):
        return torch.stack(arrays)
    return _tensor(np.stack([np.asarray(array) for array in arrays]))


def _numbers(parts: Sequence[Any], where: str) -> Tensor:
    """The first is a Python number; all become what holds every one of them: float32, else int64, else bool."""
    _require(parts, lambda part: isinstance(part, (float, int, np.number, np.bool_)), "a number", where)
    if any(isinstance(part, (float, np.floating)) for part in parts):
        dtype = torch.float32
    elif all(isinstance(part, (bool, np.bool_)) for part in parts):
        dtype = torch.bool
    else:
        dtype = torch.int64
    return torch.tensor(parts, dtype=dtype)


def _require(parts: Sequence[Any], holds: Callable[[Any], bool], rule: str, where: str, remedy: str = "") -> None:
    for number, part in enumerate(parts):
        if not holds(part):
            remedy = remedy or "make the examples alike, or pass a converter of your own"
            raise ValueError(
                f"{where} 0 is {rule}, so all must be; that of example {number} is {_described(part)}; {remedy}"
            )


def _described(part: Any) -> str:
    if hasattr(part, "shape"):
        return f"of shape {tuple(part.shape)}"
    if isinstance(part, Mapping):
        return f"a mapping with the keys {list(part)}"
    if isinstance(part, tuple):
        return f"a tuple of {len(part)}"
    return f"{type(part).__name__} {part!r:.60}"


def _paddings(padding: Any, keys: Any, kind: Any, where: str) -> Any:
    """The padding of each part: its own where ``padding`` has one for each, else the same for all."""
    if not isinstance(padding, (tuple, Mapping)):
        return dict.fromkeys(keys, padding)
    if not isinstance(padding, kind) or len(padding) != len(keys):
        raise ValueError(f"padding must be one number or one for each part of {where} ({list(keys)}), got {padding!r}")
    return padding


def _array(part: Any, where: str, number: int) -> Any:
    if isinstance(part, (str, bytes)) or part is None:
        raise TypeError(_not_numbers(part, where, number))
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise ValueError(f"{where} {number} is a ragged list: {error}") from None
    if array.dtype.hasobject or array.dtype.kind in "USV":
        raise TypeError(_not_numbers(part, where, number))
    if isinstance(part, list):  # Python numbers, which become what torch makes of them
        array = array.astype({"f": np.float32, "i": np.int64}.get(array.dtype.kind, array.dtype))
    return array


def _not_numbers(part: Any, where: str, number: int) -> str:
    place = f"example {number}" if where == "example" else f"{where} {number}"
    return (
        f"tensors are made of numbers, and {place} is {_described(part)}; "
        "turn it into numbers in the dataset (TransformDataset), or pass a converter= of your own"
    )


def _padded(arrays: list[Any], padding: Any, where: str) -> Tensor:
    shapes = [tuple(array.shape) for array in arrays]
    dims = len(shapes[0])
    remedy = "padding fills up sizes, not dimensions"
    _require(arrays, lambda array: len(array.shape) == dims, f"of {dims} dimensions", where, remedy)
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    tensors = [array if isinstance(array, Tensor) else _tensor(array) for array in arrays]
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    _check_padding(padding, dtype, where)
    joined = torch.full((len(tensors), *largest), padding, dtype=dtype, device=tensors[0].device)
    for row, tensor in zip(joined, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return joined


def _check_padding(padding: Any, dtype: torch.dtype, where: str) -> None:
    if not isinstance(padding, (float, int, np.number)):
        raise TypeError(f"padding of {where} is a number, got {padding!r}; a tuple or mapping is for examples that are such")
    if not (dtype.is_floating_point or dtype.is_complex) and torch.tensor(padding).to(dtype).item() != padding:
        raise ValueError(
            f"padding {padding!r} does not fit into the {dtype} of {where}; take another, or floats in the dataset"
        )


def _tensor(array: Any) -> Tensor:
    """A tensor over an array's memory, copied where torch needs it writable or in native order."""
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
    except (TypeError, ValueError):  # another byte order, or negative strides
        pass
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except TypeError:
        raise TypeError(f"torch has no dtype for arrays of {array.dtype}; convert them in the dataset") from None
