"""ExponentialMovingAverage: a copy of the model whose parameters follow it slowly, to be evaluated beside it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from chainring._distributed.sharding import is_sharded
from chainring._naming import unwrap
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.extension import PRIORITY_WRITER, Extension

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class ExponentialMovingAverage(Extension):
    """Averages the parameters of a model over the updates: ``decay * average + (1 - decay) * parameter`` after each.

    After the first update the average is the parameters themselves. Buffers, such as the running statistics of a
    BatchNorm, are those of the model after its last update. It runs before evaluations of the same iteration::

        average = extensions.ExponentialMovingAverage(model)
        trainer.extend(average)
        trainer.extend(extensions.Evaluator(test, average.model), name="average")

    Args:
        model: the model, or what ``torch.compile`` made of it; it is copied here, and may move to another device later.
        decay: how much of the average stays in an update, from 0 to less than 1.

    Attributes:
        model: the averaged copy. Its parts and its state are called as those of the model; it is never compiled. What
            it reports when it is called by other than an evaluator is under the name of the extension.

    Raises:
        TypeError: the model is no ``nn.Module``.
        ValueError: the decay is out of range, or the model has parameters without a shape yet.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_WRITER + 100

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"an ExponentialMovingAverage takes the model first, an nn.Module; got {type(model).__name__}")
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(f"decay is from 0 to less than 1, such as 0.999; got {decay!r}")
        self.decay = decay
        self._source: nn.Module = unwrap(model)
        _refuse_lazy(self._source)
        # Its counter stays on the host, where it is asked in every update.
        follow = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._average = AveragedModel(self._source, multi_avg_fn=follow)
        self.model: nn.Module = self._average.module
        for parameter in self.model.parameters():
            parameter.grad = None  # copied too, and never used

    def initialize(self, trainer: Trainer) -> None:
        own, source = self.model.state_dict(), self._source.state_dict()
        if own.keys() != source.keys():
            raise ValueError(
                f"the model has changed since its average was made: {sorted(own.keys() ^ source.keys())} are in one only; "
                "make the ExponentialMovingAverage of the finished model"
            )
        pairs = zip(_tensors(self.model), _tensors(self._source), strict=True)
        for tensor, given in pairs:
            tensor.data = tensor.data.to(given.device)
        if trainer.comm.size > 1:  # as the model is that of rank 0 on all
            trainer.comm.broadcast([tensor.data for tensor in _tensors(self.model) if not is_sharded(tensor)])
        # So that it may report when somebody calls it in the loop; an evaluator has names of its own.
        trainer.reporter.add_observers(trainer.extension_name or self.default_name, self.model.named_modules())

    def __call__(self, trainer: Trainer) -> None:
        self._average.update_parameters(self._source)

    def serialize(self, serializer: AbstractSerializer) -> None:
        updates = serializer("updates", int(self._average.n_averaged))
        serializer.visit("model", self.model)
        if not isinstance(serializer, Serializer):
            self._average.n_averaged.fill_(updates)


def _tensors(model: nn.Module) -> chain[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"parameters {lazy} have no shape yet; call the model with a batch before it is averaged")
