"""The ranks that begin a run: all of them with a communicator, or each by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

logger = logging.getLogger("chainring")
_PATIENCE = 5.0  # seconds in which those that run by themselves look for others, once in a process
_NOTICE = 10.0  # seconds after which it is told who has not come
_ALONE, _WAITING = "alone", "waiting"  # keys of the store
_has_looked = _is_alone = False


def begin_together(own: Any, run: int, rank: int, size: int, has_failed: Callable[[], bool]) -> None:
    """Wait until all ranks begin a run with a communicator.

    Args:
        own: the store of the communicator.
        run: the number of the run among those with it.
        rank: the number of this rank.
        size: how many there are.
        has_failed: returns whether another rank has failed.

    Raises:
        ValueError: one has begun its run without a communicator; the error is raised there too.
        RuntimeError: a rank has failed in the meantime.
    """
    key, store = f"run/{run}", _find_store()
    own.set(f"{key}/{rank}", "")
    if own.add(key, 1) == size or store is None:
        return
    store.add(_WAITING, 1)  # and for ever if this rank raises, so that the other one sees it
    began, is_told, pause = time.monotonic(), False, 0.001
    while own.add(key, 0) < size:
        if store.check([_ALONE]) and (other := str(store.get(_ALONE), "utf-8")):
            raise ValueError(_describe(other))
        if has_failed():
            raise RuntimeError("Connection closed: another rank has failed before its run began")
        if not is_told and time.monotonic() > began + _NOTICE:
            is_told = True
            late = [other for other in range(size) if not own.check([f"{key}/{other}"])]
            logger.warning("rank %d waits for ranks %s, which have not begun the run after %g s", rank, late, _NOTICE)
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    store.add(_WAITING, -1)


def begin_alone(rank: int, size: int) -> None:
    """Publish that this rank begins a run by itself, and check whether others wait for it.

    Raises:
        ValueError: another rank waits for this one to begin a run with a communicator.
    """
    global _has_looked, _is_alone
    if (store := _find_store()) is None:
        return
    store.set(_ALONE, str(rank))
    count, until = store.add(f"{_ALONE}/count", 1), time.monotonic() + (0 if _has_looked else _PATIENCE)
    _has_looked = True
    while True:
        if store.add(_WAITING, 0):
            raise ValueError(_describe(str(rank)))
        if count >= size or time.monotonic() > until:
            _is_alone = True
            return
        time.sleep(0.05)
        count = store.add(f"{_ALONE}/count", 0)


def end_alone() -> None:
    """Publish the end of the run that this rank has begun by itself, if there is one."""
    global _is_alone
    if _is_alone and (store := _find_store()) is not None:
        store.set(_ALONE, "")
    _is_alone = False


def _find_store() -> Any:
    """Return the store of the process group, which all ranks have; ``None`` without one."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None or not dist.is_initialized() else PrefixStore("chainring/runs", find())


def _describe(rank: str) -> str:
    return (
        f"all ranks train together, and rank {rank} runs its trainer without the communicator by which others wait for it: "
        "give StandardUpdater comm=create_communicator() on every rank. Where one rank trains something by itself, let the "
        "others wait for it by comm.barrier() before they begin"
    )
