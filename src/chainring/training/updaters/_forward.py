"""Calls of a model or a loss function with a batch, and the loss in their output, for updaters and Evaluator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from chainring._checks import find_call_error
from chainring._distributed.sharding import to_full
from chainring.reporting.reporter import Reported, current, report
from chainring.reporting.summary import is_scalar, select_scalars

Loss = Tensor | Mapping[str, Any]
"""What a model or a loss function returns: the loss, or a mapping that has ``"loss"``."""


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a converted batch as arguments: a tuple by position, a mapping by keyword, anything else as one argument."""
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), batch
    return (batch,), {}


def compute_loss(model: nn.Module, loss_func: Callable[..., Any] | None, batch: Any) -> tuple[Any, Any]:
    """Return the loss of a converted batch, and its weight if it comes with one."""
    # hot path: "no extension" of benchmarks/overhead.py. Nearly every batch is a tuple.
    args, kwargs = (batch, {}) if type(batch) is tuple else arguments(batch)
    try:
        output = model(*args, **kwargs) if loss_func is None else loss_func(model, *args, **kwargs)
    except TypeError:
        check_call(model, loss_func, batch)  # says what is wrong, if it is the call
        raise
    return loss_and_weight(output, "main")


def loss_and_weight(output: Any, name: str) -> tuple[Any, Any]:
    """Report the loss in the output of a model or loss function; return it with the ``"weight"`` beside it, or ``None``.

    If the output is a mapping that has ``"loss"``, all of its scalars are reported under the name of the model. A plain
    loss is reported as ``<name>/loss`` unless the model has reported one itself.
    """
    if isinstance(output, Tensor):
        output = output if type(output) is Tensor else to_full(output)
        reporter = current.reporter
        if reporter is not None and (key := f"{name}/loss") not in reporter.reported.values and output.ndim == 0:
            if reporter.watchers:
                reporter.report({key: output})
            else:  # hot path: "no extension" of benchmarks/overhead.py. A third of the time of a report.
                reporter.reported.values[key] = output.detach().clone()
        return output, None
    if isinstance(output, Mapping) and "loss" in output:
        report({f"{name}/{key}": value for key, value in select_scalars(output).items()})
        weight = output.get("weight")
        if weight is not None and not is_scalar(weight):
            raise ValueError(
                'the "weight" beside "loss" is one number, what the mean in the loss counts; '
                f"got {type(weight).__name__} of shape {tuple(getattr(weight, 'shape', ()))}; sum it, as by mask.sum()"
            )
        return to_full(output["loss"]), to_full(weight).detach() if isinstance(weight, Tensor) else weight
    return output, None


def run_backward(loss: Tensor, retain_graph: bool = False) -> None:
    """Compute the gradients of a loss.

    Gradient checkpointing runs parts of the forward pass again during the backward. Values that they report again are
    ignored; otherwise a module that is called twice would end with the value of its first call.
    """
    reporter = current.reporter
    if reporter is None:
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    # hot path: "no extension" of benchmarks/overhead.py. As in a scope of the reporter, which is two calls.
    reported = reporter.reported
    during = reporter.reported = Reported({})
    try:
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    finally:
        reporter.reported = reported
    if during.values:  # a new key, such as the size of a gradient in a tensor's hook, is a report as any other
        reported.values.update({**during.values, **reported.values})


def check_loss(loss: Any) -> None:
    """Refuse a loss that is not a scalar tensor with a gradient."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f'the loss is a scalar tensor, or a mapping that has "loss"; got {type(loss).__name__}. '
            "Return the tensor, without .item(), from the model (chainring.nn.Classifier does) or loss_func(model, *inputs)"
        )
    if loss.ndim:
        raise ValueError(f"the loss is a scalar tensor, got one of shape {tuple(loss.shape)}; reduce it, as by .mean()")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that needs a gradient, so there is nothing to train; "
            "look for detach(), no_grad() or parameters with requires_grad=False"
        )


def check_loss_func(function: Any) -> None:
    """Refuse what cannot be called, and losses of PyTorch, which do not take the model first."""
    if not callable(function):
        raise TypeError(f"loss_func is a function of the model and the inputs, got {type(function).__name__}")
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    origin = type(inner).__module__ if isinstance(inner, nn.Module) else getattr(inner, "__module__", None)
    if str(origin).startswith("torch."):
        name = _name(inner)
        raise TypeError(
            f"loss_func is called with the model first, then the inputs, and {name} takes no model; "
            f"write loss_func=lambda model, x, t: loss(model(x), t) with loss = that {name}, "
            "or wrap the model: chainring.nn.Classifier(model, lossfun=loss)"
        )


def check_call(model: nn.Module, loss_func: Callable[..., Any] | None, batch: Any) -> None:
    """Refuse a model or a loss function whose parameters do not fit this batch; for use when its call has failed."""
    args, kwargs = arguments(batch)
    inputs = _describe_inputs(args, kwargs)
    first: tuple[Any, ...] = ()
    if loss_func is None:
        function, name = model.forward, f"{type(model).__name__}.forward"
        rule = f"without a loss_func the model is called with {inputs}, which are the batch, and returns the loss"
        remedy = "Wrap it, as chainring.nn.Classifier(model) does for labels, or give loss_func=lambda model, x, t: ..."
    else:
        function = loss_func.forward if isinstance(loss_func, nn.Module) else loss_func
        name, first = _name(loss_func), (model,)
        rule = f"loss_func is called with the model first and then {inputs}"
        remedy = (
            "Write it as loss_func(model, *inputs), for example lambda model, x, t: ...; inside, use that model and no other"
        )
    if error := find_call_error(function, *first, *args, **kwargs):
        raise TypeError(f"{rule}; {name}{inspect.signature(function)} cannot be: {error}. {remedy}") from None


def check_eval_func_call(eval_func: Callable[..., Any], batch: Any) -> None:
    """Refuse an ``eval_func`` whose parameters do not fit this batch; for use when its call has failed."""
    args, kwargs = arguments(batch)
    function = eval_func.forward if isinstance(eval_func, nn.Module) else eval_func
    if error := find_call_error(function, *args, **kwargs):
        raise TypeError(
            f"eval_func is called with {_describe_inputs(args, kwargs)}, which are the batch, without the model; "
            f"{_name(eval_func)}{inspect.signature(function)} cannot be: {error}. A function that takes the model first is "
            "the loss_func of an Evaluator, which by default is that of the updater"
        ) from None


def _describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"{len(args)} inputs" if args else f"the inputs {sorted(kwargs)}" if kwargs else "no inputs"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
