"""The start of a run on several ranks: all of them train the same way, and write to the same place."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring.training._settings import Change, Settings, shared_settings

if TYPE_CHECKING:
    from chainring.serializers._store import Snapshots
    from chainring.training.trainer import Trainer


def check_agreement(trainer: Trainer) -> None:
    """Refuse ranks whose settings differ, which would compute other results than one process does, or wait forever.

    Raises:
        ValueError: a setting differs; the same error on every rank names the first.
    """
    world, settings = trainer.comm.world, shared_settings(trainer)
    digests = world.gather_object({owner: _digest(group) for owner, group in settings.items()})
    for owner in dict.fromkeys(owner for digest in digests for owner in digest):
        if any(digest.get(owner) != digests[0].get(owner) for digest in digests):
            first, *others = world.gather_object(settings.get(owner, Settings()))
            rank, changes = next(
                (rank, found) for rank, other in enumerate(others, 1) if (found := first.differences(other))
            )
            _refuse(owner, rank, changes[0])


def _digest(settings: Settings) -> str:
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


def _refuse(owner: str, rank: int, change: Change) -> None:
    is_stage = owner.startswith("model") and None in (change.value, change.other)
    stages = "; the stages of a pipeline, of which each rank has one, are not supported" if is_stage else ""
    first, other = _shorten(change.value or "absent", change.other or "absent")
    raise ValueError(
        f"all ranks train the same way, and {owner} {change.path} is {first} on rank 0 and {other} on "
        f"rank {rank}; let every rank run the same script with the same settings (what is printed or written "
        f"by rank 0 alone needs no condition on the rank){stages}"
    )


def _shorten(one: str, other: str, limit: int = 200) -> tuple[str, str]:
    """Return two texts that differ so short that one can read them, with the place where they differ."""
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, common - limit // 4) if max(len(one), len(other)) > limit else 0

    def cut(text: str) -> str:
        end = "..." if len(text) > start + limit else ""
        return f"{'...' if start else ''}{text[start : start + limit]}{end}"

    return cut(one), cut(other)


def check_out(store: Snapshots, comm: Communicator) -> None:
    """Refuse an ``out`` that is not the same place for all ranks, which a resumed run could not read.

    Raises:
        ValueError: a rank does not see what rank 0 has written there.
    """
    comm = comm.world
    with store.files.probe() if comm.is_main else nullcontext("") as probe:
        probe = comm.broadcast_object(probe)
        is_seen = comm.gather_object(store.files.exists(probe))
    blind = [rank for rank, seen in enumerate(is_seen) if not seen]
    if blind and is_seen[0]:
        raise ValueError(
            f"out is one directory for all ranks, from which each of them resumes, and {str(store)!r} of rank {blind[0]} is "
            "not that of rank 0: give a path on storage that all machines share"
        )


def check_generators(comm: Communicator) -> None:
    """Let ranks that compute a model together begin with the same random numbers, which PyTorch's seed must have given them.

    Those of Python and NumPy, which nobody may have seeded, and of the accelerator become those of the first of them.

    Raises:
        ValueError: PyTorch's generators differ; the same error on every rank.
    """
    states = comm.world.gather_object((comm.rank, torch.initial_seed(), _random.get_rng_state()))
    first: dict[int, tuple[int, int, Any]] = {}  # by the number of the data rank
    for number, (rank, seed, state) in enumerate(states):
        before, its_seed, its_state = first.setdefault(rank, (number, seed, state))
        if not torch.equal(state["torch"], its_state["torch"]):
            raise ValueError(
                f"ranks that compute a model together draw the same random numbers, and PyTorch's generator has others on "
                f"rank {number} (its seed is {seed}) than on rank {before} ({its_seed}): call torch.manual_seed(seed) with "
                "the same seed on all of them before the model is made, or again before trainer.run()"
            )
    _random.set_rng_state(first[comm.rank][2])
