"""Means of gradients by weight, over the micro-batches of an update and over ranks, which may send in the backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring._distributed.group import GroupCommunicator, gradient_buckets
from chainring._distributed.sharding import placed_like, to_local
from chainring.training.updaters._gradients import list_parameters, list_trained, unstash
from chainring.training.updaters.callbacks import run

if TYPE_CHECKING:
    from chainring.training.updaters._update import Scheme, Update


class WeightedMean:
    """Turns gradients into means by weight, over the micro-batches of an update and over the ranks of a communicator.

    The sizes of the micro-batches are not known before the last has come. So each loss is multiplied by its weight over
    that of a full update, and the sums of the gradients are corrected once, in the step.

    Attributes:
        sends: True if gradients are sent while the backward runs: nothing but the last backward of an update adds to them.
    """

    def __init__(self, scheme: Scheme, comm: Communicator | None, exchanged: Set[int], sends: bool) -> None:
        self._scheme, self._comm, self._exchanged = scheme, comm, exchanged
        self.sends = sends

    @property
    def reference(self) -> Any:
        """The weight of a full update."""
        return self._scheme.updater.accumulate * getattr(self._scheme.iterators.get("main"), "batch_size", 1)

    def weigh(self, loss: Tensor, weight: Any) -> Tensor:
        """Return a loss times the share of its weight in a full update."""
        if isinstance(weight, Tensor):  # a count, in the precision of the loss
            weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
        share = weight / self.reference
        return loss if type(share) is float and share == 1.0 else loss * share

    def sending(self, update: Update) -> AbstractContextManager[None]:
        """Return the context of a backward, in which gradients are sent that it makes final."""
        callbacks = update.scheme.updater.callbacks
        if self._comm is None or not update.is_last or callbacks.backward_on_finish or callbacks.comm_on_start:
            return nullcontext()
        update.sent = total = RankSum(self._comm, list_trained(update.scheme.optimizers.values()))
        return total.sending()

    def finish(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> None:
        """Make the gradients of optimizers means over all that has been weighed."""
        callbacks, watch = update.scheme.updater.callbacks, update.scheme.exchange_watch
        if self._comm is not None:
            if watch is not None:
                watch.has_exchanged = True
            run(callbacks.comm_on_start, update.context)
        totals = self._sum(update, names, optimizers)
        if self._comm is not None:
            run(callbacks.comm_on_finish, update.context)
        update.total_weight = totals[0]
        for optimizer, total in zip(optimizers, totals, strict=True):
            self._rescale(optimizer, total)

    def _sum(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> Sequence[Any]:
        """Sum the gradients of optimizers over micro-batches and ranks, and return the sum of the weights of each."""
        for optimizer in optimizers if update.stashed else ():
            unstash(optimizer, update.stashed)
        totals = [update.totals.pop(name) for name in names]
        if self._comm is None:
            return totals
        sent, update.sent = update.sent, None
        return _sum_over_ranks(self._comm, optimizers, totals, self._exchanged, sent)

    def _rescale(self, optimizer: Optimizer, total: Any) -> None:
        """Turn sums weighted by ``w / reference`` into means, where ``total`` is the sum of the weights w.

        Those of wrapped modules were also divided by the number of ranks, as DDP and FSDP do.
        """
        if isinstance(total, Tensor) and not total.is_floating_point():
            total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
        factor = self.reference / total
        if not isinstance(factor, Tensor) and factor == 1 and not self._exchanged:
            return
        size = self._scheme.updater.comm.size
        for parameter in list_parameters([optimizer]):
            if parameter.grad is not None:
                to_local(parameter.grad).mul_(factor * size if id(parameter) in self._exchanged else factor)


class BucketedSum:
    """Sends gradients of some parameters in buckets, each in the backward as soon as it is complete, or after it.

    All ranks send the same buckets in the same order, whether in the backward or not. A gradient that changes after it was
    sent is stale: if a parameter is reached twice, as in a checkpointed part of a model, or a user's hook changes it.

    Args:
        parameters: those whose gradients are sent.
        buckets: the positions of parameters in each.
        start: sends the next bucket, which has these gradients.
    """

    def __init__(
        self, parameters: Sequence[Any], buckets: Sequence[Sequence[int]], start: Callable[[Sequence[Tensor]], Any]
    ) -> None:
        self.parameters = parameters
        self.buckets, self._start = buckets, start
        self._started, self._sends = 0, False
        self._sent: dict[int, tuple[Tensor, int]] = {}  # in the backward: gradients by position, each with its version

    @contextmanager
    def sending(self) -> Generator[None]:
        """Return the context of the backward in which gradients are sent."""
        self._sends = True
        bucket_of = {id(self.parameters[i]): number for number, bucket in enumerate(self.buckets) for i in bucket}
        missing = list(map(len, self.buckets))

        def note(parameter: Tensor) -> None:
            missing[bucket_of[id(parameter)]] -= 1
            while self._started < len(self.buckets) and missing[self._started] <= 0 and self._send():
                pass

        # Registered last, so that they come after hooks of the user's.
        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in self.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _send(self) -> bool:
        """Send the next bucket, unless some of its gradients are not there, or not dense; then it waits for the end."""
        bucket = self.buckets[self._started]
        gradients = [self.parameters[index].grad for index in bucket]
        if any(gradient is None or gradient.layout is not torch.strided for gradient in gradients):
            return False
        self._sent.update((index, (each, each._version)) for index, each in zip(bucket, gradients, strict=True))
        self._start(gradients)
        self._started += 1
        return True

    def send_remaining(self, gradients: Sequence[Tensor]) -> None:
        """Send the buckets that were not sent in the backward."""
        for bucket in self.buckets[self._started :]:
            self._start([gradients[index] for index in bucket])
        self._started = len(self.buckets)

    def is_stale(self, gradients: Sequence[Tensor | None] | None) -> bool:
        """Return True if these are not the gradients that were sent in the backward."""
        if gradients is None:
            return bool(self._sent)
        sent = self._sent.items()
        return any(gradients[index] is not each or each._version != version for index, (each, version) in sent)


class RankSum(BucketedSum):
    """The sums over the ranks of the gradients of some parameters."""

    def __init__(self, comm: Communicator, parameters: Sequence[Any]) -> None:
        super().__init__(parameters, list(gradient_buckets(list(map(to_local, parameters)))), self._start_sum)
        self._comm, self._waits = comm, list[Callable[[], Tensor]]()

    def _start_sum(self, gradients: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
        self._waits.append(self._comm.start_sum(flat))

    def finish(self, numbers: Tensor) -> Tensor:
        """Replace each gradient by its sum, after all ranks have sent theirs; return the sums of some numbers."""
        gradients = [to_local(parameter.grad) for parameter in self.parameters]
        self.send_remaining(gradients)
        find_sums = self._share(numbers, gradients)  # after all buckets, of which a rank may have sent some only now
        sums = [wait() for wait in self._waits]
        numbers, is_stale = find_sums()
        if is_stale:
            self._waits, self._started = [], 0
            self.send_remaining(gradients)
            sums = [wait() for wait in self._waits]
        for bucket, flat in zip(self.buckets, sums, strict=True):
            sizes = [gradients[index].numel() for index in bucket]
            for index, values in zip(bucket, torch.split(flat, sizes), strict=True):
                parameter, gradient = self.parameters[index], gradients[index]
                if gradient is parameter.grad and gradient.is_contiguous():
                    parameter.grad = values.view_as(gradient)  # which saves a copy
                else:
                    gradient.copy_(values.view_as(gradient))
        return numbers

    def _share(self, numbers: Tensor, gradients: Sequence[Tensor]) -> Callable[[], tuple[Tensor, bool]]:
        """Start to sum numbers, and to find out whether a rank has sent gradients that have changed since."""
        if not self._sends:
            find_sums = self._comm.start_sum(numbers)
            return lambda: (find_sums(), False)
        is_stale = self.is_stale(gradients)
        if numbers.is_cpu:  # hot path: "two ranks, a plain model": a message more takes a tenth of the update
            find_sums = self._comm.start_sum(torch.cat([numbers, numbers.new_tensor([is_stale])]))
            return lambda: (find_sums()[:-1], bool(find_sums()[-1]))
        find_sums, find_largest = self._comm.start_sum(numbers), self._comm.start_max(int(is_stale))
        return lambda: (find_sums(), bool(find_largest()))  # the device is not waited for


def _sum_over_ranks(
    comm: Communicator,
    optimizers: Sequence[Optimizer],
    weights: Sequence[Any],
    exchanged: Set[int],
    sent: RankSum | None = None,
) -> list[Any]:
    """Sum the gradients of the optimizers over the ranks, in place; return the sums of the weights, one per optimizer.

    The parameters whose ids are in ``exchanged`` have been summed by DDP or FSDP already; ``sent`` has been sent in
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
    parameters = [parameter for parameter in list_trained(optimizers) if id(parameter) not in exchanged]
    total = RankSum(comm, parameters) if sent is None else sent
    touched = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else placed_like(parameter.grad, parameter)
    device = next(iter(list_parameters(optimizers))).device
    weight_tensors = [torch.as_tensor(weight, dtype=torch.float64, device=device) for weight in weights]
    sums = torch.cat([torch.stack(weight_tensors), torch.tensor(touched, dtype=torch.float64, device=device)])
    if isinstance(comm, GroupCommunicator):
        sums = total.finish(sums)
    else:  # of the user's: all at once
        comm.all_reduce([*(to_local(parameter.grad) for parameter in parameters), sums], average=False)
    if not all(touched):  # only then is the device waited for
        for parameter, count in zip(parameters, sums[len(weights) :].tolist(), strict=True):
            parameter.grad = parameter.grad if count else None
    return list(sums[: len(weights)].unbind())
