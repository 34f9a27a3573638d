"""Digests of tensors, of 64 bits, however they are sharded.

The digest of a tensor is the sum over its elements, of element i the product of its bits and a fixed odd number K(i), modulo
2**64, to which its dtype and shape are then mixed. As a sum it does not depend on which rank holds which shard. One changed
element always changes it, since an odd factor has an inverse modulo 2**64; two exchanged elements change it unless the
difference of their bits times that of their factors is 0. ``K(i)`` is the product of a factor of the row i // 4096 and one
of the column i % 4096. The bits of an element count as an integer, so that NaNs and -0.0 count as well; those of 64 bits and
complex ones as two or four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chainring._distributed.sharding import Shard
from chainring._random import stable_hash

_ROW = 4096  # elements that share the factor of their row
_CHUNK = 1 << 20  # elements that are multiplied at once: they take 8 bytes each
_UINT64 = 2**64


def read_together(tensors: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Return vectors of integers as they are on the host: those of one device by one read."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    read: dict[int, NDArray[np.int64]] = {}
    for indices in by_device.values():
        vectors = [tensors[index].to(torch.int64) for index in indices]
        values, end = (vectors[0] if len(vectors) == 1 else torch.cat(vectors)).cpu().numpy(), 0
        for index in indices:
            start, end = end, end + len(tensors[index])
            read[index] = values[start:end]
    return [read[index] for index in range(len(tensors))]


def sums_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the sums over the elements of whole tensors, which waits for their devices; 0 of tensors of other libraries."""
    plain = [type(tensor) is Tensor and not tensor.is_meta for tensor in tensors]
    sums = read_together([sum_whole(tensor).reshape(1) for tensor, is_plain in zip(tensors, plain, strict=True) if is_plain])
    values = iter(sums)
    return [int(next(values)[0]) if is_plain else 0 for is_plain in plain]


@lru_cache(1024)
def salt(dtype: torch.dtype, shape: torch.Size) -> int:
    return stable_hash(str(dtype), *shape)


def sums_to_compare(tensors: Sequence[Tensor | None], absent: int, device: torch.device) -> Tensor:
    """Return sums over whole tensors on a device, faster ones: each is compared with that of another such tensor alone.

    ``absent`` stands for the sum of one that is not there. No device is waited for.
    """
    sums: list[Any] = [absent if tensor is None else _sum_words(tensor) for tensor in tensors]
    if device.type == "cpu":
        return torch.from_numpy(np.array([int(total) % _UINT64 for total in sums], np.uint64).view(np.int64))
    return torch.stack([torch.as_tensor(total, dtype=torch.int64).to(device) for total in sums])


def _sum_words(tensor: Tensor) -> Any:
    """Return a sum over a tensor by words: a number, or a tensor on an accelerator."""
    words = _words_of(tensor)
    if not words.is_cpu or words.dtype != torch.int64:
        return _sum_run(words, 0)
    values, factors = words.numpy(), _factors(4 * _ROW, 0, words.device)
    starts = range(0, len(values), len(factors))
    chunks = [values[start : start + len(factors)] for start in starts]
    return sum(int(np.einsum("i,i->", chunk, factors[: len(chunk)])) * (2 * i + 1) for i, chunk in enumerate(chunks))


def _words_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of 64 bits, if it has whole ones, and otherwise as smaller ones."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.nbytes % 8:
        return _as_integers(tensor).reshape(-1)
    elements = tensor.detach().reshape(-1)
    if elements.storage_offset() * elements.element_size() % 8:
        elements = elements.clone()
    return elements.view(torch.int64)


def add_words(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the plain sums of the words of tensors on a device, by one fast pass; a change of one word changes its sum.

    No device is waited for.
    """
    words = map(_words_of, tensors)
    return torch.stack([each.sum(dtype=each.dtype).to(device, torch.int64) for each in words])


def sum_whole(tensor: Tensor) -> Tensor:
    """Return the sum over all elements of a tensor, as a tensor without dimensions."""
    return _sum_run(_as_integers(tensor).reshape(-1), 0)


def sum_shards(shards: Sequence[Shard], device: torch.device) -> Tensor:
    """Return the sum over the elements in some shards of a tensor, as a tensor without dimensions."""
    sums = []
    for shard in shards:
        bits = _as_integers(shard.tensor)
        shape = (*shard.shape, *bits.shape[len(shard.shape) :])
        offsets = (*shard.offsets, *[0] * (bits.ndim - len(shard.offsets)))
        sums.append(_sum_region(bits, offsets, shape).to(device))
    return _add_up(sums, device)


def _add_up(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    return sums[0] if len(sums) == 1 else sum(sums, torch.zeros((), dtype=torch.int64, device=device))


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of at most 32 bits, those of an element in dimensions added at the end."""
    dense = tensor.detach()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).resolve_conj().resolve_neg()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    dense = dense.contiguous().unsqueeze(-1)
    return dense.view({1: torch.uint8, 2: torch.int16}.get(dense.element_size(), torch.int32))


def _sum_region(bits: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    first = next((d for d, size in enumerate(bits.shape) if size != 1), bits.ndim)
    if tuple(bits.shape[first + 1 :]) == tuple(shape[first + 1 :]):  # its elements follow one another in the whole tensor
        return _sum_run(bits.reshape(-1), sum(map(int.__mul__, map(int, offsets), strides)))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    rows = max(1, _CHUNK // max(1, bits[0].numel()))
    for start in range(0, len(bits), rows):
        chunk = bits[start : start + rows]
        positions = torch.zeros((), dtype=torch.int64, device=bits.device)
        for dimension, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
            begin = offset + (start if dimension == 0 else 0)
            along = torch.arange(begin, begin + chunk.shape[dimension], device=bits.device).mul_(stride)
            positions = positions + along.view(-1, *[1] * (bits.ndim - 1 - dimension))
        of_rows = torch.as_tensor(_row_factors(math.prod(shape), bits.device))
        of_columns = torch.as_tensor(_factors(_ROW, 0, bits.device))
        total += (chunk * of_columns[positions % _ROW] * of_rows[positions // _ROW]).sum()
    return total


def _sum_run(bits: Tensor, start: int) -> Tensor:
    """Return the sum over elements that follow one another, the first of which is element ``start``."""
    # hot path: "recorder" of benchmarks/gate.py: on the host NumPy passes over the memory once, and takes each tensor once
    is_on_host = bits.device.type == "cpu"
    row_factors, column_factors = _row_factors(start + len(bits), bits.device), _factors(_ROW, 0, bits.device)
    elements: Any = np.from_dlpack(bits) if is_on_host else bits
    sums: list[Any] = []
    at = 0
    while at < len(bits):
        row, column = divmod(start + at, _ROW)
        rows = 0 if column else min(len(bits) - at, _CHUNK) // _ROW  # whole ones; 0: the chunk is a part of one
        length = rows * _ROW or min(_ROW - column, len(bits) - at)
        chunk = elements[at : at + length].reshape(rows or 1, -1)
        of_columns, of_rows = column_factors[column : column + chunk.shape[1]], row_factors[row : row + len(chunk)]
        if is_on_host:  # the same result on any number of threads
            sums.append(int(np.einsum("i,i->", np.einsum("ij,j->i", chunk, of_columns), of_rows)))
        else:
            sums.append((chunk * of_columns).sum(1).mul_(of_rows).sum())
        at += length
    if is_on_host:
        return torch.from_numpy(np.array(sum(sums) % _UINT64, np.uint64).view(np.int64))
    return _add_up(sums, bits.device)


def _row_factors(elements: int, device: torch.device) -> Any:
    """Return the factors of the rows of so many elements, or of more: powers of two, so that the cache has few of them."""
    return _factors(1 << (elements // _ROW).bit_length(), _ROW, device)


@lru_cache(64)
def _factors(count: int, first: int, device: torch.device) -> Any:
    """Return odd factors as a tensor, on the host as an array."""
    # FROZEN: another result would make every ledger of an earlier run differ from one of now.
    numbers = mix((np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    odd = (numbers | np.uint64(1)).view(np.int64)
    return odd if device.type == "cpu" else torch.from_numpy(odd).to(device)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits each of which depends on all bits of a value: the last steps of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
