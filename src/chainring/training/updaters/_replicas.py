"""Replicas of a model on several devices: made, brought up to date, and relieved of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from chainring.converters import as_device
from chainring.names import unwrapped


@dataclass(frozen=True, slots=True)
class Replica:
    """A model that computes a part of a batch.

    Attributes:
        model: the main model or a copy of it.
        device: where its part of the batch goes; ``None`` leaves it where it is.
    """

    model: nn.Module
    device: torch.device | None

    def current(self) -> AbstractContextManager[Any]:
        """Inside, what a forward makes on "cuda" without a number is made on this device."""
        device = self.device
        is_numbered = device is not None and device.type != "cpu" and device.index is not None
        return torch.accelerator.device_index(device.index) if is_numbered else nullcontext()  # type: ignore[union-attr]


def check_names(model: Any, models: Any, devices: Any) -> None:
    """Refuses mappings that do not say which replica is the main one, or not the same replicas.

    Raises:
        ValueError: there is neither mapping, or the two differ.
        KeyError: one lacks ``"main"``.
        TypeError: one is no mapping.
    """
    if models is None and devices is None:
        raise ValueError(
            "a ParallelUpdater needs to know its replicas: devices={'main': 0, 'second': 1} makes one of the model on each, "
            "models={'main': model, 'second': copy} hands them over; for one device take StandardUpdater"
        )
    for what, given in (("models", models), ("devices", devices)):
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise TypeError(f"{what} is a mapping by the replicas' names, such as {{'main': ...}}, got {given!r:.80}")
        if "main" not in given:
            raise KeyError(f"{what} must contain 'main', whose parameters are trained; got {list(given)}")
    if models is None:
        return
    if devices is not None and set(models) != set(devices):
        raise ValueError(f"models and devices name the same replicas, got {list(models)} and {list(devices)}")
    if model is not None and model is not models["main"]:
        raise ValueError("model and models['main'] are two models, and one can be trained; leave model out")


def replicas_of(main: nn.Module, models: Mapping[str, nn.Module] | None, devices: Mapping[str, Any] | None) -> list[Replica]:
    """The main model, where it is, and after it the others in their order: those given, or copies of it."""
    others = [name for name in (models or devices or {}) if name != "main"]
    replicas = []
    for name in ["main", *others]:
        device = None if devices is None else as_device(devices[name])
        if name == "main":
            model = main
        elif models is not None:
            model = models[name]
            _check_form(main, model, name)
        else:
            model = _copied(main)
        if device is not None and name != "main":
            model.to(device)
        replicas.append(Replica(model, _device_of(model) if devices is None else device))
    return replicas


def _copied(model: nn.Module) -> nn.Module:
    # Buffers without a shape yet are the one thing in a lazy module that copy does not know.
    memo: dict[int, Any] = {
        id(held): UninitializedBuffer(device=held.device, dtype=held.dtype)  # type: ignore[call-arg]
        for held in model.buffers()
        if is_lazy(held)
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        error.add_note(f"raised in copying {type(model).__name__} for another device; hand over models={{'main': ...}}")
        raise


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _check_form(main: nn.Module, replica: nn.Module, name: str) -> None:
    ours, theirs = _form(main), _form(replica)
    differing = [path for path in {**ours, **theirs} if not _fit(ours.get(path), theirs.get(path))]
    if differing:
        raise ValueError(
            f"replicas have the same modules, with parameters of the same shapes and dtypes; models['main'] and "
            f"models[{name!r}] differ in {differing[:4]}; make them by the same code, or give model and devices instead"
        )


def _form(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Every module and every parameter; a parameter has a shape and a dtype, if it has been decided."""
    parts: dict[str, tuple[Any, ...]] = {f"module {path!r}": ("module",) for path, _ in unwrapped(model).named_modules()}
    for path, held in unwrapped(model).named_parameters():
        parts[path] = ("open",) if is_lazy(held) else (held.shape, held.dtype)
    return parts


def _fit(ours: tuple[Any, ...] | None, theirs: tuple[Any, ...] | None) -> bool:
    return ours == theirs or (ours is not None and theirs is not None and ("open",) in (ours, theirs))


def refresh(main: nn.Module, replica: nn.Module) -> None:
    """Makes a replica what the main model is now: parameters, buffers, training flags; without gradients.

    What has no shape yet in the main model is left out.
    """
    main, replica = unwrapped(main), unwrapped(replica)
    with torch.no_grad():
        for ours, theirs in zip(main.parameters(), replica.parameters(), strict=True):
            if ours is theirs or is_lazy(ours):
                continue
            if is_lazy(theirs):
                theirs.materialize(ours.shape, dtype=ours.dtype)
            theirs.copy_(ours)
            theirs.requires_grad_(ours.requires_grad)
            theirs.grad = None
        for part, its_copy in zip(main.modules(), replica.modules(), strict=True):
            its_copy.training = part.training
            _refresh_buffers(part, its_copy, _device_of(replica))


def _refresh_buffers(part: nn.Module, its_copy: nn.Module, device: torch.device | None) -> None:
    for name, buffer in part.named_buffers(recurse=False):
        held = getattr(its_copy, name, None)
        if held is buffer or is_lazy(buffer):
            continue
        if held is None or is_lazy(held) or held.shape != buffer.shape:  # a cache, say, that grows with its input
            setattr(its_copy, name, buffer.to(device, copy=True))
        else:
            held.copy_(buffer)


def is_unshaped(model: nn.Module) -> bool:
    """Whether the model has a parameter or buffer whose shape its first forward decides."""
    return any(is_lazy(held) for held in (*model.parameters(), *model.buffers()))


def bring_gradients(replica: nn.Module, main: nn.Module) -> None:
    """Adds the gradients of a replica to those of the main model, and leaves the replica without."""
    with torch.no_grad():
        for ours, theirs in zip(unwrapped(main).parameters(), unwrapped(replica).parameters(), strict=True):
            if ours is theirs or is_lazy(theirs) or theirs.grad is None:
                continue
            gradient = theirs.grad.to(ours.device)
            ours.grad = gradient if ours.grad is None else ours.grad.add_(gradient)
            theirs.grad = None
