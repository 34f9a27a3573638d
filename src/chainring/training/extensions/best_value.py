"""BestValue, MaxValue, MinValue: the best mean of a reported value so far, and when it was reached."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chainring._messages import OneTimeWarning
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training.extension import Extension
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.training.triggers.best_value import check_compare

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class BestValue(Extension):
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
        check_compare(compare)
        if not isinstance(key, str):
            raise TypeError(f'the key is that of a reported value, such as "validation/main/loss"; got {key!r}')
        self.key = key
        self.compare = compare
        self.trigger = get_trigger(trigger)
        self._forget()

    def _forget(self) -> None:
        self._means = IntervalMeans([self.key])
        self._best: tuple[float, int, int] | None = None  # the value, its iteration and its epoch
        self._warning = OneTimeWarning()

    @property
    def best_value(self) -> float:
        """The best mean so far; like the other two properties, it raises a `RuntimeError` if there is none yet."""
        return self._checked()[0]

    @property
    def best_iteration(self) -> int:
        """The iteration in which the best mean was reached."""
        return self._checked()[1]

    @property
    def best_epoch(self) -> int:
        """The number of completed epochs when the best mean was reached."""
        return self._checked()[2]

    def _checked(self) -> tuple[float, int, int]:
        if self._best is None:
            raise RuntimeError(f"there is no best value of {self.key!r} yet: its trigger has not fired with one")
        return self._best

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (self.key,)

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
        elif not math.isnan(mean) and (self._best is None or self._is_better(mean, self._best[0])):
            self._best = mean, updater.iteration, updater.epoch

    def _is_better(self, mean: float, best: float) -> bool:
        return mean != best and bool(self.compare(best, mean))

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved_key = serializer("key", self.key)
        best = serializer("best", None if self._best is None else list(self._best))
        self._warning.serialize(serializer)
        self._means.serialize(serializer)
        if not isinstance(serializer, Serializer):
            self._best = None if best is None else (float(best[0]), int(best[1]), int(best[2]))
            if saved_key != self.key:
                self._forget()  # what is known of another key says nothing


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
