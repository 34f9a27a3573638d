"""Updates by ``torch.compile``: whole ones in one function, or only the loss and its gradients in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring._messages import warn
from chainring.datasets._batches import Uncounted, require_count
from chainring.reporting.reporter import current
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_optional
from chainring.training.updaters._arguments import check_loss
from chainring.training.updaters._update import arguments, clear_gradients, is_on_host, loss_and_weight
from chainring.training.updaters.callbacks import list_parameters, run

if TYPE_CHECKING:
    from chainring.training.updaters._update import Precision, Scheme, Update

_IS_AVAILABLE = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since torch 2.13
_LIMITS: dict[str, Any] = {"recompile_limit": 64, "isolate_recompiles": True}  # its overloads do not know them yet


def compile_unless(obstacle: str | None, scheme: Scheme) -> Compiled | None:
    """Return the compiled functions of an updater; ``None``, with a warning, if something stands against it."""
    if obstacle is None and _IS_AVAILABLE:
        return Compiled(scheme)
    _warn(obstacle or f"an update is compiled by torch 2.13 or newer, and this is {torch.__version__}")
    return None


class Compiled:
    """Computes the updates of an updater in compiled functions, and leaves to it what cannot be compiled.

    An update of one micro-batch of one process is one function, steps included, in which a learning rate may change without
    a new compilation. In all other updates, and where callbacks run within the computation, one function computes the loss
    and its gradients.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = proxy(scheme)
        model, self._loss_func = scheme.models["main"], scheme.updater.loss_func
        loss_func = self._loss_func
        forward = model if loss_func is None else partial(loss_func, model)
        self._optimizers = list(scheme.optimizers.values())
        self._parameters = list_parameters(self._optimizers)
        device = self._parameters[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._one = torch.ones((), **self._options)
        self._rates: list[Tensor] = []  # the learning rate of each parameter group
        self._filled_rates: list[Any] = []  # the numbers that they were filled with
        averages = scheme.mean is not None
        # Without captured graphs, whose next run would overwrite gradients that are still to be added to.
        gradients = partial(_gradients, forward, scheme.precision, self._parameters, averages)
        self._gradients = _Function(gradients, captures=False)
        self._update: _Function | None = None
        if not averages and scheme.precision.scaler is None:
            update = partial(_update, forward, scheme.precision, self._parameters, self._optimizers)
            self._update = _Function(update, captures=device.type == "cuda")

    @property
    def computes_whole_updates(self) -> bool:
        """True if an update is one function, which overwrites gradients, so that none is to be cleared before."""
        if self._scheme.updater.loss_func is not self._loss_func:
            raise AttributeError("loss_func is compiled, and cannot change: make another updater, or leave compile=True out")
        return self._update is not None and self._update.is_usable and not self._scheme.updater.callbacks.are_within

    def run_update(self, update: Update, inputs: Any) -> bool:
        """Compute a whole update; return False, with the gradients cleared, if it is to be computed in stages."""
        if self._update is None or not self.computes_whole_updates:
            return False
        # A hook of a step, such as that of `FailOnNonNumber`, or a fused kernel cannot be compiled in.
        hooked = (o for o in self._optimizers if o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks)
        steps = not any(hooked) and not any(group.get("fused") for o in self._optimizers for group in o.param_groups)
        captures = self._one.device.type == "cuda"
        # hot path: "Chainring, compile=True, fused Adam" in benchmarks/epochs.py, where copies would take 0.5 ms of 7
        fills = steps or captures  # gradients are written into the memory of `parameter.grad`, else returned
        results: Any = None
        with self._tensors_as_rates():
            for parameter in self._parameters:
                if not (fills and parameter.requires_grad):
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            if not self._is_hooked(self._update):
                results = self._update(fills, steps, inputs, self._one)
        if self._update.is_eager:
            for optimizer in self._optimizers:
                clear_gradients(optimizer)
            return False
        weight, gradients = results
        if not fills:
            _add_gradients(self._parameters, gradients)
        update.weight, update.is_empty = weight, weight is not None and self._scheme.is_empty(weight)
        if not steps:
            update.step(list(self._scheme.optimizers))
        else:
            self._scheme.check_weights(is_empty=update.is_empty)
            for optimizer in self._optimizers:
                vars(optimizer)["_opt_called"] = True  # as its step records for the schedulers of torch
        if captures:  # the next run of a captured graph overwrites its outputs
            weight = _clone(weight)
            if (reporter := current.reporter) is not None:
                reporter.observation.update({key: _clone(value) for key, value in reporter.observation.items()})
        if weight is not None:
            update.weights[0] = weight
        return True

    @contextmanager
    def _tensors_as_rates(self) -> Generator[None]:
        """Make the learning rates of parameter groups tensors in the context; numbers would be compiled in as constants."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if len(groups) != len(self._rates):
            self._rates = [torch.zeros((), **self._options) for _ in groups]
            self._filled_rates = [None] * len(groups)
            self._parameters[:] = list_parameters(self._optimizers)
        for index, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            number = group.get("lr")
            if isinstance(number, float | int):
                if number != self._filled_rates[index]:
                    rate.fill_(number)
                self._filled_rates[index], group["lr"] = number, rate
        try:
            yield
        finally:
            for group, rate, number in zip(groups, self._rates, self._filled_rates, strict=True):
                if group.get("lr") is rate:
                    group["lr"] = number

    @property
    def computes_gradients(self) -> bool:
        """True if no callback runs between the forward and the backward, which are one function."""
        callbacks = self._scheme.updater.callbacks
        has_failed = self._update is not None and self._update.is_eager
        is_whole = not (callbacks.forward_on_finish or callbacks.backward_on_start)
        return is_whole and self._gradients.is_usable and not has_failed

    def add_gradients(self, update: Update, inputs: Any) -> Any:
        """Add the gradients of a micro-batch, and return its loss; ``None`` if they cannot be compiled."""
        scheme = self._scheme
        self._parameters[:] = list_parameters(self._optimizers)
        if self._is_hooked(self._gradients):
            return None
        examples = 1 if isinstance(update.examples, Uncounted) else update.examples
        number = torch.full((), 1.0 if scheme.mean is None else 1 / scheme.mean.reference, **self._options)
        number = number if scheme.precision.scaler is None else scheme.precision.scaler.scale(number)
        results = self._gradients(inputs, number * bool(examples), number * examples)
        if self._gradients.is_eager:
            return None
        loss, weight, gradients = results
        update.context.loss = loss
        update.has_loss_weight = update.has_loss_weight or weight is not None
        update.weight = require_count(update.examples) if weight is None or examples == 0 else weight
        update.is_empty = is_on_host(update.weight) and bool(update.weight == 0)
        if not update.is_empty:
            _add_gradients(self._parameters, gradients)
        update.weights.setdefault(update.context.micro_step, update.weight)
        run(scheme.updater.callbacks.backward_on_finish, update.context)
        return loss

    def _is_hooked(self, function: _Function) -> bool:
        """Return True, and give a compiled function up for good, if a parameter has a hook of its gradient."""
        is_hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters)
        if is_hooked:
            function.give_up("a parameter has a hook of its gradient, which a compiled function would pass over")
        return is_hooked

    def serialize(self, serializer: AbstractSerializer) -> None:
        if self._update is not None:
            self._update.serialize(serializer["compiled"])
        self._gradients.serialize(serializer["compiled_gradients"])


class _Function:
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
        _warn(reason)

    @property
    def is_usable(self) -> bool:
        """False where an update runs eagerly: watchers look at the graph of autograd."""
        return not (self.is_eager or (current.reporter is not None and current.reporter.watchers))

    def serialize(self, serializer: AbstractSerializer) -> None:
        is_eager = visit_optional(serializer, "is_eager", self.is_eager)
        if not isinstance(serializer, Serializer):
            self.is_eager = bool(is_eager)


def _warn(reason: str) -> None:
    warn(f"updates run as they are, not compiled: {reason}. To compile the model alone, hand over torch.compile(model)")


def _add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those of the parameters, none of which share memory then: what follows writes to them in place."""
    seen: set[int] = set()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is not None:
            parameter.grad += gradient
            continue
        address = gradient.untyped_storage().data_ptr()
        is_private = gradient.stride() == parameter.stride() and address not in seen
        parameter.grad = gradient if is_private else torch.empty_like(parameter).copy_(gradient)
        seen.add(address)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _loss(forward: Callable[..., Any], precision: Precision, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    with precision.autocast():
        loss, weight = loss_and_weight(forward(*args, **kwargs))
    check_loss(loss)
    return loss, weight


def _gradients(
    forward: Any, precision: Precision, parameters: Sequence[Tensor], averages: bool, inputs: Any, factor: Any, share: Any
) -> Any:
    loss, weight = _loss(forward, precision, inputs)
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
    """Compute the gradients and return them, or write them to ``parameter.grad``, as steps need them, where it ``fills``."""
    loss, weight = _loss(forward, precision, inputs)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not fills:  # times a tensor: else the gradient of (weight * x).sum() would be x itself, of the batch
        return weight, torch.autograd.grad(loss * one, trained)
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        assert parameter.grad is not None  # see run_update
        parameter.grad.copy_(gradient)
    with torch.no_grad():
        for optimizer in optimizers if steps else ():
            inspect.unwrap(type(optimizer).step)(optimizer)  # without the record of the profiler
    return weight, None
