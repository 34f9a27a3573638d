"""The precision of a forward: the dtype of autocast, and the loss scaler that fp16 needs in the backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring.serializers.base import AbstractSerializer, Serializer

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


class Precision:
    """The floating-point format of a forward.

    Args:
        name: ``"fp32"`` for the dtypes of the model; ``"bf16"`` or ``"fp16"`` for autocast to that format.
        device_type: of the models, such as ``"cuda"``.

    Attributes:
        name: as given.
        scaler: the loss scaler of ``"fp16"``, whose range is small; else ``None``.

    Raises:
        ValueError: there is no such precision.
    """

    def __init__(self, name: str, device_type: str) -> None:
        if name not in _DTYPES:
            raise ValueError(f'precision is "fp32", "bf16" or "fp16", got {name!r}')
        self.name = name
        self._dtype = _DTYPES[name]
        self._device_type = device_type
        self.scaler = LossScaler(device_type) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager of the forward."""
        return _NO_AUTOCAST if self._dtype is None else torch.autocast(self._device_type, dtype=self._dtype)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Visit the state of the loss scaler, or ``None``: the precision is a setting, which a resumed run may change."""
        state = serializer("scaler", None if self.scaler is None else self.scaler.state_dict())
        if self.scaler is not None and state is not None and not isinstance(serializer, Serializer):
            self.scaler.load_state_dict(state)


class LossScaler:
    """Scales the loss up and the gradients down again; a step whose gradients overflow is skipped."""

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._stepped: set[Optimizer] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale."""
        if optimizer in self._stepped:  # its second step of this update: the scaler counts by its own updates
            self.update()
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step, unless its gradients have overflowed."""
        self._scaler.step(optimizer)
        self._stepped.add(optimizer)

    def update(self) -> None:
        """Adapt the scale at the end of an update."""
        if self._stepped:
            self._scaler.update()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and for how many updates it has held."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state that `state_dict` returned."""
        self._scaler.load_state_dict(state)
