"""BestValueTrigger, MaxValueTrigger and MinValueTrigger: when a reported value is better than ever before."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainring.serializers.base import AbstractSerializer
from chainring.training.triggers._mean import MeanTrigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_COMPARE = "compare is called with the best value so far and a new one, and says whether the new one is better"


class BestValueTrigger(MeanTrigger):
    """Fires when the mean of a reported value is better than every mean before.

    Each time that it is asked it takes the value into account, weighted as the updates are. When its own trigger fires, it
    compares the mean since that last fired with the best so far. The first mean is the best so far; one that is equal is
    not better whatever ``compare`` says; NaN never is. It sees what has been reported when it is asked: by
    the update, and by the extensions before its own.

    Args:
        key: of the value in the observation, such as ``"validation/main/loss"``. What is no single number is passed over.
        compare: called with the best mean so far and the new one; whether the new one is better.
        trigger: when a mean is taken and compared.

    Raises:
        TypeError: the key is no string, ``compare`` cannot be called with two numbers, or the trigger is of another form.
        ValueError: the trigger's unit or period is none.
    """

    def __init__(self, key: str, compare: Callable[[float, float], bool], trigger: Any = (1, "epoch")) -> None:
        _check_compare(compare)
        self.compare = compare
        super().__init__(key, trigger)

    def forget(self) -> None:
        super().forget()
        self._best: float | None = None

    def judge(self, mean: float, trainer: Trainer) -> bool:
        return self._is_better(mean)

    def _is_better(self, mean: float) -> bool:
        """Whether a mean is the best so far; if so it is remembered."""
        best = self._best
        if math.isnan(mean) or mean == best:
            return False
        if best is not None and not self.compare(best, mean):
            return False
        self._best = mean
        return True

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._best = serializer("best", self._best)
        super().serialize(serializer)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {_shown(self.compare)}, {_shown(self.trigger)})"

    __repr__ = __str__


class MaxValueTrigger(BestValueTrigger):
    """Fires when the mean of a reported value is greater than every mean before; else as `BestValueTrigger`.

    Args:
        key: of the value in the observation, such as ``"validation/main/accuracy"``.
        trigger: when a mean is taken and compared.
    """

    def __init__(self, key: str, trigger: Any = (1, "epoch")) -> None:
        super().__init__(key, operator.lt, trigger)

    def __str__(self) -> str:
        return f"MaxValueTrigger({self.key!r}, {_shown(self.trigger)})"

    __repr__ = __str__


class MinValueTrigger(BestValueTrigger):
    """Fires when the mean of a reported value is less than every mean before; else as `BestValueTrigger`.

    Args:
        key: of the value in the observation, such as ``"validation/main/loss"``.
        trigger: when a mean is taken and compared.
    """

    def __init__(self, key: str, trigger: Any = (1, "epoch")) -> None:
        super().__init__(key, operator.gt, trigger)

    def __str__(self) -> str:
        return f"MinValueTrigger({self.key!r}, {_shown(self.trigger)})"

    __repr__ = __str__


def _check_compare(compare: Any) -> None:
    """Refuses now what would fail, or be true of everything, at the second comparison, which may be after hours."""
    if not callable(compare):
        raise TypeError(f"{_COMPARE}; got {compare!r}: write lambda best, new: new > best")
    if compare is max or compare is min:  # they return a number, and nearly every number is true
        name = compare.__name__
        raise TypeError(f"{_COMPARE}; {name} gives a number: use {name.capitalize()}ValueTrigger(key)")
    try:
        inspect.signature(compare).bind(0.0, 0.0)
    except ValueError:
        return  # some callables of C have no signature
    except TypeError as error:
        raise TypeError(f"{_COMPARE}; {compare!r} cannot be called so: {error}; write lambda best, new: ...") from None


def _shown(setting: Any) -> str:
    return getattr(setting, "__name__", None) or str(setting)
