"""WarmupShift: from a small value to the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chainring.training.extensions._shift import Shift, count, number

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class WarmupShift(Shift):
    """Moves an attribute from ``warmup_start`` to ``init`` in so many calls, in equal steps.

    Before the first update it is ``warmup_start``. After the last of those calls it leaves the attribute alone, so that
    another shift may go on from there.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        warmup_start: the value before the first call.
        warmup_iter: calls until it has risen.
        init: the value after them; ``None`` takes the one that the groups have.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``warmup_iter`` is below 1; or, when the run starts, the groups lack the attribute, or differ in it while
            there is no ``init``.
    """

    def __init__(self, attr: str, warmup_start: float, warmup_iter: int, init: float | None, optimizer: Any = None) -> None:
        self.warmup_start = number("warmup_start", warmup_start)
        self.warmup_iter = count("warmup_iter", warmup_iter)
        super().__init__(attr, init, optimizer)

    def value(self, calls: int, init: float) -> float:
        if calls >= self.warmup_iter:
            return init
        return (calls * init + (self.warmup_iter - calls) * self.warmup_start) / self.warmup_iter

    def __call__(self, trainer: Trainer) -> None:
        self._calls += 1
        if self._calls <= self.warmup_iter:
            self._write()
