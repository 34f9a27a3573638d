"""Closures, with which an optimizer computes the loss and its gradients any number of times within one step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring._checks import is_number
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import is_sharded, to_full
from chainring.reporting.summary import weighted_mean
from chainring.training.updaters._gradients import list_parameters
from chainring.training.updaters.callbacks import UpdateContext

NO_FP16 = (
    'precision="fp16" scales the loss, by a factor that may change in the middle of a step, and a step with a closure reads '
    'the loss; use precision="bf16", which needs no scale'
)


class Evaluation(NamedTuple):
    """The closure of a micro-batch, and what it was given in."""

    closure: Callable[[], Any]
    context: UpdateContext
    examples: Any
    observation: dict[str, Any] | None


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the ``step`` of an optimizer has one required argument, which is a closure, as that of LBFGS."""
    # Of the class, because a scheduler wraps the object's.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) == 1 and "closure" in required[0].name and required[0].kind is not inspect.Parameter.KEYWORD_ONLY


def can_step(optimizer: Optimizer, *arguments: Any) -> bool:
    """Return True if the ``step`` of an optimizer can be called with these arguments."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer, *arguments)
    except TypeError:
        return False
    return True


def check_not_sharded(optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse PyTorch's LBFGS over sharded parameters, at which it would fail in its first step."""
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, torch.optim.LBFGS) and any(map(is_sharded, list_parameters([optimizer]))):
            raise ValueError(
                f"optimizer {name!r} is LBFGS, which takes all gradients as one vector, and its parameters are sharded by "
                "fully_shard or parallelize_module; leave the model plain or wrap it in DistributedDataParallel"
            )


def check_returned(loss: Any) -> Any:
    """Return the loss that a closure has returned.

    Raises:
        TypeError: it is not one number.
    """
    if not is_number(loss) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise TypeError(f"a closure calls self.backward(loss) and returns the loss, one number; got {type(loss).__name__}")
    return to_full(loss)


def mean_loss(comm: Communicator, losses: Sequence[tuple[Any, Any]], device: torch.device) -> Any:
    """Return the mean of losses, each with its weight, over all ranks: the same number on each rank, for joint decisions."""
    if len(losses) == 1 and comm.size == 1:
        return losses[0][0]
    dtype = torch.float32 if device.type == "mps" else torch.float64
    numbers = [(torch.as_tensor(loss, dtype=dtype, device=device).detach().reshape(()), weight) for loss, weight in losses]
    mean, weight = weighted_mean(numbers)
    if comm.size > 1:
        sums = torch.stack([mean * weight, torch.as_tensor(weight, dtype=dtype, device=device)])
        comm.all_reduce([sums], average=False)
        mean = sums[0] / sums[1]
    loss = losses[0][0]
    return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean


@contextmanager
def only_gradients_of(chosen: Iterable[Optimizer], optimizers: Iterable[Optimizer]) -> Generator[None]:
    """Set aside the gradients of all optimizers except the chosen ones: in the context they are absent and do not change."""
    own = set(map(id, list_parameters(chosen)))
    others = [parameter for parameter in list_parameters(optimizers) if id(parameter) not in own]
    gradients = [parameter.grad for parameter in others]
    for parameter in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter.grad = gradient
