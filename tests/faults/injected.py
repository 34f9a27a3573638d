"""What is put into the process of a run before it starts: places at which it is killed or held up, and another clock."""

import importlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass

from chainring._places.base import Directory

OPERATIONS = ("rename", "replace", "truncate", "ftruncate", "unlink", "rmdir", "mkdir", "symlink", "fsync")
_committing = threading.local()


@dataclass
class Plan:
    """What befalls a process.

    Attributes:
        slow: seconds that a write may be held up at each of its points, at random.
        point: the named point of the commit protocol at which the process is killed, and which of its occurrences.
        operation: the number of the operation on the file system at which it is killed, and whether before or after it.
        clock: seconds by which the wall clock is wrong.
        holds: whether the process waits to be killed when the run has started, before its first update.
        answer: seconds after which a request to an object store has failed that was not answered; 0 leaves it as it is.
        lease: for how many seconds the process takes the lease of a place in an object store; 0 leaves it as it is.
        seed: of the delays.
    """

    slow: float = 0.0
    point: tuple[str, int] | None = None
    operation: tuple[int, str] | None = None
    clock: float = 0.0
    holds: bool = False
    answer: float = 0.0
    lease: int = 0
    seed: int = 0


class Injected:
    """Carries out a plan in this process; workers that it forks are left alone.

    Args:
        plan: the plan.
        tell: called with what happened and what it was just before the process is killed.

    Attributes:
        passed: how often each point was passed.
        operations: the operations on the file system so far.
    """

    def __init__(self, plan, tell):
        self.plan, self.tell = plan, tell
        self.passed, self.operations = {}, []
        self._pid, self._lock, self._draw = os.getpid(), threading.RLock(), random.Random(plan.seed)

    def install(self):
        """Puts itself where the snapshots and the file system are called."""
        injected = self

        class Watched(Directory):
            def __init__(self, root):
                super().__init__(root, at=injected.point)

            def draft(self, name):
                _committing.name = name
                return super().draft(name)

        importlib.import_module("chainring._places.base").Directory = Watched
        for name in OPERATIONS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        if self.plan.answer:
            bucket = importlib.import_module("chainring._places.bucket")
            bucket.Bucket.__init__.__defaults__ = (bucket.PATIENCE._replace(answer=self.plan.answer),)
        if self.plan.lease:
            lease = importlib.import_module("chainring._places.index").Index
            lease.__init__.__kwdefaults__ |= {"seconds": self.plan.lease, "period": self.plan.lease / 4}
        if self.plan.clock:
            for name, unit in (("time", 1), ("time_ns", 10**9)):
                shifted = getattr(time, name)
                setattr(time, name, lambda shifted=shifted, unit=unit: shifted() + type(shifted())(self.plan.clock * unit))

    def point(self, name):
        """A named point is passed."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            count = self.passed[name] = self.passed.get(name, 0) + 1
            if self.plan.point == (name, count):
                self._die(name)
            delay = self._draw.random() * self.plan.slow
        if delay:
            time.sleep(delay)

    def _watched(self, name, call):
        def watched(*arguments, **settings):
            if os.getpid() != self._pid:
                return call(*arguments, **settings)
            label = _label(name, arguments, settings)
            self._operation("before", name, arguments)
            if label:
                self.point(f"before {label}")
            result = call(*arguments, **settings)
            if label:
                self.point(f"after {label}")
            self._operation("after", name, arguments)
            return result

        return watched

    def _operation(self, when, name, arguments):
        with self._lock:
            if when == "before":
                self.operations.append(name)
            if self.plan.operation == (len(self.operations), when):
                self._die(f"{when} {name} {arguments}")

    def _die(self, what):
        self.tell(("killed", what, getattr(_committing, "name", None)))
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # in a thread, the end comes a moment later


def _label(name, arguments, settings):
    """What an operation means in the life of a snapshot that is committed already; empty if nothing."""
    if name == "symlink":
        return "making the link"
    if name == "rename" and os.path.islink(arguments[0]):
        return "replacing the link"
    if name == "rename" and os.fspath(arguments[1]).endswith(".old"):
        return "putting an old one aside"
    if name in ("unlink", "rmdir") and "dir_fd" in settings:
        return f"{name} in an old one"
    return ""
