"""What happens to gradients between a backward and a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring.sharding import local


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


def set_aside(optimizer: Optimizer, held: dict[Tensor, Tensor]) -> None:
    """Moves the gradients of an optimizer's parameters into ``held``, added to what is there."""
    for parameter in _with_gradient([optimizer]):
        gradient = parameter.grad
        assert gradient is not None
        held[parameter] = held[parameter] + gradient if parameter in held else gradient
        parameter.grad = None


def bring_back(optimizer: Optimizer, held: dict[Tensor, Tensor]) -> None:
    """Adds to the gradients of an optimizer's parameters what `set_aside` has moved away."""
    for parameter in _parameters([optimizer]):
        gradient = held.pop(parameter, None)
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def rescale(optimizer: Optimizer, reference: float, total: Any, divided: Set[int] = frozenset(), by: int = 1) -> None:
    """Makes gradients that were summed with weights w / reference a mean, by reference / (sum of the weights).

    Those of the parameters whose ids are in ``divided`` were also divided by the number ``by``.
    """
    if isinstance(total, Tensor) and not total.is_floating_point():
        total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    factor = reference / total
    if not isinstance(factor, Tensor) and factor == 1 and not divided:
        return
    for parameter in _with_gradient([optimizer]):
        assert parameter.grad is not None
        local(parameter.grad).mul_(factor * by if id(parameter) in divided else factor)


def sum_over_ranks(
    comm: Any, optimizers: Sequence[Optimizer], totals: Sequence[Any], summed: Set[int] = frozenset()
) -> list[Any]:
    """Sums the gradients of the optimizers, in place, and the total weights over the ranks.

    The gradients of the parameters whose ids are in ``summed`` have been exchanged already.

    A rank that did not touch a parameter takes part with zeros; what no rank touched is left without a gradient, so that
    the optimizer passes it over as it does in a world of one.
    """
    if comm.size == 1:
        return list(totals)
    trained = [parameter for parameter in _parameters(optimizers) if parameter.requires_grad]
    parameters = [parameter for parameter in trained if id(parameter) not in summed]
    device = trained[0].device
    untouched = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
    touches = torch.ones(len(parameters), dtype=torch.float64)
    touches[untouched] = 0
    for number in untouched:
        parameters[number].grad = torch.zeros_like(parameters[number])
    weights = torch.stack([torch.as_tensor(total, dtype=torch.float64, device=device) for total in totals])
    sums = torch.cat([weights, touches.to(device)])
    comm.all_reduce([parameter.grad for parameter in parameters] + [sums], average=False)
    if untouched:  # only then is the device waited for
        counts = sums[len(totals) :].tolist()
        for number in untouched:
            if not counts[number]:
                parameters[number].grad = None
    return list(sums[: len(totals)].unbind())


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
