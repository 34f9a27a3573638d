"""A snapshot of several ranks: each writes the parts that it holds, all vote, and rank 0 commits.

Rank 0 makes the directory and says where it is. Every rank writes a file of its own there and tells its size and checksum,
or why it could not. Rank 0 lists the files in the manifest and publishes the directory, as it does alone, and says how it
went. So a snapshot is complete or absent on all ranks alike, and a failure of one is raised on each.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring.communicator import Communicator
from chainring.serializers.store import Store, WriteFile

Vote = tuple[int, int] | str
"""Size and checksum of a rank's file, or why there is none."""


def file_name(rank: int, size: int) -> str:
    """What a rank's file is called."""
    return f"rank{rank:05d}-of-{size:05d}.safetensors"


def follow(comm: Communicator, write: WriteFile) -> None:
    """Takes part in the snapshot that rank 0 commits.

    Raises:
        OSError: it is not committed; the error says which rank has failed and why.
    """
    place: str | None = comm.broadcast_object(None)
    if place is not None:
        comm.gather_object(_written(write, Path(place) / file_name(comm.rank, comm.size)))
    outcome: str | None = comm.broadcast_object(None)
    if outcome is not None:
        raise OSError(errno.EIO, outcome)


def lead(
    comm: Communicator, store: Store, name: str, write: WriteFile, files: Mapping[str, WriteFile], iteration: int, about: Any
) -> None:
    """Commits a snapshot with the files of all ranks; rank 0's call beside the `follow` of the others.

    Raises:
        OSError: a rank could not write, or the snapshot could not be published.
    """
    announced = False
    votes: list[Vote] = []

    def together(place: Path) -> tuple[int, int]:
        nonlocal announced, votes
        announced = True
        comm.broadcast_object(str(place.parent))
        votes = comm.gather_object(_written(write, place))
        failed = [f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if isinstance(vote, str)]
        if failed:
            raise OSError(errno.EIO, f"the snapshot could not be written by {'; '.join(failed)}")
        return _numbers(votes[0])

    def of(rank: int) -> WriteFile:
        return lambda place: _numbers(votes[rank])

    others = {file_name(rank, comm.size): of(rank) for rank in range(1, comm.size)}
    try:
        store.commit(name, {file_name(0, comm.size): together, **others, **files}, iteration, about)
    except BaseException as error:
        if not announced:
            comm.broadcast_object(None)
        comm.broadcast_object(f"{type(error).__name__}: {error}")
        raise
    comm.broadcast_object(None)


def _written(write: WriteFile, place: Path) -> Vote:
    try:
        return write(place)
    except BaseException as error:  # whatever it is, the others must not wait
        return f"{type(error).__name__}: {error}"


def _numbers(vote: Vote) -> tuple[int, int]:
    assert not isinstance(vote, str)
    return vote
