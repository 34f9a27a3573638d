"""Which rank the others wait for: a pure function of how far each has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from chainring._distributed.group import BESIDE, OWN
from chainring._distributed.progress import Record

_MOST_DESCRIBED = 4  # ranks


class Verdict(NamedTuple):
    """What has happened: the ranks that have not arrived, none if all wait for each other, and what all ranks say of it."""

    late: list[int]
    text: str


def judge(records: Mapping[int, Record], asking: Iterable[int], waited: float, timeout: float) -> Verdict | None:
    """Return that ranks have not arrived where another has waited for too long; ``None`` if none has.

    Args:
        records: those of all ranks, by number.
        asking: the ranks whose waits count; of others it may not be known if they still wait.
        waited: the seconds of waiting that are too long.
        timeout: the setting, for the text.
    """
    for is_beside in (False, True):
        for waiting in sorted((records[rank] for rank in asking), key=lambda record: -_seconds(record, is_beside)):
            if _seconds(waiting, is_beside) < waited or waiting.state:
                continue
            if late := find_late(waiting, records, is_beside):
                return Verdict(late, _describe_late(late, records, _seconds(waiting, is_beside), timeout))
    if all(max(record.waited, record.waited_beside) >= waited for record in records.values()):
        return Verdict([], _describe_deadlock(records.values(), timeout))
    return None


def find_late(asking: Record, records: Mapping[int, Record], is_beside: bool) -> list[int]:
    """Return the ranks for which one waits, and which do not wait themselves; none if all wait for each other.

    A rank waits for those that have begun fewer collectives in a group than it has, and so for those that they wait for.

    Args:
        asking: the rank that waits.
        records: all ranks, by number.
        is_beside: whether it waits in a group of another thread, where a snapshot is agreed upon.
    """
    reached, late, queue = {asking.rank}, set(), [asking.rank]
    while queue:
        waited_for = _waited_for(records[queue.pop()], records, is_beside)
        for rank in waited_for - reached:
            if _waited_for(records[rank], records, is_beside) and not records[rank].state:
                queue.append(rank)
            else:
                late.add(rank)
        reached |= waited_for
    late = {rank for rank in late if records[rank].collectives is not None} or late  # surely, or possibly
    return sorted(late) or [rank for rank, record in records.items() if record.state]


def _waited_for(record: Record, records: Mapping[int, Record], is_beside: bool) -> set[int]:
    """Return the ranks that have not arrived where a rank waits."""
    return {
        rank
        for name, (number, ranks, description) in (record.collectives or {}).items()
        if (description == BESIDE) == is_beside and (is_beside or record.waited or description != OWN)
        for rank in ranks
        if rank != record.rank and _count(records[rank], name) < number
    }


def _seconds(record: Record, is_beside: bool) -> float:
    """Return for how long a rank has waited, or may have."""
    return record.waited_beside if is_beside else record.waited or record.idle


def _count(record: Record, group: str) -> int:
    """Return how many collectives a rank has begun in a group; none if nothing is known of it."""
    return int((record.collectives or {}).get(group, (-1 if record.collectives is None else 1 << 62,))[0])


def _describe_late(late: list[int], records: Mapping[int, Record], seconds: float, timeout: float) -> str:
    """Return which ranks have not arrived, how far they have come, where they are, and what to do."""
    names, verb = _name_ranks(late), "has" if len(late) == 1 else "have"
    waiting = _name_ranks([rank for rank in records if rank not in late])
    details = "\n".join(_describe(records[rank]) for rank in late[:_MOST_DESCRIBED])
    return (
        f"{names} {verb} not arrived in an exchange in which {waiting} waited for {seconds:.0f} s (timeout={timeout:g}).\n"
        f"{details}\n"
        "Start again, to continue from the newest snapshot. If the rank is only slow there, give it more time by "
        "create_communicator(timeout=), or let all ranks do that work."
    )


def _describe_deadlock(records: Iterable[Record], timeout: float) -> str:
    records = list(records)
    seconds = min(max(record.waited, record.waited_beside) for record in records)
    details = "\n".join(map(_describe, islice(records, _MOST_DESCRIBED)))
    return (
        f"all ranks wait for each other for {seconds:.0f} s (timeout={timeout:g}): they are in different exchanges, or the "
        f"network is lost.\n{details}\n"
        "All ranks call the same methods of a communicator, and the same collectives of torch, in the same order: see "
        "where the stacks differ."
    )


def _describe(record: Record) -> str:
    who = f"rank {record.rank}"
    if record.pid:
        who += f", process {record.pid} on {record.host},"
    if record.position is None:
        where = "is outside of a run" if record.collectives is not None else "has said nothing of its iteration"
    else:
        iteration, extension = record.position
        where = f"has iteration {iteration} as its last" + (
            "" if extension is None else f" and is in extension {extension!r}"
        )
    state = f" {record.state}" if record.state else f" It has begun no exchange for {record.idle:.0f} s."
    return f"{who} {where}.{state}" + (f" Its stack:\n{record.stacks.rstrip()}" if record.stacks else "")


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
