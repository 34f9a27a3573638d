"""DataParallel, which runs one module on several devices of one process; scatter and gather, by which it divides batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from chainring.converters import Device, as_device, device_scope, to_device
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import is_scalar, merge_observations


class DataParallel(nn.Module):
    """Runs a module on several devices, each with a chunk of the rows, and returns the module's output for all rows.

    Inputs are divided like by `scatter` and outputs joined like by `gather`, except for floating-point scalars, such as a
    loss, which are averaged over the chunks, weighted by their rows. If the module returns a mapping with ``"loss"`` and
    ``"weight"``, as updaters accept it, this weight is used, and the weights are summed. Reported values are averaged in
    the same way. If there is no tensor to divide, or there are no rows, the module runs once.

    Names, state and parameters are those of the module, into which the gradients of all devices are summed. An attribute
    that this object lacks is looked up on the module; to set one, write ``parallel.module.name = value``. Buffers that
    the forward pass changes, such as the statistics of BatchNorm, are those of the first chunk.

    Args:
        module: the module, which is moved to the first device and must stay there.
        devices: the devices; they may repeat, and may be the CPU.
        output_device: the device of the outputs; ``None`` is the first device.
        dim: the dimension of the rows, in inputs and outputs.

    Raises:
        TypeError: ``module`` is not a module, or ``devices`` is not a sequence of devices.
        ValueError: there is no device.

    Example::

        model = DataParallel(nn.Linear(4, 2), ["cpu", "cpu"])
        model(torch.ones(5, 4)).shape  # torch.Size([5, 2])
    """

    module: nn.Module

    def __init__(self, module: nn.Module, devices: Sequence[Device], output_device: Device = None, dim: int = 0) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"DataParallel takes a module first, an nn.Module; got {module!r}")
        super().__init__()
        self.devices = _as_devices(devices)
        self.output_device = self.devices[0] if output_device is None else _as_devices([output_device])[0]
        self.dim = dim
        self.module = module.to(self.devices[0])
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for all rows, on ``output_device``.

        Raises:
            ValueError: the arguments have different numbers of rows.
            RuntimeError: the module is no longer on the first device.
        """
        first = self.devices[0]
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.device != first:
                raise RuntimeError(
                    f"the module of a DataParallel stays on the first of its devices, {first}, and a parameter or buffer is "
                    f"on {tensor.device}; give the updater device={str(first)!r}, or move it by .to({str(first)!r})"
                )
        inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        chunks, sizes = _split_rows(inputs, self.devices, self.dim)
        calls = [(tuple([chunk[i] for i in range(len(args))]), {key: chunk[key] for key in kwargs}) for chunk in chunks]
        if sizes is None or len(calls) == 1:
            positional, keywords = calls[0]
            return _cut(self.module(*positional, **keywords), self.output_device, None, self.dim, "outputs")
        outer = current_observation()
        observations: list[dict[str, Any]] = [{} for _ in calls]
        outputs = []
        # One thread: the replicas share the module object, which so keeps its hooks and its names as an observer.
        # Accelerators compute on while the next replica is started.
        runs = zip(self._replicas(len(calls)), self.devices, calls, observations, strict=False)
        for replica, device, call, observation in runs:
            with report_scope(observation) if outer is not None else nullcontext(), device_scope(device):
                outputs.append(replica(*call))
        are_weighted = all(isinstance(row, Mapping) and "loss" in row and is_scalar(row.get("weight")) for row in outputs)
        weights = [to_device(self.output_device, row["weight"]) for row in outputs] if are_weighted else sizes
        if outer is not None:
            outer.update(merge_observations(observations, weights, self.output_device))
        gathered = _map_structure(partial(self._join, weights), outputs, "outputs")
        if are_weighted:
            gathered["weight"] = sum(weights)
        return gathered

    def _replicas(self, count: int) -> Iterator[Callable[[Any, Any], Any]]:
        """Yield the module itself, then the module with parameters and buffers of the other devices."""
        # Of parameters, which autograd follows back, and of buffers, before the first chunk changes them.
        copies = [
            {name: parameter.to(device) for name, parameter in self.module.named_parameters()}
            | {name: buffer.to(device, copy=True) for name, buffer in self.module.named_buffers()}
            for device in self.devices[1:count]
        ]
        yield lambda args, kwargs: self.module(*args, **kwargs)
        for state in copies:
            yield partial(functional_call, self.module, state)

    def _join(self, weights: Sequence[Any], leaves: Sequence[Any], path: str) -> Any:
        if not all(map(_is_mean, leaves)):
            return _join_values(leaves, path, self.output_device, self.dim)
        values, total = to_device(self.output_device, list(leaves)), sum(weights)
        mean = sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
        return mean.to(leaves[0].dtype) if isinstance(mean, Tensor) and isinstance(leaves[0], Tensor) else mean

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Special methods are this object's own: a copy of it is not a copy of the module.
            if name == "module" or (name.startswith("__") and name.endswith("__")):
                raise
            return getattr(self.module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this object and the module under one name, then its submodules: no name shows that it is wrapped."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the module."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # As a submodule: PyTorch continues to the module under the name that it has as an attribute here.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_mean(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and (value.is_floating_point() or value.is_complex())
    return isinstance(value, float)


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
    return _split_rows(inputs, _as_devices(devices), dim)[0]


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
    return _map_structure(lambda leaves, path: _join_values(leaves, path, target, dim), outputs, "outputs")


def _as_devices(devices: Sequence[Device]) -> list[torch.device]:
    """Return the devices as PyTorch names them, with the index of the current one where none was given."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f'devices is a sequence, such as ["cuda:0", "cuda:1"]; got {devices!r}')
    if not devices:
        raise ValueError("devices names at least one device, got none; the CPU is -1")
    targets = [as_device(device) for device in devices]
    if None in targets:
        raise TypeError(f"devices must name each device, got {list(devices)!r}; the CPU is -1")
    return [torch.empty(0, device=target).device for target in targets]


def _split_rows(inputs: Any, devices: Sequence[torch.device], dim: int) -> tuple[list[Any], list[int] | None]:
    """Return the chunks of `scatter` and their numbers of rows; ``None`` where there is no tensor to divide."""
    rows: dict[str, int] = {}  # in which all tensors must agree

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

    _map_structure(count, [inputs], "inputs")
    if len(set(rows.values())) > 1:
        numbers = ", ".join(f"{path} has {number}" for path, number in rows.items())
        raise ValueError(
            f"tensors to scatter must have the same number of rows in dimension {dim}: {numbers}. "
            "Expand one that all rows share, or keep it in the model as a buffer"
        )
    if not rows:
        return [_cut(inputs, device, None, dim) for device in devices], None
    total = next(iter(rows.values()))
    n_chunks = max(1, min(len(devices), total))
    sizes = [total // n_chunks + (index < total % n_chunks) for index in range(n_chunks)]
    spans = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    return [_cut(inputs, device, span, dim) for device, span in zip(devices, spans, strict=False)], sizes


def _cut(tree: Any, device: torch.device, span: tuple[int, int] | None, dim: int, name: str = "inputs") -> Any:
    """Return the rows of a span, or all, on a device."""

    def cut(leaves: Sequence[Any], path: str) -> Any:
        leaf = leaves[0]
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.ndim and span is not None:
            # Detached, the chunks have no common base, and a model may change each in place as it may the whole.
            leaf = (leaf if leaf.requires_grad else leaf.detach()).narrow(dim, *span)
        return to_device(device, leaf)

    return _map_structure(cut, [tree], name)


def _join_values(leaves: Sequence[Any], path: str, device: torch.device | None, dim: int) -> Any:
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


def _map_structure(function: Callable[[Sequence[Any], str], Any], trees: Sequence[Any], path: str) -> Any:
    """Call ``function(values, path)`` with the values at each path of some trees; return the results in their structure.

    The trees must have the same, or a ValueError is raised. Errors have the path as Python has it: ``inputs[0]['mask']``.
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
        mapped[name] = _map_structure(function, values, child_path)
    old = trees[0]
    if isinstance(old, (tuple, list)):
        make: Any = getattr(old, "_make", type(old))
        return make(mapped.values())
    if isinstance(old, Mapping) and not isinstance(old, MutableMapping):
        return mapped
    made = copy.copy(old)  # keeps a default factory, for example
    for name, value in mapped.items():
        if isinstance(old, Mapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # a dataclass may be frozen
    return made


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


def _describe(value: Any, names: Mapping[Any, Any] | None) -> str:
    if names is not None:
        return f"{type(value).__name__} of {sorted(map(repr, names))}"
    return "a tensor" if isinstance(value, Tensor) else "None" if value is None else "no tensor"
