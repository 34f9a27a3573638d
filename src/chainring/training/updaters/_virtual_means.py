"""What virtual ranks have reported in an update: weighted means, on every rank the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import TreeSum
from chainring.reporting.summary import is_scalar


class Reported(NamedTuple):
    """What one virtual rank has reported, the weight of it, how many rows it has had, and the weights of its steps."""

    observation: dict[str, Any]
    weight: Any
    rows: int
    step_weights: Sequence[Any] = ()


class Found(NamedTuple):
    """What a rank has found out in an update, or all ranks together.

    Attributes:
        keys: of the numbers that were reported, in the order of the virtual ranks.
        changed: the numbers of the buffers that have changed.
        absent: the places of parameters that no virtual rank has a gradient of.
        is_stale: True if gradients were sent that have changed since.
    """

    keys: tuple[str, ...] = ()
    changed: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    is_stale: bool = False


class Agreement:
    """What all ranks have found out in an update, for which they exchange no more than one number.

    Only where a rank has found something else than in the update before, all ranks tell each other what they have.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._own = self._agreed = Found()

    def start(self, own: Found) -> Callable[[], Found]:
        """Start to agree; the function that it returns waits for the other ranks."""
        if self._comm.size == 1:
            return lambda: own
        find_whether_any = self._comm.start_max(int(own != self._own))
        self._own = own

        def wait() -> Found:
            if find_whether_any():
                found = self._comm.gather_object(own)
                self._agreed = Found(
                    tuple(dict.fromkeys(key for rank in found for key in rank.keys)),
                    tuple(sorted({slot for rank in found for slot in rank.changed})),
                    tuple(sorted(set.intersection(*(set(rank.absent) for rank in found)))),
                    any(rank.is_stale for rank in found),
                )
            return self._agreed

        return wait


class Means(NamedTuple):
    """Weighted means over all virtual ranks, the sums of their weights and rows, and those of the weights of their steps."""

    values: dict[str, Any]
    weight: Tensor
    rows: Tensor
    step_weights: list[Tensor]


def list_keys(reported: Sequence[Reported]) -> tuple[str, ...]:
    """Return the keys of numbers that virtual ranks with rows have reported, in their order."""
    rows = [(key, value) for part in reported if part.rows for key, value in part.observation.items()]
    return tuple(dict.fromkeys(key for key, value in rows if _weighted(value, 0) is not None))


def start_means(
    comm: Communicator, block: range, count: int, reported: Sequence[Reported], keys: Sequence[str], device: torch.device
) -> Callable[[], Means]:
    """Start to find the mean of each key over all virtual ranks; the function that it returns waits for the other ranks.

    A virtual rank without rows does not count, nor does one that has not reported a key for the mean of that key.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = TreeSum(block, count)
    for part in reported:
        total.add([_to_vector(part, keys, dtype, device)])
    wait = total.start_gather(comm)

    def finish() -> Means:
        steps = len(reported[0].step_weights)
        weight, rows, step_weights, values, weights = torch.split(wait(), [1, 1, steps, len(keys), len(keys)])
        means = dict(zip(keys, (values / weights).unbind(), strict=True))
        return Means(means, weight.reshape(()), rows.reshape(()), list(step_weights.unbind()))

    return finish


def _to_vector(part: Reported, keys: Sequence[str], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weight and rows of a virtual rank, the weights of its steps, and the products and weights of its values."""
    sums = 2 + len(part.step_weights)
    if not part.rows:
        return torch.zeros(sums + 2 * len(keys), dtype=dtype, device=device)
    pairs = [_weighted(part.observation.get(key), part.weight) or (0, 0) for key in keys]
    numbers = [part.weight, part.rows, *part.step_weights]
    vector = _stack([*numbers, *(value for value, _ in pairs), *(weight for _, weight in pairs)], dtype, device)
    vector[sums : sums + len(keys)] *= vector[sums + len(keys) :]
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
