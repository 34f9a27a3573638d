"""Gradients of the parameters of optimizers: cleared, kept apart, scaled; and the step that uses them."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from chainring._distributed.sharding import to_local


def list_parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of some optimizers, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def list_trained(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return those that require gradients."""
    return [parameter for parameter in list_parameters(optimizers) if parameter.requires_grad]


def clear_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer's parameters to ``None``."""
    # hot path: "no extension" of benchmarks/overhead.py. zero_grad() takes 5.6 us, mostly for a record of the profiler.
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def stash(optimizer: Optimizer, stashed: dict[Tensor, Tensor], shared: Set[int]) -> None:
    """Move the gradients of an optimizer's parameters into ``stashed``, added to what is there.

    The memory of those whose ids are in ``shared`` is written to by the next backward.
    """
    for parameter in list_parameters([optimizer]):
        gradient = parameter.grad
        if gradient is not None:
            if parameter in stashed:
                stashed[parameter] = stashed[parameter] + gradient
            else:
                stashed[parameter] = gradient.clone() if id(parameter) in shared else gradient
            parameter.grad = None


def unstash(optimizer: Optimizer, stashed: dict[Tensor, Tensor]) -> None:
    """Add to the gradients of an optimizer's parameters what `stash` has moved away."""
    for parameter in list_parameters([optimizer]):
        gradient = stashed.pop(parameter, None)
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def scale(optimizer: Optimizer, factor: Any) -> None:
    """Multiply the gradients of an optimizer's parameters by a number."""
    for parameter in list_parameters([optimizer]):
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(factor)


try:
    _PROFILED_STEP: Any = Optimizer.profile_hook_step(Optimizer.step).__code__
except AttributeError:  # a PyTorch that does it in another way: steps are called as they stand
    _PROFILED_STEP = object()


def step_optimizer(optimizer: Optimizer) -> None:
    """Run the step of an optimizer.

    PyTorch wraps the ``step`` of every class in a record for its profiler and calls of the hooks, which is a quarter of the
    time of a small step. Where no profiler runs and no hook is registered, the wrapped function is called by itself. A step
    that is wrapped or replaced in any other way, as schedulers of the learning rate do, is called as it stands.
    """
    # hot path: "no extension" of benchmarks/overhead.py
    function: Any = type(optimizer).step
    try:
        is_watched = (
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
        )
    except AttributeError:  # a PyTorch that does not have these private names
        is_watched = True
    if is_watched or "step" in vars(optimizer) or getattr(function, "__code__", None) is not _PROFILED_STEP:
        optimizer.step()
    else:
        function.__wrapped__(optimizer)
