"""Triggers: their base class, those of progress and time, pairs such as ``(1, "epoch")`` for them, any or all of several."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from chainring._checks import find_call_error, is_number, plain
from chainring._progress import UNITS, Trainer, to_fraction
from chainring.iterators.base import check_epoch_period
from chainring.serializers.protocol import AbstractSerializer, Serializer, Stateful, visit_if_stateful

TriggerLike: TypeAlias = Callable[[Trainer], bool] | tuple[float, Literal["iteration", "epoch", "second"]] | None
"""A callable of the trainer; ``(period, "iteration")``, ``(period, "epoch")`` or ``(seconds, "second")``; or ``None``."""

_RULE = 'a trigger is None, a callable of the trainer, (period, "iteration"), (period, "epoch") or (seconds, "second")'


class Trigger(Stateful):
    """Base class of triggers that repeat their answer within an iteration, so that several extensions can share one.

    Any callable of one argument, the trainer, can be a trigger; this class adds a memory of the last answer. A subclass
    defines `ask`.

    Example::

        class EveryPowerOfTwo(Trigger):
            def ask(self, trainer):
                return trainer.updater.iteration.bit_count() == 1

    Attributes:
        predictable: True if the answers follow from iterations and epochs alone, so that `Trainer.explain` can plan them.
    """

    predictable = False
    _triggers_inside: Mapping[str, Any] = MappingProxyType({})  # the triggers that it asks, by name
    _asked: int | None = None
    _answer = False
    _restored = False

    def __call__(self, trainer: Trainer) -> bool:
        """Return True if the trigger fires in this iteration."""
        iteration = trainer.updater.iteration
        if iteration != self._asked:
            if self._asked is not None and iteration < self._asked:
                self.forget()  # this is another run, which has not come as far as the one that asked last
            self._answer = self.ask(trainer)
            self._asked = iteration
        return self._answer

    def ask(self, trainer: Trainer) -> bool:
        """Compute the answer for this iteration; called at most once per iteration.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define ask(trainer)")

    def forget(self) -> None:
        """Reset the state, for a run that starts from the beginning."""

    @property
    def watched_keys(self) -> Sequence[str]:
        """The keys of reported values that it needs; a rehearsal raises an error if one of them is not reported."""
        return [key for trigger in self._triggers_inside.values() for key in keys_of(trigger)]

    def identity(self, trainer: Trainer) -> Sequence[str]:
        """Return texts that distinguish it from others of its class, such as a key; a resumed run recognizes it by them.

        See `Extension.identity`.
        """
        return ()

    def for_stopping(self) -> Callable[[Trainer], bool]:
        """Return what it is as a stop trigger, of which intervals are lengths to be reached; by default itself."""
        return self

    def initialize(self, trainer: Trainer) -> None:
        """Prepare for a run, after saved state was restored; refuse a trainer with which the trigger cannot work.

        A trigger without saved state starts from the current iteration: it ignores the progress before the resume, and
        earlier calls by another trainer.
        """
        if not self._restored:
            self._asked = None
            self.forget()
        self._restored = False
        for trigger in self._triggers_inside.values():
            trainer.initialize_trigger(trigger)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the last answer and its iteration; a subclass adds its own state."""
        self._asked = serializer("asked", self._asked)
        self._answer = serializer("answer", self._answer)
        self._restored = self._restored or not isinstance(serializer, Serializer)
        for name, trigger in self._triggers_inside.items():
            serialize_inner_trigger(serializer, name, trigger)


class IntervalTrigger(Trigger):
    """Fires every ``period`` iterations or epochs: when a multiple was crossed since the last call.

    It counts exactly: a period of 0.1 epochs is one tenth. If several multiples are crossed at once, it fires once. It
    never fires before the first update, and in a resumed run it fires at the same iterations as in an uninterrupted one.

    Example::

        trainer.extend(extensions.LogReport(), trigger=IntervalTrigger(0.1, "epoch"))  # or trigger=(0.1, "epoch")

    Args:
        period: the number of iterations or epochs, above 0; it may be a fraction.
        unit: ``"iteration"`` or ``"epoch"``.

    Attributes:
        is_every_iteration: True if it fires after each iteration, so that the trainer need not call it; always False for
            a subclass, which may answer differently.

    Raises:
        ValueError: the period is not above 0, or the unit is unknown.
        TypeError: the period is not a number.
    """

    predictable = True

    def __init__(self, period: float, unit: Literal["iteration", "epoch"]) -> None:
        if unit not in UNITS:
            raise ValueError(f'the unit of an interval is "iteration" or "epoch", got {unit!r}')
        self.period = plain(period)
        self.unit = unit
        self._ratio = to_fraction(period).as_integer_ratio()
        if self._ratio[0] <= 0:
            raise ValueError(f'the period of an interval is above 0, got {period!r}; None as a trigger means "never"')
        self.is_every_iteration = type(self) is IntervalTrigger and unit == "iteration" and self._ratio == (1, 1)
        self.forget()

    def forget(self) -> None:
        self._crossed: int | None = None  # multiples of the period
        self._next_check = -math.inf  # in iterations or epochs; up to there no multiple is crossed

    def initialize(self, trainer: Trainer) -> None:
        if self.unit == "epoch":
            check_epoch_period(trainer.updater, Fraction(*self._ratio))
        super().initialize(trainer)
        if self._crossed is None:
            IntervalTrigger.ask(self, trainer)  # multiples of before do not count

    def __call__(self, trainer: Trainer) -> bool:
        """Return True if a multiple was crossed."""
        # hot path: "the script's extensions" of benchmarks/overhead.py. Far from the next multiple there is no more to do.
        updater = trainer.updater
        progress = updater.iteration if self.unit == "iteration" else updater.epoch_detail
        if progress < self._next_check:
            return False
        return progress > 0 if self.is_every_iteration else super().__call__(trainer)

    def ask(self, trainer: Trainer) -> bool:
        numerator, denominator = self._ratio
        before, now = self._crossed or 0, count_progress(trainer.updater, self.unit) * denominator // numerator
        self._set_crossed(now, fires=now != before)
        return now != before

    def _set_crossed(self, crossed: int, fires: bool = False) -> None:
        self._crossed, self._next_check = crossed, -math.inf
        if not (fires or self.is_every_iteration):  # which, asked again in the same iteration, repeat their answer
            numerator, denominator = self._ratio
            self._next_check = (crossed + 1) * numerator / denominator * (1 - 2**-50)  # a little less, for the rounding

    def for_stopping(self) -> Callable[[Trainer], bool]:
        return ReachedTrigger(self.period, self.unit)

    def get_training_length(self) -> tuple[float, str]:
        """Return the period and its unit, for an extension that shows the progress of training."""
        return self.period, self.unit

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        period = [*self._ratio, self.unit]
        saved_crossed, saved_period = serializer("crossed", self._crossed), serializer("period", period)
        # Settings are never state: a saved count of other multiples says nothing, and the trigger starts from here.
        if not isinstance(serializer, Serializer):
            self._crossed, self._next_check = None, -math.inf
            if saved_crossed is not None and list(saved_period) == period:
                self._set_crossed(saved_crossed, fires=self._answer)

    def __repr__(self) -> str:
        return f"IntervalTrigger({self.period}, {self.unit!r})"


class TimeTrigger(Trigger):
    """Fires every ``period`` seconds of training, measured by a monotonic clock.

    It first fires after one period. After a long pause it fires only once, not several times in a row to catch up, and
    continues with the next multiple of the period. Time between two runs does not count.

    Example::

        trainer.extend(extensions.snapshot(), trigger=TimeTrigger(600))  # or trigger=(600, "second")

    Args:
        period: seconds, above 0.

    Raises:
        ValueError: the period is not above 0.
        TypeError: the period is not a number.
    """

    def __init__(self, period: float) -> None:
        if to_fraction(period) <= 0:
            raise ValueError(f"a period in seconds is above 0, got {period!r}")
        self.period = plain(period)
        self._started_at = time.monotonic()
        self.forget()

    def forget(self) -> None:
        self._restored_seconds = 0.0  # of the saved run, until this one starts
        self._next = float(self.period)  # in seconds since _started_at

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        self._started_at = time.monotonic() - self._restored_seconds
        self._restored_seconds = 0.0

    def ask(self, trainer: Trainer) -> bool:
        seconds = _agreed(trainer, time.monotonic() - self._started_at)
        if seconds < self._next:
            return False
        self._next = self._next_multiple(seconds)
        return True

    def _next_multiple(self, seconds: float) -> float:
        """Return the first multiple of the period that is later."""
        count = math.floor(seconds / self.period) + 1
        # Rounding may make the quotient of a multiple too small by one.
        return count * self.period if count * self.period > seconds else (count + 1) * self.period

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self._restored_seconds = serializer("passed", time.monotonic() - self._started_at)
        saved_next, saved_period = serializer("next", self._next), serializer("period", self.period)
        # Settings are never state: with another period the saved time of the next fire says nothing.
        self._next = saved_next if saved_period == self.period else self._next_multiple(self._restored_seconds)
        self._started_at = time.monotonic() - self._restored_seconds

    def __repr__(self) -> str:
        return f"TimeTrigger({self.period})"


class ManualScheduleTrigger(Trigger):
    """Fires at given points: when one was reached since the last call; several reached at once fire once.

    Example::

        trainer.extend(extensions.ExponentialShift("lr", 0.1), trigger=ManualScheduleTrigger([30, 60], "epoch"))
        every_third_and_the_last = ManualScheduleTrigger([*range(3, 20, 3), 20], "epoch")  # of a run of 20

    Args:
        points: one number, or any iterable of numbers, in iterations or epochs since the start of training.
        unit: ``"iteration"`` or ``"epoch"``.

    Attributes:
        points: the points in ascending order.

    Raises:
        ValueError: the unit is unknown.
        TypeError: a point is not a number.
    """

    predictable = True

    def __init__(self, points: float | Iterable[float], unit: Literal["iteration", "epoch"]) -> None:
        if unit not in UNITS:
            raise ValueError(f'the unit of a schedule is "iteration" or "epoch", got {unit!r}')
        self.points = sorted(map(plain, points) if isinstance(points, Iterable) else [plain(points)], key=to_fraction)
        self.unit = unit
        self._points = [to_fraction(point) for point in self.points]
        self._passed: int | Fraction | None = None  # the progress when it was last asked

    @property
    def finished(self) -> bool:
        """True if the last point has been passed."""
        return not self._points or (self._passed is not None and self._passed >= self._points[-1])

    def forget(self) -> None:
        self._passed = None

    def initialize(self, trainer: Trainer) -> None:
        if self.unit == "epoch":
            for point in self._points:
                check_epoch_period(trainer.updater, point)
        super().initialize(trainer)
        if self._passed is None:
            self._passed = count_progress(trainer.updater, self.unit)

    def ask(self, trainer: Trainer) -> bool:
        if self.finished:
            return False
        before, now = self._passed or 0, count_progress(trainer.updater, self.unit)
        self._passed = now
        return any(before < point <= now for point in self._points)

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        passed = None if self._passed is None else list(self._passed.as_integer_ratio())
        saved_passed, saved_unit = serializer("passed", passed), serializer("unit", self.unit)
        if not isinstance(serializer, Serializer):
            self._passed = Fraction(*saved_passed) if saved_passed is not None and saved_unit == self.unit else None

    def __repr__(self) -> str:
        return f"ManualScheduleTrigger({self.points}, {self.unit!r})"


class OnceTrigger(Trigger):
    """Fires at its first call after an update, and never again.

    Example::

        trainer.extend(print_memory, trigger=OnceTrigger(call_on_resume=True))

    Args:
        call_on_resume: True to fire once more in each resumed run.

    Attributes:
        finished: True if it has fired.
    """

    predictable = True

    def __init__(self, call_on_resume: bool = False) -> None:
        self.call_on_resume = call_on_resume
        self.forget()

    def forget(self) -> None:
        self.finished = False

    def ask(self, trainer: Trainer) -> bool:
        if trainer.updater.iteration == 0:
            return False
        fires, self.finished = not self.finished, True
        return fires

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self.finished = serializer("finished", self.finished)
        if not isinstance(serializer, Serializer) and self.call_on_resume:
            self.finished = False

    def __repr__(self) -> str:
        return f"OnceTrigger({self.call_on_resume})"


class ReachedTrigger:
    """Fires from a point on: a number of iterations, epochs or seconds of training, including those before a resume.

    It depends only on the progress of the trainer and has no state: a run resumed at or past the point stops at once.

    Example::

        trainer = Trainer(updater, ReachedTrigger(20, "epoch"))  # or Trainer(updater, (20, "epoch"))

    Args:
        length: the point, 0 or above; 0 is reached before the first update.
        unit: ``"iteration"``, ``"epoch"`` or ``"second"``.

    Raises:
        ValueError: the length is below 0, or the unit is unknown.
        TypeError: the length is not a number.
    """

    predictable = True

    def __init__(self, length: float, unit: Literal["iteration", "epoch", "second"]) -> None:
        if unit not in (*UNITS, "second"):
            rule = 'the unit of a training length is "iteration", "epoch" or "second"'
            raise ValueError(f'{rule}, got {unit!r}; write for example (20, "epoch")')
        self.length = plain(length)
        self.unit = unit
        self._length = to_fraction(length)
        if self._length < 0:
            raise ValueError(f"a training length is 0 or above, got {length!r}; None trains until the data run out")
        self._float_length = float(length)
        self._first_check = self._float_length * (1 - 2**-50)  # a little before the point; from there on epochs are exact

    def initialize(self, trainer: Trainer) -> None:
        """Refuse epochs if the updater does not count them."""
        if self.unit == "epoch" and self._length:
            check_epoch_period(trainer.updater, self._length)

    def __call__(self, trainer: Trainer) -> bool:
        """Return True if the point is reached."""
        updater = trainer.updater
        if self.unit == "iteration":
            return updater.iteration >= self._float_length  # type: ignore[no-any-return]
        if self.unit == "epoch":
            # hot path: "no extension" of benchmarks/overhead.py. Far from the point a float is enough.
            return updater.epoch_detail >= self._first_check and count_progress(updater, "epoch") >= self._length
        return _agreed(trainer, trainer.elapsed_time) >= self._float_length

    def get_training_length(self) -> tuple[float, str]:
        """Return the length and its unit, for an extension that shows the progress of training."""
        return self.length, self.unit

    def __repr__(self) -> str:
        return f"ReachedTrigger({self.length}, {self.unit!r})"


def _agreed(trainer: Trainer, seconds: float) -> float:
    """Return the seconds of rank 0: clocks differ, and ranks must agree."""
    return float(trainer.comm.broadcast_object(seconds)) if trainer.comm.world.size > 1 else seconds


def never(trainer: Trainer) -> bool:
    """Return False: the trigger that ``None`` stands for."""
    return False


def count_progress(updater: Any, unit: str) -> int | Fraction:
    """Return the iterations, or the epochs, completed so far, exactly.

    Epochs are computed from the main iterator's ``(epoch, position, size)`` if it has them and they agree with
    ``updater.epoch_detail``; otherwise the simplest fraction that rounds to ``epoch_detail`` is returned.
    """
    if unit == "iteration":
        return int(updater.iteration)
    detail = updater.epoch_detail
    try:
        progress = updater.get_iterator("main").progress
    except (KeyError, AttributeError, NotImplementedError):
        progress = None
    if progress is None:
        return to_fraction(detail)
    epoch, position, size = progress
    if detail != epoch + (position / size if size else 0.0):
        return to_fraction(detail)
    return epoch + Fraction(position, size) if size else Fraction(epoch)


def get_trigger(trigger: TriggerLike) -> Callable[[Trainer], bool]:
    """Return the trigger for a setting such as ``(1, "epoch")``.

    Example::

        get_trigger((1, "epoch"))  # IntervalTrigger(1, 'epoch')
        get_trigger((30, "second"))  # TimeTrigger(30)

    Args:
        trigger: a callable of the trainer, which is returned as it is; ``None`` never fires; ``(period, "iteration")``
            and ``(period, "epoch")`` are an `IntervalTrigger`; ``(seconds, "second")`` is a `TimeTrigger`.

    Raises:
        TypeError: ``trigger`` is anything else.
        ValueError: the period is not above 0, or the unit is unknown.
    """
    if trigger is None:
        return never
    if callable(trigger):
        if isinstance(trigger, type):
            raise TypeError(f"{_RULE}; got the class {trigger.__name__}: pass an object of it")
        if error := find_call_error(trigger, None):
            rule = f"a trigger is called with one argument, the trainer, and {trigger!r} cannot be"
            raise TypeError(f"{rule}: {error}; write lambda trainer: ...")
        return trigger
    period, unit = _split_pair(trigger)
    if unit == "second":
        return TimeTrigger(period)
    if unit not in UNITS:
        raise ValueError(f'the unit of a trigger is "iteration", "epoch" or "second", got {unit!r}; write (1, "epoch")')
    return IntervalTrigger(period, unit)


def get_stop_trigger(trigger: TriggerLike) -> Callable[[Trainer], bool]:
    """Return the stop trigger for a setting: like `get_trigger`, but a pair or an interval is a length to be *reached*.

    Raises:
        TypeError: it is neither a trigger nor a pair.
        ValueError: the length is below 0, or the unit is unknown.
    """
    if isinstance(trigger, Trigger):
        return trigger.for_stopping()
    if trigger is None or callable(trigger):
        return get_trigger(trigger)
    return ReachedTrigger(*_split_pair(trigger))


def _split_pair(trigger: Any) -> tuple[Any, Any]:
    is_pair = isinstance(trigger, (tuple, list)) and len(trigger) == 2
    if not is_pair or isinstance(trigger[0], str) or not isinstance(trigger[1], str):
        parts = trigger if isinstance(trigger, (tuple, list)) else [trigger]
        number = next(filter(is_number, parts), 1)
        unit = next((part for part in parts if isinstance(part, str)), "epoch")
        remedy = f'; write ({number}, "{unit}")' if len(parts) <= 2 and unit in (*UNITS, "second") else ""
        raise TypeError(f"{_RULE}; got {trigger!r}{remedy}")
    return trigger[0], trigger[1]


def serialize_inner_trigger(serializer: AbstractSerializer, key: str, trigger: Any) -> None:
    """Save or load the trigger that another one calls; it keeps its own state if a trigger of another class was saved."""
    name = type(trigger).__name__
    if serializer(f"{key}_type", name) == name:
        visit_if_stateful(serializer, key, trigger)


def keys_of(part: Any, attribute: str = "watched_keys") -> list[str]:
    """Return the keys that an extension, a trigger or an updater names; none where that is something else of the user's."""
    keys = getattr(part, attribute, ())
    if isinstance(keys, str):
        return [keys]
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, (tuple, list, set, frozenset)) else []


def describe(trigger: Any, *, as_setting: bool = False) -> str:
    """Return a trigger as text that is the same in every process: with its settings, or the name of a function.

    As the setting by which a resumed run recognizes it, one of a user's class is the name of that: the other text may
    contain state, which is not a setting.
    """
    if as_setting and not type(trigger).__module__.startswith("chainring.") and not hasattr(trigger, "__name__"):
        return type(trigger).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", str(getattr(trigger, "__name__", trigger)))


class CombinedTrigger(Trigger):
    """Asks several triggers in every iteration, and fires when any, or all, of them do; see `any_of` and `all_of`."""

    def __init__(self, combine: Callable[[Iterable[bool]], bool], triggers: Sequence[Callable[[Trainer], bool]]) -> None:
        self._combine, self._triggers = combine, triggers
        units = {getattr(trigger, "unit", "iteration") for trigger in triggers}
        self.unit = next((unit for unit in ("second", "epoch") if unit in units), "iteration")  # for a plan of the run

    @property
    def _triggers_inside(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {f"trigger_{index}": trigger for index, trigger in enumerate(self._triggers)}

    @property
    def predictable(self) -> bool:  # type: ignore[override]
        """True if all of them are."""
        return all(getattr(trigger, "predictable", False) for trigger in self._triggers)

    def ask(self, trainer: Trainer) -> bool:
        return self._combine([bool(trigger(trainer)) for trigger in self._triggers])

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return [describe(trigger, as_setting=True) for trigger in self._triggers]

    def for_stopping(self) -> CombinedTrigger:
        return CombinedTrigger(self._combine, list(map(get_stop_trigger, self._triggers)))

    def get_training_length(self) -> tuple[float, str] | None:
        """Return the length of the only trigger that has one, where it alone ends training; ``None`` where none is known."""
        lengths = [getattr(trigger, "get_training_length", lambda: None)() for trigger in self._triggers]
        known = [length for length in lengths if length is not None]
        return known[0] if self._combine is any and len(known) == 1 else None

    def __repr__(self) -> str:
        return f"{self._combine.__name__}_of({', '.join(map(describe, self._triggers))})"


def any_of(*triggers: TriggerLike) -> Trigger:
    """Return a trigger that fires when one or more of several do.

    All are asked in every iteration, and saved with the run, so that each keeps its own count. As a stop trigger, a pair
    among them is a length to be *reached*.

    Example::

        trainer.extend(extensions.snapshot(), trigger=any_of((1000, "iteration"), (600, "second")))

    Args:
        triggers: one or more, each as for `get_trigger`.

    Raises:
        TypeError: one of them is not a trigger, or there is none.
        ValueError: the period or unit of one is invalid.
    """
    return _combine(any, triggers)


def all_of(*triggers: TriggerLike) -> Trigger:
    """Return a trigger that fires when all of several fire in the same iteration; all else is as for `any_of`.

    Example::

        stop = all_of((10, "epoch"), EarlyStoppingTrigger(max_trigger=None))  # not before ten epochs
    """
    return _combine(all, triggers)


def _combine(combine: Callable[[Iterable[bool]], bool], triggers: Sequence[TriggerLike]) -> CombinedTrigger:
    if not triggers:
        name = f"{combine.__name__}_of"
        raise TypeError(f'{name} takes one trigger or more; write {name}((1, "epoch"), other)')
    return CombinedTrigger(combine, list(map(get_trigger, triggers)))
