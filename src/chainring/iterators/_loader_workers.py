"""The worker processes of a user's DataLoader: a signal that asks the run to end is left to the trainer.

A terminal sends SIGINT to every process of its group, and a scheduler SIGTERM to every process of a job. Workers that died
of it would take the iteration with them that the trainer is about to finish.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader


class Closing:
    """Whether the workers may end: then SIGTERM, by which torch ends those that are stuck, is obeyed again."""

    def __init__(self, context: Any) -> None:
        self._event = context.Event()
        atexit.register(self.set)  # before multiprocessing, which began earlier, waits for its processes

    def set(self) -> None:
        """Lets the workers end."""
        self._event.set()
        atexit.unregister(self.set)

    def receive(self, *_: Any) -> None:
        """The handler of SIGTERM in a worker."""
        if self._event.is_set() or os.getppid() == 1:
            os._exit(0)


class Begin:
    """What a worker does first, and then what the user's ``worker_init_fn`` does."""

    def __init__(self, closing: Closing, own: Callable[[int], Any] | None) -> None:
        self._closing = closing
        self._own = own

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._closing.receive)
        if self._own is not None:
            self._own(worker)


@contextmanager
def guarded(loader: Any) -> Iterator[Closing | None]:
    """While a pass over a loader is begun, its workers are told to leave signals to the trainer."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield None
        return
    context = loader.multiprocessing_context or multiprocessing.get_context()
    closing, own = Closing(context), loader.worker_init_fn
    loader.worker_init_fn = Begin(closing, own)
    try:
        yield closing
    finally:
        loader.worker_init_fn = own
