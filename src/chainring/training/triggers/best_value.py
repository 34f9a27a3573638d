"""BestValueTrigger, MaxValueTrigger and MinValueTrigger: when a reported value is better than ever before."""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainring.reporting.summary import DictSummary
from chainring.serializers.base import AbstractSerializer, Serializer, has_state, serialize_method
from chainring.training.triggers._get_trigger import get_trigger
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class MeanTrigger(Trigger):
    """Takes the mean of a reported value over an interval, weighted as the updates are. A subclass writes `judge`.

    Args:
        key: of the value in the observation. What is no single number is passed over.
        trigger: when a mean is taken.

    Raises:
        TypeError: the key is no string, or the trigger is of another form.
        ValueError: the trigger's unit or period is none.
    """

    def __init__(self, key: str, trigger: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f'the key is that of a reported value, such as "validation/main/loss"; got {key!r}')
        self.key = key
        self.trigger = get_trigger(trigger)
        self.forget()

    def judge(self, mean: float, trainer: Trainer) -> bool:
        """The answer at the end of an interval in which the value was reported."""
        raise NotImplementedError(f"{type(self).__name__} must define judge(mean, trainer)")

    def forget(self) -> None:
        self._summary = DictSummary()
        self._seen: set[str] = set()  # the keys since the trigger last fired, as long as they may have to be named
        self._has_warned = False

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        trainer.initialize_trigger(self.trigger)

    def ask(self, trainer: Trainer) -> bool:
        observation = trainer.observation
        if self.key in observation:
            self._summary.add({self.key: observation[self.key]}, getattr(trainer.updater, "weight", 1))
        if not self._has_warned:
            self._seen.update(observation)
        if not self.trigger(trainer):
            return False
        means, self._summary = self._summary.over(trainer.comm).compute_mean(), DictSummary()
        if self.key not in means:
            self._warn(trainer.updater.iteration)
        self._seen.clear()
        return self.key in means and self.judge(means[self.key], trainer)

    def _warn(self, iteration: int) -> None:
        """Says once that there was nothing to compare, because a key that is never reported would otherwise go unnoticed."""
        if self._has_warned:
            return
        self._has_warned = True
        if self.key in self._seen:
            what, remedy = f"what was reported as {self.key!r} is no single number", "report one, for example .mean()"
        else:
            what = f"{self.key!r} was not reported; reported were {sorted(self._seen, key=str)}"
            remedy = (
                "check the key; give an interval in which it is reported, and to the extension that has this trigger "
                "a lower priority than to the one that reports it"
            )
        warnings.warn(
            f"{self} has nothing to compare at iteration {iteration}: since its interval began {what}. "
            f"This check counts for nothing, and this is said once; {remedy}",
            stacklevel=5,
        )

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        key, kind = serializer("key", self.key), serializer("trigger_type", type(self.trigger).__name__)
        self._seen = set(serializer("seen", sorted(self._seen, key=str)))
        self._has_warned = serializer("has_warned", self._has_warned)
        self._summary.serialize(serializer["summary"])
        # Settings are never state: what is known of another key says nothing, nor does the state of another trigger.
        if not isinstance(serializer, Serializer) and key != self.key:
            self.forget()
        has_own = serialize_method(self.trigger) is not None or has_state(self.trigger)
        if kind == type(self.trigger).__name__ and has_own:
            serializer.visit("trigger", self.trigger)


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
