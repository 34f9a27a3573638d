"""What virtual ranks have reported in an update: weighted means, on every rank the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import TreeSum
from chainring.reporting.summary import is_scalar


class Reported(NamedTuple):
    """What one virtual rank has reported, the weight of it, and how many rows it has had."""

    observation: dict[str, Any]
    weight: Any
    rows: int


class Agreement:
    """What all ranks have reported and changed in an update, for which they exchange no more than one number.

    Only where a rank has other keys or buffers than in the update before, all ranks tell each other which ones they have.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._own: Any = None
        self._agreed: tuple[list[str], list[int]] = [], []

    def reach(self, keys: list[str], changed: list[int]) -> tuple[list[str], list[int]]:
        """Return the keys, in the order of the virtual ranks, and the numbers of the buffers of all ranks."""
        own = keys, changed
        if self._comm.size == 1:
            return own
        if self._comm.start_max(int(own != self._own))():
            found = self._comm.gather_object(own)
            everywhere = list(dict.fromkeys(key for rank_keys, _ in found for key in rank_keys))
            self._agreed = everywhere, sorted({slot for _, slots in found for slot in slots})
        self._own = own
        return self._agreed


def list_keys(reported: Sequence[Reported]) -> list[str]:
    """Return the keys of numbers that virtual ranks with rows have reported, in their order."""
    rows = [(key, value) for part in reported if part.rows for key, value in part.observation.items()]
    return list(dict.fromkeys(key for key, value in rows if _weighted(value, 0) is not None))


def average(
    comm: Communicator, block: range, count: int, reported: Sequence[Reported], keys: list[str], device: torch.device
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the mean of each key over all virtual ranks, the sum of their weights, and that of their rows.

    A virtual rank without rows does not count, nor does one that has not reported a key for the mean of that key.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = TreeSum(block, count)
    for part in reported:
        total.add([_to_vector(part, keys, dtype, device)])
    (sums,) = total.finish(comm, [torch.empty(2 * len(keys) + 2, dtype=dtype, device=device)])
    assert sums is not None
    weight, rows, values, weights = torch.split(sums, [1, 1, len(keys), len(keys)])
    means = dict(zip(keys, (values / weights).unbind(), strict=True))
    return means, weight.reshape(()), rows.reshape(())


def _to_vector(part: Reported, keys: list[str], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weight and rows of a virtual rank, and the products and weights of its values."""
    if not part.rows:
        return torch.zeros(2 * len(keys) + 2, dtype=dtype, device=device)
    pairs = [_weighted(part.observation.get(key), part.weight) or (0, 0) for key in keys]
    numbers = [part.weight, part.rows, *(value for value, _ in pairs), *(weight for _, weight in pairs)]
    vector = _stack(numbers, dtype, device)
    vector[2 : 2 + len(keys)] *= vector[2 + len(keys) :]
    return vector


def _stack(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers, of which some may be tensors, as one vector on a device, without reading any."""
    vector = torch.tensor([0 if isinstance(number, Tensor) else number for number in numbers], dtype=dtype).to(device)
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            vector[index] = number.detach()
    return vector


def _weighted(value: Any, weight: Any) -> tuple[Any, Any] | None:
    """Return a reported number and what it counts; ``None`` of anything else. It may come with a weight of its own."""
    if type(value) is tuple and len(value) == 2 and is_scalar(value[0]) and is_scalar(value[1]):
        return value
    return (value, weight) if value is not None and is_scalar(value) else None
