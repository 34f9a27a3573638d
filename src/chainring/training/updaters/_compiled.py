"""Updates by compiled functions: a whole one, or in stages its gradients; with the values reported in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring._messages import warn
from chainring.reporting.reporter import current
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_optional
from chainring.training.updaters._forward import arguments, check_loss, loss_and_weight
from chainring.training.updaters._gradients import list_parameters, step_optimizer
from chainring.training.updaters._precision import Precision

IS_AVAILABLE = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since torch 2.13
_LIMITS: dict[str, Any] = {"recompile_limit": 64, "isolate_recompiles": True}  # its overloads do not know them yet
_HOOKED = "a parameter has a hook of its gradient, which a compiled function would pass over"


class _Compiled:
    """A function of ``torch.compile``; ``is_eager`` once that has failed, which a warning says.

    Each shape of a batch is compiled for itself, so that a resumed run computes with the same kernels, whichever shapes it
    has met; random numbers are drawn as without compilation.
    """

    def __init__(self, function: Callable[..., Any], captures: bool) -> None:
        self.is_eager = False
        options: dict[str, Any] = {"fallback_random": True, "triton.cudagraphs": captures}
        self._function = torch.compile(function, fullgraph=True, dynamic=False, options=options, **_LIMITS)

    def __call__(self, *args: Any) -> Any:
        """Call the function; if it cannot be compiled, nothing has been computed and ``is_eager`` is true."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException, Unsupported

        try:
            try:
                return self._function(*args)
            except Unsupported:  # it is compiled for the first time, or again, and differentiates
                with torch._dynamo.config.patch(trace_autograd_ops=True):
                    return self._function(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self.give_up((str(error).strip() or type(error).__name__).splitlines()[0])
            return None

    def give_up(self, reason: str) -> None:
        self.is_eager = True
        warn_not_compiled(reason)

    @property
    def is_of_use(self) -> bool:
        """False where an update runs eagerly: watchers look at the graph of autograd."""
        return not (self.is_eager or (current.reporter is not None and current.reporter.watchers))

    def serialize(self, serializer: AbstractSerializer) -> None:
        is_eager = visit_optional(serializer, "is_eager", self.is_eager)
        if not isinstance(serializer, Serializer):
            self.is_eager = bool(is_eager)


class CompiledGradients:
    """Computes the loss of a micro-batch and its gradients in a compiled function, for an update in stages.

    ``forward`` is called with the inputs; ``averages`` says whether the loss is multiplied by its weight.
    """

    def __init__(
        self, forward: Callable[..., Any], precision: Precision, optimizers: list[Optimizer], averages: bool
    ) -> None:
        self._optimizers, self._scaler = optimizers, precision.scaler
        self._parameters = list_parameters(optimizers)
        self._device = self._parameters[0].device
        # Without captured graphs, whose next run would overwrite gradients that are still to be added to.
        function = partial(_gradients, forward, precision, self._parameters, averages)
        self._compiled = _Compiled(function, captures=False)
        self.serialize = self._compiled.serialize

    @property
    def is_of_use(self) -> bool:
        return self._compiled.is_of_use

    def add(self, inputs: Any, factor: float, examples: Any) -> tuple[Any, Any] | None:
        """Add the gradients, and return the loss and its weight; ``None`` if that cannot be compiled.

        Args:
            inputs: the converted micro-batch.
            factor: of the loss, beside its weight.
            examples: the weight, if none comes with the loss; where it is 0, nothing counts.
        """
        self._parameters[:] = list_parameters(self._optimizers)
        if any(map(_is_hooked, self._parameters)):
            self._compiled.give_up(_HOOKED)
            return None
        number = torch.full((), factor, dtype=_dtype_of_numbers(self._device), device=self._device)
        number = number if self._scaler is None else self._scaler.scale(number)
        found = self._compiled(inputs, number * bool(examples), number * examples)
        if self._compiled.is_eager:
            return None
        loss, weight, gradients = found
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        _add_gradients(trained, gradients)
        return loss, weight


def _add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add to gradients, which then have memory of their own: what follows writes to them."""
    seen: set[int] = set()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is not None:
            parameter.grad += gradient
            continue
        address = gradient.untyped_storage().data_ptr()
        is_own = gradient.stride() == parameter.stride() and address not in seen
        parameter.grad = gradient if is_own else torch.empty_like(parameter).copy_(gradient)
        seen.add(address)


class CompiledUpdate:
    """Computes whole updates in a compiled function, and eagerly once that has failed.

    A learning rate may change without a new compilation. ``eagerly`` computes an update from a converted batch and returns
    its weight; ``forward`` is called with the inputs.
    """

    def __init__(
        self, eagerly: Callable[[Any], Any], forward: Callable[..., Any], precision: Precision, optimizers: list[Optimizer]
    ) -> None:
        self._eagerly = eagerly
        self._optimizers = optimizers
        self._parameters = list_parameters(self._optimizers)
        self._learning_rates: list[_LearningRate] = []
        self._device = self._parameters[0].device
        self._one = torch.ones((), dtype=_dtype_of_numbers(self._device), device=self._device)
        self._captures = self._device.type == "cuda"
        update = partial(_update, forward, precision, self._parameters, self._optimizers)
        self._compiled = _Compiled(update, self._captures)

    def __call__(self, inputs: Any) -> Any:
        """Compute an update and return its weight, ``None`` if none came with the loss."""
        if not self._compiled.is_of_use:
            return self._eagerly(inputs)
        steps = not any(map(_steps_outside, self._optimizers))
        # hot path: "Chainring, compile=True, fused Adam" in benchmarks/epochs.py, where copies would take 0.5 ms of 7
        fills = steps or self._captures
        found: Any = None
        try:
            self._prepare(fills)
            if not self._compiled.is_eager:
                found = self._compiled(fills, steps, inputs, self._one)
        finally:
            for rate in self._learning_rates:
                rate.to_number()
        if self._compiled.is_eager:
            return self._eagerly(inputs)
        weight, gradients = found
        if not fills:
            _add_gradients([parameter for parameter in self._parameters if parameter.requires_grad], gradients)
        for optimizer in self._optimizers:
            if steps:
                vars(optimizer)["_opt_called"] = True  # as its step records for the schedulers of torch
            else:
                step_optimizer(optimizer)
        if self._device.type == "cuda":  # the next run of a captured graph overwrites its outputs
            weight = _copied(weight)
            if (reporter := current.reporter) is not None:
                reporter.observation.update({key: _copied(value) for key, value in reporter.observation.items()})
        return weight

    def _prepare(self, fills: bool) -> None:
        """Make learning rates tensors, and allocate gradients that the compiled function ``fills``, or release them."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if len(groups) != len(self._learning_rates):
            self._learning_rates = [_LearningRate(self._device) for _ in groups]
            self._parameters[:] = list_parameters(self._optimizers)
        for rate, group in zip(self._learning_rates, groups, strict=True):
            rate.to_tensor(group)
        for parameter in self._parameters:
            if not (fills and parameter.requires_grad):
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if _is_hooked(parameter):
                self._compiled.give_up(_HOOKED)
                return

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._compiled.serialize(serializer)


def warn_not_compiled(reason: str) -> None:
    warn(
        f"updates run as they are, not compiled: {reason}. To compile the model alone, hand over torch.compile(model)",
    )


class _LearningRate:
    """The learning rate of a parameter group: a tensor while an update is computed, or it would be compiled in."""

    def __init__(self, device: torch.device) -> None:
        self._group: dict[str, Any] = {}
        self._number: Any = None
        self._tensor = torch.zeros((), dtype=_dtype_of_numbers(device), device=device)

    def to_tensor(self, group: dict[str, Any]) -> None:
        number = group.get("lr")
        self._group = group
        if isinstance(number, float | int):
            if number != self._number:
                self._tensor.fill_(number)
            self._number, group["lr"] = number, self._tensor

    def to_number(self) -> None:
        if self._group.get("lr") is self._tensor:
            self._group["lr"] = self._number


def _is_hooked(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _steps_outside(optimizer: Optimizer) -> bool:
    """Return True if a step has hooks, such as that of `FailOnNonNumber`, or a fused kernel, which cannot be compiled in."""
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(has_hooks or any(group.get("fused") for group in optimizer.param_groups))


def _dtype_of_numbers(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _loss(forward: Callable[..., Any], precision: Precision, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    with precision.autocast():
        return loss_and_weight(forward(*args, **kwargs), "main")


def _gradients(
    forward: Callable[..., Any],
    precision: Precision,
    parameters: Sequence[Tensor],
    averages: bool,
    inputs: Any,
    factor: Tensor,
    share: Tensor,
) -> Any:
    loss, weight = _loss(forward, precision, inputs)
    check_loss(loss)
    if averages:
        factor = share if weight is None else weight * factor
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = torch.autograd.grad(loss * factor, trained, allow_unused=True)
    return loss.detach(), weight, gradients


def _update(
    forward: Callable[..., Any],
    precision: Precision,
    parameters: Sequence[Tensor],
    optimizers: Sequence[Optimizer],
    fills: bool,
    steps: bool,
    inputs: Any,
    one: Tensor,
) -> Any:
    """Compute the gradients, which are returned, or where it ``fills`` written to those that exist, as steps need them."""
    loss, weight = _loss(forward, precision, inputs)
    check_loss(loss)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not fills:  # by a number that is not known yet: the gradient of (weight * x).sum() would be x itself, of the data
        return weight, torch.autograd.grad(loss * one, trained)
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        assert parameter.grad is not None  # see _prepare
        parameter.grad.copy_(gradient)
    with torch.no_grad():
        for optimizer in optimizers if steps else ():
            inspect.unwrap(type(optimizer).step)(optimizer)  # without the record of the profiler
    return weight, None
