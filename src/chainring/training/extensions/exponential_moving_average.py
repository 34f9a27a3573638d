"""ExponentialMovingAverage: a copy of the model with averaged parameters, which can be evaluated like the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from chainring._checks import find_call_error, is_integer, is_number, plain
from chainring._distributed.sharding import copy_model, fsdp_modules, is_sharded, reshard, shard_model_like, to_local
from chainring.serializers.protocol import AbstractSerializer, Serializer, name_of_model, unwrap
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_stop_trigger
from chainring.training.triggers.base import describe, serialize_inner_trigger
from chainring.training.updaters.callbacks import run_once_an_update


class ExponentialMovingAverage(Extension):
    """Averages the parameters of a model over updates: ``decay * average + (1 - decay) * parameter`` after each update.

    If ``decay`` is a number, the first update of the average copies the parameters; a function decides about that update
    too. Parameters that are not floating-point numbers, and buffers such as the running statistics of BatchNorm, are copied
    after each update. It runs before evaluations of the same iteration. Averages of parameters in bfloat16 or float16 are
    kept in float32, of which ``model`` has the rounded values: in 16 bits a change of a thousandth would be lost.

    Example::

        average = extensions.ExponentialMovingAverage(model)
        trainer.extend(average)
        trainer.extend(extensions.Evaluator(test_iter, average.model), name="average")

    Args:
        model: the model, or the one returned by ``torch.compile``; it is copied at construction, and may be moved to
            another device or sharded by ``fully_shard`` before or after. The average is then sharded in the same way.
        decay: the weight of the old average in an update, from 0 to less than 1; or a function of the number of updates
            of the average made so far, 0 at the first, that returns a number from 0 to 1.
        average_buffers: True to average buffers of floating-point numbers too. So, and with ``decay=lambda n: 0.999``, which
            begins with the first weights, it is timm's ``ModelEmaV3``.
        start: when averaging starts; until then the average is a copy of the parameters. ``None`` is the first update; a
            number of iterations, ``(n, "iteration")`` or ``(n, "epoch")`` a length to be reached; or a trigger that fires.

    Attributes:
        model: the averaged copy. Its submodules and its state have the same names as the model's; it is never compiled.
            Values that it reports outside of an evaluator have the name of the extension as prefix.

    Raises:
        TypeError: an attribute of the model cannot be copied.
        ValueError: parameters have no shape yet; when a run starts, the model is sharded differently from the average.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_WRITER + 100

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        start: int | TriggerLike = None,
        average_buffers: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"an ExponentialMovingAverage takes the model first, an nn.Module; got {type(model).__name__}")
        if callable(decay):
            if error := find_call_error(decay, 0):
                raise TypeError(f"decay is called with the number of updates made so far, and {decay!r} cannot be: {error}")
        elif not is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"decay is from 0 to less than 1, such as 0.999; got {decay!r}")
        try:
            given: Any = (start, "iteration") if is_integer(start) else start
            self._start = None if start is None else get_stop_trigger(given)
        except (TypeError, ValueError):
            rule = 'start is None, a number of iterations, (n, "iteration") or (n, "epoch"), 0 or above, or a trigger'
            raise ValueError(f"{rule}; got {start!r}") from None
        self.decay, self.start = plain(decay), plain(start)
        self.average_buffers = average_buffers
        self._source: nn.Module = unwrap(model)
        if lazy := [name for name, parameter in self._source.named_parameters() if is_lazy(parameter)]:
            raise ValueError(f"parameters {lazy} have no shape yet; call the model with a batch first")
        self.model: nn.Module = copy_model(self._source)
        for parameter in self.model.parameters():
            parameter.grad = None  # copied with the model, and not used
        self._copies: list[nn.Module] = [self.model]  # the last one is averaged: in float32 if the model has 16 bits
        if any(map(_is_short, self._averaged(self._source))):
            precise: Any = copy_model(self._source)
            self._copies.append(precise._apply(lambda tensor: tensor.float() if _is_short(tensor) else tensor))
        self._updates = 0
        self._has_started = start is None
        self._trainer: Trainer | None = None
        self._sharded: list[Any] | None = None  # the modules, once the average lies where the model does
        self._is_updated = self._was_updated = False  # by hand, since the last iteration and in it

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (name_of_model(self._source, trainer.updater.get_all_models()), describe(self.decay))

    def initialize(self, trainer: Trainer) -> None:
        if different := self.model.state_dict().keys() ^ self._source.state_dict().keys():
            raise ValueError(
                f"the model has changed since its average was made: {sorted(different)} are in one only; "
                "make the ExponentialMovingAverage of the finished model"
            )
        self._trainer = trainer
        self._sharded, self._is_updated = None, False
        if self._start is not None:
            trainer.initialize_trigger(self._start)
        self._prepare()
        if not trainer.is_resumed and not self._updates:
            self._copy()  # of what the script has loaded into the model since
        if trainer.comm.world.size > 1:  # the model of rank 0 is broadcast too
            tensors = chain.from_iterable(map(_tensors, self._copies))
            trainer.comm.world.broadcast([tensor.data for tensor in tensors if not is_sharded(tensor)])
        # So that it may report when it is called in the loop; an evaluator has its own observers.
        trainer.reporter.add_observers(trainer.extension_name or self.default_name, self.model.named_modules())

    def observe(self, trainer: Trainer) -> None:
        self._was_updated, self._is_updated = self._is_updated, False

    def __call__(self, trainer: Trainer) -> None:
        if not self._was_updated:
            self.update()
            self._is_updated = False

    def update(self) -> None:
        """Update the average now, for an ``update_core`` that needs it at once, for example as a target network.

        Register the extension nevertheless, so that the average is saved. In an iteration in which this was called, the
        extension itself makes no update. With virtual ranks, all of which call it, it happens once.

        Raises:
            RuntimeError: the average has a ``start``, and the extension is not registered in a running trainer; or it is
                called in a second micro-batch of an update with ``accumulate``.
        """
        run_once_an_update(self, self._update)

    def _update(self) -> None:
        if self._is_updated and self._trainer is not None and getattr(self._trainer.updater, "accumulate", 1) > 1:
            raise RuntimeError(
                "ExponentialMovingAverage.update() was called in several micro-batches of an update, and the parameters "
                "change after the last only; with accumulate leave it to the extension: trainer.extend(average)"
            )
        self._is_updated = True
        self._prepare()
        if not self._has_started and self._start is not None:
            if self._trainer is None:
                raise RuntimeError(
                    "the start of an ExponentialMovingAverage is a point in the training of a trainer, which it is not "
                    "registered in: trainer.extend(average), or make it without start= and call update() from then on"
                )
            self._has_started = bool(self._start(self._trainer))
        if not self._has_started:
            self._copy()
            return
        decay: Any = self.decay if self._updates else 0.0
        if callable(self.decay):
            decay = self.decay(self._updates)
            if not is_number(decay) or not 0 <= decay <= 1:
                raise ValueError(
                    f"decay returns a number from 0 to 1, the share of the average that stays; after {self._updates} "
                    f"updates it has returned {decay!r}"
                )
        if decay == 0.0:
            self._copy()
        else:
            self._average(float(decay))
        self._updates += 1

    def serialize(self, serializer: AbstractSerializer) -> None:
        updates, has_started = serializer("updates", self._updates), serializer("started", self._has_started)
        serialize_inner_trigger(serializer, "start", self._start)
        for name, model in zip(("model", "float32"), self._copies, strict=False):
            serializer.visit(name, model)
        if not isinstance(serializer, Serializer):
            self._updates, self._is_updated = int(updates), False
            self._has_started = has_started or self._start is None

    def _prepare(self) -> None:
        """Let the average lie where the model lies, sharded alike, which a script may decide after it was copied."""
        if self._sharded is None:
            self._sharded = fsdp_modules(self._source)
            for model in self._copies:
                self._sharded = self._sharded + self._lay_out(model)
        if self._sharded:
            reshard(self._sharded)  # an evaluation leaves parameters gathered

    def _lay_out(self, model: nn.Module) -> list[Any]:
        for tensor, source in zip(_tensors(model), _tensors(self._source), strict=True):
            if tensor.device != source.device:
                tensor.data = tensor.data.to(source.device)
        if fsdp_modules(self._source) and not fsdp_modules(model):
            shard_model_like(model, self._source)
        for (name, average), source in zip(model.named_parameters(), self._source.parameters(), strict=True):
            if (layout := _layout(average)) != (expected := _layout(source)):
                raise ValueError(
                    f"a rank averages the shards that it holds, and {name!r} is sharded as {expected} in the model, as "
                    f"{layout} in the average; shard average.model by the same calls as the model, or make the average "
                    "of the sharded model"
                )
        return fsdp_modules(model)

    def _averaged(self, model: nn.Module) -> Iterable[torch.Tensor]:
        return _tensors(model) if self.average_buffers else model.parameters()

    @torch.no_grad()
    def _copy(self) -> None:
        for model in self._copies:
            for average, source in zip(_tensors(model), _tensors(self._source), strict=True):
                to_local(average).copy_(to_local(source))

    @torch.no_grad()
    def _average(self, decay: float) -> None:
        *rounded, precise = self._copies
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for averaged, given in zip(self._averaged(precise), self._averaged(self._source), strict=True):
            average, source = to_local(averaged), to_local(given)
            if average.is_floating_point() or average.is_complex():
                averages, parameters = groups.setdefault((average.device, average.dtype), ([], []))
                averages.append(average)
                parameters.append(source.to(average))
            else:
                average.copy_(source)
        for averages, parameters in groups.values():
            torch._foreach_lerp_(averages, parameters, 1 - decay)
        if not self.average_buffers:
            for average, source in zip(precise.buffers(), self._source.buffers(), strict=True):
                average.copy_(source)
        for model in rounded:
            for tensor, average in zip(_tensors(model), _tensors(precise), strict=True):
                to_local(tensor).copy_(to_local(average))


def _tensors(model: nn.Module) -> chain[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Return the placements of a tensor and the shape of what this rank holds of it."""
    return (*(tensor.placements if is_sharded(tensor) else ()), tuple(to_local(tensor).shape))
