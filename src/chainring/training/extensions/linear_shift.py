"""LinearShift: from one value to another in a straight line."""

from __future__ import annotations

from typing import Any

from chainring.training.extensions._shift import Shift, number


class LinearShift(Shift):
    """Moves an attribute from one value to another between two calls, in equal steps.

    Up to the first of the two calls, and before the first update, it has the first value; from the second on the second.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        value_range: the first value and the second.
        time_range: how many calls have been made when it begins to move, and when it has moved.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: the second time lies before the first; or, when the run starts, the groups lack the attribute.
    """

    def __init__(
        self, attr: str, value_range: tuple[float, float], time_range: tuple[int, int], optimizer: Any = None
    ) -> None:
        self.value_range = _pair("value_range", value_range)
        self.time_range = _pair("time_range", time_range)
        if self.time_range[0] > self.time_range[1]:
            raise ValueError(
                f"time_range is the call at which the shift begins and that at which it ends, got {time_range!r}"
            )
        super().__init__(attr, self.value_range[0], optimizer)

    def value(self, calls: int, init: float) -> float:
        (begin, end), (first, last) = self.time_range, self.value_range
        if calls <= begin:
            return first
        if calls >= end:
            return last
        return first + (calls - begin) / (end - begin) * (last - first)


def _pair(name: str, values: Any) -> tuple[float, float]:
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != 2:
        raise TypeError(f"{name} is a pair of numbers, got {values!r}")
    return number(name, values[0]), number(name, values[1])
