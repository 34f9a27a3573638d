"""scatter and gather: divide the rows of a batch among devices, and join the outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from chainring.converters import Device, as_device, to_device


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> list[Any]:
    """Divide a batch into consecutive chunks, one for each device, whose numbers of rows differ by at most one.

    Tuples, lists, mappings, named tuples and dataclasses are divided too, and created again for each chunk. Gradients flow
    back to ``inputs``.

    Args:
        inputs: the tensors to divide. A 0-dimensional tensor is copied to each chunk, on its device; ``None`` and any
            other object is passed to each as it is. If there is no tensor to divide, each device gets all of it.
        devices: the devices, which may repeat.
        dim: the dimension of the rows.

    Returns:
        ``min(len(devices), rows)`` chunks, for the first of the devices; if there are no rows, one chunk without rows, so
        that a model still runs.

    Raises:
        ValueError: the tensors have different numbers of rows, or one lacks the dimension.
        TypeError: ``devices`` is not a sequence of devices, or a packed sequence is among the inputs.

    Example::

        first, second = scatter({"x": torch.ones(5, 2)}, ["cpu", "cpu"])  # 3 rows and 2 rows
    """
    return split_rows(inputs, as_devices(devices), dim)[0]


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Join the chunks that `scatter` made, or the outputs for them. Gradients flow back to each.

    Tensors are concatenated; 0-dimensional tensors, such as losses, are stacked into one with ``len(outputs)`` entries.
    Any other value that is equal in all chunks is returned once; otherwise a list with the value of each chunk is
    returned.

    Args:
        outputs: one for each chunk, all of the same structure.
        device: the device of the tensors; ``None`` is that of the first chunk.
        dim: the dimension of the rows.

    Returns:
        The values in the structure of the first chunk.

    Raises:
        ValueError: there is no chunk, or the chunks differ in structure, or in a dimension other than that of the rows.
        TypeError: a packed sequence is among the outputs.

    Example::

        gather([torch.ones(3, 2), torch.ones(2, 2)], "cpu").shape  # torch.Size([5, 2])
    """
    if not len(outputs):
        raise ValueError("gather joins at least one part, got none; scatter returns one part if there are no rows")
    target = as_device(device)
    return map_structure(lambda leaves, path: join(leaves, path, target, dim), outputs, "outputs")


def as_devices(devices: Sequence[Device]) -> list[torch.device]:
    """Return the devices as PyTorch names them, with the index of the current one where none was given."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f'devices is a sequence, such as ["cuda:0", "cuda:1"]; got {devices!r}')
    if not devices:
        raise ValueError("devices names at least one device, got none; the CPU is -1")
    targets = [as_device(device) for device in devices]
    if None in targets:
        raise TypeError(f"devices must name each device, got {list(devices)!r}; the CPU is -1")
    return [torch.empty(0, device=target).device for target in targets]


def split_rows(inputs: Any, devices: Sequence[torch.device], dim: int) -> tuple[list[Any], list[int] | None]:
    """Return the chunks of `scatter` and their numbers of rows; ``None`` where there is no tensor to divide."""
    rows = _count_rows(inputs, dim)
    if rows is None:
        return [_cut(inputs, device, None, dim) for device in devices], None
    count = max(1, min(len(devices), rows))
    sizes = [rows // count + (index < rows % count) for index in range(count)]
    spans = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    return [_cut(inputs, device, span, dim) for device, span in zip(devices, spans, strict=False)], sizes


def _count_rows(inputs: Any, dim: int) -> int | None:
    """Return the number of rows in which all tensors agree; ``None`` where there is no tensor to divide."""
    rows: dict[str, int] = {}

    def count(leaves: Sequence[Any], path: str) -> None:
        tensor = leaves[0]
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            return
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(
                f"the rows to scatter lie in dimension {dim}, which {path} of shape {tuple(tensor.shape)} lacks; "
                "set dim, or reshape it"
            )
        rows[path] = tensor.shape[dim]

    map_structure(count, [inputs], "inputs")
    if len(set(rows.values())) > 1:
        numbers = ", ".join(f"{path} has {number}" for path, number in rows.items())
        raise ValueError(
            f"tensors to scatter must have the same number of rows in dimension {dim}: {numbers}. "
            "Expand one that all rows share, or keep it in the model as a buffer"
        )
    return next(iter(rows.values()), None)


def _cut(inputs: Any, device: torch.device, span: tuple[int, int] | None, dim: int) -> Any:
    def cut(leaves: Sequence[Any], path: str) -> Any:
        leaf = leaves[0]
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.ndim and span is not None:
            # Detached, the chunks have no common base, and a model may change each in place as it may the whole.
            leaf = (leaf if leaf.requires_grad else leaf.detach()).narrow(dim, *span)
        return to_device(device, leaf)

    return map_structure(cut, [inputs], "inputs")


def join(leaves: Sequence[Any], path: str, device: torch.device | None, dim: int) -> Any:
    """Join the values at one path of the outputs, as `gather` does."""
    if not isinstance(leaves[0], Tensor):
        return leaves[0] if all(_equal(leaves[0], leaf) for leaf in leaves) else list(leaves)
    tensors = [leaf.to(leaves[0].device if device is None else device) for leaf in leaves]
    if not any(tensor.ndim for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"parts are joined in dimension {dim} and must agree in the others; {path} has the shapes {shapes}. "
            "Pad them to one shape in the model, or set dim"
        ) from error


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError, RuntimeError):  # arrays of several elements have no single answer
        return False


def map_structure(function: Callable[[Sequence[Any], str], Any], trees: Sequence[Any], path: str) -> Any:
    """Call ``function(values, path)`` with the values at each path of some trees; return the results in their structure.

    Args:
        function: ``path`` is written as in Python, ``inputs[0]['mask']``, for errors.
        trees: of the same structure, or a ValueError is raised.
        path: the name of the whole.
    """
    members = [_members(tree, path) for tree in trees]
    if len(trees) > 1:
        shapes = [_describe(tree, children) for tree, children in zip(trees, members, strict=True)]
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(
                    f"parts are joined place by place and must be alike; {path} is {shapes[0]} in part 0 and {shape} in "
                    f"part {index}"
                )
    if members[0] is None:
        return function(trees, path)
    mapped = {}
    for name in members[0]:
        child_path = f"{path}.{name}" if _has_fields(trees[0]) else f"{path}[{name!r}]"
        values = [children[name] for children in members if children is not None]
        mapped[name] = map_structure(function, values, child_path)
    return _rebuild(trees[0], mapped)


def _members(value: Any, path: str) -> dict[Any, Any] | None:
    """Return the items of a container by key, index or field; ``None`` for anything else."""
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, whose rows do not lie in one dimension; pass the padded tensor and the lengths, "
            "and pack and unpack them inside the model"
        )
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, (tuple, list)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if _has_fields(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _has_fields(value: Any) -> bool:
    """Return True for a named tuple, or a dataclass that is neither a mapping nor a tensor nor a module."""
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping, Tensor, torch.nn.Module))
    return hasattr(value, "_fields") if isinstance(value, tuple) else is_data


def _rebuild(old: Any, members: dict[Any, Any]) -> Any:
    """Return a container of the same type with other members."""
    if isinstance(old, (tuple, list)):
        make: Any = getattr(old, "_make", type(old))
        return make(members.values())
    if isinstance(old, Mapping) and not isinstance(old, MutableMapping):
        return members
    made = copy.copy(old)  # keeps a default factory, for example
    for name, value in members.items():
        if isinstance(old, Mapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # a dataclass may be frozen
    return made


def _describe(value: Any, names: Mapping[Any, Any] | None) -> str:
    if names is not None:
        return f"{type(value).__name__} of {sorted(map(repr, names))}"
    return "a tensor" if isinstance(value, Tensor) else "None" if value is None else "no tensor"
