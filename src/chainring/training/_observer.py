"""Observers: they look on while a trainer runs, without a place among its extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer


class Observer:
    """Looks on while a trainer runs; see `Trainer.watch`.

    Each method stands around a call of the trainer's, and here makes that call and nothing else. A subclass can look
    before and after it, see it fail, or leave it out. An observer that was added later stands around the earlier ones.

    Example::

        class Counter(Observer):
            count = 0

            def around_update(self, trainer, update):
                update()
                self.count += 1

    Attributes:
        is_replay: True if the run repeats iterations of an earlier one, so that no results are sent to services.
    """

    is_replay = False

    def ends(self, trainer: Trainer, ends: Callable[[], bool]) -> bool:
        """Return True to end the run before the next iteration; ``ends()`` asks the signals and the stop trigger."""
        return ends()

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        """Run one update, ``update()``."""
        update()

    def around_observe(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        """Let an extension observe the iteration, ``call()``."""
        call()

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        """Call an extension in the loop, ``call()``; a snapshot is called at the end of a run, too."""
        call()


def surround(observers: Iterable[Observer], method: str, *arguments: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call with the methods of this name of all observers around it."""
    for observer in observers:
        call = partial(getattr(observer, method), *arguments, call)
    return call
