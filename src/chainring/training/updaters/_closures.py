"""Closures, with which an optimizer computes the loss and its gradients any number of times within one step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring._checks import is_number
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import is_sharded, to_full
from chainring.datasets._columns import require_count
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import weighted_mean
from chainring.training.updaters._gradients import clear_gradients, list_parameters, scale, stash
from chainring.training.updaters.callbacks import UpdateContext, run

if TYPE_CHECKING:
    from chainring.training.updaters._update import Update

NO_FP16 = (
    'precision="fp16" scales the loss, by a factor that may change in the middle of a step, and a step with a closure reads '
    'the loss; use precision="bf16", which needs no scale'
)


NO_VIRTUAL_RANKS = (
    "virtual_ranks computes the gradients of a step once, and an optimizer whose step needs a closure computes them as "
    "often as it likes; take another optimizer, or leave virtual_ranks out"
)


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
        calls = itertools.count()
        with nullcontext() if watch is None else watch.stepping():
            self._optimizer.step(lambda: self._evaluate(is_first=next(calls) == 0))
        callbacks = update.scheme.updater.callbacks
        run(callbacks.update_on_finish, update.context)
        update.stepped.append(self._optimizer)

    def _evaluate(self, is_first: bool) -> Any:
        """Compute the gradients of the optimizer by its closures, and return the mean loss."""
        update, optimizers = self._update, self._update.scheme.optimizers
        for optimizer in update.stepped:
            clear_gradients(optimizer)
        update.stepped = []
        before = update.context, update.examples, update.weight
        with torch.enable_grad(), only_gradients_of([self._optimizer], optimizers.values()):
            losses = [self._call(evaluation, is_first) for evaluation in self._evaluations]
            with nullcontext() if is_first or current_observation() is None else report_scope({}):
                update.finish_gradients([self._name], [self._optimizer])
        update.context, update.examples, update.weight = before
        device = list_parameters([self._optimizer])[0].device
        return _mean_loss(update.scheme.updater.comm, losses, device)

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
            weight = update.note_weight(require_count(update.examples))
            if scheme.mean is not None:
                scale(self._optimizer, weight / scheme.mean.reference)
        if scheme.mean is not None:
            update.add_totals([self._name])
            stash(self._optimizer, update.stashed, scheme.wrapped.in_buckets)
        return to_full(loss), update.weight


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


def _mean_loss(comm: Communicator, losses: Sequence[tuple[Any, Any]], device: torch.device) -> Any:
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
