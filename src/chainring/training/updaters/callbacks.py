"""What is called around the stages of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from chainring.training.updaters.base import Updater


@dataclass(slots=True)
class UpdateContext:
    """Where an update is, for a callback.

    Attributes:
        updater: whose update it is.
        iteration: updates completed.
        micro_step: which of the accumulated parts is under way, from 0.
        batch: the converted batch of that part.
        loss: its loss, once the forward has run.
    """

    updater: Updater
    iteration: int
    micro_step: int
    batch: Any = None
    loss: Tensor | None = None


Callback = Callable[[UpdateContext], Any]

STAGES = ("forward", "backward", "comm", "update")


class UpdateCallbacks:
    """Functions of an `UpdateContext`, called once each time their stage starts or finishes, in the order given.

    Each argument is one callable or an iterable of them. ``forward`` and ``backward`` run once for each accumulated part,
    ``comm`` (only where a communicator was given) and ``update`` once an update. At ``update_on_start`` the gradients are
    final: averaged over parts and ranks, and unscaled.

    Raises:
        TypeError: something in an argument cannot be called.
    """

    def __init__(
        self,
        *,
        forward_on_start: Any = (),
        forward_on_finish: Any = (),
        backward_on_start: Any = (),
        backward_on_finish: Any = (),
        comm_on_start: Any = (),
        comm_on_finish: Any = (),
        update_on_start: Any = (),
        update_on_finish: Any = (),
    ) -> None:
        self.forward_on_start = _callbacks("forward_on_start", forward_on_start)
        self.forward_on_finish = _callbacks("forward_on_finish", forward_on_finish)
        self.backward_on_start = _callbacks("backward_on_start", backward_on_start)
        self.backward_on_finish = _callbacks("backward_on_finish", backward_on_finish)
        self.comm_on_start = _callbacks("comm_on_start", comm_on_start)
        self.comm_on_finish = _callbacks("comm_on_finish", comm_on_finish)
        self.update_on_start = _callbacks("update_on_start", update_on_start)
        self.update_on_finish = _callbacks("update_on_finish", update_on_finish)

    def __bool__(self) -> bool:
        """Whether there is any callback."""
        return any(vars(self).values())


def _callbacks(name: str, given: Any) -> tuple[Callback, ...]:
    if callable(given):
        return (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} is a callable of one context, or an iterable of them; got {given!r}")
    callbacks = tuple(given)
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"{name} holds {callback!r}, which cannot be called; each is a callable of one context")
    return callbacks


def run(callbacks: tuple[Callback, ...], context: UpdateContext) -> None:
    """Calls each with the context."""
    for callback in callbacks:
        callback(context)
