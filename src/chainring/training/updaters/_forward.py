"""How a model or a loss function is called with a batch, and what its answer means. Updaters and Evaluator share it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from chainring.reporting.reporter import current, report
from chainring.reporting.summary import is_scalar


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A converted batch as arguments: a tuple is passed by position, a mapping by keyword, anything else as one."""
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), batch
    return (batch,), {}


def check_loss_func(function: Any) -> None:
    """Refuses what cannot take the model first, as far as that can be seen before there is a batch.

    Raises:
        TypeError: it is not callable, a loss module, or a loss of ``torch.nn.functional``.
    """
    if not callable(function):
        raise TypeError(f"loss_func is a function of the model and the inputs, got {type(function).__name__}")
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    home = type(inner).__module__ if isinstance(inner, nn.Module) else getattr(inner, "__module__", None)
    if str(home).startswith("torch."):
        name = _name(inner)
        raise TypeError(
            f"loss_func is called with the model first, then the inputs, and {name} takes no model; "
            f"write loss_func=lambda model, x, t: loss(model(x), t) with loss = that {name}, "
            "or wrap the model: chainring.nn.Classifier(model, lossfun=loss)"
        )


def check_call(function: Callable[..., Any], model: Any, batch: Any) -> None:
    """Refuses a loss function whose parameters do not fit the model and this batch.

    Raises:
        TypeError: they do not fit.
    """
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return  # some callables of C have no signature
    args, kwargs = arguments(batch)
    try:
        signature.bind(model, *args, **kwargs)
    except TypeError as error:
        inputs = f"{len(args)} inputs" if args else f"the inputs {sorted(kwargs)}"
        raise TypeError(
            f"loss_func is called with the model first and then {inputs}, and {_name(function)}{signature} cannot be: "
            f"{error}. Write it as loss_func(model, *inputs), for example lambda model, x, t: ...; "
            "inside, use that model and not one from outside"
        ) from None


def check_model_call(model: nn.Module, batch: Any) -> None:
    """Refuses a model whose ``forward`` does not take this batch; asked when its call has failed.

    Raises:
        TypeError: it does not.
    """
    args, kwargs = arguments(batch)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        inputs = f"{len(args)} inputs" if args else f"the inputs {sorted(kwargs)}"
        raise TypeError(
            f"without a loss_func the model is called with {inputs}, which are the batch, and returns the loss; "
            f"{type(model).__name__}.forward{signature} cannot be: {error}. Wrap it, as chainring.nn.Classifier(model) "
            "does for labels, or give loss_func=lambda model, x, t: ..."
        ) from None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def loss_and_weight(answer: Any, name: str) -> tuple[Any, Any]:
    """The loss in what a model or loss function returned, and its weight if that was returned too; reports both.

    Args:
        answer: the loss, or a mapping that has ``"loss"``, whose scalars are all reported.
        name: of the model; a plain loss is reported as ``<name>/loss`` unless the model has reported one itself.
    """
    if isinstance(answer, Tensor):
        reporter = current.reporter
        if reporter is not None and (key := f"{name}/loss") not in reporter.observation and answer.ndim == 0:
            if reporter.watchers:
                reporter.report({key: answer})
            else:  # the same, in a third of the time
                reporter.observation[key] = answer.detach().clone()
        return answer, None
    if isinstance(answer, Mapping) and "loss" in answer:
        report({f"{name}/{key}": value for key, value in answer.items() if is_scalar(value)})
        return answer["loss"], _checked_weight(answer.get("weight"))
    return answer, None


def _checked_weight(weight: Any) -> Any:
    if weight is not None and not is_scalar(weight):
        raise ValueError(
            'the "weight" beside "loss" is one number, what the mean in the loss counts; '
            f"got {type(weight).__name__} of shape {tuple(getattr(weight, 'shape', ()))}; sum it, as by mask.sum()"
        )
    return weight.detach() if isinstance(weight, Tensor) else weight


def differentiate(loss: Tensor) -> None:
    """Runs the backward of a loss.

    Gradient checkpointing runs parts of the forward again in there. What they report again is not taken, or a part that
    is called twice would end with the value of its first call.
    """
    reporter = current.reporter
    if reporter is None:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    observation = reporter.observation
    during: dict[str, Any] = {}
    reporter.observation = during
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        reporter.observation = observation
    if during:  # what is new there, such as the size of a gradient in a tensor's hook, is a report as any other
        observation.update({**during, **observation})


def check_loss(loss: Any) -> None:
    """Refuses what cannot be differentiated.

    Raises:
        TypeError: the loss is no tensor.
        ValueError: it is not a single number, or depends on no parameter.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f'the loss is a scalar tensor, or a mapping that has "loss"; got {type(loss).__name__}. '
            "Return it from the model (chainring.nn.Classifier does) or from loss_func(model, *inputs)"
        )
    if loss.ndim:
        raise ValueError(f"the loss is a scalar tensor, got one of shape {tuple(loss.shape)}; reduce it, as by .mean()")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that needs a gradient, so there is nothing to train; "
            "look for detach(), no_grad() or parameters with requires_grad=False"
        )
