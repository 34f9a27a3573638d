"""Values as texts that differ where the bits differ."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring._distributed.sharding import to_local

_MAX_WRITTEN = 4  # elements up to which a tensor is written out


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested containers that is not a container itself, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield from leaves(f"{path}/{index}", item)
    elif isinstance(value, (set, frozenset)):
        yield from leaves(path, sorted(value, key=repr))
    else:
        yield path, value


def describe_leaves(path: str, value: Any) -> dict[str, str]:
    """Return the descriptions of all values in nested containers by path."""
    return {leaf_path: describe(leaf) for leaf_path, leaf in leaves(path, value)}


def describe(value: Any) -> str:
    """Return a plain value as Python writes it, a large array as dtype, shape and CRC-32, anything else as its class.

    Of a sharded tensor it is the shard of this rank.
    """
    value = to_local(as_tensor(value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.tolist()
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{dtype} {tuple(value.shape)} without data"
        if value.numel() <= _MAX_WRITTEN and not value.is_complex():
            return f"{dtype} {value.tolist()}"
        return f"{dtype} {tuple(value.shape)} of CRC {zlib.crc32(bytes_of(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Return one CRC-32 of everything in nested containers."""
    return f"{zlib.crc32(repr(describe_leaves('', value)).encode()):08x}"


def as_tensor(value: Any) -> Any:
    """Return a numeric array as a tensor, and anything else as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value.copy()) if is_numeric else value


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 in one dimension."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
