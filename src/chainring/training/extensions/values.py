"""Extensions that report values, or keep the best: observe_value, MicroAverage, ParameterStatistics, BestValue, ..."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from chainring._checks import is_number, plain
from chainring._distributed.sharding import fsdp_modules, reshard, to_full
from chainring._messages import OneTimeWarning
from chainring.reporting.reporter import report
from chainring.reporting.summary import DictMeans, is_scalar
from chainring.serializers.protocol import AbstractSerializer, Serializer, name_cleaner, name_of_model
from chainring.training.extension import PRIORITY_EDITOR, PRIORITY_WRITER, Extension, make_extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.training.triggers.best_value import BestMean


class BestValue(BestMean, Extension):
    """Keeps the best mean of a reported value so far, and the iteration and epoch in which it was reached.

    In every iteration it adds the value, if it was reported before this extension runs, to a mean with the weight of the
    update. When its trigger fires, it compares the mean since the last firing with the best so far, as `BestValueTrigger`
    does: an equal mean is not better, and NaN never is.

    Example::

        best = extensions.BestValue("validation/main/loss", lambda best, new: new < 0.99 * best)
        trainer.extend(best)
        trainer.run()
        print(best.best_value, best.best_iteration, best.best_epoch)

    Args:
        key: the key of the value in the observation, such as ``"validation/main/loss"``; the value is a scalar.
        compare: called with the best mean so far and the new one; returns True if the new one is better.
        trigger: when to compare. ``extend(BestValue(...), trigger=t)`` means the same and takes precedence.
    """

    default_name = "best_value"

    def forget(self) -> None:
        super().forget()
        self._reached = 0, 0  # the iteration and the epoch of the best mean

    @property
    def best_value(self) -> float:
        """The best mean so far; like the other two properties, it raises a `RuntimeError` if there is none yet."""
        return self._require_best()

    @property
    def best_iteration(self) -> int:
        """The iteration in which the best mean was reached."""
        self._require_best()
        return self._reached[0]

    @property
    def best_epoch(self) -> int:
        """The number of completed epochs when the best mean was reached."""
        self._require_best()
        return self._reached[1]

    def _require_best(self) -> float:
        if self._best is None:
            raise RuntimeError(f"there is no best value of {self.key!r} yet: its trigger has not fired with one")
        return self._best

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def __call__(self, trainer: Trainer) -> None:
        updater = trainer.updater
        mean = self._means.end(trainer).get(self.key)
        if mean is not None:
            if self.improve(mean):
                self._reached = updater.iteration, updater.epoch
        elif not trainer.is_rehearsing:  # which raises where the key is not reported
            self._warning.give(
                f"{type(self).__name__} has nothing to compare at iteration {updater.iteration}: since its interval began, "
                f"{self.key!r} was not reported as a single number; reported now are "
                f"{sorted(trainer.observation, key=str)}. This warning is given once; check the key",
            )

    def serialize(self, serializer: AbstractSerializer) -> None:
        best = serializer("best", None if self._best is None else [self._best, *self._reached])
        if not isinstance(serializer, Serializer):
            self._best, *reached = best or (None, 0, 0)
            self._reached = tuple(reached)
        self.visit_interval(serializer)


class MaxValue(BestValue):
    """Keeps the greatest mean of a reported value so far; otherwise like `BestValue`.

    Example::

        trainer.extend(extensions.MaxValue("validation/main/accuracy"))

    Args:
        key, trigger: as for `BestValue`.
    """

    default_name = "max_value"

    def __init__(self, key: str, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, operator.lt, trigger)


class MinValue(BestValue):
    """Keeps the least mean of a reported value so far; otherwise like `BestValue`.

    Example::

        trainer.extend(extensions.MinValue("validation/main/loss"))

    Args:
        key, trigger: as for `BestValue`.
    """

    default_name = "min_value"

    def __init__(self, key: str, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, operator.gt, trigger)


class MicroAverage(Extension):
    """Reports the sum of one reported value divided by the sum of another, both since it last fired.

    It observes each iteration in which both are reported, and reads no value from its device before it fires. If the
    denominators sum to zero, the result is NaN. An interval without both has no result; the first one gives a warning.

    Example::

        trainer.extend(extensions.MicroAverage("main/correct", "main/words", "main/accuracy"))

    Args:
        numerator_key: the key of the numerator; a scalar.
        denominator_key: the key of the denominator.
        result_key: the key under which the ratio is reported.
        trigger: when to report. ``extend(MicroAverage(...), trigger=t)`` means the same and takes precedence.
    """

    priority = PRIORITY_EDITOR
    watched_keys: Sequence[str] = ()

    def __init__(
        self, numerator_key: str, denominator_key: str, result_key: str, trigger: TriggerLike = (1, "epoch")
    ) -> None:
        for key in (numerator_key, denominator_key, result_key):
            _check_key(key)
        self.watched_keys = self.keys = numerator_key, denominator_key
        self.result_key = result_key
        self.trigger = get_trigger(trigger)
        self._sums = DictMeans()
        self._warning = OneTimeWarning()

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (self.result_key, *self.keys)

    def observe(self, trainer: Trainer) -> None:
        is_first = trainer.comm.rank == 0 or trainer.comm.survives
        if not is_first and getattr(trainer.updater, "virtual_ranks", None) is not None:
            return  # what virtual ranks report is on every rank the mean of all of them, of which one counts
        values: list[Any] = [trainer.observation.get(key) for key in self.keys]
        if all(map(is_scalar, values)):
            self._sums.add(dict(zip(self.keys, values, strict=True)))

    def __call__(self, trainer: Trainer) -> None:
        totals = self._sums.over_ranks(trainer.comm, trainer.comm.survives)
        numerator, denominator = map(totals.compute_sum, self.keys)
        self._sums = DictMeans()
        if numerator is not None:
            report({self.result_key: numerator / denominator if denominator else math.nan})
        elif not trainer.is_rehearsing:  # which raises where a key is not reported
            first, second = self.keys
            self._warning.give(
                f"MicroAverage has nothing to report as {self.result_key!r} at iteration {trainer.updater.iteration}: since "
                f"its interval began {first!r} and {second!r} were not reported together, as single numbers; reported now "
                f"are {sorted(trainer.observation)}. This warning is given once; check the keys",
            )

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved_keys = serializer("keys", self.keys)
        self._warning.serialize(serializer)
        self._sums.serialize(serializer["sums"])
        if saved_keys != self.keys:
            self._sums = DictMeans()  # settings are never state: sums of other values say nothing


class RunningAverage(Extension):
    """Reports an average of a value in which what is older counts less: its last report, and not the mean of an interval.

    It adds the value in each iteration in which it is reported, and reads it from its device only to save it. The value of
    k reports ago has the weight ``decay ** k``; weights are divided by their sum, so that the first ones are no exception.
    Each rank averages what it reports, and the log has the mean over the ranks, from which another number of ranks goes on.

    Example::

        trainer.extend(extensions.RunningAverage("main/loss"), trigger=(100, "iteration"))  # main/loss/average
        trainer.extend(extensions.LogReport(trigger=(100, "iteration")))

    Args:
        key: the key of the value in the observation; a scalar.
        result_key: the key of the average, by default ``"<key>/average"``.
        decay: at least 0 and less than 1; 0.98 is about the mean of the last 50.
        trigger: when to report. ``extend(RunningAverage(...), trigger=t)`` means the same and takes precedence.
    """

    priority = PRIORITY_EDITOR
    default_name = "running_average"
    watched_keys: Sequence[str] = ()

    def __init__(
        self, key: str, result_key: str | None = None, decay: float = 0.98, trigger: TriggerLike = (1, "epoch")
    ) -> None:
        self.key, self.result_key = key, f"{key}/average" if result_key is None else result_key
        _check_key(key)
        _check_key(self.result_key)
        if not is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"the decay of a running average is at least 0 and less than 1, got {decay!r}")
        self.decay, self.trigger, self.watched_keys = plain(decay), get_trigger(trigger), [key]
        self._sum: Any = 0.0
        self._weight = 0.0

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return self.result_key, self.key

    def observe(self, trainer: Trainer) -> None:
        value = trainer.observation.get(self.key)
        if not is_scalar(value):
            return
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).float()
            self._sum = torch.as_tensor(self._sum, dtype=value.dtype, device=value.device)
        self._sum = self.decay * self._sum + value
        self._weight = self.decay * self._weight + 1

    def __call__(self, trainer: Trainer) -> None:
        if self._weight:
            report({self.result_key: self._sum / self._weight})

    def serialize(self, serializer: AbstractSerializer) -> None:
        comm, ranks = serializer.comm, [[self._sum, self._weight]]
        if isinstance(serializer, Serializer) and comm.size > 1 and not comm.survives:  # whose ranks all have the same
            ranks = comm.gather_object([self._sum.cpu() if isinstance(self._sum, Tensor) else self._sum, self._weight])
        saved_key, ranks = serializer("key", self.key), serializer("ranks", ranks)
        if isinstance(serializer, Serializer):
            return
        if saved_key != self.key:  # settings are never state: the sum of other values says nothing
            self._sum, self._weight = 0.0, 0.0
        elif len(ranks) == comm.size:
            self._sum, self._weight = ranks[comm.rank]
        else:
            is_shared = all(rank == ranks[0] for rank in ranks)  # as with virtual ranks, where a mean would be rounded
            means = [sum(column) / len(ranks) for column in zip(*ranks, strict=True)]
            self._sum, self._weight = ranks[0] if is_shared else means


def observe_value(observation_key: str, target_func: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
    """Return an extension that reports the result of a function of the trainer, by default after every epoch.

    Example::

        trainer.extend(extensions.observe_value("momentum", lambda trainer: optimizer.param_groups[0]["momentum"]))

    Args:
        observation_key: the key under which it is reported.
        target_func: called with the trainer; returns the value.
    """
    _check_key(observation_key)
    if not callable(target_func):
        raise TypeError(f"target_func is called with the trainer, got {target_func!r}; write lambda trainer: ...")

    @make_extension(trigger=(1, "epoch"), default_name="observe_value", priority=PRIORITY_WRITER)
    def observe(trainer: Trainer) -> None:
        report({observation_key: target_func(trainer)})

    return observe


def observe_lr(optimizer_name: str = "main", observation_key: str = "lr") -> Callable[[Trainer], Any]:
    """Return an extension that reports the learning rate of an optimizer, by default after every epoch.

    It is the learning rate of the last update, because schedulers and shifts run later in the iteration. With several
    parameter groups, those after the first are reported as ``lr/1``, ``lr/2`` and so on.

    Example::

        trainer.extend(extensions.observe_lr())

    Args:
        optimizer_name: the name of the optimizer in the updater; an unknown name is refused when the run starts.
        observation_key: the key under which it is reported.
    """
    _check_key(observation_key)
    if not isinstance(optimizer_name, str):
        raise TypeError(f'optimizer_name is that of an optimizer in the updater, such as "main"; got {optimizer_name!r}')

    def initialize(trainer: Trainer) -> None:
        trainer.updater.get_optimizer(optimizer_name)

    @make_extension((1, "epoch"), "observe_lr", PRIORITY_WRITER, initializer=initialize)
    def observe(trainer: Trainer) -> None:
        groups = trainer.updater.get_optimizer(optimizer_name).param_groups
        keys = [observation_key, *(f"{observation_key}/{index}" for index in range(1, len(groups)))]
        report({key: group["lr"] for key, group in zip(keys, groups, strict=True)})

    return observe


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f'a key is that of a reported value, such as "main/loss"; got {key!r}')


Statistic = Callable[[Tensor], Any]
"""A function of a tensor of one dimension, float32 or float64, to a number, a 0-d tensor, or a 1-d tensor of several."""


class ParameterStatistics(Extension):
    """Reports statistics of the parameters and gradients of models, averaged over the updates of an interval.

    The keys are ``<prefix>/<model>/<parameter>/<data or grad>/<statistic>``, for example
    ``main/predictor/weight/grad/std``; a statistic of several numbers has one key for each, with ``/0``, ``/1``, ... They
    are reported when the trigger fires, so that a `LogReport` includes them. Statistics are computed on the device after
    every update, which is expensive for large models, and read from it when the trigger fires. Gradients are those that the
    optimizer has used; a parameter without a gradient is left out in that update.

    Example::

        percentiles = {"percentile": lambda x: x.quantile(x.new_tensor([0.05, 0.95]))}
        trainer.extend(extensions.ParameterStatistics(model, {**ParameterStatistics.default_statistics, **percentiles}))

    Args:
        models: the model, called ``"main"``, or a mapping of several by name.
        statistics: functions by name, called with a tensor of one dimension; by default ``default_statistics``.
        report_params, report_grads: False to leave out parameters or gradients.
        prefix: the first part of all keys.
        trigger: when means are reported. ``extend(..., trigger=t)`` means the same and takes precedence.

    Attributes:
        default_statistics: ``mean``, ``std``, ``min``, ``max``, and the number of ``zeros``.
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
        self._summary = DictMeans()
        for name, function in (self.default_statistics if statistics is None else statistics).items():
            self.register_statistics(name, function)

    def register_statistics(self, name: str, function: Statistic) -> None:
        """Add a statistic, or replace the one of that name."""
        if not callable(function):
            raise TypeError(f"statistic {name!r} is a function of a tensor, got {function!r}")
        self._statistics[name] = function

    def identity(self, trainer: Trainer) -> Sequence[str]:
        models = trainer.updater.get_all_models()
        return (*(name_of_model(model, models) for model in self._models.values()), self._prefix, *self._attributes)

    def observe(self, trainer: Trainer) -> None:
        values: dict[str, Any] = {}
        with torch.no_grad():
            for path, tensor in self._tensors():
                for name, function in self._statistics.items():
                    value = function(tensor)
                    if isinstance(value, Tensor):
                        value = value.clone()  # it may be a view of the parameter, which the next step changes
                    if getattr(value, "ndim", 0):
                        values |= {f"{path}/{name}/{index}": item for index, item in enumerate(value.reshape(-1))}
                    else:
                        values[f"{path}/{name}"] = value
        if trainer.comm.is_main or trainer.comm.survives:  # they are the same on all ranks, and count once
            self._summary.add(values)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor that is not empty, in one dimension and as float32 or wider, with the beginning of its keys."""
        for name, model in self._models.items():
            clean = name_cleaner(model)
            reshard(fsdp_modules(model))  # an evaluation leaves parameters gathered, which have no gradients then
            for path, parameter in model.named_parameters():
                for attribute in self._attributes:
                    tensor = parameter.detach() if attribute == "data" else parameter.grad
                    if tensor is None or not tensor.numel():
                        continue
                    whole = to_full(tensor)
                    dense = whole.to_dense() if whole.layout != torch.strided else whole
                    real = torch.view_as_real(dense) if dense.is_complex() else dense
                    numbers = real.reshape(-1).to(torch.promote_types(real.dtype, torch.float32))
                    yield f"{self._prefix}{name}/{clean(path).replace('.', '/')}/{attribute}", numbers

    def __call__(self, trainer: Trainer) -> None:
        means = self._summary.over_ranks(trainer.comm, trainer.comm.survives).compute_mean()
        self._summary = DictMeans()
        report(means)

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._summary.serialize(serializer["summary"])
