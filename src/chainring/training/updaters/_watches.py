"""Detection of updates after which ranks would differ, because they have not exchanged their gradients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import is_local_to, to_full, to_local
from chainring.training.updaters._wrapped import WrappedModules
from chainring.training.updaters.callbacks import list_parameters

_EVERY = 1000  # updates
_AT_ONCE = 1 << 22  # elements
_TOLERANCE = 1e-2  # of a gradient, which kernels that add in any order round differently on each rank


class ExchangeWatch:
    """Detects changes of parameters by an ``update_core`` outside of `StandardUpdater.step`, which exchanges gradients.

    Attributes:
        has_exchanged: True if gradients were exchanged in this update.
        is_stepping: True while an optimizer steps on gradients that were exchanged.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self.begin()
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # its __init__ has called that of Optimizer
                optimizer.register_step_post_hook(partial(self._note_step, name))

    def begin(self) -> None:
        """Begin an update."""
        self.has_exchanged = self.is_stepping = False
        self._stepped_outside: list[tuple[str, bool]] = []  # the name, and whether it was given a closure

    def _note_step(self, name: str, _: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_stepping:
            has_closure = kwargs.get("closure", *args[1:2]) is not None
            self._stepped_outside.append((name, has_closure))

    def check(self, comm: Communicator, models: Mapping[str, nn.Module], wrapped: WrappedModules, has_weighed: bool) -> None:
        """Refuse an update after which the ranks may differ, or in which DDP has exchanged gradients with other weights.

        ``has_weighed`` is true if a loss has gone through `StandardUpdater.backward`.
        """
        for name, has_closure in self._stepped_outside:
            parameters = list_parameters([self._optimizers[name]])
            # A closure gives each rank its own loss, by which its optimizer decides for itself.
            if has_weighed or has_closure or not all(id(parameter) in wrapped.parameters for parameter in parameters):
                raise RuntimeError(
                    f"update_core has let optimizer {name!r} step by itself, so the {comm.world.size} ranks have not "
                    f"exchanged its gradients, or compared them: write self.backward(loss) and self.step({name!r}) in "
                    f"update_core, or self.step({name!r}, closure) with an optimizer that needs a closure, and not "
                    "optimizer.step()"
                )
        if self.has_exchanged or self._stepped_outside:
            return
        # After an update without any exchange the parameters are compared, but for shards, which differ by nature.
        digest, is_empty = hashlib.blake2b(digest_size=16), True
        for parameter in (parameter for model in models.values() for parameter in model.parameters()):
            if id(parameter) not in wrapped.parameters and not is_lazy(parameter):
                values: Any = to_local(parameter).detach().reshape(-1).view(torch.uint8).cpu().numpy()
                digest.update(values)
                is_empty = False
        digests = [] if is_empty else comm.world.gather_object(digest.hexdigest())
        if len({digests[rank] for rank in comm.data_ranks if digests}) > 1:
            raise RuntimeError(
                f"after an update without self.step() the {comm.size} ranks have different parameters: update_core has "
                "changed them without averaging gradients. Write self.backward(loss) and self.step() in update_core"
            )


class ModelRanksWatch:
    """Compares the results of ranks that compute a model together, in the first update and in every thousandth.

    Only one of them writes what it has of the parameters that each of them holds for itself, and of the losses.
    """

    def __init__(self, comm: Communicator, models: Mapping[str, nn.Module]) -> None:
        self._comm, self._models = comm, models
        self._first: int | None = None

    def check(self, iteration: int, loss: Any, optimizers: Iterable[Optimizer]) -> None:
        """Refuse ranks whose losses or gradients differ, by the same error on every rank, before an optimizer steps."""
        self._first = iteration if self._first is None else self._first
        if iteration != self._first and iteration % _EVERY:
            return
        stepping = set(map(id, list_parameters(optimizers)))
        names = {id(p): name for model in self._models.values() for name, p in model.named_parameters()}
        sums = {
            names[id(p)]: _sums_of(to_local(p.grad))
            for model in self._models.values()
            for p in model.parameters()
            if id(p) in stepping and p.grad is not None and p.grad.layout is torch.strided and is_local_to(p, self._comm)
        }
        own = (self._comm.rank, float(to_full(loss).detach()), sums)
        first_of: dict[int, Any] = {}
        for rank, (data_rank, loss, found) in enumerate(self._comm.world.gather_object(own)):
            first, expected_loss, expected = first_of.setdefault(data_rank, (rank, loss, found))
            differing = []  # what, and both numbers
            total = math.hypot(*(norm for norm, _ in expected.values()))
            for name in dict.fromkeys([*expected, *found]):
                (norm, expected_sum), (_, found_sum) = expected.get(name, (0.0, 0.0)), found.get(name, (0.0, 0.0))
                if abs(expected_sum - found_sum) > _TOLERANCE * (norm + _TOLERANCE * total):
                    differing.append((f"a sum over the gradient of {name!r}", expected_sum, found_sum))
            if abs(expected_loss - loss) > 1e-5 * abs(expected_loss):
                differing.append(("the loss", expected_loss, loss))
            if differing:
                what, one, other = differing[0]
                raise RuntimeError(
                    f"ranks {first} and {rank} compute a model together, on the same rows, and {what} is {one:.6g} on the "
                    f"one and {other:.6g} on the other, as if each had data of its own: give both the same rows and seeds, "
                    "and place the parameters of what they share on the mesh, by parallelize_module(model, "
                    'mesh["tp"], plan); or, if each computes on a part of a sequence, add up gradients over these ranks by '
                    "UpdateCallbacks(comm_on_start=...), and the losses in the model"
                )


def _sums_of(gradient: torch.Tensor) -> tuple[float, float]:
    """Return the norm of a gradient, and the sum of its elements with signs in an order without a short period."""
    places = torch.arange(min(gradient.numel(), _AT_ONCE), device=gradient.device)
    signs = 1.0 - 2.0 * ((places * places * 7 + places * 3) % 11 % 2).double()
    sums = torch.zeros(2, dtype=torch.float64, device=gradient.device)
    for part in torch.split(gradient.detach().flatten(), _AT_ONCE):
        values = part.double()
        sums += torch.stack([values @ values, values @ signs[: values.numel()]])
    squares, total = sums.tolist()
    return math.sqrt(squares), total
