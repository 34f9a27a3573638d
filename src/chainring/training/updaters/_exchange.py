"""Updates of several ranks that change parameters without an exchange between the ranks: found, and refused."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring.training.updaters._gradients import list_parameters
from chainring.training.updaters._wrapped import WrappedModules


class ExchangeWatch:
    """Notes what an ``update_core`` does to parameters beside `StandardUpdater.step`, through which ranks exchange.

    Attributes:
        has_exchanged: True if gradients were exchanged in this update.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.has_exchanged = self._is_stepping = False
        self._optimizers = optimizers
        self._stepped_outside: list[tuple[str, bool]] = []  # the name, and whether it was given a closure
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # its __init__ has called that of Optimizer
                optimizer.register_step_post_hook(partial(self._note_step, name))

    def begin(self) -> None:
        """Begin an update."""
        self.has_exchanged = self._is_stepping = False
        self._stepped_outside = []

    @contextmanager
    def stepping(self) -> Generator[None]:
        """Return the context in which an optimizer steps on gradients that were exchanged."""
        self._is_stepping = True
        yield
        self._is_stepping = False

    def _note_step(self, name: str, _: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            has_closure = kwargs.get("closure", *args[1:2]) is not None
            self._stepped_outside.append((name, has_closure))

    def check(self, comm: Communicator, models: Mapping[str, nn.Module], wrapped: WrappedModules, has_weighed: bool) -> None:
        """Refuse an update after which the ranks may differ, or in which DDP has exchanged gradients with other weights.

        Args:
            comm: the communicator of the ranks.
            models: those that the update may have changed.
            wrapped: the modules that exchange gradients themselves.
            has_weighed: True if a loss has gone through `StandardUpdater.backward`.

        Raises:
            RuntimeError: an optimizer stepped by itself, or the parameters of the ranks differ.
        """
        for name, has_closure in self._stepped_outside:
            parameters = list_parameters([self._optimizers[name]])
            # A closure gives each rank its own loss, by which its optimizer decides for itself.
            if has_weighed or has_closure or not all(id(parameter) in wrapped.parameters for parameter in parameters):
                raise RuntimeError(
                    f"update_core has let optimizer {name!r} step by itself, so the {comm.size} ranks have not averaged its "
                    f"gradients: write self.backward(loss) and self.step({name!r}) in update_core, or self.step({name!r}, "
                    "closure) with an optimizer that needs a closure, and not optimizer.step()"
                )
        if not (self.has_exchanged or self._stepped_outside):
            self._compare(comm, models, wrapped)

    def _compare(self, comm: Communicator, models: Mapping[str, nn.Module], wrapped: WrappedModules) -> None:
        """Compare the parameters of the ranks, after an update without any exchange; sharded ones differ by nature."""
        digest, is_empty = hashlib.blake2b(digest_size=16), True
        for parameter in (parameter for model in models.values() for parameter in model.parameters()):
            if id(parameter) not in wrapped.parameters and not is_lazy(parameter):
                values: Any = parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy()
                digest.update(values)
                is_empty = False
        if not is_empty and len(set(comm.gather_object(digest.hexdigest()))) > 1:
            raise RuntimeError(
                f"after an update without self.step() the {comm.size} ranks have different parameters: update_core has "
                "changed them without averaging gradients. Write self.backward(loss) and self.step() in update_core"
            )
