"""Gradients of the parameters of optimizers: dropped, stashed, averaged over micro-batches and ranks; and the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import placed_like, to_local


def list_parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of some optimizers, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


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


def rescale(optimizer: Optimizer, reference: float, total: Any, exchanged: Set[int], world_size: int) -> None:
    """Turn sums of gradients weighted by ``w / reference`` into means, where ``total`` is the sum of the weights w.

    The parameters whose ids are in ``exchanged`` were also divided by the world size, as DDP and FSDP do.
    """
    if isinstance(total, Tensor) and not total.is_floating_point():
        total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    factor = reference / total
    if not isinstance(factor, Tensor) and factor == 1 and not exchanged:
        return
    for parameter in list_parameters([optimizer]):
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(factor * world_size if id(parameter) in exchanged else factor)


def sum_over_ranks(
    comm: Communicator, optimizers: Sequence[Optimizer], weights: Sequence[Any], exchanged: Set[int]
) -> list[Any]:
    """Sum the gradients of the optimizers over the ranks, in place; return the sums of the weights, one an optimizer.

    The parameters whose ids are in ``exchanged`` have been summed by DDP or FSDP already. A rank that did not touch a
    parameter takes part with zeros. A parameter that no rank touched is left without a gradient, so that the optimizer
    passes it over as it does in a world of one.
    """
    if comm.world.size == 1:
        return list(weights)
    trained = [parameter for parameter in list_parameters(optimizers) if parameter.requires_grad]
    if comm.size == 1:
        for parameter in trained:
            parameter.grad = None if parameter.grad is None else placed_like(parameter.grad, parameter)
        return list(weights)
    parameters = [parameter for parameter in trained if id(parameter) not in exchanged]
    touched = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else placed_like(parameter.grad, parameter)
    gradients = [to_local(parameter.grad) for parameter in parameters]
    device = trained[0].device
    weight_tensors = [torch.as_tensor(weight, dtype=torch.float64, device=device) for weight in weights]
    sums = torch.cat([torch.stack(weight_tensors), torch.tensor(touched, dtype=torch.float64, device=device)])
    comm.all_reduce([*gradients, sums], average=False)
    if not all(touched):  # only then is the device waited for
        for parameter, count in zip(parameters, sums[len(weights) :].tolist(), strict=True):
            parameter.grad = parameter.grad if count else None
    return list(sums[: len(weights)].unbind())


try:
    _PROFILED_STEP: Any = Optimizer.profile_hook_step(Optimizer.step).__code__
except AttributeError:  # a PyTorch that does it in another way: steps are called as they stand
    _PROFILED_STEP = object()


def step_optimizer(optimizer: Optimizer) -> None:
    """Let an optimizer step.

    PyTorch wraps the ``step`` of every class in a record for its profiler and calls of the hooks, which is a quarter of the
    time of a small step. Where no profiler runs and no hook is registered, the wrapped function is called by itself. A step
    that is wrapped or replaced in any other way, as schedulers of the learning rate do, is called as it stands.
    """
    # hot path: "no extension" of benchmarks/overhead.py
    function: Any = type(optimizer).step
    if getattr(function, "__code__", None) is not _PROFILED_STEP or "step" in vars(optimizer) or _is_watched(optimizer):
        optimizer.step()
    else:
        function.__wrapped__(optimizer)


def _is_watched(optimizer: Optimizer) -> bool:
    """Return True if a profiler or a hook wants to know of a step, or a PyTorch does not have these private names."""
    try:
        return bool(
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
        )
    except AttributeError:
        return True
