"""What happens to gradients between a backward and a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def clear(optimizer: Optimizer) -> None:
    """Drops the gradients of an optimizer's parameters.

    ``Optimizer.zero_grad`` does the same in 5.6 us, of which most goes into a profiler record; where a class overrides
    it, it is called.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def rescale(optimizer: Optimizer, reference: float, total: Any) -> None:
    """Makes gradients that were summed with weights w / reference a mean, by reference / (sum of the weights)."""
    factor = reference / total
    if not isinstance(factor, Tensor) and factor == 1:
        return
    for parameter in _with_gradient([optimizer]):
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


def sum_over_ranks(comm: Any, optimizers: Sequence[Optimizer], totals: Sequence[Any]) -> list[Any]:
    """Sums the gradients of the optimizers, in place, and the total weights over the ranks."""
    if comm.size == 1:
        return list(totals)
    device = next(_parameters(optimizers)).device
    weights = torch.stack([torch.as_tensor(total, dtype=torch.float64, device=device) for total in totals])
    for parameter in _parameters(optimizers):  # a rank that did not touch a parameter takes part with zeros
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    comm.all_reduce([p.grad for p in _with_gradient(optimizers)] + [weights], average=False)
    return list(weights.unbind())


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def _with_gradient(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    return (parameter for parameter in _parameters(optimizers) if parameter.grad is not None)
