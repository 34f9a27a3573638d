"""Datasets that misbehave in worker processes, and what is left of such processes."""

import contextlib
import multiprocessing
import os
import random
import re
import signal
import threading
import time

import numpy as np
import torch

from chainring.datasets import DatasetMixin


class Dataset(DatasetMixin):
    """``size`` examples, each the answer of ``get(i)``."""

    def __init__(self, size, get):
        self.size, self.get = size, get

    def __len__(self):
        return self.size

    def get_example(self, i):
        return self.get(i)


class Noisy:
    """Examples with draws from all three generators; at the top of a module, so that it can be pickled."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"x": np.random.rand(3), "i": i, "y": torch.rand(2) + random.random()}


class DecodeError(Exception):
    """With a constructor that pickle cannot repeat from ``args``."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line} is no image")
        self.path, self.line = path, line


def for_ever(i):
    """Never return, not even after a signal."""
    while True:
        threading.Event().wait(3600)


def kill_at(number, kind=signal.SIGKILL):
    """An example function that ends its own process at one index."""

    def get(i):
        if i == number:
            os.kill(os.getpid(), kind)
        return i

    return get


def is_alive(pid):
    """Return whether a process or any of its threads runs; one that is dead and not waited for does not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def gone(pids, seconds=60.0):
    """Wait until these processes have ended; return False if one still runs after so many seconds."""
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.02)
    return True


def what_is_held():
    """The child processes, threads and open files of this process; shared memory that nobody has unmapped is a file too."""
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    kinds = sorted(name.partition(":")[0] for name in files)
    return multiprocessing.active_children(), threading.active_count(), kinds


def in_shared_memory(pids):
    """The files in shared memory that these processes have made, which bear their numbers."""
    return [name for name in os.listdir("/dev/shm") if any(str(pid) in re.split(r"\D+", name) for pid in pids)]


def _is_open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")
