"""Fakes for tests: a clock that is advanced by hand, and an updater without a model, data or a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from chainring._progress import to_fraction
from chainring.reporting.reporter import report
from chainring.training.updaters.base import Updater

Values = Mapping[str, Sequence[Any]] | Callable[[int], Mapping[str, Any]]
"""Values to be reported: a mapping from a key to its values in iterations 1, 2, ..., or a function of the iteration."""


class ManualClock:
    """A clock that replaces the monotonic clock inside ``with``, and only changes by ``advance(seconds)``.

    It replaces ``time.monotonic`` and ``time.perf_counter``, with which Chainring measures time in `TimeTrigger`, a stop
    trigger in seconds, ``elapsed_time``, `ProgressBar`, `Throughput` and `Profiler`. All other code of this process that
    calls ``time.monotonic()``, including your own, uses it too; code that has imported the function itself, and other
    processes, use the real clock. A timeout measured on it never expires by itself, so start no worker processes inside.
    Sleeping takes real time and does not advance it.

    Example::

        with ManualClock() as clock:
            trainer.extend(lambda trainer: clock.advance(60))  # an iteration takes a minute
            trainer.run()

    Args:
        now: the initial time, in seconds.

    Attributes:
        now: the current time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._replaced: list[tuple[Callable[[], float], Callable[[], float]]] = []

    def advance(self, seconds: float) -> None:
        """Advance the clock by a number of seconds.

        Raises:
            ValueError: ``seconds`` is below 0.
        """
        if not seconds >= 0:
            raise ValueError(f"a monotonic clock goes forward only; got {seconds!r} seconds, give 0 or more")
        self.now += seconds

    def __enter__(self) -> Self:
        self._replaced.append((time.monotonic, time.perf_counter))
        time.monotonic = time.perf_counter = lambda: self.now
        return self

    def __exit__(self, *error: object) -> None:
        time.monotonic, time.perf_counter = self._replaced.pop()


class FakeUpdater(Updater):
    """An updater that counts and reports given values, for testing triggers and extensions without training.

    Example::

        updater = FakeUpdater(epoch_length=10, values={"main/loss": [0.5, 0.25]})
        trainer = Trainer(updater, (2, "epoch"))

    Args:
        epoch_length: the number of iterations in an epoch, above 0; it may be a fraction.
        values: the values that each update reports. A mapping has for each key a sequence of values for iterations 1, 2,
            ...; for ``None``, and beyond the end of the sequence, nothing is reported. A function is called with the
            iteration, from 1, and returns a mapping.

    Raises:
        TypeError: ``values`` is neither a mapping nor a function, or a key has no sequence.
        ValueError: ``epoch_length`` is not above 0.
    """

    def __init__(self, epoch_length: float = 1, values: Values | None = None) -> None:
        self._epoch_length = to_fraction(epoch_length)
        if self._epoch_length <= 0:
            raise ValueError(f"an epoch has more than 0 iterations, got epoch_length={epoch_length!r}")
        self.epoch_length = epoch_length
        if not callable(values):
            if values is not None and not isinstance(values, Mapping):
                raise TypeError(
                    "values is a mapping from a key to its values, or a function of the iteration; got "
                    f"{type(values).__name__}"
                )
            values = dict(values or {})
            for key, column in values.items():
                if isinstance(column, str) or not (hasattr(column, "__len__") and hasattr(column, "__getitem__")):
                    raise TypeError(
                        f"values has for each key a sequence, one value an iteration; {key!r} has {column!r}. "
                        f"For the same in each iteration give a function: lambda iteration: {{{key!r}: {column!r}}}"
                    )
        self._values = values

    def update_core(self) -> None:
        if callable(self._values):
            values = dict(self._values(self.iteration + 1) or {})
        else:
            columns = {key: column for key, column in self._values.items() if self.iteration < len(column)}
            values = {key: column[self.iteration] for key, column in columns.items() if column[self.iteration] is not None}
        if values:
            report(values)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return int(self.iteration / self._epoch_length)

    @property
    def epoch_detail(self) -> float:  # type: ignore[override]
        return float(self.iteration / self._epoch_length)

    @property
    def previous_epoch_detail(self) -> float | None:  # type: ignore[override]
        return float((self.iteration - 1) / self._epoch_length) if self.iteration else None

    @property
    def is_new_epoch(self) -> bool:  # type: ignore[override]
        return self.iteration > 0 and self.epoch != int((self.iteration - 1) / self._epoch_length)
