"""What can be asked of a loader from outside: its length, its generators, where it draws."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

_PARTS = ("sampler", "batch_sampler", "dataset")


def is_function(loader: Any) -> bool:
    """Whether a call of the loader begins a pass."""
    return callable(loader) and not isinstance(loader, Iterable)


def is_one_pass(loader: Any) -> bool:
    """Whether the loader is itself an iterator, such as a generator, and cannot be begun anew."""
    return hasattr(loader, "__next__")


def length_of(loader: Any) -> int | None:
    """Batches in a pass, where the loader tells."""
    try:
        return len(loader)
    except TypeError:
        return None


def examples_of(loader: Any) -> int | None:
    """Examples in a pass, where a ``DataLoader`` indexes its dataset."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    return None if dataset is None or isinstance(dataset, IterableDataset) else length_of(dataset)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of the loader and of its parts, where they have it."""
    for part in (loader, *[getattr(loader, name, None) for name in _PARTS]):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader or its samplers were given: they stand elsewhere at the start of each pass."""
    sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def draws_between(loader: Any) -> bool:
    """Whether a loader may draw in this process after a pass has begun: lists do not, nor torch's samplers with workers."""
    if type(loader) in (list, tuple):
        return False
    if getattr(loader, "num_workers", 0) == 0:
        return True
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return not all(type(one).__module__.startswith("torch.utils.data") for one in samplers if one is not None)


def is_distributed(loader: Any) -> bool:
    """Whether a loader already gives each rank a part of its own."""
    sampler = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
    return any(isinstance(part, DistributedSampler) for part in parts)


def check(loader: Any, epoch_length: int | None) -> None:
    """Refuses what gives no batches.

    Raises:
        TypeError: the loader cannot be iterated.
        ValueError: ``epoch_length`` is below 1.
    """
    iterates = isinstance(loader, Iterable) or callable(loader) or hasattr(loader, "__getitem__")
    if isinstance(loader, (str, bytes, dict)) or not iterates:
        raise TypeError(f"a loader is an iterable of batches, or a function that returns one; got {type(loader).__name__}")
    if epoch_length is None:
        return
    if isinstance(epoch_length, bool) or not isinstance(epoch_length, int) or epoch_length < 1:
        raise ValueError(f"epoch_length counts batches and is at least 1, got {epoch_length!r}")
