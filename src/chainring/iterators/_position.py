"""Where in the stream of epochs an iterator is: pure arithmetic, no data."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """A place between two batches: ``position`` examples of epoch ``epoch`` have been returned."""

    epoch: int
    position: int


class Stretch(NamedTuple):
    """The part of a batch that lies in one epoch: positions ``start`` to ``stop`` of its order."""

    epoch: int
    start: int
    stop: int


def advance(at: Position, size: int, batch_size: int, repeat: bool) -> tuple[list[Stretch], Position]:
    """The stretches that make up the next batch, and the place after it.

    With ``repeat`` a batch is always full: one that crosses the end of an epoch is completed from the next, as often
    as it takes. Without, the batch at the end may be short, and after it there is none (no stretches).
    """
    epoch, position = at
    stretches: list[Stretch] = []
    missing = batch_size
    while missing and (repeat or epoch == 0):
        stop = min(size, position + missing)
        stretches.append(Stretch(epoch, position, stop))
        missing -= stop - position
        epoch, position = (epoch + 1, 0) if stop == size else (epoch, stop)
    return stretches, Position(epoch, position)
