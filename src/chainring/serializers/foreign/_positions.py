"""The counts of another library's run: iterations, epochs, and the place in the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring.serializers.foreign.content import ForeignCheckpoint

_ITERATOR = "updater/iterator:main/"


def set_position(
    path: Path, state: Mapping[str, Any], saved: ForeignCheckpoint, iteration: int | None, report: list[str]
) -> dict[str, Any]:
    """Return the entries of a trainer's state that bring it where the saved run was.

    The iterator may count examples, as `SerialIterator` does, or batches of a loader; any other begins as it is.

    Raises:
        ValueError: the saved run had taken more batches of an epoch than there are.
    """
    changes: dict[str, Any] = {}
    if iteration is not None:
        changes["updater/iteration"] = iteration
    own = {key.removeprefix(_ITERATOR): value for key, value in state.items() if key.startswith(_ITERATOR)}
    saved = _with_epoch(own, saved, iteration, state.get("updater/settings/accumulate", 1), report)
    if saved.epoch is None:
        if own:
            report.append("missing: the place in the data, which begin with a first epoch")
    elif "size" in own and "batch_size" in own:
        changes |= _of_examples(path, own, saved)
    elif {"passes", "taken", "batches", "epoch_length"} <= own.keys():
        changes |= _of_batches(path, own, saved, report)
    elif own:
        report.append("not loaded: the place in the data, because the iterator counts in another way; it begins as it is")
    counts = {"iteration": iteration, "epoch": saved.epoch, "batches of the next epoch": saved.batches or None}
    found = ", ".join(f"{name} {number}" for name, number in counts.items() if number is not None)
    report.append(f"counts: {found}" if found else "missing: iteration and epoch, which begin at 0")
    return changes


def _with_epoch(
    own: Mapping[str, Any], saved: ForeignCheckpoint, iteration: int | None, accumulate: Any, report: list[str]
) -> ForeignCheckpoint:
    """Return the checkpoint with the epoch that follows from the iteration, where it has no epoch of its own."""
    length = own.get("batches")
    if "size" in own and own.get("batch_size"):
        length = math.ceil(own["size"] / own["batch_size"])
    if saved.epoch is not None or iteration is None or not length or accumulate != 1:
        return saved
    epoch, batches = divmod(iteration, length)
    report.append(f"missing: the epoch; {epoch} follows from the iteration and the {length} batches of an epoch here")
    return dataclasses.replace(saved, epoch=epoch, batches=batches)


def _batches(saved: ForeignCheckpoint, in_epoch: int | None, batch_size: int | None = None) -> int:
    """Return how many batches of the next epoch were taken."""
    if saved.examples is not None and batch_size:
        return saved.examples // batch_size
    if saved.batches is not None or saved.fraction is None or in_epoch is None:
        return saved.batches or 0
    return round(saved.fraction * in_epoch)


def _of_examples(path: Path, own: Mapping[str, Any], saved: ForeignCheckpoint) -> dict[str, Any]:
    size, batch_size = own["size"], own["batch_size"]
    position = _batches(saved, math.ceil(size / batch_size)) * batch_size if saved.examples is None else saved.examples
    if position and position >= size:
        raise ValueError(
            f"{path}: the saved run had taken {position} examples of an epoch, and the data have {size}: use the same data "
            "and the same batch size"
        )
    epoch = saved.epoch or 0
    return {
        f"{_ITERATOR}epoch": epoch,
        f"{_ITERATOR}position": position,
        f"{_ITERATOR}is_new_epoch": position == 0 and epoch > 0,
        f"{_ITERATOR}previous_epoch_detail": max(0.0, epoch + (position - batch_size) / size) if epoch or position else None,
    }


def _of_batches(path: Path, own: Mapping[str, Any], saved: ForeignCheckpoint, report: list[str]) -> dict[str, Any]:
    length, epoch = own["batches"], saved.epoch or 0
    taken = _batches(saved, length, own.get("batch_size"))
    if length is not None and taken and taken >= length:
        raise ValueError(
            f"{path}: the saved run had taken {taken} batches of an epoch, and the loader has {length}: use the same data "
            "and the same batch size"
        )
    if taken and (own.get("loader") is not None or own["epoch_length"] != length):
        report.append("not loaded: the place in the epoch, because the loader keeps its own; it begins that epoch again")
        taken = 0
    return {
        f"{_ITERATOR}epoch": epoch,
        f"{_ITERATOR}position": taken,
        f"{_ITERATOR}epoch_detail": epoch + (taken / length if length else 0.0),
        f"{_ITERATOR}previous_epoch_detail": max(0.0, epoch + (taken - 1) / length) if length and (epoch or taken) else None,
        f"{_ITERATOR}is_new_epoch": taken == 0 and epoch > 0,
        f"{_ITERATOR}passes": epoch + (taken > 0),
        f"{_ITERATOR}taken": taken,
    }
