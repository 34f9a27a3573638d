"""BestValue, MaxValue, MinValue: the best mean of a reported value so far, and when it was reached."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training.extension import Extension
from chainring.training.triggers import TriggerLike
from chainring.training.triggers.best_value import BestMean

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class BestValue(BestMean, Extension):
    """Keeps the best mean of a reported value so far, and the iteration and epoch in which it was reached.

    In every iteration it adds the value, if it was reported before this extension runs, to a mean with the weight of the
    update. When its trigger fires, it compares the mean since the last firing with the best so far, as `BestValueTrigger`
    does: an equal mean is not better, and NaN never is. A resumed run continues with the saved best value.

    Example::

        best = extensions.BestValue("validation/main/loss", lambda best, new: new < 0.99 * best)
        trainer.extend(best)
        trainer.run()
        print(best.best_value, best.best_iteration, best.best_epoch)

    Args:
        key: the key of the value in the observation, such as ``"validation/main/loss"``; the value is a scalar.
        compare: called with the best mean so far and the new one; returns True if the new one is better.
        trigger: when to compare. ``extend(BestValue(...), trigger=t)`` means the same and takes precedence.

    Raises:
        TypeError: the key is not a string, ``compare`` cannot be called with two numbers, or ``trigger`` is not a trigger.
        ValueError: the period or unit of the trigger is invalid.
    """

    default_name = "best_value"

    def __init__(self, key: str, compare: Callable[[float, float], bool], trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, compare, trigger)

    def forget(self) -> None:
        super().forget()
        self._reached = 0, 0  # the iteration and the epoch of the best mean

    @property
    def best_value(self) -> float:
        """The best mean so far; like the other two properties, it raises a `RuntimeError` if there is none yet."""
        return self._require_best()

    @property
    def best_iteration(self) -> int:
        """The iteration in which the best mean was reached."""
        self._require_best()
        return self._reached[0]

    @property
    def best_epoch(self) -> int:
        """The number of completed epochs when the best mean was reached."""
        self._require_best()
        return self._reached[1]

    def _require_best(self) -> float:
        if self._best is None:
            raise RuntimeError(f"there is no best value of {self.key!r} yet: its trigger has not fired with one")
        return self._best

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def __call__(self, trainer: Trainer) -> None:
        updater = trainer.updater
        mean = self._means.end(trainer).get(self.key)
        if mean is None:
            self._warning.give(
                f"{type(self).__name__} has nothing to compare at iteration {updater.iteration}: since its interval began, "
                f"{self.key!r} was not reported as a single number; reported now are "
                f"{sorted(trainer.observation, key=str)}. This warning is given once; check the key",
            )
        elif self.improve(mean):
            self._reached = updater.iteration, updater.epoch

    def serialize(self, serializer: AbstractSerializer) -> None:
        best = serializer("best", None if self._best is None else [self._best, *self._reached])
        if not isinstance(serializer, Serializer):
            self._best, *reached = best or (None, 0, 0)
            self._reached = tuple(reached)
        self.visit_interval(serializer)


class MaxValue(BestValue):
    """Keeps the greatest mean of a reported value so far; otherwise like `BestValue`.

    Example::

        trainer.extend(extensions.MaxValue("validation/main/accuracy"))

    Args:
        key, trigger: as for `BestValue`.
    """

    default_name = "max_value"

    def __init__(self, key: str, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, operator.lt, trigger)


class MinValue(BestValue):
    """Keeps the least mean of a reported value so far; otherwise like `BestValue`.

    Example::

        trainer.extend(extensions.MinValue("validation/main/loss"))

    Args:
        key, trigger: as for `BestValue`.
    """

    default_name = "min_value"

    def __init__(self, key: str, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, operator.gt, trigger)
