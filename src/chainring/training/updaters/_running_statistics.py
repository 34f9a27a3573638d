"""Running statistics of modules, such as BatchNorm's, of which every virtual rank computes its own in an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import TreeSum


class RunningStatistics:
    """The buffers of some models. All virtual ranks begin an update with the same ones.

    Those that a virtual rank changes are set aside for it, so that the next one starts from the same values. In the end,
    a floating-point buffer is the mean of the results weighted by rows, and an integer buffer is that of virtual rank 0.
    """

    def __init__(self, models: Iterable[nn.Module], count: int) -> None:
        owners = {id(module): module for model in models for module in model.modules()}.values()
        slots = [(module._buffers, name) for module in owners for name in module._buffers]
        found = {id(buffers[name]): (buffers, name) for buffers, name in slots if buffers[name] is not None}
        self._slots: list[tuple[Any, str]] = list(found.values())
        self._buffers: list[Tensor] = [buffers[name] for buffers, name in self._slots]
        self._count = count

    @torch.no_grad()
    def begin(self, block: range) -> None:
        """Begin an update."""
        self._initial = [buffer.clone() for buffer in self._buffers]
        self._sum = TreeSum(block, self._count)
        self._changed: set[int] = set()

    @torch.no_grad()
    def put(self, values: dict[int, Tensor]) -> None:
        """Put the buffers in place that `take` has returned of a virtual rank; all others are as at the beginning."""
        for slot, value in values.items():
            self._buffers[slot].copy_(value)

    @torch.no_grad()
    def take(self, values: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the buffers that a virtual rank has changed, ``values`` being those of before, and undo its changes."""
        taken = dict(values)
        for slot, (buffers, name) in enumerate(self._slots):
            own, found = self._buffers[slot], buffers[name]
            if slot in taken or found is not own or _may_differ(found, self._initial[slot]):
                taken[slot] = found.clone()
                buffers[name] = own
                own.copy_(self._initial[slot])
        return taken

    @torch.no_grad()
    def undo(self) -> None:
        """Set all buffers to what they were at the beginning of the update."""
        for (buffers, name), own, initial in zip(self._slots, self._buffers, self._initial, strict=True):
            buffers[name] = own
            own.copy_(initial)

    @torch.no_grad()
    def add(self, number: int, rows: int, values: dict[int, Tensor]) -> None:
        """Add the results of virtual rank ``number``, which has had so many rows."""
        leaf: list[Tensor | None] = [None] * len(self._slots)
        for slot, value in values.items() if rows else ():
            initial = self._initial[slot]
            self._changed.add(slot)
            if _is_averaged(value):
                leaf[slot] = torch.where(value == initial, 0, _exact(value) - _exact(initial)) * rows  # also of infinities
            elif number == 0:
                leaf[slot] = value.to(torch.int64) - initial.to(torch.int64)
        self._sum.add(leaf)

    @property
    def changed(self) -> tuple[int, ...]:
        """The numbers of the buffers that a virtual rank of this rank has changed."""
        return tuple(sorted(self._changed))

    @torch.no_grad()
    def finish(self, comm: Communicator, changed: Sequence[int], rows: Tensor) -> None:
        """Set the buffers that have changed on any rank, of ``rows`` rows over all virtual ranks."""
        if not changed:
            return
        like = [_exact(self._buffers[slot]) for slot in changed]
        sums = self._sum.select(changed, like).finish(comm, like)
        for slot, total in zip(changed, sums, strict=True):
            buffer, initial = self._buffers[slot], self._initial[slot]
            assert total is not None
            change = total / rows if _is_averaged(buffer) else total
            buffer.copy_(torch.where(change == 0, _exact(initial), _exact(initial) + change))


def _may_differ(buffer: Tensor, initial: Tensor) -> bool:
    """Return True if a buffer has changed; on an accelerator, which would have to be waited for, always."""
    # Its version does not tell: BatchNorm's kernel on the host changes its statistics without counting that.
    return buffer.device.type != "cpu" or not torch.equal(buffer, initial)


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _exact(buffer: Tensor) -> Tensor:
    """Return a buffer in a dtype in which sums are computed."""
    if not _is_averaged(buffer):
        return buffer.to(torch.int64)
    return buffer.to(torch.promote_types(buffer.dtype, torch.float32 if buffer.device.type == "mps" else torch.float64))
