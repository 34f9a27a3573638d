"""Means of gradients by weight, over the micro-batches of an update and over ranks, which may send in the backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring._distributed.group import GroupCommunicator, gradient_buckets
from chainring._distributed.sharding import placed_like, to_local
from chainring.training.updaters._ranks import check_strided, list_buffers
from chainring.training.updaters.callbacks import list_parameters, run

if TYPE_CHECKING:
    from chainring.training.updaters._update import Scheme, Update


class WeightedMean:
    """Turns gradients into means by weight, over micro-batches, and over the ranks of a communicator or virtual ranks.

    The sizes of the micro-batches are not known before the last has come. So each loss is multiplied by its weight over
    that of a full update, and the sums of the gradients are corrected once, in the step.
    """

    def __init__(self, scheme: Scheme, comm: Communicator | None, exchanged: Set[int], sends: bool) -> None:
        self._scheme, self._comm, self._exchanged = proxy(scheme), comm, exchanged
        self.sends = sends  # gradients while the backward runs: nothing but the last backward of an update adds to them

    @property
    def reference(self) -> Any:
        """The weight of a full update."""
        return self._scheme.updater.accumulate * getattr(self._scheme.iterators.get("main"), "batch_size", 1)

    def weigh(self, loss: Tensor, weight: Any) -> Tensor:
        if isinstance(weight, Tensor):  # a count, in the precision of the loss
            weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
        share = weight / self.reference
        return loss if type(share) is float and share == 1.0 else loss * share

    def sending(self, update: Update) -> AbstractContextManager[None]:
        """Return the context of a backward, in which gradients are sent as soon as they are final."""
        callbacks = update.scheme.updater.callbacks
        if update.part is not None:
            return update.part.whole.sending(update)
        if self._comm is None or not update.is_last or callbacks.backward_on_finish or callbacks.comm_on_start:
            return nullcontext()
        update.sent = total = RankSum(self._comm, list_trained(update.scheme.optimizers.values()))
        return total.sending(waits=update.is_empty)

    def start(self) -> None:
        """Prepare for a run, of the ranks that there are now."""

    def finish(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> list[Optimizer]:
        """Make the gradients of optimizers means over all that has been weighed; return those of which anything counts."""
        callbacks, watch = update.scheme.updater.callbacks, update.scheme.exchange_watch
        if self._comm is not None:
            if watch is not None:
                watch.has_exchanged = True
            run(callbacks.comm_on_start, update.context)
        totals = self._sum(update, names, optimizers)
        if self._comm is not None:
            run(callbacks.comm_on_finish, update.context)
        update.total_weight, counting = totals[0], []
        may_be_empty = update.is_empty or type(update.weight) is not int  # else this rank alone has a weight
        for optimizer, total in zip(optimizers, totals, strict=True):
            if may_be_empty and self._scheme.is_empty(total):
                continue
            counting.append(optimizer)
            if isinstance(total, Tensor) and not total.is_floating_point():
                total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
            factor = self.reference / total
            if isinstance(factor, Tensor) or factor != 1 or self._exchanged:
                size = self._scheme.updater.comm.size  # by which DDP and FSDP have divided the gradients of wrapped modules
                for parameter in list_parameters([optimizer]):
                    if parameter.grad is not None:
                        to_local(parameter.grad).mul_(factor * size if id(parameter) in self._exchanged else factor)
        return counting

    def conclude(self, update: Update) -> None:
        """Give all ranks the buffers of rank 0 at the end of an update."""
        scheme = update.scheme
        if scheme.virtual is None and (buffers := list_buffers(list(scheme.models.values()))):
            scheme.updater.comm.broadcast(buffers)

    def _start_sum(self, comm: GroupCommunicator, update: Update, numbers: Tensor) -> Callable[[], Tensor]:
        """Start to sum numbers over the ranks beside the gradients; return what waits for the sums, when those are there."""
        return comm.start_sum(numbers)

    def _sum(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> Sequence[Any]:
        """Sum the gradients of optimizers over micro-batches and ranks, and return the sum of the weights of each.

        A rank that did not touch a parameter takes part with zeros. A parameter that no rank touched is left without a
        gradient, so that the optimizer skips it, as it does in a world of one.
        """
        comm = self._comm
        if update.part is not None:
            return update.part.whole.sum_gradients(optimizers)
        for optimizer in optimizers if update.stashed else ():
            unstash(optimizer, update.stashed)
        weights = [update.totals.pop(name) for name in names]
        sent, update.sent = update.sent, None
        if comm is None or comm.world.size == 1:
            return weights
        if comm.size == 1:
            for parameter in list_trained(optimizers):
                if parameter.grad is not None:
                    parameter.grad = placed_like(parameter.grad, parameter)
            return weights
        parameters = [parameter for parameter in list_trained(optimizers) if id(parameter) not in self._exchanged]
        total = RankSum(comm, parameters) if sent is None else sent
        touched = [parameter.grad is not None for parameter in parameters]
        for parameter in parameters:
            gradient = parameter.grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else placed_like(gradient, parameter)
        options: dict[str, Any] = {"dtype": torch.float64, "device": list_parameters(optimizers)[0].device}
        # A number is filled in on the device: to copy it there would wait until all that came before is computed.
        counts = torch.ones(len(touched), **options) if all(touched) else torch.tensor(touched, **options)
        sums = torch.cat([fill(weights, **options), counts])
        if isinstance(comm, GroupCommunicator):
            sums = total.finish(sums, partial(self._start_sum, comm, update))
        else:  # a communicator of the user's, which cannot start sums: all at once
            comm.all_reduce([*(to_local(parameter.grad) for parameter in parameters), sums], average=False)
        if not all(touched):  # only then read the counts, which waits for the device
            for parameter, count in zip(parameters, sums[len(weights) :].tolist(), strict=True):
                parameter.grad = parameter.grad if count else None
        return sums[: len(weights)].unbind()


class BucketedSum:
    """Sends gradients of some parameters in buckets, each in the backward as soon as it is complete, or after it.

    All ranks send the same buckets in the same order, whether in the backward or not. A gradient that changes after it was
    sent is stale: if a parameter is reached twice, as in a checkpointed part of a model, or a user's hook changes it.
    """

    def __init__(
        self, parameters: Sequence[Any], buckets: Sequence[Sequence[int]], start: Callable[[Sequence[Tensor]], Any]
    ) -> None:
        self.parameters, self.buckets = parameters, buckets  # the positions of parameters in each
        self._start = start  # sends the next bucket, which has these gradients
        self.started, self._sends = 0, False
        self._sent: dict[int, tuple[Tensor, int]] = {}  # in the backward: gradients by position, each with its version

    @contextmanager
    def sending(self, waits: bool = False) -> Generator[None]:
        """Return the context of the backward in which gradients are sent; this rank may have none and send after it."""
        self._sends = True
        bucket_of = {id(self.parameters[i]): number for number, bucket in enumerate(self.buckets) for i in bucket}
        missing = list(map(len, self.buckets))

        def note(parameter: Tensor) -> None:
            missing[bucket_of[id(parameter)]] -= 1
            while self.started < len(self.buckets) and missing[self.started] <= 0 and self._send():
                pass

        # Registered last, so that they come after hooks of the user's.
        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in self.parameters if not waits]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _send(self) -> bool:
        """Send the next bucket and return True; a bucket with missing or sparse gradients waits for the end."""
        bucket = self.buckets[self.started]
        gradients = [self.parameters[index].grad for index in bucket]
        if any(gradient is None or gradient.layout is not torch.strided for gradient in gradients):
            return False
        self._sent.update((index, (tensor, tensor._version)) for index, tensor in zip(bucket, gradients, strict=True))
        self._start(gradients)
        self.started += 1
        return True

    def is_stale(self, gradients: Sequence[Tensor | None] | None) -> bool:
        """Return True if these are not the gradients that were sent in the backward."""
        if gradients is None:
            return bool(self._sent)
        return any(
            gradients[index] is not tensor or tensor._version != version for index, (tensor, version) in self._sent.items()
        )


class RankSum(BucketedSum):
    """The sums over the ranks of the gradients of some parameters."""

    def __init__(self, comm: Communicator, parameters: Sequence[Any]) -> None:
        super().__init__(parameters, list(gradient_buckets(list(map(to_local, parameters)))), self._start_sum)
        self._comm, self._waits = comm, list[Callable[[], Tensor]]()

    def _start_sum(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            check_strided(gradient)
        self._waits.append(self._comm.start_sum(torch.cat([gradient.detach().reshape(-1) for gradient in gradients])))

    def finish(self, numbers: Tensor, start_sum: Callable[[Tensor], Callable[[], Tensor]]) -> Tensor:
        """Replace each gradient by its sum, after all ranks have sent theirs; return the sums of some numbers."""
        gradients = [to_local(parameter.grad) for parameter in self.parameters]

        def send_all_from(first: int) -> None:
            for bucket in self.buckets[first:]:
                self._start_sum([gradients[index] for index in bucket])

        send_all_from(self.started)
        # After all buckets the numbers, and whether any rank has sent stale gradients; on the host both in one message.
        # hot path: "two ranks, a plain model": a message more takes a tenth of the update; an accelerator is not waited for
        is_stale, is_joint = self.is_stale(gradients), self._sends and numbers.is_cpu
        numbers = torch.cat([numbers, numbers.new_tensor([is_stale])]) if is_joint else numbers
        wait_for_sums = start_sum(numbers)
        wait_for_stale = self._comm.start_max(int(is_stale)) if self._sends and not is_joint else None
        sums = [wait() for wait in self._waits]
        numbers = wait_for_sums()
        any_stale = numbers[-1] if is_joint else wait_for_stale is not None and wait_for_stale()
        if any_stale:
            self._waits = []
            send_all_from(0)
            sums = [wait() for wait in self._waits]
            if self._comm.may_lack:
                self._comm.barrier()
        for bucket, flat in zip(self.buckets, sums, strict=True):
            sizes = [gradients[index].numel() for index in bucket]
            for index, values in zip(bucket, torch.split(flat, sizes), strict=True):
                parameter, gradient = self.parameters[index], gradients[index]
                if gradient is parameter.grad and gradient.is_contiguous():
                    parameter.grad = values.view_as(gradient)  # which saves a copy
                else:
                    gradient.copy_(values.view_as(gradient))
        return numbers[:-1] if is_joint else numbers


def fill(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers, and tensors of one element, as one vector on a device, without waiting for what it computes."""
    if device.type == "cpu":
        return torch.tensor([n.item() if isinstance(n, Tensor) else n for n in numbers], dtype=dtype)
    pieces = []
    for number, equal in groupby(numbers, lambda n: None if isinstance(n, Tensor) and n.device == device else float(n)):
        if number is None:
            pieces.append(torch.stack([tensor.detach().reshape(()).to(dtype) for tensor in equal]))
        else:
            pieces.append(torch.full((len(list(equal)),), number, dtype=dtype, device=device))
    return torch.cat(pieces)


def list_trained(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of some optimizers that require gradients, each once."""
    return [parameter for parameter in list_parameters(optimizers) if parameter.requires_grad]


def stash(optimizer: Optimizer, stashed: dict[Tensor, Tensor], shared: Set[int]) -> None:
    """Move the gradients of an optimizer's parameters into ``stashed``, added to what is there.

    Those of parameters whose ids are in ``shared`` are copied, because the next backward writes to their memory.
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


@contextmanager
def only_gradients_of(chosen: Iterable[Optimizer], optimizers: Iterable[Optimizer]) -> Generator[None]:
    """Set aside the gradients of all optimizers except the chosen ones: in the context they are absent and do not change."""
    kept = set(map(id, list_parameters(chosen)))
    others = [parameter for parameter in list_parameters(optimizers) if id(parameter) not in kept]
    gradients = [parameter.grad for parameter in others]
    for parameter in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter.grad = gradient
