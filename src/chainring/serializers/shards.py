"""Tensors that were saved in parts by several ranks, put together again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from chainring.serializers import tensor_file
from chainring.serializers.manifest import CorruptError


class _Part(NamedTuple):
    tensor: Tensor
    offsets: Sequence[int]
    shape: Sequence[int]
    path: Path


def read_all(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of the files of a snapshot, each whole.

    Raises:
        CorruptError: parts of a tensor are missing, too many, or do not fit together.
        ValueError: a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[_Part]] = {}
    for path in paths:
        places = tensor_file.places(path)
        for name, tensor in tensor_file.read(path).items():
            if name in places:
                parts.setdefault(name, []).append(_Part(tensor, *places[name], path))
            elif name in tensors:
                raise CorruptError(f"{path} has {name!r}, which another file of the snapshot has too")
            else:
                tensors[name] = tensor
    if both := parts.keys() & tensors.keys():
        raise CorruptError(f"{min(both)!r} is saved whole and in parts")
    return tensors | {name: _together(name, held) for name, held in parts.items()}


def _together(name: str, parts: list[_Part]) -> Tensor:
    first = parts[0]
    covered = sum(part.tensor.numel() for part in parts)
    fit = all(part.shape == first.shape and part.tensor.dtype == first.tensor.dtype and _is_inside(part) for part in parts)
    if not fit or covered != math.prod(first.shape):  # checked first: the shape alone could ask for any memory
        raise CorruptError(f"the parts of {name!r} in {[part.path.name for part in parts]} are not one whole")
    # Every number is written over unless parts overlap, in which case some would be left: NaN says so, zero elsewhere.
    full = torch.full(tuple(first.shape), math.nan if first.tensor.is_floating_point() else 0, dtype=first.tensor.dtype)
    for part in parts:
        full[_slices(part)] = part.tensor
    return full


def _slices(part: _Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.tensor.shape, strict=True))


def _is_inside(part: _Part) -> bool:
    sizes = tuple(part.tensor.shape)
    return len(sizes) == len(part.offsets) == len(part.shape) and all(
        0 <= start <= start + size <= whole for start, size, whole in zip(part.offsets, sizes, part.shape, strict=True)
    )
