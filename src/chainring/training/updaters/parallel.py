"""ParallelUpdater: one process, several devices, each with a replica of the model and a share of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from chainring.converters import Converter, Device, as_device, concat_examples, device_scope, to_device
from chainring.datasets._batches import Uncounted, count_examples, require_count, take_examples
from chainring.reporting.reporter import Reporter, current, current_observation, report_scope
from chainring.reporting.summary import merge_observations, weighted_mean
from chainring.serializers.protocol import AbstractSerializer, named_submodules, unwrap, visit_setting
from chainring.training.updaters._arguments import Loss, check_default_update, check_loss, check_models, move
from chainring.training.updaters._update import compute_loss
from chainring.training.updaters.callbacks import run
from chainring.training.updaters.standard import StandardUpdater


class ParallelUpdater(StandardUpdater):
    """Splits each batch over replicas of the model; the update equals that of `StandardUpdater` on the whole batch.

    Replica i of n computes the loss of ``batch[i::n]``, the main model first; if a batch has fewer examples than there
    are replicas, the last replicas get none. Losses, and values reported during the forward, are averaged by weight: the
    number of examples, or what the loss returns as ``"weight"``. Gradients are summed into the main model, which the
    optimizers train and which is saved; all replicas report under its name.

    Before every forward pass, each replica gets the main model's parameters, buffers and training flags. Changes that its
    forward pass makes to buffers are discarded, so running statistics are those of the main model's share of each batch.

    Args:
        iterator, optimizer, converter, loss_func: see `StandardUpdater`; ``converter`` and ``loss_func`` are called once
            for each share, with its device and its replica.
        model: the main model, of which a copy is made for each other device.
        models: the replicas by name, instead of ``model``, all of the same structure; the optimizers train
            ``models["main"]``.
        devices: the device of each replica by its name, as for `StandardUpdater`; devices may repeat. By default,
            replicas stay where they are.

    Raises:
        ValueError: neither ``models`` nor ``devices`` is given, or their names differ, or the models differ in structure,
            or a shape in the main model is not known yet.
        KeyError: one of them lacks ``"main"``.
        TypeError: see `StandardUpdater`.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = ParallelUpdater(iterator, optimizer, model, devices={"main": 0, "second": 1})
    """

    def __init__(
        self,
        iterator: Iterable[Any] | Mapping[str, Iterable[Any]],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | None = None,
        *,
        models: Mapping[str, nn.Module] | None = None,
        devices: Mapping[str, Device] | None = None,
        converter: Converter = concat_examples,
        loss_func: Callable[..., Loss] | None = None,
    ) -> None:
        if models is None and devices is None:
            raise ValueError(
                "a ParallelUpdater needs replicas: devices={'main': 0, 'second': 1} copies the model to each device, "
                "models={'main': model, 'second': copy} passes your own; for one device use StandardUpdater"
            )
        for argument, given in (("models", models), ("devices", devices)):
            if given is not None and not isinstance(given, Mapping):
                raise TypeError(
                    f"{argument} is a mapping by the replicas' names, such as {{'main': ...}}, got {given!r:.80}"
                )
            if given is not None and "main" not in given:
                raise KeyError(f"{argument} must contain 'main', whose parameters are trained; got {list(given)}")
        if models and devices and set(models) != set(devices):
            raise ValueError(f"models and devices name the same replicas, got {list(models)} and {list(devices)}")
        if models and model is not None and model is not models["main"]:
            raise ValueError("model and models['main'] are two models, and one can be trained; leave model out")
        if iterator is None:
            raise TypeError("a ParallelUpdater splits each batch over replicas; without data, use StandardUpdater")
        main = check_models(model if models is None else models)["main"]
        if any(map(is_lazy, (*main.parameters(), *main.buffers()))):
            raise ValueError(
                "replicas are copies of the main model, which has a layer whose shape is not known yet; call the model with "
                "one batch before the updater is made"
            )
        super().__init__(iterator, optimizer, main, converter=converter, loss_func=loss_func)
        if type(self).update_core is ParallelUpdater.update_core:
            check_default_update(self._scheme.iterators, self._scheme.models, self._scheme.optimizers)
        self._replicas: list[_Replica] = []
        for name in ["main", *(name for name in models or devices or {} if name != "main")]:
            replica = main if name == "main" else _copy(main) if models is None else models[name]
            _check_structure(main, replica, name)
            device = _device_of(replica) if devices is None else as_device(devices[name])
            if devices is not None:
                move([replica], device, self._scheme.optimizers.values())
            self._replicas.append(_Replica(replica, device))
        self.device = self._replicas[0].device
        self.replica_devices = [_device_of(replica.model) for replica in self._replicas]
        self._reporter_with_replicas: Reporter | None = None

    def update_core(self) -> None:
        """Run one update: split the next batch, compute the losses, one backward through all of them, and a step."""
        update, iterator = self._scheme.update, self._scheme.iterators["main"]
        update.context.epoch = getattr(iterator, "epoch", 0)
        batch = next(iterator)
        examples = count_examples(batch)
        count = max(1, min(require_count(examples), len(self._replicas)))
        replicas, context = self._replicas[:count], update.context
        shares = [take_examples(batch, slice(index, None, count)) for index in range(count)]
        context.batch = [self.converter(share, replica.device) for replica, share in zip(replicas, shares, strict=True)]
        context.examples = None if isinstance(examples, Uncounted) else examples
        run(self.callbacks.batch_on_finish, context)
        compute = partial(self._compute_gradients_in_replicas, replicas, shares, context.batch)
        if self._scheme.steps_by_closure:
            for name in self._scheme.optimizers:
                self.step(name, compute)
            return
        compute()
        update.step(list(self._scheme.optimizers))

    def _compute_gradients_in_replicas(self, replicas: list[_Replica], shares: list[Any], inputs: list[Any]) -> Tensor:
        """Add the gradients of all shares to those of the main model, and return the loss of the batch."""
        self._add_observers()
        main, *others = [replica.model for replica in replicas]
        with self.autocast():
            _refresh(main, others)  # before the main model's forward, which may write into its buffers
            outputs = [self._forward_replica(*pair) for pair in zip(replicas, inputs, strict=True)]
        losses, loss_weights, observations = zip(*outputs, strict=True)
        device = losses[0].device
        weights = [
            count_examples(share) if weight is None else to_device(device, weight)
            for weight, share in zip(loss_weights, shares, strict=True)
        ]
        if (outer := current_observation()) is not None:
            outer.update(merge_observations(observations, weights, device))
            if any(weight is not None for weight in loss_weights):
                outer["main/weight"] = sum(weights)
        weighted = [(loss.to(device), weight) for loss, weight in zip(losses, weights, strict=True)]
        loss: Tensor
        loss, weight = weighted[0] if len(weighted) == 1 else weighted_mean(weighted)
        self.backward(loss, weight)
        with torch.no_grad():  # the gradients of the replicas are added to those of the main model
            for target, *sources in zip(*(unwrap(replica.model).parameters() for replica in replicas), strict=True):
                for source in sources:
                    if target is not source and source.grad is not None and not self._scheme.update.is_empty:
                        gradient = source.grad.to(target.device)
                        target.grad = gradient if target.grad is None else target.grad.add_(gradient)
                        source.grad = None
        return loss

    def _forward_replica(self, replica: _Replica, inputs: Any) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the loss of a replica, the weight that came with it, and the values reported beside it."""
        observation: dict[str, Any] = {}
        with nullcontext() if current.reporter is None else report_scope(observation), device_scope(replica.device):
            loss, weight = compute_loss(replica.model, self.loss_func, inputs)
        if not isinstance(loss, Tensor) or loss.ndim:
            check_loss(loss)  # raises, and says what is wrong
        return loss, weight, observation

    def _add_observers(self) -> None:
        """Let the modules of every replica report under the names of the main model's."""
        reporter = current.reporter
        if reporter is not None and reporter is not self._reporter_with_replicas:
            for replica in self._replicas[1:]:
                for path, module in named_submodules("main", replica.model):
                    reporter.add_observer(path, module)
            self._reporter_with_replicas = reporter

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        visit_setting(serializer["settings"], "number of replicas", len(self._replicas), "number of replicas")


class _Replica(NamedTuple):
    """The main model or a copy of it, and the device of its share of a batch; ``None`` leaves the share where it is."""

    model: nn.Module
    device: torch.device | None


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        error.add_note(f"raised in copying {type(model).__name__} for another device; hand over models={{'main': ...}}")
        raise


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _check_structure(main: nn.Module, replica: nn.Module, name: str) -> None:
    first, second = _structure(main), _structure(replica)
    pairs = {path: (first.get(path), second.get(path)) for path in {**first, **second}}
    differing = [path for path, pair in pairs.items() if pair[0] != pair[1]]
    if differing:
        raise ValueError(
            f"replicas have the same modules, with parameters of the same shapes and dtypes; models['main'] and "
            f"models[{name!r}] differ in {differing[:4]}; make them by the same code, or give model and devices instead"
        )


def _structure(model: nn.Module) -> dict[str, Any]:
    structure: dict[str, Any] = {f"module {path!r}": "module" for path, _ in unwrap(model).named_modules()}
    return structure | {path: (value.shape, value.dtype) for path, value in unwrap(model).named_parameters()}


@torch.no_grad()
def _refresh(main: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Copy parameters, buffers and training flags of the main model into replicas, and clear their gradients."""
    main = unwrap(main)
    for replica in map(unwrap, replicas):
        for source, target in zip(main.parameters(), replica.parameters(), strict=True):
            if source is not target:
                target.copy_(source)
                target.requires_grad_(source.requires_grad)
                target.grad = None
        device = _device_of(replica)
        for module, module_copy in zip(main.modules(), replica.modules(), strict=True):
            module_copy.training = module.training
            for name, buffer in module.named_buffers(recurse=False):
                target = getattr(module_copy, name, None)
                if target is buffer:
                    continue
                if target is None or target.shape != buffer.shape:  # a cache, say, that grows
                    setattr(module_copy, name, buffer.to(device, copy=True))
                else:
                    target.copy_(buffer)
