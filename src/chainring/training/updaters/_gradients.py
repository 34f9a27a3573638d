"""Gradients of the parameters of optimizers: dropped, stashed, averaged over micro-batches and ranks; and the step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from chainring._distributed.communicator import Communicator
from chainring._distributed.group import GroupCommunicator, gradient_buckets
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


@contextmanager
def sending(parameters: Sequence[Any], buckets: Sequence[Sequence[int]], send: Callable[[], bool]) -> Generator[None]:
    """Send buckets of gradients in a backward, one after the other, each as soon as the backward has computed all of it.

    Args:
        parameters: those whose gradients are sent.
        buckets: the places of parameters, in the order in which all ranks send.
        send: sends the next bucket; returns False if it has to wait for the end of the backward.
    """
    bucket_of = {id(parameters[place]): number for number, places in enumerate(buckets) for place in places}
    missing, sent = list(map(len, buckets)), 0

    def note(parameter: Tensor) -> None:
        nonlocal sent
        missing[bucket_of[id(parameter)]] -= 1
        while sent < len(buckets) and missing[sent] <= 0 and send():
            sent += 1

    # Registered last, so that they come after hooks of the user's.
    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class GradientVersions:
    """Notes the gradients that were sent, and finds out whether they have changed since.

    They change if a parameter is reached twice, as in a checkpointed part of a model, or if a user's hook changes them.
    """

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Tensor, int]] = {}  # by place, with the version

    def note(self, places: Sequence[int], gradients: Sequence[Tensor]) -> None:
        self._sent.update((place, (each, each._version)) for place, each in zip(places, gradients, strict=True))

    def are_stale(self, gradients: Sequence[Tensor | None] | None) -> bool:
        """Return True if these, by place, are not those that were sent."""
        if gradients is None:
            return bool(self._sent)
        sent = self._sent.items()
        return any(gradients[place] is not each or each._version != version for place, (each, version) in sent)


class RankSum:
    """The sums over the ranks of the gradients of some parameters, which may be sent while the backward runs.

    The buckets are the same whether or not they are, and so are the bits of the sums.

    Attributes:
        parameters: those that require gradients, and that no wrapped module exchanges.
    """

    def __init__(self, comm: Communicator, optimizers: Iterable[Optimizer], exchanged: Set[int]) -> None:
        trained = [parameter for parameter in list_parameters(optimizers) if parameter.requires_grad]
        self.parameters = [parameter for parameter in trained if id(parameter) not in exchanged]
        self._comm, self._buckets = comm, list(gradient_buckets(list(map(to_local, self.parameters))))
        self._waits: list[Callable[[], Tensor]] = []
        self._versions: GradientVersions | None = None

    def backward(self) -> AbstractContextManager[None]:
        """Return the context of the last backward of an update, in which gradients are sent."""
        self._versions = GradientVersions()
        return sending(self.parameters, self._buckets, self._send)

    def _send(self) -> bool:
        """Send the next bucket, unless some of its gradients are not there, or not dense."""
        places = self._buckets[len(self._waits)]
        found = [self.parameters[place].grad for place in places]
        gradients = [gradient for gradient in found if gradient is not None and gradient.layout is torch.strided]
        if len(gradients) < len(places):
            return False
        assert self._versions is not None
        self._versions.note(places, gradients)
        self._start(gradients)
        return True

    def _start(self, gradients: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
        self._waits.append(self._comm.start_sum(flat))

    def finish(self, numbers: Tensor) -> Tensor:
        """Replace each gradient by its sum, after all ranks have sent theirs; return the sums of some numbers."""
        gradients = [to_local(parameter.grad) for parameter in self.parameters]
        self._send_remaining(gradients)
        find_sums = self._share(numbers, gradients)  # after all buckets, of which a rank may have sent some only now
        sums = [wait() for wait in self._waits]
        numbers, is_stale = find_sums()
        if is_stale:
            self._waits = []
            self._send_remaining(gradients)
            sums = [wait() for wait in self._waits]
        for places, flat in zip(self._buckets, sums, strict=True):
            sizes = [gradients[place].numel() for place in places]
            for place, values in zip(places, torch.split(flat, sizes), strict=True):
                self._set(place, gradients[place], values)
        return numbers

    def _share(self, numbers: Tensor, gradients: Sequence[Tensor]) -> Callable[[], tuple[Tensor, bool]]:
        """Start to sum numbers, and to find out whether a rank has sent gradients that have changed since."""
        if self._versions is None:
            find_sums = self._comm.start_sum(numbers)
            return lambda: (find_sums(), False)
        is_stale = self._versions.are_stale(gradients)
        if numbers.is_cpu:  # hot path: "two ranks, a plain model": a message more takes a tenth of the update
            find_sums = self._comm.start_sum(torch.cat([numbers, numbers.new_tensor([is_stale])]))
            return lambda: (find_sums()[:-1], bool(find_sums()[-1]))
        find_sums, find_largest = self._comm.start_sum(numbers), self._comm.start_max(int(is_stale))
        return lambda: (find_sums(), bool(find_largest()))  # the device is not waited for

    def _set(self, place: int, gradient: Tensor, values: Tensor) -> None:
        if gradient is self.parameters[place].grad and gradient.is_contiguous():
            self.parameters[place].grad = values.view_as(gradient)  # which saves a copy
        else:
            gradient.copy_(values.view_as(gradient))

    def _send_remaining(self, gradients: Sequence[Tensor]) -> None:
        """Send the buckets that were not sent in the backward."""
        for places in self._buckets[len(self._waits) :]:
            self._start([gradients[place] for place in places])


def sum_over_ranks(
    comm: Communicator,
    optimizers: Sequence[Optimizer],
    weights: Sequence[Any],
    exchanged: Set[int],
    begun: RankSum | None = None,
) -> list[Any]:
    """Sum the gradients of the optimizers over the ranks, in place; return the sums of the weights, one per optimizer.

    The parameters whose ids are in ``exchanged`` have been summed by DDP or FSDP already; ``begun`` has been sent in
    part. A rank that did not touch a parameter takes part with zeros. A parameter that no rank touched is left without a
    gradient, so that the optimizer skips it, as it does in a world of one.
    """
    if comm.world.size == 1:
        return list(weights)
    if comm.size == 1:
        for parameter in list_parameters(optimizers):
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = placed_like(parameter.grad, parameter)
        return list(weights)
    exchange = RankSum(comm, optimizers, exchanged) if begun is None else begun
    touched = [parameter.grad is not None for parameter in exchange.parameters]
    for parameter in exchange.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else placed_like(parameter.grad, parameter)
    device = next(iter(list_parameters(optimizers))).device
    weight_tensors = [torch.as_tensor(weight, dtype=torch.float64, device=device) for weight in weights]
    sums = torch.cat([torch.stack(weight_tensors), torch.tensor(touched, dtype=torch.float64, device=device)])
    if isinstance(comm, GroupCommunicator):
        sums = exchange.finish(sums)
    else:  # of the user's: all at once
        comm.all_reduce([*(to_local(parameter.grad) for parameter in exchange.parameters), sums], average=False)
    if not all(touched):  # only then is the device waited for
        for parameter, count in zip(exchange.parameters, sums[len(weights) :].tolist(), strict=True):
            parameter.grad = parameter.grad if count else None
    return list(sums[: len(weights)].unbind())


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
