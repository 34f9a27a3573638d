"""Gradients of parameters that `fully_shard` has sharded, for virtual ranks, which sum whole ones in an order of their own.

While virtual ranks compute, `fully_shard` does not reduce gradients: a backward leaves that of the whole parameter with the
gathered one, on each rank its own. It is moved to the sharded parameter as a ``DTensor`` that is the sum of what the ranks
hold (``Partial``), and so it is there, and can be cleared, put aside and added to, as that of a plain parameter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from chainring._distributed.sharding import (
    as_summand,
    fsdp_modules,
    fsdp_parameters,
    is_sharded,
    is_summand,
    reshard,
    shard_like,
    to_local,
)

_ELEMENT_BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD,
)  # fmt: skip


class ShardedGradients:
    """The gradients that each rank has computed of the sharded parameters of some models."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        for model in models:
            reshard(fsdp_modules(model))  # an evaluation leaves parameters gathered
        self._held = [held for model in models for held in fsdp_parameters(model)]

    def __bool__(self) -> bool:
        """Return True if a model has sharded parameters."""
        return bool(self._held)

    def drop(self) -> None:
        """Forget gradients that a backward which failed may have left."""
        for held in self._held:
            _take(held)

    @contextmanager
    def backward(self) -> Generator[None]:
        """Return the context of a backward, which adds to the gradients that are there."""
        for held in self._held:
            own = held.sharded_param.grad
            gathered = getattr(held, "unsharded_param", None)  # not before the first forward
            if gathered is not None and is_summand(own) and gathered.dtype == own.dtype:
                gathered.grad, held.sharded_param.grad = to_local(own), None
        yield
        self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Move what a backward has left to the gradients of the sharded parameters.

        Raises:
            RuntimeError: a parameter still has the gradient of a step.
        """
        for held in self._held:
            parameter, gradient = held.sharded_param, _take(held)
            if gradient is None:
                continue
            own = parameter.grad
            if own is None:
                parameter.grad = as_summand(gradient.to(parameter.dtype), parameter)
            elif is_summand(own):
                to_local(own).add_(gradient)
            else:
                raise RuntimeError(
                    "loss.backward() has met the gradients of a step, which are sharded and were summed over the ranks; "
                    "write self.backward(loss) in update_core, which clears them before"
                )


def _take(held: Any) -> Tensor | None:
    """Return the gradient that a backward has left with a gathered parameter, which then has none."""
    gathered, gradient = getattr(held, "unsharded_param", None), held.unsharded_accumulated_grad
    if gradient is None and gathered is not None:
        gradient = gathered.grad
    if "unsharded_accumulated_grad" in vars(held):  # until torch 2.14, and there with a MixedPrecisionPolicy
        held.unsharded_accumulated_grad = None
    if gathered is not None:
        gathered.grad = None
    return gradient  # type: ignore[no-any-return]


def whole_like(parameter: Any) -> Tensor:
    """Return a tensor of the shape, dtype and device of a whole parameter, which takes no memory where that is sharded."""
    if not is_sharded(parameter):
        return parameter  # type: ignore[no-any-return]
    return torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def set_gradient(parameter: Any, gradient: Tensor | None) -> None:
    """Set the gradient of a parameter to a whole one that every rank has, of which a sharded parameter takes its shard."""
    parameter.grad = None
    parameter.grad = shard_like(gradient, parameter)


def check_sharded_parameters(optimizers: Mapping[str, optim.Optimizer]) -> None:
    """Refuse optimizers that update a shard differently from the same elements of the whole parameter.

    Raises:
        ValueError: an optimizer of sharded parameters does not work element by element, or not with these.
    """
    for name, optimizer in optimizers.items():
        groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for group, parameter in groups:
            if is_sharded(parameter) and (reason := _find_reason(optimizer, group, parameter)):
                raise ValueError(
                    "with virtual_ranks each rank makes of its shards what one rank makes of whole parameters, to the last "
                    f"bit, and optimizer {name!r} of sharded parameters {reason}, or leave the model plain or wrap it in "
                    "DistributedDataParallel"
                )


def _find_reason(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: Any) -> str | None:
    """Return why the bits of a step depend on the shards, and what to write instead; ``None`` if they do not."""
    cls, device = type(optimizer), parameter.device.type
    if cls not in _ELEMENT_BY_ELEMENT:
        names = ", ".join(known.__name__ for known in _ELEMENT_BY_ELEMENT)
        return f"is {cls.__qualname__}, which may use more than one element at a time: take one of torch.optim's {names}"
    if group.get("fused"):
        return "has fused=True, whose kernels round by the place of an element: take foreach=True, or neither"
    if device == "cpu" and parameter.element_size() < 4:
        return (
            f"steps in {parameter.dtype} on the host, whose kernels round by the place of an element: keep parameters in "
            'float32 and compute with precision="bf16"'
        )
    if device != parameter.device_mesh.device_type:
        return (
            f"steps on {device!r}, to which fully_shard has moved them, and ranks exchange on "
            f"{parameter.device_mesh.device_type!r}: leave offload_policy out"
        )
    return None
