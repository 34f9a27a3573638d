"""The arguments of an updater: converted to mappings by name, or refused with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chainring._checks import is_integer
from chainring._distributed.sharding import fsdp_modules, is_sharded, reshard
from chainring._naming import parameter_names
from chainring.iterators.loader import as_iterator
from chainring.training.updaters._closures import can_step, needs_closure
from chainring.training.updaters._forward import check_loss_func
from chainring.training.updaters.callbacks import UpdateCallbacks


def check_models(given: Any) -> dict[str, nn.Module]:
    """Return the models by name.

    Raises:
        TypeError: one is not a module.
        ValueError: the mapping is empty.
    """
    models = _by_name(given, "model")
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            is_class = isinstance(model, type)
            hint = "; call the class to make one" if is_class else "; converter= is a keyword" if callable(model) else ""
            raise TypeError(
                f"a StandardUpdater takes an iterator, an optimizer and third the model, an nn.Module{hint}. "
                f"Model {name!r} is {_describe(model)}"
            )
        sharded = fsdp_modules(model)
        if sharded and not hasattr(torch.cpu.Stream, "record_event"):
            _check_on_accelerator(name, model)
        reshard(sharded)  # a forward without a backward leaves parameters gathered, which are other objects
    return models


def _check_on_accelerator(name: str, model: nn.Module) -> None:
    parameters: list[Any] = list(model.parameters())
    if any(is_sharded(each) and each.device_mesh.device_type == "cpu" for each in parameters):
        raise NotImplementedError(
            f"fully_shard computes on the CPU since torch 2.7, and this is {torch.__version__}: install a newer one, wrap "
            f"model {name!r} in DistributedDataParallel, or train on accelerators"
        )


def check_optimizers(given: Any, models: Mapping[str, nn.Module]) -> dict[str, Optimizer]:
    """Return the optimizers by name, each over parameters of the models."""
    optimizers = _by_name(given, "optimizer")
    names = parameter_names(models)
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer {name!r} must be a torch.optim.Optimizer, got {_describe(optimizer)}")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"optimizer {name!r} is a {_describe(optimizer)}, whose state is divided among all ranks and cannot be "
                "saved; shard the model by torch.distributed.fsdp.fully_shard instead, and its optimizer's state is too"
            )
        foreign = sum(id(parameter) not in names for parameter in parameters)
        if foreign:
            raise ValueError(
                f"every parameter of an optimizer must belong to a registered model; of the {len(parameters)} of optimizer "
                f"{name!r}, {foreign} belong to none of {sorted(models)}. Make it from that model's parameters(), "
                "or register its model too: model={'main': ..., 'other': ...}"
            )
    return optimizers


def check_settings(converter: Any, loss_func: Any, accumulate: Any, across_epochs: Any, callbacks: Any) -> None:
    if not callable(converter):
        raise TypeError(f"converter is called with a batch and a device, got {_describe(converter)}")
    if loss_func is not None:
        check_loss_func(loss_func)
    if not is_integer(accumulate):
        raise TypeError(f"accumulate is the number of micro-batches in an update, an integer, got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate is the number of micro-batches in an update, at least 1, got {accumulate}")
    if not isinstance(across_epochs, bool):
        raise TypeError(f"accumulate_across_epochs is True or False, got {across_epochs!r}")
    if callbacks is not None and not isinstance(callbacks, UpdateCallbacks):
        raise TypeError(f"callbacks is an UpdateCallbacks, such as UpdateCallbacks(update_on_start=f), got {callbacks!r}")


def as_iterators(given: Any) -> dict[str, Any]:
    """Return the iterators by name; none of ``None``."""
    return {} if given is None else {name: as_iterator(source) for name, source in _by_name(given, "iterator").items()}


def _by_name(given: Any, role: str) -> dict[str, Any]:
    """Return one object as ``{"main": it}``, a mapping of several as a dict."""
    if not isinstance(given, Mapping):
        return {"main": given}
    if not given:
        remedy = "; give None for updates without data" if role == "iterator" else ""
        raise ValueError(f"at least one {role} is needed, got an empty dict{remedy}")
    return dict(given)


def _describe(given: Any) -> str:
    name = getattr(given, "__name__", None)
    return f"the class {name}" if isinstance(given, type) else (name or type(given).__name__)


def check_default_update(
    iterators: Mapping[str, Any], models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    """Refuse iterators, models and optimizers with which the default update cannot work.

    Raises:
        ValueError: none of the iterators, or of the models, is called ``"main"``.
        TypeError: the step of an optimizer takes other arguments.
    """
    registered: tuple[tuple[str, Mapping[str, Any]], ...] = (("iterator", iterators), ("model", models))
    for role, objects in registered:
        if objects and "main" not in objects:
            raise ValueError(
                f'the default update works with the {role} "main", got only {sorted(objects)}; '
                "rename one, or write update_core in a subclass"
            )
    arguments = (None,) if any(map(needs_closure, optimizers.values())) else ()
    for name, optimizer in optimizers.items():
        if not can_step(optimizer, *arguments):
            call = "step(closure), because one of the optimizers needs a closure" if arguments else "step()"
            raise TypeError(
                f"the default update calls {call}, and that of optimizer {name!r} is "
                f"{type(optimizer).__name__}.step{inspect.signature(type(optimizer).step)}; "
                "write update_core in a subclass, which calls it otherwise"
            )
