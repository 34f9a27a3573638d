"""Ranks that are processes, under torchrun or another launcher: a communicator over torch.distributed."""

from __future__ import annotations

import atexit
import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from chainring._distributed.communicator import (
    RUNNING_ALONE,
    WAITING,
    Communicator,
    RankFailed,
    describe_alone,
    store_of_group,
)
from chainring._distributed.group import (
    BACKGROUND_GROUP,
    MAIN_GROUP,
    TIMEOUT,
    GroupCommunicator,
    end_groups,
    is_connection_error,
    is_timeout,
    new_group,
)
from chainring._distributed.heartbeat import Heartbeat
from chainring._messages import mute

logger = logging.getLogger("chainring")
_NOTICE = 10.0  # seconds after which it is told who has not begun a run


class ProcessGroupCommunicator(GroupCommunicator):
    """The ranks of torch.distributed's process group.

    Tensors go through a group of its backend, everything else through gloo on the host, which does not wait for the device:
    by the same group, unless the backend has no gloo. The default group is left to DDP and FSDP. Errors reach the other
    ranks by the ``store`` through which they have met. With ``ends_group`` this communicator has started the process group,
    and also ends it. A ``group`` is one that its ranks have formed, whose processes its ``failures`` watch.
    """

    def __init__(
        self,
        device: torch.device,
        local_rank: int,
        store: Any,
        ends_group: bool = False,
        exchange: Any = nullcontext,
        timeout: float | None = None,
        group: Any = None,
        failures: Heartbeat | None = None,
    ) -> None:
        self.timeout = TIMEOUT.total_seconds() if timeout is None else timeout
        is_formed, description = group is not None, BACKGROUND_GROUP
        if store is not None and not is_formed:
            failures = Heartbeat(store, dist.get_rank(), dist.get_world_size(), self.timeout, timeout is not None)
        self._failures, self._store, self._runs = failures, store, 0
        if failures is not None:
            exchange, description = failures.exchange, MAIN_GROUP
        super().__init__(group if is_formed else new_group(description=description), exchange)
        self.local_rank, self.device = local_rank, device
        if "cpu:gloo" not in dist.get_backend_config(self._group):
            self._objects = new_group("gloo", description=description)
        if failures is not None and not is_formed:
            failures.watch_processes(self.gather_object)
        self._is_open, self._ends_group = True, ends_group
        if self.rank != 0:
            mute()
        atexit.register(self.close)

    def begin(self, computes_with_others: Callable[[], bool]) -> None:
        """Wait until all ranks begin this run, unless one has begun its own without a communicator, or has failed."""
        if self._failures is None or self.size == 1:
            return
        self._runs += 1
        key, runs = f"run/{self._runs}", store_of_group()
        with self.waiting():
            self._store.set(f"{key}/{self.rank}", "")
            if self._store.add(key, 1) == self.size or runs is None:
                return
            runs.add(WAITING, 1)  # and for ever if this rank raises, so that the other one sees it
            began, pause = time.monotonic(), 0.001
            notice_at = began + _NOTICE
            while self._store.add(key, 0) < self.size and not self.has_lost(began):
                if runs.check([RUNNING_ALONE]) and (other := str(runs.get(RUNNING_ALONE), "utf-8")):
                    raise ValueError(describe_alone(other))
                if self._failures.failure is not None:
                    raise RuntimeError("Connection closed: another rank has failed before its run began")
                if time.monotonic() > notice_at:
                    notice_at = math.inf
                    late = [rank for rank in range(self.size) if not self._store.check([f"{key}/{rank}"])]
                    text = "rank %d waits for ranks %s, which have not begun the run after %g s"
                    logger.warning(text, self.rank, late, _NOTICE)
                time.sleep(pause)
                pause = min(2 * pause, 0.25)
            runs.add(WAITING, -1)

    def has_lost(self, began: float) -> bool:
        """Return whether ranks are lost for which this one waits, and the others go on: the next exchange says which."""
        return False

    def barrier(self) -> None:
        self.gather_object(None)

    def leave(self) -> None:
        self._is_open = False
        super().leave()

    def beside(self) -> Communicator:
        self.barrier()  # so that they connect at the same time
        waiting = self._waiting if self._failures is None else partial(self._failures.exchange, is_beside=True)
        return ProcessGroupCommunicator(self.device, self.local_rank, None, exchange=waiting)

    def failed(self, error: BaseException) -> BaseException:
        failures = self._failures
        if failures is None or not self._is_open:
            return error
        text = f"rank {self.rank} has failed, and all stop with it:\n\n{''.join(traceback.format_exception(error))}"
        if isinstance(error, RankFailed):
            first: str | None = text
        else:
            first = failures.poll(is_timeout(error)) if is_connection_error(error) else failures.publish(text)
        self.leave()
        if first is None:
            error.add_note("another rank ended without publishing an error: it was killed, or ended outside of the training")
            return error
        failures.wait_for_others()
        if first == text:
            return error
        failure = RankFailed(first)
        failure.__cause__ = error
        return failure

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._failures is not None:
            self._failures.close()
        if self._ends_group and dist.is_initialized():
            if self._is_open:
                dist.destroy_process_group()
            else:
                end_groups([dist.group.WORLD])
        self._failures, self._is_open, self._ends_group = None, False, False


class MeshCommunicator(GroupCommunicator):
    """The ranks that share the data, among those of a world in which others see the same rows, as for tensor parallelism.

    Tensors are exchanged with the ranks that share the data and have the same place otherwise, a column of the mesh. What
    is gathered is that of one column, the first, so that all ranks of the world have the same. All ranks refuse alike
    columns that are no mesh of the whole ``world``; ``ranks`` are the numbers of those of this one, in the order of their
    data.
    """

    def __init__(self, world: GroupCommunicator, ranks: Sequence[int]) -> None:
        columns = sorted(set(map(tuple, world.gather_object(list(ranks)))))
        shown = [list(column) for column in columns]
        if (
            sorted(rank for column in columns for rank in column) != list(range(world.size))
            or len(set(map(len, columns))) > 1
        ):
            raise ValueError(
                f"every rank shares the data with as many others as any, and of {world.size} ranks the mesh has those that "
                f'share it as {shown}: give all ranks the same slice of one mesh over all ranks, such as mesh["dp"]'
            )
        if columns[0][0] != 0:
            raise ValueError(
                f"rank 0 of the world writes, and is the first of those that share the data; the mesh has {shown}: make it "
                "by init_device_mesh, which numbers the ranks in order"
            )
        groups = [new_group(ranks=column) for column in columns]
        world.barrier()  # a rank that refuses what comes next, and ends, would break the groups that others still form
        column_here = next(index for index, column in enumerate(columns) if world.rank in column)
        super().__init__(groups[column_here], world.waiting)
        self.local_rank, self.device = world.local_rank, world.device
        self._world, self._columns, self._column_here = world, columns, column_here
        world.within.append(self)

    @property
    def is_main(self) -> bool:
        return self._world.is_main

    @property
    def world(self) -> Communicator:
        return self._world

    @property
    def data_ranks(self) -> Sequence[int]:
        return self._columns[self._column_here]

    @property
    def model_ranks(self) -> Sequence[int]:
        return [column[self.rank] for column in self._columns]

    def begin(self, computes_with_others: Callable[[], bool]) -> None:
        self._world.begin(computes_with_others)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered = self._world.gather_object(obj)
        return [gathered[rank] for rank in self._columns[0]]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self.gather_object(obj)[root]

    def start_max(self, number: int) -> Callable[[], int]:
        return self._world.start_max(number)

    def barrier(self) -> None:
        self._world.barrier()

    def beside(self) -> Communicator:
        beside: Any = self._world.beside()
        return MeshCommunicator(beside, self.data_ranks)

    def failed(self, error: BaseException) -> BaseException:
        return self._world.failed(error)

    def close(self) -> None:
        self._world.close()
