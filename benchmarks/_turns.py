"""Loops that take turns: each in a process of its own, a quarter of an epoch at a time.

What else a machine does slows a loop down by half for a second or two. Loops that alternate faster than that are slowed
down alike, and those in separate processes share no lock, no collector and no cache of an allocator.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

QUARTERS = 4
_watch: Callable[[], None] | None = None


def lap() -> None:
    """Note that a training step begins: every loop calls it, by hand, through Chainring and through other libraries."""
    if _watch is not None:
        _watch()


class Watch:
    """In the process of a loop: counts its steps, and after each quarter of an epoch tells its time and waits.

    The quarters begin an eighth of an epoch late, so that each end of an epoch, and what is left to other threads there,
    falls within one of them. The first epoch is not timed.
    """

    def __init__(self, steps: int, clock: Callable[[], float], pipe: Connection) -> None:
        self._quarter = steps // QUARTERS
        self._left = steps + self._quarter // 2 + 1
        self._clock = clock
        self._pipe = pipe
        self._began = clock()

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._pipe.send(self._clock() - self._began)
            self._pipe.recv()
            self._left = self._quarter
            self._began = self._clock()


class Loop:
    """A loop in its process, which begins at once and waits when its first epoch is done, for which `wait` waits.

    Args:
        name: for the message when it fails.
        run: makes the steps of that many epochs.
        epochs: how many will be timed.
        steps: of an epoch, a multiple of `QUARTERS`.
        clock: gives seconds.
    """

    def __init__(self, name: str, run: Callable[[int], object], epochs: int, steps: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._pipe, theirs = multiprocessing.Pipe()
        # Forked, because a loop is a closure; one more epoch comes before those that are timed, and a part of one after.
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(run, epochs + 2, steps, clock, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Wait until its first epoch is done, which is not timed: beside those of other loops."""
        self._seconds()

    def turn(self) -> float:
        """Seconds of its next quarter of an epoch."""
        self._pipe.send(None)
        return self._seconds()

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.join()

    def _seconds(self) -> float:
        try:
            return float(self._pipe.recv())
        except EOFError:
            raise RuntimeError(f"a loop is timed to its end, and {self._name!r} ended before; see above") from None


def _run(run: Callable[[int], object], epochs: int, steps: int, clock: Callable[[], float], pipe: Connection) -> None:
    global _watch
    _watch = Watch(steps, clock, pipe)
    run(epochs)
