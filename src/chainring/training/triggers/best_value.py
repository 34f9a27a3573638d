"""Triggers that compare the means of a reported value: the best value so far, and early stopping."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from chainring._checks import find_call_error, is_integer, is_number, plain
from chainring._hints import hinting
from chainring._messages import OneTimeWarning, info
from chainring._progress import Trainer
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training.triggers.base import Trigger, TriggerLike, describe, get_stop_trigger, get_trigger

_RULE = "compare is called with the best value so far and a new one, and returns True if the new one is better"
_BETTER = dict.fromkeys(
    ["loss", "error", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "crossentropy"], "min"
) | dict.fromkeys(["accuracy", "auc", "auroc", "f1", "miou", "bleu"], "max")
_WORDS = re.compile(r"(?i:cross[_ -]?entropy|miou|f1(?!\d))|[A-Z]?[a-z]+|[A-Z]+")
_WITHOUT_MEANING = {"top", "total"}  # at the end: accuracy_top5, loss_total
_DOUBTFUL = {"neg", "negative", "minus", "inverse", "acc"}


def mode_of_key(key: str) -> Literal["max", "min"] | None:
    """Return whether greater or less is better, where the last word of a key leaves no doubt; ``None`` for any other.

    ``main/loss`` and ``val_top1_error`` are ``"min"``, ``top-5 accuracy`` and ``f1`` are ``"max"``; ``acc``,
    ``accuracy_loss`` and ``negative_loss`` may mean either.
    """
    words = [re.sub("[_ -]", "", word.lower()) for word in _WORDS.findall(key)]
    while words and words[-1] in _WITHOUT_MEANING:
        words.pop()
    modes: set[Any] = {_BETTER[word] for word in words if word in _BETTER}
    is_clear = len(modes) == 1 and words[-1] in _BETTER and not _DOUBTFUL.intersection(words)
    return modes.pop() if is_clear else None


def require_mode(key: str, mode: str, call: str) -> Literal["max", "min"]:
    """Return whether greater or less is better, as ``mode`` says or, with ``"auto"``, the key; ``call`` is for the error."""
    if mode not in ("auto", "max", "min"):
        raise ValueError(f'mode is "auto", "max" or "min", got {mode!r}')
    found = mode_of_key(key) if mode == "auto" and isinstance(key, str) else mode
    if found is None:
        raise ValueError(
            f"whether greater or less is better does not follow from the key {key!r}; write "
            f'{call}, mode="max") if greater is better, otherwise mode="min"'
        )
    return found  # type: ignore[return-value]


class BestMean:
    """The best mean of a reported value so far, for the trigger that fires and the extension that keeps it."""

    def __init__(self, key: str, compare: Callable[[float, float], bool], trigger: TriggerLike = (1, "epoch")) -> None:
        if not callable(compare):
            raise TypeError(f"{_RULE}; got {compare!r}: write lambda best, new: new > best")
        if compare is max or compare is min:  # they return a number, and nearly every number is true
            name = compare.__name__
            raise TypeError(f"{_RULE}; {name} returns a number: use {name.capitalize()}ValueTrigger(key)")
        if error := find_call_error(compare, 0.0, 0.0):
            raise TypeError(f"{_RULE}; {compare!r} cannot be called so: {error}; write lambda best, new: ...")
        if not isinstance(key, str):
            raise TypeError(f'the key is that of a reported value, such as "validation/main/loss"; got {key!r}')
        self.key, self.compare = key, compare
        self.trigger: Any = get_trigger(trigger)
        self._warning = OneTimeWarning()
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._means = IntervalMeans([self.key])
        self._is_asked = False
        self._best: float | None = None
        self._warning.was_given = False

    @property
    def watched_keys(self) -> Sequence[str]:
        return (self.key, *super().watched_keys)  # type: ignore[misc]

    def identity(self, trainer: Trainer) -> Sequence[str]:
        """Return the key."""
        return (self.key,)

    def improve(self, mean: float) -> bool:
        """Return True if a mean is better than the best so far, which it then replaces."""
        best = self._best
        if math.isnan(mean) or mean == best or (best is not None and not self.compare(best, mean)):
            return False
        self._best = mean
        return True

    def visit_interval(self, serializer: AbstractSerializer) -> None:
        """Save or load the open interval; last, because what is known of another key says nothing and is forgotten."""
        saved_key = serializer("key", self.key)
        self._warning.serialize(serializer)
        self._means.serialize(serializer)
        if not isinstance(serializer, Serializer) and saved_key != self.key:
            self.forget()


class BestValueTrigger(BestMean, Trigger):
    """Fires when the mean of a reported value is better than all earlier means.

    At each call it adds the value to a mean, with the weight of the update. When its own ``trigger`` fires, it compares
    the mean since that last fired with the best so far. The first mean is the best so far; an equal mean is not better,
    whatever ``compare`` returns, and NaN never is. It sees the values that were reported before it is called: by the
    update, and by extensions that run earlier.

    Example::

        best = BestValueTrigger("validation/main/loss", lambda best, new: new < 0.99 * best)
        trainer.extend(extensions.snapshot(filename="best"), trigger=best)

    Args:
        key: the key of the value in the observation, such as ``"validation/main/loss"``. Only scalars are used.
        compare: called with the best mean so far and the new one; returns True if the new one is better.
        trigger: when the mean is compared and restarted.

    Raises:
        TypeError: the key is not a string, ``compare`` cannot be called with two numbers, or ``trigger`` is not a trigger.
        ValueError: the period or unit of ``trigger`` is invalid.
    """

    _fires_without_value = False

    @property
    def _subject(self) -> str:
        return str(self)

    def forget(self) -> None:
        super().forget()
        self._seen: set[str] = set()  # the keys reported in this interval, as long as the warning may have to name them

    @property
    def _triggers_inside(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {"trigger": self.trigger}

    def ask(self, trainer: Trainer) -> bool:
        if not self._is_asked:  # else again, since ranks were lost meanwhile
            self._means.observe(trainer)
        self._is_asked = True
        answer = self._compare(trainer)
        self._is_asked = False
        return answer

    def _compare(self, trainer: Trainer) -> bool:
        if not self._warning.was_given:
            self._seen.update(trainer.observation)
        if not self.trigger(trainer):
            return False
        means = self._means.end(trainer)
        if self.key not in means:  # otherwise a key that is never reported would go unnoticed
            first, last = self.key.partition("/")[0], self.key.rpartition("/")[2]  # as in a heading, "val/loss"
            near = [key for key in sorted(map(str, self._seen)) if key.startswith(first) and key.endswith(f"/{last}")]
            near += difflib.get_close_matches(self.key, map(str, self._seen), 1)
            cause = f"{self.key!r} was not reported; reported were {sorted(self._seen, key=str)}"
            cause += f" (did you mean {near[0]!r}?)" if near else ""
            remedy = "check the key; give a longer interval, or this extension a lower priority than the one that reports it"
            if self.key in self._seen:
                cause = f"the value reported as {self.key!r} is not a single number"
                remedy = "report one, for example .mean()"
            iteration = trainer.updater.iteration
            self._warning.give(
                f"{self._subject} has nothing to compare at iteration {iteration}: since its interval began, {cause}. "
                f"This check does not count, and this warning is given once; {remedy}",
            )
        self._seen.clear()
        return self.check(means[self.key], trainer) if self.key in means else self._fires_without_value

    def check(self, mean: float, trainer: Trainer) -> bool:
        """Return True if the mean of the interval that ends makes the trigger fire."""
        return self.improve(mean)

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self._best = serializer("best", self._best)
        self._seen = set(serializer("seen", sorted(self._seen, key=str)))
        self.visit_interval(serializer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, {describe(self.compare)}, {describe(self.trigger)})"


class RankingTrigger(BestValueTrigger):
    """Fires whenever its own ``trigger`` does, and then has the mean by which ``snapshot(keep_best=)`` ranks."""

    _fires_without_value = True

    def __init__(self, key: str, trigger: TriggerLike) -> None:
        super().__init__(key, operator.gt, trigger)
        self._value: tuple[int, float] | None = None

    @property
    def _subject(self) -> str:
        return f"snapshot(keep_best=({self.key!r}, ...))"

    def check(self, mean: float, trainer: Trainer) -> bool:
        self._value = trainer.updater.iteration, mean
        return True

    def value_of(self, iteration: int) -> float | None:
        """Return the mean with which it fired in an iteration, ``None`` if it did not, or had none."""
        return self._value[1] if self._value is not None and self._value[0] == iteration else None

    def __repr__(self) -> str:
        return describe(self.trigger)


class MaxValueTrigger(BestValueTrigger):
    """Fires when the mean of a reported value is greater than all earlier means; otherwise like `BestValueTrigger`.

    Example::

        trainer.extend(extensions.snapshot(filename="best"), trigger=MaxValueTrigger("validation/main/accuracy"))

    Args:
        key, trigger: as for `BestValueTrigger`.
    """

    def __init__(self, key: str, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, operator.lt, trigger)

    def __repr__(self) -> str:
        return f"MaxValueTrigger({self.key!r}, {describe(self.trigger)})"


class MinValueTrigger(BestValueTrigger):
    """Fires when the mean of a reported value is less than all earlier means; otherwise like `BestValueTrigger`.

    Example::

        trainer.extend(extensions.snapshot(filename="best"), trigger=MinValueTrigger("validation/main/loss"))

    Args:
        key, trigger: as for `BestValueTrigger`.
    """

    def __init__(self, key: str, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(key, operator.gt, trigger)

    def __repr__(self) -> str:
        return f"MinValueTrigger({self.key!r}, {describe(self.trigger)})"


class EarlyStoppingTrigger(BestValueTrigger):
    """Stop trigger that fires after ``patience`` checks in a row without improvement, or when ``max_trigger`` fires.

    A check compares the mean since the last check with the best so far, as in `BestValueTrigger`. The first mean is an
    improvement; an equal one and NaN are not, nor is one that is better by ``min_delta`` or less. A check of an interval in
    which the value was not reported does not count and does not reset the count; the first one gives a warning.

    As the trigger of an extension, it fires from the check that exhausts the patience until the next improvement.

    Example::

        stop = EarlyStoppingTrigger(monitor="validation/main/loss", patience=5, max_trigger=(100, "epoch"))
        trainer = Trainer(updater, stop)

    Args:
        check_trigger: when the mean is compared and restarted.
        monitor: the key of the value in the observation, such as ``"validation/main/loss"``.
        patience: the number of checks in a row without improvement after which training stops.
        mode: ``"max"`` if greater is better, ``"min"`` if less is better; ``"auto"`` is ``"max"`` for a key whose last
            word is ``accuracy``, ``auc``, ``auroc``, ``f1``, ``miou`` or ``bleu``, ``"min"`` for ``loss``, ``error``,
            ``perplexity``, ``ppl``, ``mse``, ``rmse``, ``mae``, ``wer``, ``cer`` or ``cross_entropy``. Others need a mode.
        verbose: True to print a line when training stops early.
        max_trigger: ends training in any case; as for a trainer's stop trigger, a pair is a length to be *reached*.
            ``None`` sets no limit.
        min_delta: by how much more than this a mean must be better than the best so far, 0 or above.
        threshold: a mean that is at least as good as this stops training at once.
        min_iterations: until so many iterations nothing but ``max_trigger`` stops training; checks are counted.
        check_finite: True to stop training at once where a mean is NaN or infinite.

    Attributes:
        mode: ``"max"`` or ``"min"``.

    Raises:
        TypeError: the key is not a string, the patience is not an integer, or a trigger is not a trigger.
        ValueError: the patience is below 1, the mode is unknown or does not follow from the key, or the period or unit of a
            trigger is invalid.
    """

    @hinting({})
    def __init__(
        self,
        check_trigger: TriggerLike = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int = 3,
        mode: Literal["auto", "max", "min"] = "auto",
        verbose: bool = False,
        max_trigger: TriggerLike = (100, "epoch"),
        *,
        min_delta: float = 0.0,
        threshold: float | None = None,
        min_iterations: int = 0,
        check_finite: bool = False,
    ) -> None:
        if isinstance(check_trigger, str):
            raise TypeError(
                f'first comes when to check, such as (1, "epoch"), and the key has a name, monitor={check_trigger!r}: '
                f"got the string {check_trigger!r} first"
            )
        for name, count in (("patience", patience), ("min_iterations", min_iterations)):
            if not is_integer(count):
                raise TypeError(f"{name} is the number of {name.partition('_')[2] or 'checks'}, an integer; got {count!r}")
        if patience < 1:
            raise ValueError(f"patience is the number of checks without improvement, at least 1; got {patience!r}")
        if min_iterations < 0:
            raise ValueError(
                f"min_iterations is the number of iterations before training stops, 0 or above; got {min_iterations!r}"
            )
        if not is_number(min_delta) or not 0 <= min_delta < math.inf:
            raise ValueError(
                f"min_delta is the least difference of a better mean, a number of 0 or above; got {min_delta!r}"
            )
        if threshold is not None and (not is_number(threshold) or math.isnan(threshold)):
            raise ValueError(f"threshold is the mean that is good enough, a number; got {threshold!r}")
        self.patience, self.verbose = int(patience), verbose
        self.max_trigger = get_stop_trigger(max_trigger)
        self.mode = require_mode(monitor, mode, f"EarlyStoppingTrigger(monitor={monitor!r}")
        self._sign = 1 if self.mode == "max" else -1
        self._min_delta, self._threshold = plain(min_delta), plain(threshold)
        self._min_iterations, self._check_finite = int(min_iterations), check_finite
        super().__init__(monitor, self._is_better, check_trigger)

    def _is_better(self, best: float, new: float) -> bool:
        return self._sign * (new - best) > self._min_delta

    def forget(self) -> None:
        super().forget()
        self._count = 0  # checks in a row without improvement
        self._last: float | None = None  # the mean of the last check

    @property
    def _triggers_inside(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {**super()._triggers_inside, "max_trigger": self.max_trigger}

    def __call__(self, trainer: Trainer) -> bool:
        # All are settings, and the answer is not kept: a run that is resumed with more patience continues.
        is_reached = self.max_trigger(trainer)
        super().__call__(trainer)
        return is_reached or (trainer.updater.iteration >= self._min_iterations and self._reason() is not None)

    def check(self, mean: float, trainer: Trainer) -> bool:
        """Return True if this check lets training stop."""
        before = self._reason()
        self._last, self._count = mean, 0 if self.improve(mean) else self._count + 1
        reason = self._reason()
        if self.verbose and reason is not None and before is None:
            updater = trainer.updater
            info(f"training stops early, at epoch {updater.epoch}, iteration {updater.iteration}: {self.key} {reason}")
        return reason is not None

    def _reason(self) -> str | None:
        """Return why training may stop, ``None`` if it may not."""
        last = math.nan if self._last is None else self._last
        if self._threshold is not None and self._sign * (last - self._threshold) >= 0:
            return f"was {last}, as good as the threshold {self._threshold}"
        if self._check_finite and self._last is not None and not math.isfinite(last):
            return f"was {last}, which is not finite"
        if self._count >= self.patience:
            return f"has been no better than {self._best} in {self.patience} checks, and was {last} in the last"
        return None

    def get_training_length(self) -> tuple[float, str] | None:
        """Return the length of ``max_trigger`` and its unit; ``None`` if it has none."""
        length: tuple[float, str] | None = getattr(self.max_trigger, "get_training_length", lambda: None)()
        return length

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._count = serializer("count", self._count)
        self._last = serializer("last", self._last)
        saved_mode = serializer("mode", self.mode)
        super().serialize(serializer)
        if saved_mode != self.mode:
            self._best, self._count, self._last = None, 0, None

    def __repr__(self) -> str:
        return f"EarlyStoppingTrigger({self.trigger}, {self.key!r}, {self.patience}, {self.mode!r})"
