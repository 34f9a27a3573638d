"""MultistepShift: multiplied at chosen calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from chainring.training.extensions._shift import ScalingShift, count, not_negative, power


class MultistepShift(ScalingShift):
    """Sets an attribute to ``init * gamma ** n``, where n is how many of the steps are reached.

    Before the first update it is ``init``; a step of 3 is reached by the third call.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        gamma: 0 or above.
        step_value: the calls at which it is multiplied, in ascending order; at one that stands twice, twice.
        init: the value before the first call; ``None`` takes the one that the groups have.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``gamma`` is below 0, a step below 1, or they do not ascend; or, when the run starts, the groups lack the
            attribute, or differ in it while there is no ``init``.
    """

    def __init__(
        self, attr: str, gamma: float, step_value: Sequence[int], init: float | None, optimizer: Any = None
    ) -> None:
        self.gamma = not_negative("gamma", gamma)
        if isinstance(step_value, str) or not isinstance(step_value, Iterable):
            raise TypeError(f"step_value is a sequence of calls, such as [30, 60]; got {step_value!r}")
        self.step_value = [count("a step of step_value", step) for step in step_value]
        if self.step_value != sorted(self.step_value):
            raise ValueError(f"step_value ascends, got {self.step_value}; sort it")
        super().__init__(attr, init, None, self.gamma > 1, optimizer)

    def factor(self, calls: int) -> float:
        return power(self.gamma, bisect_right(self.step_value, calls))
