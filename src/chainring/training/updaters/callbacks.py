"""UpdateCallbacks: functions called around the stages of an update, such as gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from chainring._checks import is_number, plain
from chainring._distributed.sharding import is_sharded, norm_in_order, placed_like, total_norm
from chainring.reporting.reporter import report

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from chainring.training.updaters.base import Updater


@dataclass(slots=True)
class UpdateContext:
    """The state of an update, which its callbacks receive.

    Attributes:
        updater: the updater that runs the update.
        iteration: the number of completed updates.
        micro_step: index of the micro-batch in a gradient accumulation, from 0.
        batch: the converted micro-batch, on the device. A callback of ``batch_on_finish`` may replace it. In a
            `ParallelUpdater`, a list with the share of each replica.
        epoch: the epoch that the micro-batch belongs to, from 0. ``updater.epoch`` counts the epochs that are over, and is
            one more with the last batch of an epoch, also while that is computed.
        loss: the loss of the micro-batch, after the forward pass.
        examples: the number of examples in it, not counting one that was repeated to fill a rank's share. ``None`` if it
            is not known, because the arrays of the batch have different numbers of rows.

    Example::

        UpdateCallbacks(backward_on_start=lambda context: print(context.micro_step, float(context.loss)))
    """

    updater: Updater
    iteration: int
    micro_step: int
    batch: Any = None
    loss: Tensor | None = None
    examples: Any = 0
    epoch: Any = 0


Callback = Callable[[UpdateContext], Any]
Callbacks = Callback | Iterable[Callback]
_STAGES = (
    "batch_on_finish", "forward_on_start", "forward_on_finish", "backward_on_start", "backward_on_finish",
    "comm_on_start", "comm_on_finish", "update_on_start", "update_on_finish",
)  # fmt: skip


class UpdateCallbacks:
    """Functions that are called with an `UpdateContext` when a stage of an update starts or finishes, in the order given.

    Each argument is one callable or an iterable of them. ``batch_on_finish`` runs after a batch was converted and moved
    to the device, ``forward`` and ``backward`` once per micro-batch, ``comm`` (only with a communicator) and ``update``
    once per update. At ``update_on_start`` the gradients are final: averaged over micro-batches and ranks, and unscaled;
    those of optimizers that do not step there are set aside. If an optimizer steps with a closure, each call of the
    closure has these stages, except ``update_on_finish``.

    An extension that needs a callback during the run calls `add` in its ``initialize`` and `remove` in its ``finalize``.
    Each stage is also an attribute, a tuple: ``callbacks.update_on_start += (show,)``.

    Attributes:
        are_any: True if there is any callback.
        are_within: True if a stage other than ``batch_on_finish`` has callbacks, so that they run within the computation.

    Raises:
        TypeError: an argument contains something that is not callable.

    Example::

        def show(context):
            print(context.iteration, context.loss)

        callbacks = UpdateCallbacks(backward_on_finish=show, update_on_start=clip_grad_norm(1.0))
    """

    def __init__(
        self,
        *,
        batch_on_finish: Callbacks = (),
        forward_on_start: Callbacks = (),
        forward_on_finish: Callbacks = (),
        backward_on_start: Callbacks = (),
        backward_on_finish: Callbacks = (),
        comm_on_start: Callbacks = (),
        comm_on_finish: Callbacks = (),
        update_on_start: Callbacks = (),
        update_on_finish: Callbacks = (),
    ) -> None:
        self.batch_on_finish = _as_tuple("batch_on_finish", batch_on_finish)
        self.forward_on_start = _as_tuple("forward_on_start", forward_on_start)
        self.forward_on_finish = _as_tuple("forward_on_finish", forward_on_finish)
        self.backward_on_start = _as_tuple("backward_on_start", backward_on_start)
        self.backward_on_finish = _as_tuple("backward_on_finish", backward_on_finish)
        self.comm_on_start = _as_tuple("comm_on_start", comm_on_start)
        self.comm_on_finish = _as_tuple("comm_on_finish", comm_on_finish)
        self.update_on_start = _as_tuple("update_on_start", update_on_start)
        self.update_on_finish = _as_tuple("update_on_finish", update_on_finish)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _as_tuple(name, value) if name in _STAGES else value)
        if name in _STAGES:
            self.are_within = any(vars(self).get(stage) for stage in _STAGES if stage != "batch_on_finish")
            self.are_any = self.are_within or bool(vars(self).get("batch_on_finish"))

    def add(self, stage: str, callback: Callback, *, first: bool = False) -> None:
        """Register a callback; this is possible during a run too.

        Args:
            stage: when it is called, such as ``"batch_on_finish"``.
            callback: a callable of one argument, the `UpdateContext`.
            first: True to insert it before the registered callbacks, not after them.

        Raises:
            ValueError: there is no such stage.
            TypeError: ``callback`` cannot be called.
        """
        before, (callback,) = self._callbacks_of(stage), _as_tuple(stage, [callback])
        setattr(self, stage, (callback, *before) if first else (*before, callback))

    def remove(self, stage: str, callback: Callback) -> None:
        """Unregister a callback; one that is not registered is ignored.

        Raises:
            ValueError: there is no such stage.
        """
        setattr(self, stage, tuple(other for other in self._callbacks_of(stage) if other != callback))

    def __bool__(self) -> bool:
        """Return True if there is any callback."""
        return self.are_any

    def _callbacks_of(self, stage: str) -> tuple[Callback, ...]:
        if stage not in _STAGES:
            raise ValueError(f"a stage is one of {', '.join(_STAGES)}; got {stage!r}")
        return tuple(getattr(self, stage))


def _as_tuple(name: str, given: Callbacks) -> tuple[Callback, ...]:
    callbacks: tuple[Any, ...] = (given,) if callable(given) or not isinstance(given, Iterable) else tuple(given)
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"{name} is a callable of one context, or an iterable of them; got {callback!r}")
    return callbacks


meeting: ContextVar[Callable[[Callable[[], Any]], None] | None] = ContextVar("meeting", default=None)
"""Lets a function run once for all virtual ranks; set while one of them computes, and all come to it."""


taken_back: ContextVar[list[Callable[[], Any]] | None] = ContextVar("taken_back", default=None)
"""What undoes the counts of callbacks, if the virtual rank that is computed now has to be computed again."""


def undo_if_computed_again(function: Callable[[], Any]) -> None:
    """Call a function if what is computed now, a virtual rank, is thrown away and computed again."""
    undo = taken_back.get()
    if undo is not None:
        undo.append(function)


keeping: ContextVar[Callable[[Any], None] | None] = ContextVar("keeping", default=None)
"""Keeps the state that an object has now, and puts it back if ranks are lost in the update, as all that this has changed."""


def run_once_an_update(owner: Any, function: Callable[[], Any]) -> None:
    """Run a function that changes the state of its owner, once for all virtual ranks where one of them asks for it."""
    if (keep := keeping.get()) is not None:
        keep(owner)
    meet = meeting.get()
    if meet is None:
        function()
    else:
        meet(function)


def run(callbacks: tuple[Callback, ...], context: UpdateContext) -> None:
    """Call each callback with the context."""
    for callback in callbacks:
        callback(context)


def list_parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of some optimizers, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def clip_grad_norm(max_norm: float, norm_type: float = 2.0) -> Callable[[UpdateContext], None]:
    """Clip the gradients by their total norm to ``max_norm``; report the norm before clipping as ``grad_norm``.

    The norm is taken over all gradients of the optimizers that step together, as if they were one vector, like in
    ``torch.nn.utils.clip_grad_norm_``: of all optimizers in the default update, of one where ``update_core`` calls
    ``step`` for one after the other. It stays on the device.

    Args:
        max_norm: the largest norm allowed, above 0; infinity only reports the norm.
        norm_type: the exponent of the norm, above 0; ``math.inf`` is the maximum of the absolute values.

    Returns:
        A callback for ``update_on_start``.

    Raises:
        ValueError: a number is not above 0.

    Example::

        callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(1.0))
    """
    max_norm, norm_type = _require_positive("max_norm", max_norm), _require_positive("norm_type", norm_type)

    def clip(context: UpdateContext) -> None:
        parameters = list_parameters(context.updater.get_all_optimizers().values())
        groups = _by_layout(parameters)
        if getattr(context.updater, "virtual_ranks", None) is None:
            norms = [total_norm([p.grad for p in group], norm_type) for group in groups]
            norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
        else:
            norm = norm_in_order([p.grad for p in parameters if p.grad is not None], norm_type)
        for group in groups if max_norm != math.inf else ():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
        report({"grad_norm": norm})

    return clip


def clip_grad_value(max_value: float) -> Callable[[UpdateContext], None]:
    """Clip each element of each gradient to the range from ``-max_value`` to ``max_value``.

    Args:
        max_value: above 0.

    Returns:
        A callback for ``update_on_start``.

    Raises:
        ValueError: it is not above 0.

    Example::

        callbacks = UpdateCallbacks(update_on_start=clip_grad_value(0.5))
    """
    max_value = _require_positive("max_value", max_value)

    def clip(context: UpdateContext) -> None:
        for group in _by_layout(list_parameters(context.updater.get_all_optimizers().values())):
            torch.nn.utils.clip_grad_value_(group, max_value)

    return clip


def _by_layout(parameters: Iterable[Any]) -> list[list[Any]]:
    """Return the parameters that have a gradient, plain ones and those of each mesh apart: PyTorch does not mix them.

    A gradient of which each rank has a part of the sum is placed as its parameter is.
    """
    groups: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = placed_like(parameter.grad, parameter)
            groups.setdefault(parameter.device_mesh if is_sharded(parameter) else None, []).append(parameter)
    return list(groups.values())


def _require_positive(name: str, value: float) -> float:
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} is a number above 0, got {value!r}")
    return plain(value)
