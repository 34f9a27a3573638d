"""The precision of a forward: the dtype of autocast, and the loss scaler that fp16 needs in the backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import is_sharded, to_local
from chainring._hints import PRECISIONS
from chainring.training.updaters._gradients import list_parameters

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


class Precision:
    """``"fp32"``: the dtypes of the model; ``"bf16"``: autocast; ``"fp16"``: autocast with a loss scaler."""

    def __init__(self, name: str, device_type: str, comm: Communicator | None = None) -> None:
        if name not in _DTYPES:
            hint = PRECISIONS.get(str(name).removeprefix("torch."))
            raise ValueError(f'precision is "fp32", "bf16" or "fp16", got {name!r}' + (f"; {hint}" if hint else ""))
        self.name = name
        self.dtype = _DTYPES[name]
        self._device_type = device_type
        self.scaler = LossScaler(device_type, comm or Communicator()) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager of the forward."""
        return NO_AUTOCAST if self.dtype is None else torch.autocast(self._device_type, dtype=self.dtype)


class LossScaler(torch.amp.GradScaler):
    """Scales the loss up and the gradients down again; an optimizer may step several times in one update.

    Ranks that hold shards of gradients skip a step, and lower the scale, if one of them finds an overflow in its shard.
    """

    def __init__(self, device_type: str, comm: Communicator) -> None:
        super().__init__(device_type)
        self._comm = comm
        self._stepped: set[Optimizer] = set()

    def unscale_(self, optimizer: Optimizer) -> None:
        if optimizer in self._stepped:  # its second step of this update: GradScaler counts by its own updates
            self.update()
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """Unscale gradients in place, where plain ones and those of several meshes are not unscaled together by PyTorch."""
        if not any(map(is_sharded, list_parameters([optimizer]))):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        parameters = [_local_with_gradient(parameter) for parameter in list_parameters([optimizer])]
        local: Any = SimpleNamespace(param_groups=[{"params": parameters}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        largest = torch.stack([each.to(found_inf.device) for each in [found_inf, *found.values()]]).max()
        self._comm.world.all_reduce([largest], average=False)
        return {found_inf.device: largest}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._stepped.add(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._stepped:
            super().update(new_scale)
        self._stepped.clear()


def _local_with_gradient(parameter: Any) -> Tensor:
    """Return the shard of a parameter that lies on this rank, in the same memory, with that of its gradient."""
    local = to_local(parameter).detach()
    local.grad = None if parameter.grad is None else to_local(parameter.grad)
    return local


def device_type_of(models: Iterable[nn.Module]) -> str:
    """Return the type of the device that the models are on."""
    parameters = (parameter for model in models for parameter in model.parameters())
    return next((parameter.device.type for parameter in parameters), "cpu")
