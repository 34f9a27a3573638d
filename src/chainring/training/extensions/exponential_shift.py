"""ExponentialShift: multiplied by a rate at every call."""

from __future__ import annotations

from typing import Any

from chainring.training.extensions._shift import ScalingShift, not_negative, power


class ExponentialShift(ScalingShift):
    """Sets an attribute to ``init * rate ** calls``.

    Before the first update it is ``init``. With ``trigger=(1, "epoch")`` it is multiplied by ``rate`` after every epoch.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        rate: 0 or above.
        init: the value before the first call; ``None`` takes the one that the groups have.
        target: where the shift ends; ``None`` has no end.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``rate`` is below 0, ``target`` is not on the way; or, when the run starts, the groups lack the
            attribute, or differ in it while there is no ``init``.
    """

    def __init__(
        self, attr: str, rate: float, init: float | None = None, target: float | None = None, optimizer: Any = None
    ) -> None:
        self.rate = not_negative("rate", rate)
        super().__init__(attr, init, target, self.rate > 1, optimizer)

    def factor(self, calls: int) -> float:
        return power(self.rate, calls)
