"""PolynomialShift: falls to zero as a polynomial."""

from __future__ import annotations

from typing import Any

from chainring.training.extensions._shift import ScalingShift, count, not_negative


class PolynomialShift(ScalingShift):
    """Sets an attribute to ``init * max(1 - calls / max_count, 0) ** rate``.

    Before the first update it is ``init``; from call ``max_count`` on it is 0, or ``target``.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        rate: the exponent, 0 or above.
        max_count: calls until it has fallen.
        init: the value before the first call; ``None`` takes the one that the groups have.
        target: where the shift ends; ``None`` means at 0.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``rate`` is below 0, ``max_count`` below 1, ``target`` is not on the way; or, when the run starts, the
            groups lack the attribute, or differ in it while there is no ``init``.
    """

    def __init__(
        self,
        attr: str,
        rate: float,
        max_count: int,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ) -> None:
        self.rate = not_negative("rate", rate)
        self.max_count = count("max_count", max_count)
        super().__init__(attr, init, target, False, optimizer)

    def factor(self, calls: int) -> float:
        return float(max(1 - calls / self.max_count, 0) ** self.rate)
