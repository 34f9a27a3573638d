"""Survival: ranks that go on in their processes when others are lost, as fewer, and do again what was interrupted.

An exchange is completed by all ranks that are left, or by none. Each rank numbers the exchanges that it begins, which are
the same on all, and keeps the results that another may lack: where one has completed an exchange, all have begun it, and so
have completed what it had waited for before it began that one. When ranks are lost, the others form a group of their own,
and give each other the results that some have and others lack. Who is given one goes on as if nothing had happened, to its
next exchange; there `RanksLost` is raised, as it is at once on those that wait for what nobody has. So all are in the same
step of the loop then, and do it again.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chainring._distributed.communicator import Communicator, RanksLost
from chainring._distributed.group import (
    MAIN_GROUP,
    TIMEOUT,
    connect_timeout,
    flattened,
    is_connection_error,
    is_timeout,
    list_groups,
    new_group,
    set_timeout,
)
from chainring._distributed.heartbeat import Heartbeat, set_once
from chainring._distributed.process_group import ProcessGroupCommunicator
from chainring._distributed.progress import Process, this_process
from chainring._messages import info, mute

_LOSS, _SILENT, _LEADER, _MEMBERS = "chainring/loss", "chainring/silent", "leader", "members"  # keys of the store
_SLICE = timedelta(seconds=0.25)  # of a wait, after which a rank looks whether others have lost one
_PATIENCE = 12.0  # seconds of waiting after which the others are asked whether they still run, which takes 3
_QUESTIONS = 3  # in a row that a rank leaves without an answer, on a machine that may be overloaded, before it is lost
_FORMING = -1  # stands for the number of an exchange while a group is formed
_PAUSE = 0.01  # seconds between two looks at the store while a group is formed


class _Round(NamedTuple):
    """The ranks that are left after a loss; the first has all."""

    number: int
    groups: list[Any]  # theirs, until it is used: its end may have to wait for long, and then not in the thread that trains
    members: list[int]  # the ranks, each by the number that it had at first, in their order now
    store: Any
    heartbeat: Any


class _Processes:
    """The processes of all ranks, each by the number that it had at first, as this one knows them."""

    def __init__(self, me: int, told: Iterable[tuple[list[Any], str]]) -> None:
        self.me = me
        self.known = [(Process(*process), host) for process, host in told]
        self.ended_runs = 0
        self.silent: set[int] = set()  # ranks that have not answered, however often they were asked
        self._unanswered = Counter[int]()  # by rank, how many of the last questions
        self._next_question = 0.0

    def is_gone(self, who: int) -> bool:
        """Return whether a rank has ended, or did not answer."""
        return who in self.silent or self.known[who][0].has_ended()

    def are_lost(self, round_: _Round, began: float, members: Iterable[int] | None = None) -> bool:
        """Return whether ranks of a round are gone, or these ``members`` of it, or another one has found that out.

        Ask the ranks whether they still run, if this one has waited for them for long.
        """
        self.ask(round_, began)
        return any(map(self.is_gone, members or round_.members)) or bool(round_.store.check([_LOSS]))

    def ask(self, round_: _Round, began: float) -> None:
        """Ask the ranks of a round whether they still run, if this one has waited for long."""
        if time.monotonic() > max(began + _PATIENCE, self._next_question):
            if (silent := round_.heartbeat.find_silent()) is not None:
                self._unanswered = Counter(
                    {who: self._unanswered[who] + 1 for who in map(round_.members.__getitem__, silent)}
                )
                self.silent |= {who for who, count in self._unanswered.items() if count >= _QUESTIONS}
            self._next_question = time.monotonic() + _PATIENCE / 4

    def wait_for(self, work: Any, round_: _Round, waiting: Callable[[], AbstractContextManager[Any]]) -> None:
        """Wait for the end of an exchange, in a context.

        Raises:
            RuntimeError: it has failed, or ranks were lost that it waits for.
        """
        began = time.monotonic()
        with waiting():
            while True:
                try:
                    work.wait(_SLICE)
                    return
                except RuntimeError as error:
                    if "Operation timed out" not in str(error):  # that of the exchange has other words
                        raise
                if self.are_lost(round_, began):
                    raise RuntimeError("Connection closed: ranks were lost")


class SurvivingCommunicator(ProcessGroupCommunicator):
    """The ranks of a process group that goes on without those that are lost.

    ``store`` has to outlive every rank.
    """

    survives = True
    lost: tuple[tuple[int, str], ...] = ()

    def __init__(
        self, device: torch.device, local_rank: int, rank: int, size: int, store: Any, timeout: float | None
    ) -> None:
        self._processes = _Processes(rank, [json.loads(store.get(f"about/{who}")) for who in range(size)])
        self._kept: dict[tuple[int, int], list[Tensor]] = {}  # by round and number, results that another rank may lack
        self._under_way, self._begun = {}, 0
        start = dist.PrefixStore("start", store)  # type: ignore[attr-defined]
        seconds = TIMEOUT.total_seconds() if timeout is None else timeout
        heartbeat = Heartbeat(start, rank, size, seconds, timeout is not None)
        self._round = self._next = _Round(-1, [], list(range(size)), start, heartbeat)
        self._regroup(RuntimeError("Connection closed: another rank has failed while the ranks form their group"))
        first = self._next
        super().__init__(
            device, local_rank, first.store, True, timeout=timeout, group=first.groups[0], failures=first.heartbeat
        )
        if text := self._enter():
            info(text)

    def has_lost(self, began: float) -> bool:
        return self._processes.are_lost(self._round, began)

    def end(self) -> None:
        """Wait for the end of the run on rank 0, since another one has to end it if that is lost.

        Raises:
            RanksLost: it was, on all that are left.
            RankFailed: a rank has failed.
        """
        now, began = self._round, time.monotonic()
        self._processes.ended_runs += 1
        key, first = f"end/{self._processes.ended_runs}", now.members[0]
        if self.rank == 0:
            now.store.set(key, "")
        while self._is_open and not now.store.check([key]):
            if now.heartbeat.failure is not None:
                raise self.failed(RuntimeError("Connection closed: another rank has failed at the end of its run"))
            if self._processes.are_lost(now, began, [first]) and not now.store.check([key]):
                self.barrier()
            time.sleep(_PAUSE)

    # --- exchanges ---

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self.send(tensors, root)
        self.barrier()  # the root does not wait for the others

    def send(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Replace each tensor by the one of rank ``root``, before an exchange that all complete after this one."""
        for flat in flattened(tensors):
            self._begin(partial(dist.broadcast, flat, group_src=root), [flat], gives=False, joins=False)()

    def gather_object(self, obj: Any) -> list[Any]:
        return _gather(lambda tensor: self.start_all_gather(tensor)(), obj)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self.gather_object(obj if self.rank == root else None)[root]

    def barrier(self) -> None:
        self.start_all_gather(torch.zeros(1, dtype=torch.uint8))()

    def beside(self) -> Communicator:
        return Communicator()  # what all ranks write together are shards, and there are none

    def _begin(
        self, start: Callable[..., Any], results: list[Tensor], sent: Tensor | None = None, *, on_host: bool = False,
        gives: bool = True, joins: bool = True,
    ) -> Callable[[], list[Tensor]]:  # fmt: skip
        now = self._round
        key, settled, is_done = (now.number, self._begun), list(self._kept), False
        self._begun += 1
        work = failure = None
        if self._next is now:
            try:
                work = start(group=self._group, async_op=True)
            except RuntimeError as error:
                failure = error
        self._under_way[key[1]] = pending = [work, sent]
        del work, sent

        def wait() -> list[Tensor]:
            nonlocal is_done
            if is_done:
                return results
            if self._round is not now:
                raise RuntimeError("this exchange was begun by more ranks than there are now")
            if self._next is now:
                try:
                    if failure is not None:
                        raise failure
                    self._processes.wait_for(pending[0], now, self.waiting)
                except RuntimeError as error:
                    self._recover(error)
                else:
                    if joins:
                        for earlier in settled:
                            self._kept.pop(earlier, None)
                    if gives:
                        self._kept[key] = [result.clone() for result in results]
            if self._next is not now:
                if key not in self._kept:
                    raise RanksLost(self._enter())
                for result, value in zip(results, self._kept[key], strict=True):
                    result.copy_(value)
            del self._under_way[key[1]]
            pending.clear()
            is_done = True
            return results

        return wait

    # --- a loss ---

    def _recover(self, error: RuntimeError) -> None:
        """Form the group of the ranks that are left, and take what another has completed and this one has not.

        Raises:
            RuntimeError: ``error``, if it does not come of a loss: a rank has raised an error, or is late.
        """
        now, silent = self._round, self._processes.silent
        if not is_connection_error(error) or is_timeout(error):
            raise error
        if silent:
            now.store.set(_SILENT, json.dumps(sorted(silent)))
        now.store.set(_LOSS, "")  # which those look for that wait for others
        if now.heartbeat.poll() is not None:
            raise error
        self._regroup(error)

    def _regroup(self, error: RuntimeError) -> None:
        """Form a group of the ranks that are left, again if some are lost meanwhile; raise ``error`` if one has failed."""
        now = self._round
        number = now.number
        while self._next is now:
            self._drop_groups()
            number += 1
            store = dist.PrefixStore(f"round/{number}", now.store.underlying_store)  # type: ignore[attr-defined]
            if (members := self._meet(store, error)) is not None:
                self._next = self._form(number, store, members) or now

    def _meet(self, store: Any, error: RuntimeError) -> list[int] | None:
        """Return who is left, by what the first of them has found out; ``None`` if it is lost meanwhile."""
        now, is_gone, began = self._round, self._processes.is_gone, time.monotonic()
        me = self._processes.me
        if now.store.check([_SILENT]):
            self._processes.silent |= set(json.loads(now.store.get(_SILENT)))
        store.set(f"here/{me}", "")
        set_once(store, _LEADER, str(me))
        leader = int(store.get(_LEADER))
        while True:
            is_led = not is_gone(leader)  # before the look at what it has published
            if store.check([_MEMBERS]):
                break
            if now.heartbeat.failure is not None:
                raise error
            if not is_led:
                return None
            self._processes.ask(now, began)
            if leader == me:
                left = [who for who in now.members if store.check([f"here/{who}"]) and not is_gone(who)]
                if all(map(is_gone, set(now.members) - set(left))):
                    store.set(_MEMBERS, json.dumps(left))
                    continue
            time.sleep(_PAUSE)
        members: list[int] = json.loads(store.get(_MEMBERS))
        if me not in members:
            now.heartbeat.stop(
                f"rank {now.members.index(me)} did not answer for some time, and the other ranks go on without it."
            )
        return members

    def _form(self, number: int, store: Any, members: list[int]) -> _Round | None:
        """Return the group of some ranks, when it has exchanged what some have and others lack; ``None`` if that fails."""
        rank, size, heartbeat = members.index(self._processes.me), len(members), None
        # A connection of its own, since one in which the group waits for the others is closed to the heartbeat meanwhile.
        connection = getattr(store, "clone", lambda: store)()
        try:
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("group", connection), rank=rank, world_size=size,  # type: ignore[attr-defined]
                timeout=connect_timeout(size),
            )  # fmt: skip
            set_timeout(dist.group.WORLD, TIMEOUT)
            group = new_group(description=MAIN_GROUP)
            heartbeat = self._round.heartbeat.among(store, rank, size)
            formed = _Round(number, [group], members, store, heartbeat)

            def exchange(tensor: Tensor) -> Tensor:
                gathered = tensor.new_empty(size, *tensor.shape)
                work = dist.all_gather(list(gathered), tensor, group=group, async_op=True)
                self._under_way[_FORMING] = [work, tensor]
                self._processes.wait_for(work, formed, formed.heartbeat.exchange)
                return gathered

            heartbeat.watch_processes(partial(_gather, exchange))
            lacks = _gather(exchange, (self._round.number, self._begun, list(self._under_way), list(self._kept)))
            givers: dict[tuple[int, int], int] = {}
            for giver, (*_, kept) in enumerate(lacks):
                for key in kept:
                    if any(key[0] == of and (key[1] >= begun or key[1] in waiting) for of, begun, waiting, _ in lacks):
                        givers.setdefault(key, giver)
            given = _gather(exchange, {key: self._kept[key] for key, giver in givers.items() if giver == rank})
        except RuntimeError as error:
            if not is_connection_error(error) and not isinstance(error, dist.DistError):
                raise
            if heartbeat is not None:
                heartbeat.poll()  # it does not wait for the others then
                heartbeat.close()
            return None
        for gift in given:
            self._kept = {**gift, **self._kept}
        return formed

    def _enter(self) -> str:
        """Be one of the ranks that are left from now on; return which were lost."""
        before, now = self._round, self._next
        before.heartbeat.close()
        self._round, self._store, self._failures = now, now.store, now.heartbeat
        self._group = self._objects = now.groups.pop()
        self.rank, self.size, self._waiting = now.members.index(self._processes.me), len(now.members), now.heartbeat.exchange
        self._under_way, self._begun, self._runs = {}, 0, 0
        mute(self.rank > 0)
        if before.members == now.members:
            return ""
        lost = {number: self._processes.known[who] for number, who in enumerate(before.members) if who not in now.members}
        names = ", ".join(f"rank {number} (process {process.pid} on {host})" for number, (process, host) in lost.items())
        verb, ranks = "was" if len(lost) == 1 else "were", "rank goes" if self.size == 1 else "ranks go"
        self.lost += tuple((process.pid, host) for process, host in lost.values())
        return f"{names} {verb} lost: {self.size} {ranks} on"

    def _drop_groups(self) -> None:
        """Forget all process groups, which end when no exchange of theirs is under way, as it may be for ever."""
        works = [pending[0] for pending in self._under_way.values() if pending and pending[0] is not None]
        for pending in self._under_way.values():
            pending.clear()
        self._group = self._objects = None
        groups = list_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        # PyTorch names groups by their number, also one that could not be formed: names have to be the same on all ranks.
        attrgetter("_world")(dist.distributed_c10d).group_count = 0

        def end() -> None:  # before, it would wait, and hold the interpreter where it is the last to refer to them
            while not all(work.is_completed() for work in works):
                time.sleep(_SLICE.total_seconds())
            groups.clear()

        Thread(target=end, name="chainring-leave", daemon=True).start()


def describe_process() -> str:
    """Return what the others have to know of this process before they form a group with it."""
    return json.dumps((this_process(-1), socket.gethostname()))


def _gather(exchange: Callable[[Tensor], Tensor], obj: Any) -> list[Any]:
    """Return the objects of all ranks, by an exchange that stacks the tensors of all."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes: list[int] = exchange(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(exchange(padded), sizes, strict=True)]
