"""ExponentialMovingAverage: a copy of the model with averaged parameters, to be evaluated beside it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from chainring._checks import is_number
from chainring._distributed.sharding import is_sharded
from chainring._naming import unwrap
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.extension import PRIORITY_WRITER, Extension

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class ExponentialMovingAverage(Extension):
    """Averages the parameters of a model over the updates: ``decay * average + (1 - decay) * parameter`` after each.

    After the first update the average is the parameters themselves. Buffers, such as the running statistics of a
    BatchNorm, are those of the model after its last update. It runs before evaluations of the same iteration.

    Example::

        average = extensions.ExponentialMovingAverage(model)
        trainer.extend(average)
        trainer.extend(extensions.Evaluator(test_iter, average.model), name="average")

    Args:
        model: the model, or the one returned by ``torch.compile``; it is copied here, and may move to another device later.
        decay: the share of the average that stays in an update, from 0 to less than 1.

    Attributes:
        model: the averaged copy. Its submodules and its state have the names of the model's; it is never compiled.
            What it reports outside of an evaluator has the name of the extension.

    Raises:
        TypeError: the model is not an ``nn.Module``.
        ValueError: the decay is out of range, or the model has parameters without a shape yet.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_WRITER + 100

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"an ExponentialMovingAverage takes the model first, an nn.Module; got {type(model).__name__}")
        if not is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"decay is from 0 to less than 1, such as 0.999; got {decay!r}")
        self.decay = decay
        self._source: nn.Module = unwrap(model)
        if lazy := [name for name, parameter in self._source.named_parameters() if is_lazy(parameter)]:
            raise ValueError(f"parameters {lazy} have no shape yet; call the model with a batch before it is averaged")
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._average = AveragedModel(self._source, multi_avg_fn=update)  # its counter stays on the host, where it is read
        self.model: nn.Module = self._average.module
        for parameter in self.model.parameters():
            parameter.grad = None  # copied with the model, and not used

    def initialize(self, trainer: Trainer) -> None:
        if different := self.model.state_dict().keys() ^ self._source.state_dict().keys():
            raise ValueError(
                f"the model has changed since its average was made: {sorted(different)} are in one only; "
                "make the ExponentialMovingAverage of the finished model"
            )
        for tensor, source in zip(_tensors(self.model), _tensors(self._source), strict=True):
            tensor.data = tensor.data.to(source.device)
        if trainer.comm.size > 1:  # the model of rank 0 is broadcast too
            trainer.comm.broadcast([tensor.data for tensor in _tensors(self.model) if not is_sharded(tensor)])
        # So that it may report when it is called in the loop; an evaluator has its own observers.
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
