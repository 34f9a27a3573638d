"""ManualClock: a clock that stands still until it is told to go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class ManualClock:
    """Inside ``with ManualClock() as clock:`` time passes only by ``clock.advance(seconds)``.

    It takes the place of ``time.monotonic`` and ``time.perf_counter``, by which Chainring measures time: in `TimeTrigger`,
    a stop trigger in seconds, ``elapsed_time``, `ProgressBar`, `Throughput`, `Profiler`. So does all code of this process
    that reads them as ``time.monotonic()``, one's own included; what has imported the function itself keeps the real one.
    Other processes are not reached. A timeout measured on it never passes by itself, so start no worker processes inside.
    Sleeping takes its time and does not move it.

    Args:
        now: where it stands at first, in seconds.

    Attributes:
        now: where it stands, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._replaced: list[tuple[Callable[[], float], Callable[[], float]]] = []

    def advance(self, seconds: float) -> None:
        """Lets so many seconds pass.

        Raises:
            ValueError: they are below 0.
        """
        if not seconds >= 0:
            raise ValueError(f"a monotonic clock goes forward only; got {seconds!r} seconds, give 0 or more")
        self.now += seconds

    def __enter__(self) -> Self:
        self._replaced.append((time.monotonic, time.perf_counter))
        time.monotonic = time.perf_counter = lambda: self.now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        time.monotonic, time.perf_counter = self._replaced.pop()
