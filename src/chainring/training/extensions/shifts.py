"""What the shifts share: an attribute of the groups of parameters is a function of the number of calls."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.extension import Extension
from chainring.training.extensions._param_groups import constructed_settings, find_optimizer, is_optimizer, same, write

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class Shift(Extension):
    """Sets an attribute in every group of parameters to `value`, once before the first update and then at every call.

    State is the number of calls and, where ``init`` is ``None``, the value that the script had constructed. So a resumed
    run neither decays twice nor starts anew; an attribute that its script constructs otherwise is a changed setting, from
    which the shift is computed then.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``.
        init: the value before the first call; ``None`` takes the one that the groups have.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.
    """

    skip_on_resume = True

    def __init__(self, attr: str, init: float | None, optimizer: Any) -> None:
        if not isinstance(attr, str):
            raise TypeError(f'attr is the name of a setting in param_groups, such as "lr"; got {attr!r}')
        if not (optimizer is None or isinstance(optimizer, str) or is_optimizer(optimizer)):
            raise TypeError(f"optimizer is None, a name in the updater or an optimizer; got {type(optimizer).__name__}")
        self.attr = attr
        self.init = None if init is None else _number("init", init)
        self.optimizer = optimizer
        self._target: Any = None  # the optimizer, from `initialize` on
        self._restored = False
        self._begin()
        if is_optimizer(optimizer):
            self._check(optimizer)
            if self.init is None:
                self._common([group[attr] for group in optimizer.param_groups])

    def _begin(self) -> None:
        self._calls = 0
        self._found: float | None = None
        self._constructed: list[Any] = []
        self._was_last: bool | None = None  # to write, when the state was saved; None where it had not begun

    def value(self, calls: int, init: float) -> float:
        """The value of the attribute after so many calls."""
        raise NotImplementedError(f"{type(self).__name__} must define value(calls, init)")

    def initialize(self, trainer: Trainer) -> None:
        optimizer = find_optimizer(trainer.updater, self.optimizer)
        self._check(optimizer)
        was_last = self._was_last if self._restored else None
        if was_last is None:
            self._begin()
        made = [group.get(self.attr) for group in constructed_settings(trainer.updater, optimizer)]
        is_changed = bool(made and self._constructed) and not same(made, self._constructed)
        if self.init is None and (self._found is None or is_changed):
            self._found = self._common(made if is_changed else [group[self.attr] for group in optimizer.param_groups])
        self._check_init(self._init)
        self._target, self._constructed, self._restored = optimizer, made, False
        if was_last is not False:  # else another extension has written since, and what it wrote has come back
            self._write()

    def __call__(self, trainer: Trainer) -> None:
        self._calls += 1
        self._write()

    @property
    def _init(self) -> float:
        init = self._found if self.init is None else self.init
        assert init is not None
        return init

    def _write(self) -> None:
        value = self.value(self._calls, self._init)
        for group in self._target.param_groups:
            write(group, self.attr, value)

    def _check(self, optimizer: Any) -> None:
        """Refuses an attribute that a group lacks, or that is no number."""
        groups = optimizer.param_groups
        known = sorted(set(groups[0]) - {"params", "param_names"})
        for index, group in enumerate(groups):
            if self.attr not in group:
                raise ValueError(
                    f"a shift sets an attribute of every group of parameters, and group {index} of "
                    f"{type(optimizer).__name__} has no {self.attr!r}; group 0 has {known}"
                )
            value = group[self.attr]
            if isinstance(value, bool) or not (isinstance(value, (int, float)) or _is_scalar(value)):
                raise TypeError(f"a shift sets a number, and {self.attr!r} of {type(optimizer).__name__} is {value!r}")

    def _common(self, values: list[Any]) -> float:
        numbers = [float(value) for value in values]
        if any(value != numbers[0] for value in numbers):
            raise ValueError(
                f"without init a shift begins with the value of the groups of parameters, and they have several values of "
                f"{self.attr!r}: {numbers}; give init, or an LRScheduler, which scales each group by itself"
            )
        return numbers[0]

    def _check_init(self, init: float) -> None:
        """Refuses a beginning that the other settings do not fit."""

    def serialize(self, serializer: AbstractSerializer) -> None:
        is_begun = self._target is not None
        was_last = self._is_last() if is_begun and isinstance(serializer, Serializer) else self._was_last
        attr = serializer("attr", self.attr)
        self._calls = serializer("calls", self._calls)
        self._found = serializer("found", self._found)
        self._constructed = serializer("constructed", self._constructed)
        was_last = serializer("was_last", was_last)
        if not isinstance(serializer, Serializer):
            self._target, self._restored, self._was_last = None, True, was_last
            if attr != self.attr:  # settings are never state: how far another attribute had come says nothing
                self._begin()

    def _is_last(self) -> bool:
        """Whether the groups have the value of this shift, which no other extension has changed since."""
        value = self.value(self._calls, self._init)
        return all(same(group[self.attr], value) for group in self._target.param_groups)


class ScalingShift(Shift):
    """``init`` times a factor that follows from the number of calls, up to a target.

    Args:
        attr: as for `Shift`.
        init: as for `Shift`.
        target: where the shift ends; ``None`` has no end.
        grows: whether the factor grows with the calls, or falls.
        optimizer: as for `Shift`.
    """

    def __init__(self, attr: str, init: float | None, target: float | None, grows: bool, optimizer: Any) -> None:
        self.target = None if target is None else _number("target", target)
        self._grows = grows
        super().__init__(attr, init, optimizer)
        if self.init is not None:
            self._check_init(self.init)

    def factor(self, calls: int) -> float:
        """By what the initial value is multiplied after so many calls."""
        raise NotImplementedError(f"{type(self).__name__} must define factor(calls)")

    def value(self, calls: int, init: float) -> float:
        """The value of the attribute after so many calls."""
        if not init:
            return init
        value = init * self.factor(calls)
        if self.target is None:
            return value
        return min(value, self.target) if self._rises(init) else max(value, self.target)

    def _rises(self, init: float) -> bool:
        return self._grows == (init > 0)

    def _check_init(self, init: float) -> None:
        if self.target is None or not init:
            return
        if init > self.target if self._rises(init) else init < self.target:
            way = "up" if self._rises(init) else "down"
            raise ValueError(
                f"target is where the shift ends, and {self.attr!r} goes {way} from {init} and never comes to "
                f"{self.target}; give a target on its way"
            )


def _power(base: float, exponent: float) -> float:
    """``base ** exponent`` for a base of 0 or above; infinite where it is too large for a float."""
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def _number(name: str, value: Any) -> float:
    """A setting as a finite float.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN or infinite.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is a finite number, got {value!r}")
    return float(value)


def _not_negative(name: str, value: Any) -> float:
    """The same, 0 or above."""
    checked = _number(name, value)
    if checked < 0:
        raise ValueError(f"{name} is 0 or above, got {value!r}")
    return checked


def _count(name: str, value: Any) -> int:
    """A setting that counts calls, at least 1.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below 1.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} counts calls, an integer; got {value!r}")
    if value < 1:
        raise ValueError(f"{name} counts calls, at least 1; got {value!r}")
    return int(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


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
        self.rate = _not_negative("rate", rate)
        super().__init__(attr, init, target, self.rate > 1, optimizer)

    def factor(self, calls: int) -> float:
        return _power(self.rate, calls)


class InverseShift(ScalingShift):
    """Sets an attribute to ``init * (1 + gamma * calls) ** -power``.

    Before the first update it is ``init``.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        gamma: 0 or above.
        power: below 0 the attribute grows.
        init: the value before the first call; ``None`` takes the one that the groups have.
        target: where the shift ends; ``None`` has no end.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``gamma`` is below 0, ``target`` is not on the way; or, when the run starts, the groups lack the
            attribute, or differ in it while there is no ``init``.
    """

    def __init__(
        self,
        attr: str,
        gamma: float,
        power: float,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ) -> None:
        self.gamma = _not_negative("gamma", gamma)
        self.power = _number("power", power)
        super().__init__(attr, init, target, self.power < 0, optimizer)

    def factor(self, calls: int) -> float:
        return _power(1 + self.gamma * calls, -self.power)


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
    return _number(name, values[0]), _number(name, values[1])


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
        self.gamma = _not_negative("gamma", gamma)
        if isinstance(step_value, str) or not isinstance(step_value, Iterable):
            raise TypeError(f"step_value is a sequence of calls, such as [30, 60]; got {step_value!r}")
        self.step_value = [_count("a step of step_value", step) for step in step_value]
        if self.step_value != sorted(self.step_value):
            raise ValueError(f"step_value ascends, got {self.step_value}; sort it")
        super().__init__(attr, init, None, self.gamma > 1, optimizer)

    def factor(self, calls: int) -> float:
        return _power(self.gamma, bisect_right(self.step_value, calls))


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
        self.rate = _not_negative("rate", rate)
        self.max_count = _count("max_count", max_count)
        super().__init__(attr, init, target, False, optimizer)

    def factor(self, calls: int) -> float:
        return float(max(1 - calls / self.max_count, 0) ** self.rate)


class StepShift(ScalingShift):
    """Sets an attribute to ``init * gamma ** floor(calls / step)``.

    Before the first update it is ``init``.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        gamma: 0 or above.
        step: calls between two multiplications.
        init: the value before the first call; ``None`` takes the one that the groups have.
        target: where the shift ends; ``None`` has no end.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``gamma`` is below 0, ``step`` below 1, ``target`` is not on the way; or, when the run starts, the groups
            lack the attribute, or differ in it while there is no ``init``.
    """

    def __init__(
        self,
        attr: str,
        gamma: float,
        step: int,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ) -> None:
        self.gamma = _not_negative("gamma", gamma)
        self.step = _count("step", step)
        super().__init__(attr, init, target, self.gamma > 1, optimizer)

    def factor(self, calls: int) -> float:
        return _power(self.gamma, calls // self.step)


class WarmupShift(Shift):
    """Moves an attribute from ``warmup_start`` to ``init`` in so many calls, in equal steps.

    Before the first update it is ``warmup_start``. After the last of those calls it leaves the attribute alone, so that
    another shift may go on from there.

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        warmup_start: the value before the first call.
        warmup_iter: calls until it has risen.
        init: the value after them; ``None`` takes the one that the groups have.
        optimizer: a name in the updater, or the optimizer; ``None`` is the updater's main one.

    Raises:
        TypeError: a setting is of another kind.
        ValueError: ``warmup_iter`` is below 1; or, when the run starts, the groups lack the attribute, or differ in it while
            there is no ``init``.
    """

    def __init__(self, attr: str, warmup_start: float, warmup_iter: int, init: float | None, optimizer: Any = None) -> None:
        self.warmup_start = _number("warmup_start", warmup_start)
        self.warmup_iter = _count("warmup_iter", warmup_iter)
        super().__init__(attr, init, optimizer)

    def value(self, calls: int, init: float) -> float:
        if calls >= self.warmup_iter:
            return init
        return (calls * init + (self.warmup_iter - calls) * self.warmup_start) / self.warmup_iter

    def __call__(self, trainer: Trainer) -> None:
        self._calls += 1
        if self._calls <= self.warmup_iter:
            self._write()
