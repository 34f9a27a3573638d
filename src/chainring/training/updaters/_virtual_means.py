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


class Means(NamedTuple):
    """Weighted means over all virtual ranks, the sums of their weights and rows, and those of the weights of their steps.

    ``is_new`` is not 0 if a rank has said so.
    """

    values: dict[str, Any]
    weight: Tensor
    rows: Tensor
    step_weights: list[Tensor]
    is_new: Tensor


class Agreement:
    """What all ranks have found out in an update, and the weighted means over all virtual ranks of what these report.

    Ranks tell each other what they have found only where one has found something new. Whether one has goes along with the
    means of the keys of the update before; on an accelerator, whose numbers would have to be waited for, it goes beside
    them. A virtual rank without rows does not count, nor does one that has not reported a key for the mean of that key.
    """

    def __init__(self, comm: Communicator, block: range, count: int, device: torch.device) -> None:
        self._comm, self._block, self._count, self._device = comm, block, count, device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._own = self._agreed = Found()

    def start(self, own: Found, reported: Sequence[Reported]) -> Callable[[], tuple[Found, Means]]:
        """Start to agree, and to find means; the function that it returns waits for the other ranks.

        Args:
            own: what this rank has found.
            reported: by each of its virtual ranks.
        """
        if self._comm.size == 1:
            return lambda: (own, self._start_means(reported, own.keys, False)())
        is_new, self._own = own != self._own, own
        find_whether_any = None if self._device.type == "cpu" else self._comm.start_max(int(is_new))
        wait = self._start_means(reported, self._agreed.keys, is_new)

        def finish() -> tuple[Found, Means]:
            means = wait()
            if bool(means.is_new) if find_whether_any is None else find_whether_any():
                self._agreed = _join(self._comm.gather_object(own))
                means = self._start_means(reported, self._agreed.keys, False)()
            return self._agreed, means

        return finish

    def _start_means(self, reported: Sequence[Reported], keys: Sequence[str], is_new: bool) -> Callable[[], Means]:
        total = TreeSum(self._block, self._count)
        for part in reported:
            total.add([_to_vector(part, keys, is_new, self._dtype, self._device)])
        wait = total.start_gather(self._comm)
        sizes = [1, 1, 1, len(reported[0].step_weights), len(keys), len(keys)]

        def finish() -> Means:
            new, weight, rows, step_weights, values, weights = torch.split(wait(), sizes)
            means = dict(zip(keys, (values / weights).unbind(), strict=True))
            return Means(means, weight.reshape(()), rows.reshape(()), list(step_weights.unbind()), new)

        return finish


def _join(found: Sequence[Found]) -> Found:
    """Return what all ranks have found together."""
    return Found(
        tuple(dict.fromkeys(key for rank in found for key in rank.keys)),
        tuple(sorted({slot for rank in found for slot in rank.changed})),
        tuple(sorted(set.intersection(*(set(rank.absent) for rank in found)))),
        any(rank.is_stale for rank in found),
    )


def list_keys(reported: Sequence[Reported]) -> tuple[str, ...]:
    """Return the keys of numbers that virtual ranks with rows have reported, in their order."""
    rows = [(key, value) for part in reported if part.rows for key, value in part.observation.items()]
    return tuple(dict.fromkeys(key for key, value in rows if _weighted(value, 0) is not None))


def _to_vector(part: Reported, keys: Sequence[str], is_new: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weight and rows of a virtual rank, the weights of its steps, and the products and weights of its values."""
    pairs = [_weighted(part.observation.get(key), part.weight) or (0, 0) for key in keys]
    sums = [part.weight, part.rows, *part.step_weights]
    numbers = [*sums, *(value for value, _ in pairs), *(weight for _, weight in pairs)]
    vector = _stack([is_new, *(numbers if part.rows else [0] * len(numbers))], dtype, device)
    start = 1 + len(sums)
    vector[start : start + len(keys)] *= vector[start + len(keys) :]
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
