"""DataParallel: runs one module on several devices of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from chainring.converters import Device, device_scope, to_device
from chainring.parallel.scatter import as_devices, join, map_structure, split_rows
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import is_scalar, merge_observations

_Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and keywords


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
        self.devices = as_devices(devices)
        self.output_device = self.devices[0] if output_device is None else as_devices([output_device])[0]
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
        for tensor in self._tensors():
            if tensor.device != first:
                raise RuntimeError(
                    f"the module of a DataParallel stays on the first of its devices, {first}, and a parameter or buffer is "
                    f"on {tensor.device}; give the updater device={str(first)!r}, or move it by .to({str(first)!r})"
                )
        inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        chunks, sizes = split_rows(inputs, self.devices, self.dim)
        calls = [(tuple([chunk[i] for i in range(len(args))]), {key: chunk[key] for key in kwargs}) for chunk in chunks]
        if sizes is None or len(calls) == 1:
            positional, keywords = calls[0]
            return map_structure(self._to_output_device, [self.module(*positional, **keywords)], "outputs")
        return self._run(calls, sizes)

    def _run(self, calls: list[_Call], sizes: list[int]) -> Any:
        outer = current_observation()
        observations: list[dict[str, Any]] = [{} for _ in calls]
        outputs = []
        # One thread: the replicas share the module object, which so keeps its hooks and its names as an observer.
        # Accelerators compute on while the next replica is started.
        runs = zip(self._replicas(len(calls)), self.devices, calls, observations, strict=False)
        for replica, device, call, observation in runs:
            with report_scope(observation) if outer is not None else nullcontext(), device_scope(device):
                outputs.append(replica(*call))
        given = _given_weights(outputs)
        weights = sizes if given is None else [to_device(self.output_device, weight) for weight in given]
        if outer is not None:
            outer.update(merge_observations(observations, weights, self.output_device))
        gathered = map_structure(partial(self._join, weights), outputs, "outputs")
        if given is not None:
            gathered["weight"] = sum(weights)
        return gathered

    def _replicas(self, count: int) -> Iterator[Callable[[Any, Any], Any]]:
        """Yield the module itself, then the module with parameters and buffers of the other devices."""
        copies: Iterable[dict[str, Tensor]] = map(self._copy_state, self.devices[1:count])
        if not any(map(is_lazy, self._tensors())):  # a lazy one has its shapes only after the first chunk
            copies = list(copies)  # before the first chunk changes a buffer
        yield lambda args, kwargs: self.module(*args, **kwargs)
        for state in copies:
            yield partial(functional_call, self.module, state)

    def _copy_state(self, device: torch.device) -> dict[str, Tensor]:
        """Return parameters on a device, which autograd follows back, and buffers that may be changed there."""
        state = {name: parameter.to(device) for name, parameter in self.module.named_parameters()}
        return state | {name: buffer.to(device, copy=True) for name, buffer in self.module.named_buffers()}

    def _join(self, weights: Sequence[Any], leaves: Sequence[Any], path: str) -> Any:
        if not all(map(_is_mean, leaves)):
            return join(leaves, path, self.output_device, self.dim)
        values, total = to_device(self.output_device, list(leaves)), sum(weights)
        mean = sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
        return mean.to(leaves[0].dtype) if isinstance(mean, Tensor) and isinstance(leaves[0], Tensor) else mean

    def _to_output_device(self, leaves: Sequence[Any], path: str) -> Any:
        return leaves[0].to(self.output_device) if isinstance(leaves[0], Tensor) else leaves[0]

    def _tensors(self) -> Iterator[Tensor]:
        return itertools.chain(self.module.parameters(), self.module.buffers())

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


def _given_weights(outputs: Sequence[Any]) -> list[Any] | None:
    """Return the weights beside the losses, if the outputs have them."""
    if all(isinstance(output, Mapping) and "loss" in output and is_scalar(output.get("weight")) for output in outputs):
        return [output["weight"] for output in outputs]
    return None
