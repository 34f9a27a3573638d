"""StepShift: multiplied once in so many calls."""

from __future__ import annotations

from typing import Any

from chainring.training.extensions._shift import ScalingShift, count, not_negative, power


class StepShift(ScalingShift):
    """Sets an attribute to ``init * gamma ** floor(calls / step)``.

    Before the first update it is ``init``.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        gamma: 0 or above.
        step: calls between two multiplications.
        init: the value before the first call; ``None`` takes the one that the groups have.
        target: where the shift ends; ``None`` has no end.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``gamma`` is below 0, ``step`` below 1, ``target`` is not on the way; or, when the run starts, the groups
            lack the attribute, or differ in it while there is no ``init``.
    """

    def __init__(
        self,
        attr: str,
        gamma: float,
        step: int,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ) -> None:
        self.gamma = not_negative("gamma", gamma)
        self.step = count("step", step)
        super().__init__(attr, init, target, self.gamma > 1, optimizer)

    def factor(self, calls: int) -> float:
        return power(self.gamma, calls // self.step)
