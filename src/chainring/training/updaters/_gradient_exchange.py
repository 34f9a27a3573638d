"""The exchange of gradients between virtual ranks, which begins in the last backward of an update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import Exchange, TreeSum, absent_of
from chainring.training.updaters._gradients import GradientVersions, sending
from chainring.training.updaters._sharded_gradients import whole_like


class GradientExchange:
    """Sums gradients over the virtual ranks of all ranks.

    Those of the last virtual rank of this rank may be sent while its backward runs, each bucket as soon as it is complete.
    Where one changes after that, it is stale, and everything must be sent again.
    """

    def __init__(self, comm: Communicator, total: TreeSum, parameters: Sequence[Tensor]) -> None:
        self._comm, self._total, self._parameters = comm, total, parameters
        self._exchange = Exchange(comm, total, list(map(whole_like, parameters)))
        self._versions = GradientVersions()

    def backward(self) -> AbstractContextManager[None]:
        """Return the context of the last backward of an update, in which gradients are sent."""
        return sending(self._parameters, self._exchange.buckets, self._send)

    def _send(self) -> bool:
        """Send the next bucket, unless some of its gradients are not there, or not dense."""
        places = self._exchange.buckets[self._exchange.started]
        found = [self._parameters[place].grad for place in places]
        gradients = [gradient for gradient in found if gradient is not None and gradient.layout is torch.strided]
        if len(gradients) < len(places):
            return False
        self._versions.note(places, gradients)
        self._exchange.start(gradients)
        return True

    def is_stale(self, leaf: Sequence[Tensor | None] | None) -> bool:
        """Return True if the gradients that were sent are not those of the last virtual rank any more."""
        return self._versions.are_stale(leaf)

    def absent(self, leaf: Sequence[Tensor | None] | None) -> tuple[int, ...]:
        """Return the places of parameters that no virtual rank of this rank has a gradient of."""
        return tuple(absent_of([*self._total.nodes.values(), *([] if leaf is None else [leaf])]))

    def start(self, leaf: Sequence[Tensor | None] | None) -> None:
        """Send what was not sent yet."""
        if self._comm.size > 1:
            self._exchange.start_all(leaf)

    def finish(self) -> Sequence[Tensor | None]:
        """Return the sums, after all ranks have sent what they have; of a world of one, which has them, without a copy."""
        if self._comm.size > 1:
            return self._exchange.finish()
        (sums,) = self._total.nodes.values()
        return sums

    def repeat(self, leaf: Sequence[Tensor | None] | None) -> Sequence[Tensor | None]:
        """Return the sums, of the gradients as they are now."""
        self.finish()
        exchange = Exchange(self._comm, self._total, list(map(whole_like, self._parameters)))
        exchange.start_all(leaf)
        return exchange.finish()
