"""Metric objects: those that are attributes of models, and the sums of their counts over ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from chainring._checks import is_number
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import shared_by_copies
from chainring._messages import warn
from chainring.serializers._values import is_same_value
from chainring.serializers.protocol import has_state, serialize_method

_PLAIN = {bool, int, float, str, type(None), dict, OrderedDict}
"""Types of most attributes of a module, which are not metrics."""


def is_metric(value: Any) -> bool:
    """Return True for an object with ``compute()`` and ``reset()``, such as a torchmetrics metric."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


@contextmanager
def fresh_metrics(models: Iterable[nn.Module]) -> Generator[None]:
    """Replace every metric that is an attribute of a submodule by a reset copy, until the end of the context.

    A metric accumulates over an interval of training. Without this, an evaluation of the same model would add its examples
    to that interval and then end it.
    """
    slots = [attribute for model in models for attribute in _metric_attributes(model)]
    # One memo for all, so that a metric under two names is copied once.
    memo = shared_by_copies(part for _, _, metric in slots for part in parts_of(metric) if hasattr(part, "__dict__"))
    copies = [copy.deepcopy(metric, memo) for _, _, metric in slots]
    try:
        for (attributes, name, _), fresh in zip(slots, copies, strict=True):
            fresh.reset()
            attributes[name] = fresh
        yield
    finally:
        for attributes, name, metric in slots:
            attributes[name] = metric


def list_metrics(models: Iterable[nn.Module]) -> list[Any]:
    """Return the metrics that are attributes of submodules."""
    return [metric for model in models for *_, metric in _metric_attributes(model)]


def uncounted(
    models: Iterable[nn.Module], but: Collection[str] = ("_buffers", "_modules", "_parameters")
) -> AbstractContextManager[None]:
    """Return a context that undoes what metrics that are attributes of submodules have counted in it; not in buffers."""
    return restored(list_metrics(models), but)


@contextmanager
def restored(metrics: Iterable[Any], but: Collection[str] = ()) -> Generator[None]:
    """Put metrics back as they were at the end of the context, except for some of their attributes."""
    put_back = remember(metrics, but)
    try:
        yield
    finally:
        put_back()


def remember(metrics: Iterable[Any], but: Collection[str] = ()) -> Callable[[], None]:
    """Return a function that puts metrics back as they are now, except for some of their attributes; call it once."""
    counting = {id(metric): metric for metric in metrics if hasattr(metric, "__dict__")}.values()
    states = [
        copy.deepcopy({name: value for name, value in vars(metric).items() if name not in but}, {id(metric): metric})
        for metric in counting
    ]

    def put_back() -> None:
        for metric, state in zip(counting, states, strict=True):
            for name in vars(metric).keys() - state.keys() - set(but):
                del vars(metric)[name]
            vars(metric).update(state)

    return put_back


def _metric_attributes(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for module in model.modules():
        for attributes in (vars(module), module._modules):
            for name, value in attributes.items():
                if type(value) in _PLAIN or not is_metric(value):
                    continue
                # A module with trained parameters is a layer that only happens to have methods of those names.
                if not isinstance(value, nn.Module) or not any(p.requires_grad for p in value.parameters()):
                    yield attributes, name, value


def warn_of_unsaved(metrics: Mapping[str, Any]) -> None:
    """Name the metrics whose state is not saved by their owner, a model for example."""
    saved = (name for name, m in metrics.items() if serialize_method(m) is not None or (has_state(m) and m.state_dict()))
    if unsaved := sorted(metrics.keys() - set(saved)):
        warn(
            f"this state lies inside the interval of the metrics {unsaved}, and what they have counted is not in it: a run "
            "resumed from here computes them over the rest of the interval. Save where intervals end; or make the metric a "
            "part of the model that saves its state: metric.persistent(True), or an nn.Module with buffers",
        )


def all_over_ranks(metrics: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """Return metrics that have counted what those of all ranks have; a `ValueError` says where that cannot be.

    One that has ``sync``, as those of torchmetrics, exchanges what it has counted when it is computed, and is returned as it
    is. Of another, all that ``reset`` sets back must be counts: whole numbers, and arrays, lists and mappings of them. Rank
    0 gets a copy with their sums, and the metric is reset.
    """
    keys = comm.gather_object(list(metrics))
    for key in sorted({key for of_rank in keys for key in of_rank}):
        if missing := [rank for rank, of_rank in enumerate(keys) if key not in of_rank]:
            raise ValueError(
                f"the metric {key!r} is computed on all ranks together, and rank {missing[0]} has not reported it; report "
                "it in every forward"
            )
    totals = {key: _over_ranks(key, metrics[key], comm) for key in keys[0]}
    return {key: total for key, total in totals.items() if total is not None}


def _over_ranks(key: str, metric: Any, comm: Communicator) -> Any:
    if comm.size == 1 or exchanges(metric):
        return metric
    total = copy.deepcopy(metric)
    total.reset()
    state, start = getattr(metric, "__dict__", {}), getattr(total, "__dict__", {})
    changed = {name: value for name, value in state.items() if not _is_same(value, start.get(name))}
    no_counts = [name for name, value in changed.items() if not _is_count(value, start.get(name))]
    counts = {name: _move("cpu", value) for name, value in changed.items() if name not in no_counts}
    gathered = comm.gather_object((counts, no_counts if hasattr(metric, "__dict__") else ["__slots__"]))
    if refused := sorted({name for _, names in gathered for name in names}):
        raise ValueError(
            f"with virtual_ranks the metric {key!r} ({type(metric).__name__}) of {comm.size} ranks is computed from the sum "
            f"of what they have counted, and its {', '.join(refused)} is not made of whole numbers that reset() sets to a "
            "start; count in such numbers, derive it from torchmetrics.Metric, or report a value of each batch, of which "
            "the mean is taken"
        )
    metric.reset()
    if comm.rank > 0:
        return None
    for name in dict.fromkeys(name for counts, _ in gathered for name in counts):
        values = [counts[name] for counts, _ in gathered if name in counts]
        tensors = [leaf for leaf in tree_leaves(changed.get(name)) if isinstance(leaf, Tensor)]
        start[name] = _move(tensors[0].device if tensors else "cpu", _add(values, _move("cpu", start.get(name))))
    return total


def check_exchange(metrics: Mapping[str, Any], comm: Communicator) -> None:
    """Refuse metrics that exchange what they have counted, where some ranks see the same rows, or may be lost."""
    for key, metric in metrics.items() if comm.survives else ():
        if exchanges(metric):
            raise ValueError(
                f"with create_communicator(survive=True) the metric {key!r} ({type(metric).__name__}) would exchange what "
                "it has counted with a rank that may be lost meanwhile: give it sync_on_compute=False, if it counts in "
                "whole numbers, with virtual_ranks; or report a value of each batch, of which the mean is taken"
            )
    for key, metric in metrics.items() if comm.world.size > comm.size else ():
        for part in parts_of(metric) if exchanges(metric) else ():
            group = getattr(part, "process_group", None)
            is_over_rows = group is not None and dist.get_process_group_ranks(group) == list(comm.data_ranks)
            if hasattr(part, "process_group") and not is_over_rows:
                raise ValueError(
                    f"the metric {key!r} ({type(part).__name__}) exchanges what it has counted over all "
                    f"{comm.world.size} ranks, and on this mesh {comm.size} of them share the data, whose rows would count "
                    'more than once: give it process_group=mesh["dp"].get_group() of the mesh in '
                    'comm=create_communicator(mesh=mesh["dp"])'
                )


def parts_of(metric: Any) -> list[Any]:
    """Return a metric, or those of a collection."""
    return list(metric.modules()) if isinstance(metric, nn.Module) else [metric]


def exchanges(metric: Any) -> bool:
    """Return whether a metric, or each of a collection, exchanges by itself what it has counted when it is computed."""
    if callable(values := getattr(metric, "values", None)):
        return all(map(exchanges, values()))
    return callable(getattr(metric, "sync", None)) and bool(getattr(metric, "sync_on_compute", True))


def _is_same(value: Any, start: Any) -> bool:
    try:
        return is_same_value(value, start)
    except Exception:  # an object of the user's own
        return False


def _is_count(value: Any, start: Any) -> bool:
    """Return whether a value is made of whole numbers, in the same structure as at the start."""
    if isinstance(value, Mapping):
        return isinstance(start, Mapping) and all(_is_count(item, start.get(key, 0)) for key, item in value.items())
    if isinstance(value, list):
        return isinstance(start, list) and len(value) == len(start) and all(map(_is_count, value, start))
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, np.ndarray) and value.dtype.kind not in "iuf":
            return False
        if not is_number(start) and getattr(start, "shape", None) != value.shape:
            return False
        tensor = torch.as_tensor(value)
        if tensor.is_floating_point():
            return bool((tensor == tensor.round()).all())
        return tensor.dtype is not torch.bool and not tensor.is_complex()
    return is_number(value) and is_number(start) and float(value).is_integer()


def _add(values: list[Any], start: Any) -> Any:
    """Return the start plus what each of the values has counted beyond it."""
    if isinstance(start, Mapping):
        total: Any = copy.copy(values[0])
        for key in dict.fromkeys(key for value in values for key in value):
            total[key] = _add([value[key] for value in values if key in value], start.get(key, 0))
        return total
    if isinstance(start, list):
        return [_add([value[index] for value in values], item) for index, item in enumerate(start)]
    return start + sum(value - start for value in values)


def _move(device: Any, value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), value)
