"""Reported objects that count by themselves, such as the metrics of torchmetrics: computed and reset once an interval."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from chainring.serializers.base import has_state, serialize_method

_PLAIN = {bool, int, float, str, type(None), dict, OrderedDict}
"""Types of most attributes of a module, none of which are metrics."""


def is_metric(value: Any) -> bool:
    """Whether a reported value is one: it has ``compute()`` and ``reset()``."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


def take(name: str, metric: Any) -> dict[str, Any]:
    """Ends the interval of a metric: what it has computed, by name. Of a mapping each value is ``<name>/<its own>``."""
    value = metric.compute()
    metric.reset()
    return {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}


def warn_of_unsaved(metrics: Mapping[str, Any]) -> None:
    """Says which metrics have no state that their owner, a model for example, could have saved."""
    unsaved = sorted(name for name, metric in metrics.items() if not _offers_state(metric))
    if unsaved:
        warnings.warn(
            f"this state lies inside the interval of the metrics {unsaved}, and what they have counted is not in it: a run "
            "resumed from here computes them over the rest of the interval. Save where intervals end; or make the metric a "
            "part of the model that saves its state: metric.persistent(True), or an nn.Module with buffers",
            stacklevel=3,
        )


def _offers_state(metric: Any) -> bool:
    return serialize_method(metric) is not None or (has_state(metric) and bool(metric.state_dict()))


@contextmanager
def own_metrics(models: Iterable[nn.Module]) -> Generator[None]:
    """Inside, every metric that is an attribute of a part of the models is a copy that begins anew.

    A metric counts over the interval of training that is under way. Without this, an evaluation of the same model would
    add its examples to that interval and then end it.
    """
    places = [place for model in models for place in _places(model)]
    memo: dict[int, Any] = {}  # one for all, so that a metric in two places is one copy
    copies = [copy.deepcopy(metric, memo) for _, _, metric in places]
    try:
        for (attributes, name, _), own in zip(places, copies, strict=True):
            own.reset()
            attributes[name] = own
        yield
    finally:
        for attributes, name, metric in places:
            attributes[name] = metric


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for part in model.modules():
        for attributes in (vars(part), part._modules):
            for name, value in attributes.items():
                if type(value) not in _PLAIN and is_metric(value) and not _is_trained(value):
                    yield attributes, name, value


def _is_trained(value: Any) -> bool:
    """Whether it is rather a part of the network, which only happens to have methods of those names."""
    return isinstance(value, nn.Module) and any(parameter.requires_grad for parameter in value.parameters())
