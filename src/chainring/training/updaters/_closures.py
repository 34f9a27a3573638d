"""Closures, with which an optimizer computes the loss and its gradients any number of times within one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from chainring._checks import is_number
from chainring._distributed.sharding import to_full, to_local
from chainring.datasets._columns import require_count
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import weighted_mean
from chainring.training.updaters._arguments import NO_FP16
from chainring.training.updaters._means import only_gradients_of, stash
from chainring.training.updaters._update import clear_gradients
from chainring.training.updaters.callbacks import UpdateContext, list_parameters, run

if TYPE_CHECKING:
    from chainring.training.updaters._update import Update


class _Evaluation(NamedTuple):
    """The closure of a micro-batch, and what it was given in."""

    closure: Callable[[], Any]
    context: UpdateContext
    examples: Any
    observation: dict[str, Any] | None


class ClosureStep:
    """A step of an optimizer that computes the mean loss of all micro-batches of an update as often as it likes."""

    def __init__(self, update: Update, name: str) -> None:
        self._update, self._name = update, name
        self._optimizer = update.scheme.optimizers[name]
        self._evaluations: list[_Evaluation] = []
        self._has_gradients = False  # of a backward before the closure was given
        self._is_first = True

    def add(self, closure: Any) -> None:
        """Add the closure of the current micro-batch."""
        update = self._update
        if not callable(closure):
            raise TypeError(f"a closure is a function without arguments that returns the loss, got {type(closure).__name__}")
        if update.scheme.precision.scaler is not None:
            raise ValueError(NO_FP16)
        self._evaluations.append(_Evaluation(closure, update.context, update.examples, current_observation()))
        if update.weight is not None:
            self._has_gradients = True
            if update.scheme.mean is not None:
                update.add_totals([self._name])

    def run(self) -> None:
        """Let the optimizer step, which calls all closures any number of times."""
        update, watch = self._update, self._update.scheme.exchange_watch
        if self._has_gradients:
            update.finish_gradients([self._name], [self._optimizer])
        if watch is not None:
            watch.is_stepping = True
        self._optimizer.step(self._evaluate)
        if watch is not None:
            watch.is_stepping = False
        run(update.scheme.updater.callbacks.update_on_finish, update.context)
        update.stepped.append(self._optimizer)

    def _evaluate(self) -> Any:
        """Compute the gradients of the optimizer by its closures, and return the mean loss."""
        update, optimizers = self._update, self._update.scheme.optimizers
        is_first, self._is_first = self._is_first, False
        for optimizer in update.stepped:
            clear_gradients(optimizer)
        update.stepped = []
        before = update.context, update.examples, update.weight
        with torch.enable_grad(), only_gradients_of([self._optimizer], optimizers.values()):
            losses = [self._call(evaluation, is_first) for evaluation in self._evaluations]
            with nullcontext() if is_first or current_observation() is None else report_scope({}):
                update.finish_gradients([self._name], [self._optimizer])
        update.context, update.examples, update.weight = before
        return self._mean(losses)

    def _call(self, evaluation: _Evaluation, is_first: bool) -> tuple[Any, Any]:
        """Return the loss of a micro-batch and its weight; its gradients are added to those of the micro-batches before."""
        update, scheme, observation = self._update, self._update.scheme, evaluation.observation
        update.context, update.examples, update.weight = evaluation.context, evaluation.examples, None
        clear_gradients(self._optimizer)
        if is_first:
            update.weights.pop(evaluation.context.micro_step, None)
        with nullcontext() if observation is None else report_scope(observation if is_first else {}):
            loss = evaluation.closure()
        if not is_number(loss) and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise TypeError(
                f"a closure calls self.backward(loss) and returns the loss, one number; got {type(loss).__name__}"
            )
        if update.weight is None:  # the closure has called loss.backward()
            if scheme.wrapped.parameters and scheme.updater.comm.size > 1:
                raise RuntimeError(
                    "DDP and fully_shard exchange gradients in the backward, before which self.backward(loss) weighs the "
                    "loss; write self.backward(loss) in the closure, not loss.backward()"
                )
            weight = update.weight = require_count(update.examples)
            update.weights.setdefault(update.context.micro_step, weight)
            if scheme.mean is not None:
                for parameter in list_parameters([self._optimizer]):
                    if parameter.grad is not None:
                        to_local(parameter.grad).mul_(weight / scheme.mean.reference)
        if scheme.mean is not None:
            update.add_totals([self._name])
            stash(self._optimizer, update.stashed, scheme.wrapped.in_buckets)
        return to_full(loss), update.weight

    def _mean(self, losses: list[tuple[Any, Any]]) -> Any:
        """Return the mean of losses by weight, over all ranks: the same number on each rank, for joint decisions."""
        comm, (loss, _) = self._update.scheme.updater.comm, losses[0]
        if len(losses) == 1 and comm.size == 1:
            return loss
        device = list_parameters([self._optimizer])[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        numbers = [(torch.as_tensor(each, dtype=dtype, device=device).detach().reshape(()), w) for each, w in losses]
        mean, weight = weighted_mean(numbers)
        if comm.size > 1:
            sums = torch.stack([mean * weight, torch.as_tensor(weight, dtype=dtype, device=device)])
            comm.all_reduce([sums], average=False)
            mean = sums[0] / sums[1]
        return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean
