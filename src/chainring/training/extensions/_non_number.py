"""Whether tensors hold NaN or infinity, asked without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chainring.sharding import local


def is_bad(tensors: Sequence[Tensor]) -> Tensor:
    """Whether any number in any tensor is NaN or infinite, as one boolean on their device."""
    dense = [tensor.coalesce().values() if tensor.is_sparse else local(tensor) for tensor in tensors]
    dense = [tensor.detach() for tensor in dense if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())]
    if not dense:
        return torch.zeros((), dtype=torch.bool)
    # The largest magnitude, which is NaN where there is one; unlike a sum of squares it cannot overflow.
    return ~torch.isfinite(torch.nn.utils.get_total_norm(dense, math.inf))


class Flag:
    """A boolean on its way from the device to the host: to read it waits for nothing that was asked of the device later."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.Event | None = None
        if value.device.type == "cpu":
            self._value = value
            return
        self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._value.copy_(value, non_blocking=True)
        self._event = torch.Event(value.device)
        self._event.record()

    def read(self) -> bool:
        """The boolean."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)


def remember(updater: Any, take: Callable[[Any], Any]) -> Callable[[], None]:
    """Shows each converted batch of an updater to ``take``, whose answer, if it has one, goes on in its place.

    Returns what puts the updater's own converter back.
    """
    own = updater.converter

    def convert(batch: Any, device: Any) -> Any:
        converted = own(batch, device)
        answer = take(converted)
        return converted if answer is None else answer

    updater.converter = convert

    def undo() -> None:
        updater.converter = own

    return undo
