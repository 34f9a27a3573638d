"""How ranks talk to one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Communicator:
    """A world of one: this process is rank 0 of 1, and what it exchanges with the others it already has.

    It goes through every part of a run, so that a run of several ranks is the same run with another communicator.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")

    def all_reduce(self, tensors: Sequence[Tensor], average: bool = True) -> None:
        """Replaces each tensor, in place, by its mean over the ranks, or with ``average=False`` by its sum."""

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Replaces each tensor, in place, by the one of rank ``root``."""

    def gather_object(self, obj: Any) -> list[Any]:
        """What every rank gave, in the order of the ranks, on every rank."""
        return [obj]

    def barrier(self) -> None:
        """Waits until every rank has come here."""

    def close(self) -> None:
        """Ends the exchange; afterwards the communicator must not be used."""
