"""Which rank the others wait for: how far each has come, where it is, and who has not arrived."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import islice
from operator import attrgetter
from typing import Any

import torch.distributed as dist

OWN = "chainring"  # describes the groups whose waits are noted by the communicator itself
BESIDE = "chainring beside"  # and those of its exchanges in another thread
_LONGEST_STACK = 20_000  # characters
_MOST_DESCRIBED = 4  # ranks
_LATER = 10.0  # seconds for which a backend that ends the process lets this library say why before
_positions: list[Callable[[], tuple[int, str | None]]] = []  # of the runs in this process, the inner ones last
_notes: list[Callable[[int], None]] = []


@contextmanager
def reporting_position(position: Callable[[], tuple[int, str | None]]) -> Iterator[None]:
    """Let a function say, during a run, its last iteration and the extension that is called."""
    _positions.append(position)
    try:
        yield
    finally:
        _positions.remove(position)


def read_position() -> tuple[int, str | None] | None:
    """Return the last iteration of the run in this process and the extension that is called; ``None`` outside of runs."""
    for position in _positions[-1:]:
        with contextlib.suppress(Exception):  # an updater of someone else computes it, and not always
            iteration, extension = position()
            return int(iteration), extension
    return None


def _groups() -> list[Any]:
    """Return all process groups of torch.distributed that this rank belongs to."""
    return list(attrgetter("_world.pg_map")(dist.distributed_c10d)) if dist.is_initialized() else []


def _backends_of(group: Any) -> list[Any]:
    """Return the backends of a process group, each once."""
    return list({id(backend): backend for backend in map(group._get_backend, group._device_types)}.values())


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let no exchange through a process group, or one of its backends, that begins from now on take longer."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
        return
    for backend in _backends_of(group) if isinstance(group, dist.ProcessGroup) else [group]:  # torch 2.6
        backend._set_default_timeout(timeout)


def noting(note: Callable[[int], None], is_on: bool = True) -> None:
    """Call a function after each update of several ranks with the number of updates, or with ``is_on=False`` no more."""
    (_notes.append if is_on else _notes.remove)(note)


def note_iteration(iteration: int) -> None:
    """Say how many updates there were, which a process that is stopped or hangs cannot say any more."""
    for note in _notes:
        note(iteration)


def count_collectives() -> dict[str, tuple[int, list[int], str]]:
    """Return by the name of each process group how many collectives this rank has begun in it, its ranks and description."""
    counts: dict[str, tuple[int, list[int], str]] = {}
    for group in _groups():
        with contextlib.suppress(Exception):  # destroyed meanwhile, or of a backend that does not count
            number = sum(backend._get_sequence_number_for_group() for backend in _backends_of(group))
            counts[group.group_name] = number, dist.get_process_group_ranks(group), group.group_desc
    return counts


@dataclass
class Status:
    """How far a rank has come.

    Attributes:
        rank: its number.
        host: the name of its machine.
        pid: the number of its process.
        position: its last iteration, and the extension that it calls; ``None`` outside of a run.
        idle: seconds since it has last begun a collective or ended an iteration.
        waited: seconds for which it has waited in an exchange of its communicator; 0 if it does not.
        waited_beside: the same of another thread, in which a snapshot is agreed upon.
        collectives: what `count_collectives` returns; ``None`` if nothing is known of it.
        asked: the number of the question that this answers; 0 if it has answered none.
        state: why it does not answer; an empty text if it does.
        stacks: where its threads are.
    """

    rank: int
    host: str = ""
    pid: int = 0
    position: list[Any] | tuple[int, str | None] | None = None
    idle: float = 0.0
    waited: float = 0.0
    waited_beside: float = 0.0
    collectives: Mapping[str, Any] | None = None
    asked: int = 0
    state: str = ""
    stacks: str = field(default="", repr=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def seconds(self, is_beside: bool) -> float:
        """Return for how long it has waited, or may have."""
        return self.waited_beside if is_beside else self.waited or self.idle

    def count(self, group: str) -> int:
        """Return how many collectives it has begun in a group; none if nothing is known of it."""
        return int((self.collectives or {}).get(group, (-1 if self.collectives is None else 1 << 62,))[0])


def find_late(asking: Status, statuses: Mapping[int, Status], is_beside: bool) -> list[int]:
    """Return the ranks for which one waits, and which do not wait themselves; none if all wait for each other.

    A rank waits for those that have begun fewer collectives in a group than it has, and so for those that they wait for.

    Args:
        asking: the rank that waits.
        statuses: all ranks, by number.
        is_beside: whether it waits in a group of another thread, where a snapshot is agreed upon.
    """
    reached, late, queue = {asking.rank}, set(), [asking.rank]
    while queue:
        waited_for = _waited_for(statuses[queue.pop()], statuses, is_beside)
        for rank in waited_for - reached:
            if _waited_for(statuses[rank], statuses, is_beside) and not statuses[rank].state:
                queue.append(rank)
            else:
                late.add(rank)
        reached |= waited_for
    late = {rank for rank in late if statuses[rank].collectives is not None} or late  # surely, or possibly
    return sorted(late) or [rank for rank, status in statuses.items() if status.state]


def _waited_for(status: Status, statuses: Mapping[int, Status], is_beside: bool) -> set[int]:
    """Return the ranks that have not arrived where a rank waits."""
    found: set[int] = set()
    for name, (number, ranks, description) in (status.collectives or {}).items():
        if (description == BESIDE) == is_beside and (is_beside or status.waited or description != OWN):
            found.update(rank for rank in ranks if rank != status.rank and statuses[rank].count(name) < number)
    return found


def is_ahead(collectives: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether a rank has begun more than another in a group whose waits nobody notes, such as that of DDP."""
    return any(
        name in others and number > others[name][0]
        for name, (number, _, description) in collectives.items()
        if description not in (OWN, BESIDE)
    )


def lower_timeouts(seconds: float) -> None:
    """Let no exchange that begins from now on take longer; a little more is left to backends that end the process."""
    for group in _groups():
        with contextlib.suppress(Exception):  # destroyed meanwhile, or of a backend that knows no timeout
            for backend in _backends_of(group):
                limit = timedelta(seconds=seconds if backend.name() == "gloo" else seconds + _LATER)
                if attrgetter("options._timeout")(backend) > limit:
                    set_timeout(backend, limit)


def format_stacks(first: int | None) -> str:
    """Return where the threads of this process are, those of the library left out; ``first`` comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    texts = []
    for ident in sorted(frames, key=lambda ident: (ident != first, ident != threading.main_thread().ident)):
        name = names.get(ident, "a thread")
        if not name.startswith("chainring-watch") and ident != threading.get_ident():
            texts.append(f"{name} (most recent call last):\n{''.join(traceback.format_stack(frames[ident]))}")
    return "".join(texts)[:_LONGEST_STACK]


def describe_late(late: list[int], statuses: Mapping[int, Status], seconds: float, timeout: float) -> str:
    """Return what all ranks say when some have not arrived: which, how far they have come, where they are, what to do."""
    if not late:
        return _describe_deadlock(statuses.values(), seconds, timeout)
    names, verb = _name_ranks(late), "has" if len(late) == 1 else "have"
    waiting = _name_ranks([rank for rank in statuses if rank not in late])
    details = "\n".join(_describe(statuses[rank]) for rank in late[:_MOST_DESCRIBED])
    return (
        f"{names} {verb} not arrived in an exchange in which {waiting} waited for {seconds:.0f} s (timeout={timeout:g}).\n"
        f"{details}\n"
        "Start again, to continue from the newest snapshot. If the rank is only slow there, give it more time by "
        "create_communicator(timeout=), or let all ranks do that work."
    )


def _describe(status: Status) -> str:
    who = f"rank {status.rank}"
    if status.pid:
        who += f", process {status.pid} on {status.host},"
    if status.position is None:
        where = "is outside of a run" if status.collectives is not None else "has said nothing of its iteration"
    else:
        iteration, extension = status.position
        where = f"has iteration {iteration} as its last" + (
            "" if extension is None else f" and is in extension {extension!r}"
        )
    state = f" {status.state}" if status.state else f" It has begun no exchange for {status.idle:.0f} s."
    return f"{who} {where}.{state}" + (f" Its stack:\n{status.stacks.rstrip()}" if status.stacks else "")


def _describe_deadlock(statuses: Iterable[Status], seconds: float, timeout: float) -> str:
    details = "\n".join(map(_describe, islice(statuses, _MOST_DESCRIBED)))
    return (
        f"all ranks wait for each other for {seconds:.0f} s (timeout={timeout:g}): they are in different exchanges, or the "
        f"network is lost.\n{details}\n"
        "All ranks call the same methods of a communicator, and the same collectives of torch, in the same order: see "
        "where the stacks differ."
    )


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
