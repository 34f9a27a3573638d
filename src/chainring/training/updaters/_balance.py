"""Deals virtual ranks by the speed of the ranks, which is measured in some of the updates."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import Deal
from chainring.datasets._batches import count_examples

T = TypeVar("T")
_WARM_UP = 2  # updates, in which much is compiled and allocated once
_FIRST = 5  # of those after them are measured,
_PERIOD = 8  # and then one in so many
_KEPT = 5  # measurements, of which the median counts
_GAIN = 0.05  # of the time of an update, by each of them, for which it is dealt anew: noise does not gain each time


def time_on(device: torch.device | None) -> Any:
    """Return the time on the host, or an event on an accelerator, which has the time when it has passed."""
    if device is None or device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two results of `time_on`, of which events must have passed."""
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000)


class Span:
    """The times, on the host or on an accelerator, between which this rank has computed so many virtual ranks."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._count = device, count
        self._times: list[tuple[Any, Any]] = []
        self._began: Any = None

    def begin(self) -> None:
        self._began = time_on(self._device)

    @property
    def is_running(self) -> bool:
        return self._began is not None

    def pause(self) -> bool:
        """Wait from now on; return whether this rank has computed."""
        began, self._began = self._began, None
        if began is not None:
            self._times.append((began, time_on(self._device)))
        return began is not None

    def seconds(self) -> float | None:
        """Return the time for one virtual rank; ``None`` if the device is not there yet, for which nobody waits."""
        if self._device.type != "cpu" and not all(end.query() for _, end in self._times):
            return None
        return sum(seconds_between(*times) for times in self._times) / self._count


class Balance:
    """Finds the deal in which the slowest rank is as fast as can be, if that is wanted and there are several ranks."""

    def __init__(self, comm: Communicator, device: torch.device, is_wanted: bool) -> None:
        self._comm, self._device, self._is_wanted = comm, device, is_wanted and comm.size > 1
        self.span: Span | None = None  # of the update, if it is measured, as it is on all ranks then
        self._ended: Span | None = None  # of the last update, if it was measured and has come to its end
        self._last: Span | None = None  # of the update that was measured before
        self._updates = 0
        self._measured = deque[list[float]](maxlen=_KEPT)  # seconds for a virtual rank, by rank
        self._unchecked = dict[str, Deal]()  # the deal that was told, by the iterator of which no batch was counted since

    def begin(self, deal: Deal) -> Deal:
        """Begin an update, if the one before was computed by a deal; return its own, the same on all ranks.

        Ranks exchange here what they have measured in the one before, since they may be lost in any exchange, and what has
        begun is done again then.
        """
        if self._ended is not None:
            deal = self._deal_by_speed(deal, self._ended)
        self._updates += self._is_wanted
        since = self._updates - _WARM_UP
        is_measured = 0 < since <= _FIRST or (since > 0 and since % _PERIOD == 0)
        self.span = Span(self._device, len(self.choose(deal.block(self._comm.rank)))) if is_measured else None
        self._ended = None
        return deal

    @staticmethod
    def choose(computed: Sequence[T]) -> Sequence[T]:
        """Return those that are measured of what a rank computes: not the last, of which gradients are sent meanwhile."""
        return computed[:-1] or computed

    def end(self) -> None:
        self._ended = self.span

    @contextmanager
    def computing(self) -> Generator[None]:
        if self.span is not None:
            self.span.begin()
        try:
            yield
        finally:
            if self.span is not None:
                self.span.pause()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave out what runs in the context."""
        has_computed = self.span is not None and self.span.pause()
        yield
        if self.span is not None and has_computed:
            self.span.begin()

    def _deal_by_speed(self, deal: Deal, ended: Span) -> Deal:
        # What an accelerator has measured last is not over yet.
        span, self._last = (ended if self._device.type == "cpu" else self._last), ended
        ranks = self._comm.gather_object(None if span is None else span.seconds())
        if None in ranks:
            return deal
        self._measured.append(ranks)
        if len(self._measured) < _KEPT:
            return deal
        seconds = [float(np.median(of_rank)) for of_rank in zip(*self._measured, strict=True)]
        better = fastest(seconds, deal.count)
        gains = (_slowest(better, ranks) < (1 - _GAIN) * _slowest(deal, ranks) for ranks in self._measured)
        return better if all(gains) else deal

    def tell(self, deal: Deal, iterators: Mapping[str, Any]) -> None:
        for iterator in iterators.values():
            iterator.deal = deal
        self._unchecked = dict.fromkeys(iterators, deal)

    def check_rows(self, name: str, iterator: Any, batch: Any) -> None:
        """Refuse an iterator that does not return to the ranks the rows of the deal that it was told."""
        if (deal := self._unchecked.get(name)) is None:
            return
        rows: list[Any] = self._comm.gather_object(count_examples(batch))
        shares: list[Any] = deal.blocks
        if (audits := iterator.audits) is not None:  # some rows come twice
            shares = [audits.share(deal, rank)[0] for rank in range(len(shares))]

        def due_of(total: int, shares: Sequence[Any] = shares) -> list[int]:
            return [sum(len(range(v, total, deal.count)) for v in share) for share in shares]

        count = sum(rows)
        total = bisect_left(range(count + 1), count, key=lambda total: sum(due_of(total)))
        # Without what audits ask for, a full batch may look like a smaller one with it.
        leaves_out = iterator.repeat and count == iterator.batch_size != total and rows == due_of(count, deal.blocks)
        if total >= deal.count:  # of fewer, two deals may give each rank equally many
            del self._unchecked[name]
        if rows != (due := due_of(count if leaves_out else total)):
            raise RuntimeError(
                f'with balance="speed" or audit virtual ranks are dealt anew, and iterator {name!r} '
                f"({type(iterator).__name__}) has returned {rows} rows to the ranks, of which {due} are theirs now: keep "
                "whole batches, and let __next__ return self.take_share(batch) of one; an iterator around another "
                "one writes inner.deal, inner.audits = self.deal, self.audits before next(inner)"
            )


def fastest(seconds: Sequence[float], count: int) -> Deal:
    """Return the deal of ``count`` virtual ranks whose slowest rank is fastest; each takes a rank ``seconds``."""
    sizes = [1] * len(seconds)
    for _ in range(count - len(sizes)):
        sizes[min(range(len(sizes)), key=lambda rank: (sizes[rank] + 1) * seconds[rank])] += 1
    return Deal((0, *accumulate(sizes)))


def _slowest(deal: Deal, seconds: Sequence[float]) -> float:
    return max(len(block) * each for block, each in zip(deal.blocks, seconds, strict=True))
