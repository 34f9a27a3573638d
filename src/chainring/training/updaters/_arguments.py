"""What a StandardUpdater is made from: checked where it is given, so that an error names what the user wrote."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chainring.training.updaters._optimizer_state import parameter_names
from chainring.training.updaters.callbacks import UpdateCallbacks


def named(given: Any, what: str) -> dict[str, Any]:
    """One object as ``{"main": it}``, a dict of several as it is."""
    if not isinstance(given, dict):
        return {"main": given}
    if not given:
        raise ValueError(f"at least one {what} is needed, got an empty dict")
    return dict(given)


def models(given: Any) -> dict[str, nn.Module]:
    """The models by name."""
    by_name = named(given, "model")
    for name, model in by_name.items():
        if not isinstance(model, nn.Module):
            is_class = isinstance(model, type)
            hint = "; call the class to make one" if is_class else "; converter= is a keyword" if callable(model) else ""
            raise TypeError(
                f"a StandardUpdater takes an iterator, an optimizer and third the model, an nn.Module{hint}. "
                f"Model {name!r} is {_described(model)}"
            )
    return by_name


def optimizers(given: Any, by_name: Mapping[str, nn.Module]) -> dict[str, Optimizer]:
    """The optimizers by name, each over parameters of the models."""
    found = named(given, "optimizer")
    names = parameter_names(by_name)
    for name, optimizer in found.items():
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer {name!r} must be a torch.optim.Optimizer, got {_described(optimizer)}")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in names for parameter in parameters)
        if foreign:
            raise ValueError(
                f"every parameter of an optimizer must belong to a registered model; of the {len(parameters)} of optimizer "
                f"{name!r}, {foreign} belong to none of {sorted(by_name)}. Make it from that model's parameters(), "
                "or register its model too: model={'main': ..., 'other': ...}"
            )
    return found


def check_settings(converter: Any, accumulate: Any, callbacks: Any) -> None:
    """Refuses settings of another kind or out of range."""
    if not callable(converter):
        raise TypeError(f"converter is called with a batch and a device, got {_described(converter)}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"accumulate counts the parts of an update, an integer, got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate counts the parts of an update, at least 1, got {accumulate}")
    if callbacks is not None and not isinstance(callbacks, UpdateCallbacks):
        raise TypeError(f"callbacks is an UpdateCallbacks, such as UpdateCallbacks(update_on_start=f), got {callbacks!r}")


def require_main(iterators: Mapping[str, Any], by_name: Mapping[str, nn.Module]) -> None:
    """What the default update works with must be there."""
    for what, registered in (("iterator", iterators), ("model", by_name)):
        if "main" not in registered:
            raise ValueError(
                f'the default update works with the {what} "main", got only {sorted(registered)}; '
                "name one so, or write update_core in a subclass"
            )


def refuse_closures(by_name: Mapping[str, Optimizer]) -> None:
    """The default update calls ``step()``, which an optimizer that evaluates the loss itself does not take."""
    for name, optimizer in by_name.items():
        try:
            inspect.signature(type(optimizer).step).bind(optimizer)  # of the class: a scheduler wraps the object's
        except TypeError:
            raise TypeError(
                f"the default update calls optimizer.step() without a closure, and optimizer {name!r} "
                f"({type(optimizer).__name__}) needs one; write update_core in a subclass, "
                f"and there get_optimizer({name!r}).step(closure)"
            ) from None


def look_up(registered: Mapping[str, Any], name: str, what: str) -> Any:
    """What is registered as ``name``."""
    try:
        return registered[name]
    except KeyError:
        raise KeyError(f"no {what} {name!r}; registered: {sorted(registered)}") from None


def device_type(by_name: Mapping[str, nn.Module]) -> str:
    """The kind of device that the models are on."""
    for model in by_name.values():
        for parameter in model.parameters():
            return parameter.device.type
    return torch.device("cpu").type


def _described(given: Any) -> str:
    name = getattr(given, "__name__", None)
    return f"the class {name}" if isinstance(given, type) else (name or type(given).__name__)
