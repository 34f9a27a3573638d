"""What virtual ranks have each for itself: running statistics of modules, and gradients of sharded parameters."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import (
    as_summand,
    fsdp_modules,
    fsdp_parameters,
    is_sharded,
    is_summand,
    reshard,
    shard_like,
    to_local,
)
from chainring._distributed.virtual_ranks import TreeSum

_ELEMENT_BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD,
)  # fmt: skip


class RunningStatistics:
    """The buffers of some models. All virtual ranks begin an update with the same ones.

    Those that a virtual rank changes are set aside for it, so that the next one starts from the same values. In the end,
    a floating-point buffer is the mean of the results weighted by rows, and an integer buffer is that of virtual rank 0.
    """

    def __init__(self, models: Iterable[nn.Module], count: int) -> None:
        owners = {id(module): module for model in models for module in model.modules()}.values()
        slots = [(module._buffers, name) for module in owners for name in module._buffers]
        found = {id(buffers[name]): (buffers, name) for buffers, name in slots if buffers[name] is not None}
        self._slots: list[tuple[Any, str]] = list(found.values())
        self._buffers: list[Tensor] = [buffers[name] for buffers, name in self._slots]
        self._count = count

    @torch.no_grad()
    def begin(self, block: range) -> None:
        """Begin an update."""
        self._initial = [buffer.clone() for buffer in self._buffers]
        self._sum = TreeSum(block, self._count)
        self._changed: set[int] = set()

    @torch.no_grad()
    def put(self, values: dict[int, Tensor]) -> None:
        """Put the buffers in place that `take` has returned of a virtual rank; all others are as at the beginning."""
        for slot, value in values.items():
            self._buffers[slot].copy_(value)

    @torch.no_grad()
    def take(self, values: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the buffers that a virtual rank has changed, ``values`` being those of before, and undo its changes."""
        taken = dict(values)
        for slot, (buffers, name) in enumerate(self._slots):
            own, found = self._buffers[slot], buffers[name]
            if slot in taken or found is not own or _may_differ(found, self._initial[slot]):
                taken[slot] = found.clone()
                buffers[name] = own
                own.copy_(self._initial[slot])
        return taken

    @torch.no_grad()
    def undo(self) -> None:
        """Set all buffers to what they were at the beginning of the update."""
        for (buffers, name), own, initial in zip(self._slots, self._buffers, self._initial, strict=True):
            buffers[name] = own
            own.copy_(initial)

    @torch.no_grad()
    def add(self, number: int, rows: int, values: dict[int, Tensor]) -> None:
        """Add the results of virtual rank ``number``, which has had so many rows."""
        leaf: list[Tensor | None] = [None] * len(self._slots)
        for slot, value in values.items() if rows else ():
            initial = self._initial[slot]
            self._changed.add(slot)
            if _is_averaged(value):
                leaf[slot] = torch.where(value == initial, 0, _exact(value) - _exact(initial)) * rows  # also of infinities
            elif number == 0:
                leaf[slot] = value.to(torch.int64) - initial.to(torch.int64)
        self._sum.add(leaf)

    @property
    def changed(self) -> tuple[int, ...]:
        """The numbers of the buffers that a virtual rank of this rank has changed."""
        return tuple(sorted(self._changed))

    @torch.no_grad()
    def finish(self, comm: Communicator, changed: Sequence[int], rows: Tensor) -> None:
        """Set the buffers that have changed on any rank, of ``rows`` rows over all virtual ranks."""
        if not changed:
            return
        like = [_exact(self._buffers[slot]) for slot in changed]
        sums = self._sum.select(changed, like).finish(comm, like)
        for slot, total in zip(changed, sums, strict=True):
            buffer, initial = self._buffers[slot], self._initial[slot]
            assert total is not None
            change = total / rows if _is_averaged(buffer) else total
            buffer.copy_(torch.where(change == 0, _exact(initial), _exact(initial) + change))


def _may_differ(buffer: Tensor, initial: Tensor) -> bool:
    """Return True if a buffer has changed; on an accelerator, which would have to be waited for, always."""
    # Its version does not tell: BatchNorm's kernel on the host changes its statistics without counting that.
    return buffer.device.type != "cpu" or not torch.equal(buffer, initial)


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _exact(buffer: Tensor) -> Tensor:
    """Return a buffer in a dtype in which sums are computed."""
    if not _is_averaged(buffer):
        return buffer.to(torch.int64)
    return buffer.to(torch.promote_types(buffer.dtype, torch.float32 if buffer.device.type == "mps" else torch.float64))


class ShardedGradients:
    """The gradients that each rank has computed of the sharded parameters of some models.

    While virtual ranks compute, `fully_shard` does not reduce gradients, which virtual ranks sum in an order of their own: a
    backward leaves that of the whole parameter with the gathered one, on each rank its own. It is moved to the sharded
    parameter as a ``DTensor`` that is the sum of what the ranks hold (``Partial``), and so it is there, and can be cleared,
    put aside and added to, as that of a plain parameter.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        for model in models:
            reshard(fsdp_modules(model))  # an evaluation leaves parameters gathered
        self._held = [held for model in models for held in fsdp_parameters(model)]

    def __bool__(self) -> bool:
        """Return True if a model has sharded parameters."""
        return bool(self._held)

    def drop(self) -> None:
        """Forget gradients that a backward which failed may have left."""
        for held in self._held:
            _take(held)

    @contextmanager
    def backward(self) -> Generator[None]:
        """Return the context of a backward, which adds to the gradients that are there."""
        for held in self._held:
            own = held.sharded_param.grad
            gathered = getattr(held, "unsharded_param", None)  # not before the first forward
            if gathered is not None and is_summand(own) and gathered.dtype == own.dtype:
                gathered.grad, held.sharded_param.grad = to_local(own), None
        yield
        self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Move what a backward has left to the gradients of the sharded parameters.

        Raises:
            RuntimeError: a parameter still has the gradient of a step.
        """
        for held in self._held:
            parameter, gradient = held.sharded_param, _take(held)
            if gradient is None:
                continue
            own = parameter.grad
            if own is None:
                parameter.grad = as_summand(gradient.to(parameter.dtype), parameter)
            elif is_summand(own):
                to_local(own).add_(gradient)
            else:
                raise RuntimeError(
                    "loss.backward() has met the gradients of a step, which are sharded and were summed over the ranks; "
                    "write self.backward(loss) in update_core, which clears them before"
                )


def _take(held: Any) -> Tensor | None:
    """Return the gradient that a backward has left with a gathered parameter, which then has none."""
    gathered, gradient = getattr(held, "unsharded_param", None), held.unsharded_accumulated_grad
    if gradient is None and gathered is not None:
        gradient = gathered.grad
    if "unsharded_accumulated_grad" in vars(held):  # until torch 2.14, and there with a MixedPrecisionPolicy
        held.unsharded_accumulated_grad = None
    if gathered is not None:
        gathered.grad = None
    return gradient  # type: ignore[no-any-return]


def whole_like(parameter: Any) -> Tensor:
    """Return a tensor of the shape, dtype and device of a whole parameter, which takes no memory where that is sharded."""
    if not is_sharded(parameter):
        return parameter  # type: ignore[no-any-return]
    return torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def set_gradient(parameter: Any, gradient: Tensor | None) -> None:
    """Set the gradient of a parameter to a whole one that every rank has, of which a sharded parameter takes its shard."""
    parameter.grad = None
    parameter.grad = shard_like(gradient, parameter)


def check_sharded_parameters(optimizers: Mapping[str, optim.Optimizer]) -> None:
    """Refuse optimizers that update a shard differently from the same elements of the whole parameter.

    Raises:
        ValueError: an optimizer of sharded parameters does not work element by element, or not with these.
    """
    for name, optimizer in optimizers.items():
        groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for group, parameter in groups:
            if is_sharded(parameter) and (reason := _find_reason(optimizer, group, parameter)):
                raise ValueError(
                    "with virtual_ranks each rank makes of its shards what one rank makes of whole parameters, to the last "
                    f"bit, and optimizer {name!r} of sharded parameters {reason}, or leave the model plain or wrap it in "
                    "DistributedDataParallel"
                )


def _find_reason(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: Any) -> str | None:
    """Return why the bits of a step depend on the shards, and what to write instead; ``None`` if they do not."""
    cls, device = type(optimizer), parameter.device.type
    if cls not in _ELEMENT_BY_ELEMENT:
        names = ", ".join(known.__name__ for known in _ELEMENT_BY_ELEMENT)
        return f"is {cls.__qualname__}, which may use more than one element at a time: take one of torch.optim's {names}"
    if group.get("fused"):
        return "has fused=True, whose kernels round by the place of an element: take foreach=True, or neither"
    if device == "cpu" and parameter.element_size() < 4:
        return (
            f"steps in {parameter.dtype} on the host, whose kernels round by the place of an element: keep parameters in "
            'float32 and compute with precision="bf16"'
        )
    if device != parameter.device_mesh.device_type:
        return (
            f"steps on {device!r}, to which fully_shard has moved them, and ranks exchange on "
            f"{parameter.device_mesh.device_type!r}: leave offload_policy out"
        )
    return None
