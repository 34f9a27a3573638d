"""ParallelUpdater: one process, several devices, each with a replica of the model and a part of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from chainring._naming import named_submodules, unwrap
from chainring.converters import Device, as_device, concat_examples, to_device
from chainring.reporting.reporter import Reporter, current, current_observation, report_scope
from chainring.reporting.summary import is_metric, weighted_means
from chainring.training.updaters._forward import arguments, check_call, check_loss, check_model_call, loss_and_weight
from chainring.training.updaters.standard import StandardUpdater, count_examples, named_models, refuse_closures, require_main


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
    parts: dict[str, tuple[Any, ...]] = {f"module {path!r}": ("module",) for path, _ in unwrap(model).named_modules()}
    for path, held in unwrap(model).named_parameters():
        parts[path] = ("open",) if is_lazy(held) else (held.shape, held.dtype)
    return parts


def _fit(ours: tuple[Any, ...] | None, theirs: tuple[Any, ...] | None) -> bool:
    return ours == theirs or (ours is not None and theirs is not None and ("open",) in (ours, theirs))


def refresh(main: nn.Module, replica: nn.Module) -> None:
    """Makes a replica what the main model is now: parameters, buffers, training flags; without gradients.

    What has no shape yet in the main model is left out.
    """
    main, replica = unwrap(main), unwrap(replica)
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
        for ours, theirs in zip(unwrap(main).parameters(), unwrap(replica).parameters(), strict=True):
            if ours is theirs or is_lazy(theirs) or theirs.grad is None:
                continue
            gradient = theirs.grad.to(ours.device)
            ours.grad = gradient if ours.grad is None else ours.grad.add_(gradient)
            theirs.grad = None


Answer = tuple[Any, Any, dict[str, Any]]
"""The loss of a part, what it weighs, and what was reported beside it."""


class ParallelUpdater(StandardUpdater):
    """Splits each batch over replicas of the model; its update is that of `StandardUpdater` on the whole batch.

    Replica i of n computes the loss of ``batch[i::n]``, the main model first; of a batch with fewer examples than there
    are replicas the last ones get nothing. Losses, and what is reported during the forward, are averaged by weight: the
    number of examples, or what the loss returns as ``"weight"``. Gradients are summed into the main model, which is the
    one that the optimizers train, that is saved, and under whose name all replicas report.

    Before every forward a replica gets the main model's parameters, buffers and training flags. What its forward writes
    into buffers is forgotten, so running statistics are those of the main model's part of each batch.

    Args:
        iterator, optimizer, converter, loss_func: see `StandardUpdater`; ``converter`` and ``loss_func`` are called once
            for each part, with its device and its replica.
        model: the main model, of which a copy is made for each other device.
        models: the replicas by name instead, all of one form; the parameters are those of ``models["main"]``.
        devices: the device of each replica by its name; devices may repeat. Without, replicas stay where they are.

    Raises:
        ValueError: neither ``models`` nor ``devices`` is given, or they differ in names, or the models in their form.
        KeyError: one of them lacks ``"main"``.
        TypeError: see `StandardUpdater`.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        model: nn.Module | None = None,
        *,
        models: Mapping[str, nn.Module] | None = None,
        devices: Mapping[str, Device] | None = None,
        converter: Callable[..., Any] = concat_examples,
        loss_func: Callable[..., Any] | None = None,
    ) -> None:
        check_names(model, models, devices)
        main = named_models({"main": model} if models is None else dict(models))["main"]
        device = None if devices is None else devices["main"]
        super().__init__(iterator, optimizer, {"main": main}, converter=converter, device=device, loss_func=loss_func)
        if type(self).update_core is ParallelUpdater.update_core:
            require_main(self._iterators, self._models)
            refuse_closures(self._optimizers)
        self._replicas = replicas_of(main, models, devices)
        self.device = self._replicas[0].device
        self._named_in: Reporter | None = None

    def update_core(self) -> None:
        """One update: the parts of the next batch, their losses, one backward through all, and a step."""
        batch = next(self._iterators["main"])
        count = max(1, min(len(batch), len(self._replicas)))
        used = self._replicas[:count]
        shards = [batch[number::count] for number in range(count)]
        converted = [self.converter(shard, replica.device) for replica, shard in zip(used, shards, strict=True)]
        inputs = self._finish_batch(converted, count_examples(batch))
        with self.autocast():
            answers = self._forward(used, shards, inputs)
        losses = [loss for loss, _, _ in answers]
        device = losses[0].device
        weights = [to_device(device, weight) for _, weight, _ in answers]
        outer = current_observation()
        if outer is not None:
            outer.update(_merged([observation for _, _, observation in answers], weights, device))
        self.backward(_mean(losses, weights), sum(weights))
        for replica in used[1:]:
            bring_gradients(replica.model, self._models["main"])
        for name in self._optimizers:
            self.step(name)

    def _forward(self, used: Sequence[Replica], shards: Sequence[Any], inputs: Sequence[Any]) -> list[Answer]:
        """What each replica answers to its part of the batch."""
        self._name_replicas()
        main, *others = used
        # All begin with the buffers that the main model begins with. A model of lazy layers has none, and no parameters,
        # before its first forward.
        is_first = is_unshaped(main.model)
        self._refresh([] if is_first else others)
        answers = [self._answer(main, shards[0], inputs[0])]
        self._refresh(others if is_first else [])
        return answers + [self._answer(*each) for each in zip(others, shards[1:], inputs[1:], strict=True)]

    def _refresh(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            refresh(self._models["main"], replica.model)

    def _answer(self, replica: Replica, shard: Any, inputs: Any) -> Answer:
        observation: dict[str, Any] = {}
        with nullcontext() if current.reporter is None else report_scope(observation), replica.current():
            loss, weight = self._loss_of(replica.model, inputs)
        if not isinstance(loss, Tensor) or loss.ndim:
            check_loss(loss)  # raises, and says what is wrong
        return loss, count_examples(shard) if weight is None else weight, observation

    def _loss_of(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        function = self.loss_func
        args, kwargs = arguments(batch)
        if function is None:
            try:
                return loss_and_weight(model(*args, **kwargs), "main")
            except TypeError:
                check_model_call(model, batch)  # says what is wrong, if it is the call
                raise
        if not self._checked:
            check_call(function, model, batch)
            self._checked = True
        return loss_and_weight(function(model, *args, **kwargs), "main")

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "number of replicas": len(self._replicas)}

    def _name_replicas(self) -> None:
        """Lets the parts of every replica report under the names of the main model's."""
        reporter = current.reporter
        if reporter is None or reporter is self._named_in:
            return
        for replica in self._replicas[1:]:
            for path, part in named_submodules("main", replica.model):
                reporter.add_observer(path, part)
        self._named_in = reporter


def _mean(losses: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    """The weighted mean where the first loss is, with the graphs of all."""
    if len(losses) == 1:
        return losses[0]
    total: Any = sum(weights)
    if not isinstance(total, Tensor) and not total:  # nothing counts, and without parts nothing would be divided either
        weights, total = [1] * len(losses), len(losses)
    first = losses[0]
    dtype = torch.promote_types(first.dtype, torch.float32)  # of a count, in the digits of the loss
    shares = [(weight.to(dtype) if isinstance(weight, Tensor) else weight) / total for weight in weights]
    return sum((loss.to(first.device) * share for loss, share in zip(losses, shares, strict=True)), first.new_zeros(()))


def _merged(seen: Sequence[dict[str, Any]], weights: Sequence[Any], device: torch.device) -> dict[str, Any]:
    """What the replicas reported, as one: numbers by weighted mean, of all else the last."""
    if len(seen) == 1:
        return seen[0]
    parts = [{key: _beside(value, device) for key, value in own.items()} for own in seen]
    for key in dict.fromkeys(key for own in parts for key in own):
        metrics = {id(own[key]) for own in parts if is_metric(own.get(key))}
        if len(metrics) > 1:
            raise TypeError(
                f"{key!r} is a metric of which each replica has its own, and each has counted a part of the batch; report "
                "the metric's value of the batch, which is averaged, or keep one metric outside the model, for all replicas"
            )
    return weighted_means(list(zip(parts, weights, strict=True)))


def _beside(value: Any, device: torch.device) -> Any:
    """A reported value where those of the other replicas are, so that they can be averaged."""
    return to_device(device, value) if isinstance(value, (Tensor, tuple)) else value
