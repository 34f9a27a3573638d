"""ParameterStatistics: what parameters and gradients are like, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from chainring._distributed.sharding import to_full
from chainring._naming import name_cleaner
from chainring.reporting.reporter import report
from chainring.reporting.summary import DictSummary
from chainring.serializers.base import AbstractSerializer
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.triggers import get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

Statistic = Callable[[Tensor], Any]
"""Of a tensor as one dimension of float32 or float64: a tensor without dimensions, or one dimension of several numbers."""


def _std(values: Tensor) -> Tensor:
    return values.std(correction=0)


def _zeros(values: Tensor) -> Tensor:
    return (values == 0).sum()


class ParameterStatistics(Extension):
    """Reports statistics of the parameters and gradients of models, averaged over the updates of an interval.

    The keys are ``<prefix>/<model>/<parameter>/<data or grad>/<statistic>``, ``main/predictor/weight/grad/std`` for
    example; of a statistic of several numbers, these with ``/0``, ``/1``, ... after them. They are in the observation
    of the iteration in which the trigger fires, where a `LogReport` finds them. Statistics are computed after every
    update, on the device, and read from it when the trigger fires: a cost to be weighed for large models.

    A parameter without a gradient has no statistics of it in that update. Gradients are those that the optimizer has used.

    Args:
        models: the model, called ``"main"``, or a mapping of several by name.
        statistics: functions by name, each called with all numbers of a tensor in one dimension; by default
            ``default_statistics``. Add to those, for example percentiles::

                {**ParameterStatistics.default_statistics, "percentile": lambda x: x.quantile(x.new_tensor([0.05, 0.95]))}

        report_params: whether to look at parameters.
        report_grads: whether to look at gradients.
        prefix: before all keys.
        trigger: when means are reported. ``extend(..., trigger=t)`` means the same and comes first.

    Attributes:
        default_statistics: ``mean``, ``std``, ``min``, ``max``, and the number of ``zeros``.

    Raises:
        TypeError: something else stands where a model, a function or a trigger belongs.
        ValueError: there is no model, neither parameters nor gradients are to be looked at, or the trigger's unit or
            period is none.
    """

    priority = PRIORITY_WRITER
    skip_on_resume = True
    default_statistics: Mapping[str, Statistic] = MappingProxyType(
        {"mean": torch.mean, "std": _std, "min": torch.min, "max": torch.max, "zeros": _zeros}
    )

    def __init__(
        self,
        models: Any,
        statistics: Mapping[str, Statistic] | None = None,
        report_params: bool = True,
        report_grads: bool = True,
        prefix: str | None = None,
        trigger: Any = (1, "epoch"),
    ) -> None:
        named: dict[str, Any] = dict(models) if isinstance(models, Mapping) else {"main": models}
        for name, model in named.items():
            if not isinstance(model, nn.Module):
                raise TypeError(
                    "ParameterStatistics takes the model first, an nn.Module, or a mapping of several by name; "
                    f"model {name!r} is {type(model).__name__}"
                )
        if not named:
            raise ValueError("models is a model, or a mapping of at least one by name; got an empty mapping")
        if not report_params and not report_grads:
            raise ValueError("there is nothing to report; leave report_params or report_grads True")
        self.trigger = get_trigger(trigger)
        self._models = named
        self._statistics: dict[str, Statistic] = {}
        self._attributes = ["data"] * report_params + ["grad"] * report_grads
        self._prefix = "" if prefix is None else f"{prefix}/"
        self._summary = DictSummary()
        for name, function in (self.default_statistics if statistics is None else statistics).items():
            self.register_statistics(name, function)

    def register_statistics(self, name: str, function: Statistic) -> None:
        """Adds a statistic, or puts it in the place of the one of that name.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(function):
            raise TypeError(f"statistic {name!r} is a function of a tensor, got {function!r}")
        self._statistics[name] = function

    def observe(self, trainer: Trainer) -> None:
        with torch.no_grad():
            values = {key: value for place, numbers in self._tensors() for key, value in self._values(place, numbers)}
        self._summary.add(values)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What there is to look at, each with the beginning of its keys; what holds no number is passed over."""
        for name, model in self._models.items():
            clean = name_cleaner(model)
            for path, parameter in model.named_parameters():
                for attribute in self._attributes:
                    tensor = parameter.detach() if attribute == "data" else parameter.grad
                    if tensor is not None and tensor.numel():
                        yield f"{self._prefix}{name}/{clean(path).replace('.', '/')}/{attribute}", _numbers(to_full(tensor))

    def _values(self, place: str, numbers: Tensor) -> Iterator[tuple[str, Any]]:
        for name, function in self._statistics.items():
            value = function(numbers)
            if isinstance(value, Tensor) and _is_part(value, numbers):
                value = value.clone()  # it would change with the next step
            if getattr(value, "ndim", 0):
                yield from ((f"{place}/{name}/{number}", each) for number, each in enumerate(value.reshape(-1)))
            else:
                yield f"{place}/{name}", value

    def __call__(self, trainer: Trainer) -> None:
        means, self._summary = self._summary.compute_mean(), DictSummary()
        report(means)

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._summary.serialize(serializer["summary"])


def _is_part(value: Tensor, whole: Tensor) -> bool:
    return value.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _numbers(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in one dimension, with at least the digits and the range of float32."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1).to(torch.promote_types(real.dtype, torch.float32))
