"""The shifts: extensions that set an attribute of the parameter groups to a function of the number of their calls."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from chainring._checks import is_integer, is_number
from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training.extension import Extension
from chainring.training.extensions.lr_scheduler import (
    OptimizerLike,
    are_equal,
    constructed_settings,
    is_optimizer,
    name_of,
    set_value,
)
from chainring.training.trainer import Trainer


class Shift(Extension):
    """Sets an attribute in every parameter group to `value`, once before the first update and then at every call.

    The state is the number of calls and, if ``init`` is ``None``, the value with which the script constructed the
    optimizer. If the script of a resumed run uses another value, the shift is computed from that.
    """

    skip_on_resume = True

    def __init__(self, attr: str, init: float | None, optimizer: OptimizerLike, target: float | None = None) -> None:
        if not isinstance(attr, str):
            raise TypeError(f'attr is the name of a setting in param_groups, such as "lr"; got {attr!r}')
        if not (optimizer is None or isinstance(optimizer, str) or is_optimizer(optimizer)):
            raise TypeError(f"optimizer is None, a name in the updater or an optimizer; got {type(optimizer).__name__}")
        self.attr = attr
        self.init = None if init is None else _check_number("init", init)
        self.optimizer = optimizer
        self.target = None if target is None else _check_number("target", target)
        self._running_optimizer: Any = None  # the optimizer, from `initialize` on
        self._reset()
        if self.init is not None:
            self._check_target(self.init)
        if is_optimizer(optimizer):
            values = self._values(optimizer)
            if self.init is None:
                self._common_value(values)

    def _reset(self) -> None:
        self._calls = 0
        self._initial_value: float | None = None  # the initial value, where `init` is None
        self._constructed: list[Any] = []
        self._was_last: bool | None = None  # in the saved run, whether it set the attribute last; None without one

    def factor(self, calls: int) -> float:
        """Return the factor of the initial value after a number of calls; a subclass defines this method or `value`."""
        raise NotImplementedError(f"{type(self).__name__} must define factor(calls) or value(calls, init)")

    def value(self, calls: int, init: float) -> float:
        """Return the value of the attribute after a number of calls."""
        if not init:
            return init
        value = init * self.factor(calls)
        return value if self.target is None else sorted((init, value, self.target))[1]

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (name_of(self.optimizer, trainer.updater), self.attr)

    def sets_lr(self, optimizer: Any) -> bool:
        return self.attr == "lr" and optimizer is self._running_optimizer

    def initialize(self, trainer: Trainer) -> None:
        name = "main" if self.optimizer is None else self.optimizer
        optimizer: Any = trainer.updater.get_optimizer(name) if isinstance(name, str) else name
        values = self._values(optimizer)
        was_last, self._was_last = self._was_last, None
        if was_last is None:
            self._reset()
        constructed = [group.get(self.attr) for group in constructed_settings(trainer.updater, optimizer)]
        is_changed = bool(constructed and self._constructed) and not are_equal(constructed, self._constructed)
        if self.init is None and (self._initial_value is None or is_changed):
            self._initial_value = self._common_value(constructed if is_changed else values)
        self._check_target(self._initial())
        self._running_optimizer, self._constructed = optimizer, constructed
        if was_last is not False:  # otherwise another extension had set the attribute since, and its value was restored
            self._set_value()

    def __call__(self, trainer: Trainer) -> None:
        self._calls += 1
        self._set_value()

    def _set_value(self) -> None:
        value = self.value(self._calls, self._initial())
        for group in self._running_optimizer.param_groups:
            set_value(group, self.attr, value)

    def _initial(self) -> float:
        return self._initial_value if self.init is None else self.init  # type: ignore[return-value]

    def _values(self, optimizer: Any) -> list[Any]:
        """Return the value of each group; refuse a group without the attribute, and anything but a number."""
        groups, name = optimizer.param_groups, type(optimizer).__name__
        for index, group in enumerate(groups):
            if self.attr not in group:
                known = sorted(set(groups[0]) - {"params", "param_names"})
                raise ValueError(
                    f"a shift sets an attribute of every parameter group, and group {index} of {name} has no "
                    f"{self.attr!r}; group 0 has {known}"
                )
            value = group[self.attr]
            is_scalar_tensor = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
            if not is_number(value) and not is_scalar_tensor:
                raise TypeError(f"a shift sets a number, and {self.attr!r} of {name} is {value!r}")
        return [group[self.attr] for group in groups]

    def _common_value(self, values: list[Any]) -> float:
        numbers = [float(value) for value in values]
        if any(value != numbers[0] for value in numbers):
            raise ValueError(
                f"without init a shift starts with the value of the parameter groups, and they have several values of "
                f"{self.attr!r}: {numbers}; give init, or use an LRScheduler, which scales each group by itself"
            )
        return numbers[0]

    def _check_target(self, init: float) -> None:
        if self.target is None or not init:
            return
        rises = (self.factor(sys.maxsize) > 1) == (init > 0)
        if init > self.target if rises else init < self.target:
            raise ValueError(
                f"target is where the shift ends, and {self.attr!r} goes {'up' if rises else 'down'} from {init} and "
                f"never reaches {self.target}; give a target that it reaches"
            )

    def serialize(self, serializer: AbstractSerializer) -> None:
        was_last = self._was_last
        if self._running_optimizer is not None and isinstance(serializer, Serializer):
            value = self.value(self._calls, self._initial())
            was_last = all(are_equal(current, value) for current in self._values(self._running_optimizer))
        attr = serializer("attr", self.attr)
        self._calls = serializer("calls", self._calls)
        self._initial_value = serializer("found", self._initial_value)
        self._constructed = serializer("constructed", self._constructed)
        was_last = serializer("was_last", was_last)
        if not isinstance(serializer, Serializer):
            self._running_optimizer, self._was_last = None, was_last
            if attr != self.attr:  # settings are never state: what is known of another attribute says nothing
                self._reset()


class ExponentialShift(Shift):
    """Sets an attribute to ``init * rate ** calls``.

    Before the first update it is ``init``.

    Example::

        trainer.extend(extensions.ExponentialShift("lr", 0.9, target=1e-5), trigger=(1, "epoch"))

    Args:
        attr: ``"lr"``, ``"momentum"``, ``"weight_decay"`` or any other number in ``optimizer.param_groups``; it is set in
            every group.
        rate: the factor of each call, 0 or above.
        init: the value before the first call; ``None`` takes the current value of the groups.
        target: the value at which the shift ends; ``None`` sets no end.
        optimizer: the optimizer, or its name in the updater; ``None`` is the updater's main optimizer.

    Raises:
        ValueError: ``target`` cannot be reached; or, when the run starts, the groups lack the attribute, or have different
            values of it and ``init`` is not given.
    """

    def __init__(
        self, attr: str, rate: float, init: float | None = None, target: float | None = None, optimizer: OptimizerLike = None
    ) -> None:
        self.rate = _check_number("rate", rate, minimum=0)
        super().__init__(attr, init, optimizer, target)

    def factor(self, calls: int) -> float:
        return _power(self.rate, calls)


class InverseShift(Shift):
    """Sets an attribute to ``init * (1 + gamma * calls) ** -power``.

    Example::

        trainer.extend(extensions.InverseShift("lr", gamma=1e-4, power=0.75))

    Args:
        gamma: 0 or above.
        power: the negative exponent; if it is below 0 the attribute grows.
        attr, init, target, optimizer: as for `ExponentialShift`.
    """

    def __init__(
        self,
        attr: str,
        gamma: float,
        power: float,
        init: float | None = None,
        target: float | None = None,
        optimizer: OptimizerLike = None,
    ) -> None:
        self.gamma = _check_number("gamma", gamma, minimum=0)
        self.power = _check_number("power", power)
        super().__init__(attr, init, optimizer, target)

    def factor(self, calls: int) -> float:
        return _power(1 + self.gamma * calls, -self.power)


class LinearShift(Shift):
    """Changes an attribute linearly from one value to another between two calls.

    Before the first of these calls, and before the first update, it has the first value; after the second, the second.

    Example::

        trainer.extend(extensions.LinearShift("lr", (0.1, 0.0), (10_000, 20_000)))

    Args:
        value_range: the first and the second value.
        time_range: the numbers of calls at which the change begins and ends.
        attr, optimizer: as for `ExponentialShift`.
    """

    def __init__(
        self, attr: str, value_range: tuple[float, float], time_range: tuple[int, int], optimizer: OptimizerLike = None
    ) -> None:
        self.value_range = _check_pair("value_range", value_range)
        self.time_range = _check_pair("time_range", time_range)
        if self.time_range[0] > self.time_range[1]:
            raise ValueError(
                f"time_range is the call at which the shift begins and the one at which it ends, got {time_range!r}"
            )
        super().__init__(attr, self.value_range[0], optimizer)

    def value(self, calls: int, init: float) -> float:
        (begin, end), (first, last) = self.time_range, self.value_range
        if calls <= begin:
            return first
        if calls >= end:
            return last
        return first + (calls - begin) / (end - begin) * (last - first)


class MultistepShift(Shift):
    """Sets an attribute to ``init * gamma ** n``, where n is the number of steps that have been reached.

    A step of 3 is reached by the third call.

    Example::

        trainer.extend(extensions.MultistepShift("lr", 0.1, [30, 60], init=0.1), trigger=(1, "epoch"))

    Args:
        gamma: 0 or above.
        step_value: the calls at which it is multiplied, in ascending order; a repeated number counts twice.
        attr, init, optimizer: as for `ExponentialShift`.
    """

    def __init__(
        self, attr: str, gamma: float, step_value: Sequence[int], init: float | None, optimizer: OptimizerLike = None
    ) -> None:
        self.gamma = _check_number("gamma", gamma, minimum=0)
        if isinstance(step_value, str) or not isinstance(step_value, Iterable):
            raise TypeError(f"step_value is a sequence of calls, such as [30, 60]; got {step_value!r}")
        self.step_value = [_check_count("a step of step_value", step) for step in step_value]
        if self.step_value != sorted(self.step_value):
            raise ValueError(f"step_value ascends, got {self.step_value}; sort it")
        super().__init__(attr, init, optimizer)

    def factor(self, calls: int) -> float:
        return _power(self.gamma, bisect_right(self.step_value, calls))


class PolynomialShift(Shift):
    """Sets an attribute to ``init * max(1 - calls / max_count, 0) ** rate``.

    From call ``max_count`` on it is 0, or ``target``.

    Example::

        trainer.extend(extensions.PolynomialShift("lr", rate=2, max_count=20_000))

    Args:
        rate: the exponent, 0 or above.
        max_count: the number of calls until it is 0.
        target: the value at which the shift ends; ``None`` means 0.
        attr, init, optimizer: as for `ExponentialShift`.
    """

    def __init__(
        self,
        attr: str,
        rate: float,
        max_count: int,
        init: float | None = None,
        target: float | None = None,
        optimizer: OptimizerLike = None,
    ) -> None:
        self.rate = _check_number("rate", rate, minimum=0)
        self.max_count = _check_count("max_count", max_count)
        super().__init__(attr, init, optimizer, target)

    def factor(self, calls: int) -> float:
        return float(max(1 - calls / self.max_count, 0) ** self.rate)


class StepShift(Shift):
    """Sets an attribute to ``init * gamma ** floor(calls / step)``.

    Example::

        trainer.extend(extensions.StepShift("lr", 0.1, step=30), trigger=(1, "epoch"))

    Args:
        gamma: 0 or above.
        step: the number of calls between two multiplications.
        attr, init, target, optimizer: as for `ExponentialShift`.
    """

    def __init__(
        self,
        attr: str,
        gamma: float,
        step: int,
        init: float | None = None,
        target: float | None = None,
        optimizer: OptimizerLike = None,
    ) -> None:
        self.gamma = _check_number("gamma", gamma, minimum=0)
        self.step = _check_count("step", step)
        super().__init__(attr, init, optimizer, target)

    def factor(self, calls: int) -> float:
        return _power(self.gamma, calls // self.step)


class WarmupShift(Shift):
    """Changes an attribute linearly from ``warmup_start`` to ``init`` in ``warmup_iter`` calls.

    Before the first update it is ``warmup_start``. After the last of those calls it no longer sets the attribute, so that
    another shift may continue from there.

    Example::

        trainer.extend(extensions.WarmupShift("lr", warmup_start=0.0, warmup_iter=500, init=0.1))

    Args:
        warmup_start: the value before the first call.
        warmup_iter: the number of calls of the warmup.
        init: the value after the warmup; ``None`` takes the current value of the groups.
        attr, optimizer: as for `ExponentialShift`.
    """

    def __init__(
        self, attr: str, warmup_start: float, warmup_iter: int, init: float | None, optimizer: OptimizerLike = None
    ) -> None:
        self.warmup_start = _check_number("warmup_start", warmup_start)
        self.warmup_iter = _check_count("warmup_iter", warmup_iter)
        super().__init__(attr, init, optimizer)

    def value(self, calls: int, init: float) -> float:
        if calls >= self.warmup_iter:
            return init
        return (calls * init + (self.warmup_iter - calls) * self.warmup_start) / self.warmup_iter

    def __call__(self, trainer: Trainer) -> None:
        self._calls += 1
        if self._calls <= self.warmup_iter:
            self._set_value()


def _power(base: float, exponent: float) -> float:
    """Return ``base ** exponent`` for a base of 0 or above; infinity if it is too large for a float."""
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def _check_number(name: str, value: Any, minimum: float = -math.inf) -> float:
    if not is_number(value):
        raise TypeError(f"{name} is a number, got {value!r}")
    if not math.isfinite(value) or value < minimum:
        raise ValueError(f"{name} is a finite number{f' of {minimum} or above' if minimum == 0 else ''}, got {value!r}")
    return float(value)


def _check_pair(name: str, values: Any) -> tuple[float, float]:
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise TypeError(f"{name} is a pair of numbers, got {values!r}")
    return _check_number(name, values[0]), _check_number(name, values[1])


def _check_count(name: str, value: Any) -> int:
    if not is_integer(value):
        raise TypeError(f"{name} counts calls, an integer; got {value!r}")
    if value < 1:
        raise ValueError(f"{name} counts calls, at least 1; got {value!r}")
    return int(value)
