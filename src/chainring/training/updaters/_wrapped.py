"""Models of several ranks: which of them communicate by themselves, and how all begin and stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chainring._distributed.sharding import fsdp_modules, is_sharded


class Wrapped:
    """The parts of some models that are wrapped in DDP or `fully_shard`, which exchange gradients in their backward.

    Args:
        models: of an updater.

    Attributes:
        parameters: the ids of their parameters.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        parts = [part for model in models for part in model.modules()]
        self._replicated = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self._sharded = [part for model in models for part in fsdp_modules(model)]
        replicated = [each for part in self._replicated for each in part.parameters()]
        sharded = [each for part in parts for each in part.parameters(recurse=False) if is_sharded(each)]
        self.parameters = {id(parameter) for parameter in replicated + sharded}

    def synchronize(self, now: bool) -> None:
        """Whether the next forward and backward exchange gradients, or only add to them."""
        for part in self._replicated:
            part.require_backward_grad_sync = now  # what DDP's own no_sync() sets
        for sharded in self._sharded:
            sharded.set_requires_gradient_sync(now)

    def lay_out(self) -> None:
        """Makes DDP lay out its buckets before the first update, by two backwards that touch no data.

        It orders them by the first backward that it sees. After a resume that is another one than in the uninterrupted run,
        sums of three ranks or more then round otherwise, and the two runs differ in their last bits. DDP with a static graph
        must see the graph of the model first, and is left alone.
        """
        for part in self._replicated:
            if not part.static_graph:
                inner, part.module = part.module, _Surrogate(part.module)
                kept, part.broadcast_buffers = part.broadcast_buffers, False
                try:
                    for _ in range(2):
                        loss: Tensor = part.forward()  # type: ignore[no-untyped-call]
                        loss.backward()  # type: ignore[no-untyped-call]
                finally:
                    part.module, part.broadcast_buffers = inner, kept
                for parameter in part.parameters():
                    parameter.grad = None


class _Surrogate(nn.Module):
    """Stands for a model: its output depends on every parameter, the first ones last, as in a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training = model.training
        self._used = [[parameter for parameter in model.parameters() if parameter.requires_grad]]  # not registered

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._used[0]]).sum()


def equalize(comm: Any, models: Sequence[nn.Module], wrapped: Wrapped) -> None:
    """Gives all ranks the parameters and buffers of rank 0."""
    tensors = [parameter for model in models for parameter in model.parameters() if id(parameter) not in wrapped.parameters]
    comm.broadcast([*tensors, *buffers(models)])


def buffers(models: Sequence[nn.Module]) -> list[Tensor]:
    """The buffers of models, those of DDP left out, which passes on those of rank 0 itself."""
    return [buffer for model in models for buffer in _buffers(model) if not is_sharded(buffer)]


def _buffers(part: nn.Module) -> Iterator[Tensor]:
    if not isinstance(part, DistributedDataParallel):
        yield from (buffer for buffer in part._buffers.values() if buffer is not None)
        for child in part.children():
            yield from _buffers(child)
