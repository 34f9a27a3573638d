"""In which floating-point format the forward is computed, and what that asks of the backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring.serializers.base import AbstractSerializer, Serializer

_NOTHING: AbstractContextManager[Any] = nullcontext()


class LossScaler:
    """Scales the loss up and gradients down again; a step whose gradients overflow is left out."""

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._stepped: set[Optimizer] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Gives the gradients of an optimizer their true size."""
        if optimizer in self._stepped:  # its second step of this update: the scaler counts by its own updates
            self.update()
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, unless its gradients have overflowed."""
        self._scaler.step(optimizer)
        self._stepped.add(optimizer)

    def update(self) -> None:
        """Called at the end of each update."""
        if self._stepped:
            self._scaler.update()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how long it has held."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a scale that was saved."""
        self._scaler.load_state_dict(state)


class Full:
    """``fp32``: everything as the model has it."""

    name = "fp32"
    scaler: LossScaler | None = None
    """What the loss and the gradients go through, where the format's range is small."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward."""
        return _NOTHING

    def serialize(self, serializer: AbstractSerializer) -> None:
        """The state of the loss scaler, or ``None``: the precision is a setting, which a resumed run may change."""
        state = serializer("scaler", None if self.scaler is None else self.scaler.state_dict())
        if self.scaler is not None and state is not None and not isinstance(serializer, Serializer):
            self.scaler.load_state_dict(state)


class Autocast(Full):
    """``bf16``: matrix products and the like in a format with the range of float32."""

    name = "bf16"

    def __init__(self, device_type: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._device_type = device_type
        self._dtype = dtype

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, dtype=self._dtype)


class Scaled(Autocast):
    """``fp16``: a format of small range."""

    name = "fp16"

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type, torch.float16)
        self.scaler = LossScaler(device_type)


def get_precision(name: str, device_type: str) -> Full:
    """The precision of that name.

    Raises:
        ValueError: there is none.
    """
    if name == "fp32":
        return Full()
    if name == "bf16":
        return Autocast(device_type)
    if name == "fp16":
        return Scaled(device_type)
    raise ValueError(f'precision is "fp32", "bf16" or "fp16", got {name!r}')
