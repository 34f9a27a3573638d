"""Divides a batch among devices, and joins what they made of it."""

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
    """Divides a batch into consecutive parts, one for each device, whose numbers of rows differ by at most one.

    There are ``min(len(devices), rows)`` parts, for the first of the devices; of no rows there is one part, without rows,
    so that a model still runs. Tuples, lists, mappings, named tuples and dataclasses are entered and made anew for each
    part. Gradients flow back to ``inputs``.

    Args:
        inputs: holds the tensors to divide. A tensor without dimensions goes to each part, on its device; ``None`` and
            what else is no tensor goes to each as it is. With no tensor to divide, each device gets all of it.
        devices: may repeat.
        dim: the dimension of the rows.

    Raises:
        ValueError: tensors disagree in their number of rows, or one lacks the dimension.
        TypeError: ``devices`` is no sequence of devices, or a packed sequence is among the inputs.
    """
    targets = as_devices(devices)
    rows = count_rows(inputs, dim)
    if rows is None:
        return [_part(inputs, device, None, dim) for device in targets]
    parts, start = [], 0
    for device, size in zip(targets, part_sizes(rows, len(targets)), strict=False):
        parts.append(_part(inputs, device, (start, size), dim))
        start += size
    return parts


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Joins the parts that `scatter` made, or what became of them. Gradients flow back to each part.

    Tensors are concatenated; those without dimensions, such as losses, are stacked into one of ``len(outputs)`` entries.
    Of anything else that is equal in all parts there is one, and otherwise a list with that of each part.

    Args:
        outputs: one for each part, all of the same structure.
        device: where the tensors go; ``None`` is where those of the first part are.
        dim: the dimension of the rows.

    Raises:
        ValueError: there is no part, or the parts differ in structure, or in a dimension other than that of the rows.
        TypeError: a packed sequence is among the outputs.
    """
    if not len(outputs):
        raise ValueError("gather joins at least one part, got none; scatter gives one part where there are no rows")
    target = as_device(device)
    return map_structure(lambda leaves, where: join(leaves, where, target, dim), outputs, "outputs")


def as_devices(devices: Sequence[Device]) -> list[torch.device]:
    """The devices as PyTorch names them, with the number of the current one where none was given.

    Raises:
        TypeError: that is no sequence of devices.
        ValueError: it is empty.
        RuntimeError: PyTorch has no such device.
    """
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f'devices is a sequence, such as ["cuda:0", "cuda:1"]; got {devices!r}')
    if not devices:
        raise ValueError("devices names at least one device, got none; the host is -1")
    targets = [as_device(device) for device in devices]
    if None in targets:
        raise TypeError(f"devices must name each device, got {list(devices)!r}; the host is -1")
    return [torch.empty(0, device=target).device for target in targets]


def count_rows(inputs: Any, dim: int) -> int | None:
    """The number of rows in which all tensors agree; ``None`` where there is no tensor to divide.

    Raises:
        ValueError: they disagree, or one lacks the dimension.
    """
    found: dict[str, int] = {}

    def note(leaves: Sequence[Any], where: str) -> None:
        tensor = leaves[0]
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            return
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(
                f"the rows to scatter lie in dimension {dim}, which {where} of shape {tuple(tensor.shape)} lacks; "
                "set dim, or reshape it"
            )
        found[where] = tensor.shape[dim]

    map_structure(note, [inputs], "inputs")
    if len(set(found.values())) > 1:
        numbers = ", ".join(f"{where} has {number}" for where, number in found.items())
        raise ValueError(
            f"tensors to scatter must have the same number of rows in dimension {dim}: {numbers}. "
            "Expand one that all rows share, or keep it in the model as a buffer"
        )
    return next(iter(found.values()), None)


def part_sizes(rows: int, number: int) -> list[int]:
    """How many rows each part has, of at most ``number`` parts: none is empty unless there are no rows, and one part."""
    parts = max(1, min(number, rows))
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _part(inputs: Any, device: torch.device, span: tuple[int, int] | None, dim: int) -> Any:
    def cut(leaves: Sequence[Any], where: str) -> Any:
        leaf = leaves[0]
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.ndim and span is not None:
            # Detached, the parts have no common base, and a model may change each in place as it may the whole.
            leaf = (leaf if leaf.requires_grad else leaf.detach()).narrow(dim, *span)
        return to_device(device, leaf)

    return map_structure(cut, [inputs], "inputs")


def join(leaves: Sequence[Any], where: str, device: torch.device | None, dim: int) -> Any:
    """What `gather` makes of the values at one place of the parts."""
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
            f"parts are joined in dimension {dim} and must agree in the others; {where} has the shapes {shapes}. "
            "Pad them to one shape in the model, or set dim"
        ) from error


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError, RuntimeError):  # arrays of several elements have no single answer
        return False


def map_structure(function: Callable[[Sequence[Any], str], Any], parts: Sequence[Any], where: str) -> Any:
    """Calls ``function(values, place)`` with what all parts have at one place, and puts the answers in their structure.

    Args:
        function: ``place`` is written as in Python, ``inputs[0]['mask']``, for errors.
        parts: of the same structure.
        where: what the whole is called.

    Raises:
        ValueError: the structures differ.
        TypeError: there is a packed sequence, whose rows do not lie in one dimension.
    """
    first = parts[0]
    members = [_members(part, where) for part in parts]
    names = members[0]
    if len(parts) > 1:
        shapes = [_described(part, own) for part, own in zip(parts, members, strict=True)]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(
                    f"parts are joined place by place and must be alike; {where} is {shapes[0]} in part 0 and {shape} in "
                    f"part {number}"
                )
    if names is None:
        return function(parts, where)
    values = []
    for name in names:
        place = f"{where}.{name}" if _has_fields(first) else f"{where}[{name!r}]"
        values.append(map_structure(function, [own[name] for own in members if own is not None], place))
    return _rebuilt(first, dict(zip(names, values, strict=True)))


def _members(value: Any, where: str) -> dict[Any, Any] | None:
    """What a container holds, by key, position or field; ``None`` for anything else."""
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"{where} is a PackedSequence, whose rows do not lie in one dimension; pass the padded tensor and the lengths, "
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
    """Whether its members are attributes: of a named tuple, or of a dataclass that is neither a mapping nor a tensor."""
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_data and not isinstance(value, (Mapping, Tensor, torch.nn.Module))


def _rebuilt(old: Any, members: dict[Any, Any]) -> Any:
    """A container of the same type with other members."""
    if isinstance(old, (tuple, list)):
        make: Any = getattr(old, "_make", type(old))
        return make(members.values())
    if isinstance(old, Mapping) and not isinstance(old, MutableMapping):
        return members
    made = copy.copy(old)  # which keeps a default factory, and what else the type carries
    for name, value in members.items():
        if isinstance(old, Mapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # a dataclass may be frozen
    return made


def _described(value: Any, names: Mapping[Any, Any] | None) -> str:
    if names is not None:
        return f"{type(value).__name__} of {sorted(map(repr, names))}"
    return "a tensor" if isinstance(value, Tensor) else "None" if value is None else "no tensor"
