"""DataParallel: one module, one process, several devices."""

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
from chainring.parallel.scatter import as_devices, count_rows, join, map_structure, part_sizes, scatter
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import is_scalar, merge_observations

_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keywords."""


class DataParallel(nn.Module):
    """Runs a module on several devices, each with its part of the rows, and returns what the module would of all rows.

    Inputs are divided as by `scatter` and outputs joined as by `gather`, but for single numbers of floating point, such
    as a loss: they are the mean over the parts, weighted by their rows, which for a mean over rows is what one device
    has. Where the module returns a mapping with ``"loss"`` and ``"weight"``, as updaters take it, that is the weight, and
    the weights add up. What the parts report is averaged in the same way. Without a tensor to divide, and of no rows, the
    module runs once.

    The module stays where it is the only one: its names, its state and its parameters, into which the gradients of all
    devices are summed, are its own. An attribute that this object lacks is looked up there; to set one, write
    ``parallel.module.name = value``. Buffers that the forward changes, such as the statistics of a BatchNorm, keep what
    the first part made of them.

    Args:
        module: is moved to the first device, and must stay there.
        devices: may repeat, and may be the host.
        output_device: where outputs go; ``None`` is the first device.
        dim: the dimension of the rows, in inputs and outputs.

    Raises:
        TypeError: ``module`` is no module, or ``devices`` no sequence of devices.
        ValueError: there is no device.
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
        """What the module returns of all rows, on ``output_device``.

        Raises:
            ValueError: arguments disagree in their number of rows.
            RuntimeError: the module is no longer on the first device.
        """
        self._check_home()
        inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        rows = count_rows(inputs, self.dim)
        calls = [_call(part, len(args)) for part in scatter(inputs, self.devices, self.dim)]
        if rows is None or len(calls) == 1:
            positional, keywords = calls[0]
            return map_structure(self._moved, [self.module(*positional, **keywords)], "outputs")
        return self._run(calls, part_sizes(rows, len(calls)))

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

    def _replicas(self, number: int) -> Iterator[Callable[[Any, Any], Any]]:
        """The module itself, then the module with parameters and buffers of the other devices."""
        copies: Iterable[dict[str, Tensor]] = map(self._copied, self.devices[1:number])
        if not any(map(is_lazy, _tensors(self.module))):  # a lazy one has its shapes only after the first part
            copies = list(copies)  # before the first part changes a buffer
        yield lambda args, kwargs: self.module(*args, **kwargs)
        for state in copies:
            yield partial(functional_call, self.module, state)

    def _copied(self, device: torch.device) -> dict[str, Tensor]:
        """Parameters on a device, a move that autograd follows back, and buffers that may be changed there."""
        state = {name: parameter.to(device) for name, parameter in self.module.named_parameters()}
        return state | {name: buffer.to(device, copy=True) for name, buffer in self.module.named_buffers()}

    def _join(self, weights: Sequence[Any], leaves: Sequence[Any], where: str) -> Any:
        if not all(map(_is_mean, leaves)):
            return join(leaves, where, self.output_device, self.dim)
        total = sum(weights)
        mean = sum(self._moved([leaf], "") * (weight / total) for leaf, weight in zip(leaves, weights, strict=True))
        return mean.to(leaves[0].dtype) if isinstance(mean, Tensor) and isinstance(leaves[0], Tensor) else mean

    def _moved(self, leaves: Sequence[Any], where: str) -> Any:
        return leaves[0].to(self.output_device) if isinstance(leaves[0], Tensor) else leaves[0]

    def _check_home(self) -> None:
        home = self.devices[0]
        for tensor in _tensors(self.module):
            if tensor.device != home:
                raise RuntimeError(
                    f"the module of a DataParallel stays on the first of its devices, {home}, and a parameter or buffer is "
                    f"on {tensor.device}; give the updater device={str(home)!r}, or move it by .to({str(home)!r})"
                )

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
        """This object and the module under one name, then the module's parts: no name shows that it is wrapped."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Puts back a state of the module."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # As a part of a larger module: PyTorch goes on to the module under the name that it has as an attribute here.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _call(part: Mapping[Any, Any], positional: int) -> _Call:
    """The arguments in a part, which has them by position and by keyword."""
    items = list(part.items())
    return tuple([value for _, value in items[:positional]]), dict(items[positional:])


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _is_mean(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and (value.is_floating_point() or value.is_complex())
    return isinstance(value, float)


def _given_weights(outputs: Sequence[Any]) -> list[Any] | None:
    """What the outputs say that the mean in their loss counts, if they do."""
    if all(isinstance(output, Mapping) and "loss" in output and is_scalar(output.get("weight")) for output in outputs):
        return [output["weight"] for output in outputs]
    return None
