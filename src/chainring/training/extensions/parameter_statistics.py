"""ParameterStatistics: reports statistics of parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import fsdp_modules, reshard, to_full
from chainring._naming import name_cleaner, name_of_model
from chainring.reporting.reporter import report
from chainring.reporting.summary import DictMeans
from chainring.serializers.protocol import AbstractSerializer
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.triggers import TriggerLike, get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

Statistic = Callable[[Tensor], Any]
"""A function of a tensor of one dimension, float32 or float64, to a number, a 0-d tensor, or a 1-d tensor of several."""


class ParameterStatistics(Extension):
    """Reports statistics of the parameters and gradients of models, averaged over the updates of an interval.

    The keys are ``<prefix>/<model>/<parameter>/<data or grad>/<statistic>``, for example
    ``main/predictor/weight/grad/std``; a statistic of several numbers has one key for each, with ``/0``, ``/1``, ... They
    are reported in the iteration in which the trigger fires, so that a `LogReport` includes them. Statistics are computed
    on the device after every update, which is expensive for large models, and read from it when the trigger fires.

    Gradients are those that the optimizer has used; a parameter without a gradient is left out in that update.

    Example::

        percentiles = {"percentile": lambda x: x.quantile(x.new_tensor([0.05, 0.95]))}
        trainer.extend(extensions.ParameterStatistics(model, {**ParameterStatistics.default_statistics, **percentiles}))

    Args:
        models: the model, called ``"main"``, or a mapping of several by name.
        statistics: functions by name, each called with a tensor flattened to one dimension; by default
            ``default_statistics``.
        report_params, report_grads: False to leave out parameters or gradients.
        prefix: the first part of all keys.
        trigger: when means are reported. ``extend(..., trigger=t)`` means the same and takes precedence.

    Attributes:
        default_statistics: ``mean``, ``std``, ``min``, ``max``, and the number of ``zeros``.

    Raises:
        TypeError: a model, a function or the trigger has the wrong type.
        ValueError: there is no model, neither parameters nor gradients are reported, or the period or unit of the trigger
            is invalid.
    """

    priority = PRIORITY_WRITER
    skip_on_resume = True
    default_statistics: Mapping[str, Statistic] = MappingProxyType(
        {
            "mean": torch.mean,
            "std": lambda values: values.std(correction=0),
            "min": torch.min,
            "max": torch.max,
            "zeros": lambda values: (values == 0).sum(),
        }
    )

    def __init__(
        self,
        models: nn.Module | Mapping[str, nn.Module],
        statistics: Mapping[str, Statistic] | None = None,
        report_params: bool = True,
        report_grads: bool = True,
        prefix: str | None = None,
        trigger: TriggerLike = (1, "epoch"),
    ) -> None:
        self._models: dict[str, nn.Module] = dict(models) if isinstance(models, Mapping) else {"main": models}
        for name, model in self._models.items():
            if not isinstance(model, nn.Module):
                rule = "ParameterStatistics takes the model first, an nn.Module, or a mapping of several by name"
                raise TypeError(f"{rule}; model {name!r} is {type(model).__name__}")
        if not self._models:
            raise ValueError("models is a model, or a mapping of at least one by name; got an empty mapping")
        if not report_params and not report_grads:
            raise ValueError("there is nothing to report; leave report_params or report_grads True")
        self.trigger = get_trigger(trigger)
        self._statistics: dict[str, Statistic] = {}
        self._attributes = ["data"] * report_params + ["grad"] * report_grads
        self._prefix = "" if prefix is None else f"{prefix}/"
        self._comm = Communicator()
        self._summary = DictMeans()
        for name, function in (self.default_statistics if statistics is None else statistics).items():
            self.register_statistics(name, function)

    def register_statistics(self, name: str, function: Statistic) -> None:
        """Add a statistic, or replace the one of that name.

        Raises:
            TypeError: the function is not callable.
        """
        if not callable(function):
            raise TypeError(f"statistic {name!r} is a function of a tensor, got {function!r}")
        self._statistics[name] = function

    def identity(self, trainer: Trainer) -> Sequence[str]:
        models = trainer.updater.get_all_models()
        return (*(name_of_model(model, models) for model in self._models.values()), self._prefix, *self._attributes)

    def initialize(self, trainer: Trainer) -> None:
        self._comm = trainer.comm

    def observe(self, trainer: Trainer) -> None:
        with torch.no_grad():
            values = {key: value for path, tensor in self._tensors() for key, value in self._compute(path, tensor)}
        if self._comm.is_main:  # they are the same on all ranks, and count once
            self._summary.add(values)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor that is not empty, with the beginning of its keys."""
        for name, model in self._models.items():
            clean = name_cleaner(model)
            reshard(fsdp_modules(model))  # an evaluation leaves parameters gathered, which have no gradients then
            for path, parameter in model.named_parameters():
                for attribute in self._attributes:
                    tensor = parameter.detach() if attribute == "data" else parameter.grad
                    if tensor is not None and tensor.numel():
                        yield f"{self._prefix}{name}/{clean(path).replace('.', '/')}/{attribute}", _flatten(to_full(tensor))

    def _compute(self, path: str, tensor: Tensor) -> Iterator[tuple[str, Any]]:
        for name, function in self._statistics.items():
            value = function(tensor)
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                value = value.clone()  # a view of the parameter, which the next step changes
            if getattr(value, "ndim", 0):
                yield from ((f"{path}/{name}/{index}", item) for index, item in enumerate(value.reshape(-1)))
            else:
                yield f"{path}/{name}", value

    def __call__(self, trainer: Trainer) -> None:
        summary, self._summary = self._summary, DictMeans()
        report(summary.over_ranks(self._comm).compute_mean())

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._summary.serialize(serializer["summary"])


def _flatten(tensor: Tensor) -> Tensor:
    """Return all numbers of a tensor in one dimension, as float32 or wider."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1).to(torch.promote_types(real.dtype, torch.float32))
