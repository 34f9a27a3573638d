"""Which example comes when: a pure function of (seed, epoch, position).

The order of an epoch is a keyed permutation that can be asked for any stretch by itself, so no order is stored and a
run resumes in the middle of an epoch of 10^9 examples as fast as at its start.

The permutation is an alternating (unbalanced) Feistel network over the next power of two, with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Its round keys are BLAKE2b of seed and epoch.
It is made for shuffling, not for secrecy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 8
_MOST_LOOKED_UP = 2**18
"""A permutation of so many values is computed whole; a larger one would take much memory to save little time."""


def stable_hash(*parts: int | str) -> int:
    """63 bits that depend on every part and are the same in every process and on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stable_hashes(*parts: int | str) -> Callable[[int], int]:
    """A function of one more part, which gives ``stable_hash(*parts, last)`` in half of its time."""
    begun = hashlib.blake2b("".join(f"{part}\x1f" for part in parts).encode(), digest_size=8)

    def hash_of(last: int) -> int:
        whole = begun.copy()
        whole.update(b"%d" % last)
        return int.from_bytes(whole.digest(), "little") >> 1

    return hash_of


def epoch_order(seed: int, epoch: int, size: int, start: int = 0, stop: int | None = None) -> Indices:
    """The indices at positions ``start`` to ``stop`` of the shuffled order of one epoch.

    Args:
        seed: any integer.
        epoch: which epoch; each has an order of its own.
        size: the number of examples.
        start: the first position wanted.
        stop: one past the last position wanted, by default ``size``.

    Returns:
        An int64 array of ``stop - start`` indices. Over the whole epoch every index below ``size`` comes exactly once.
    """
    stop = size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise ValueError(f"positions must satisfy 0 <= start <= stop <= size, got {start}, {stop}, {size}")
    bits = max(2, (size - 1).bit_length())
    dtype = np.uint32 if bits <= 32 else np.uint64
    permuted: Callable[..., NDArray[np.unsignedinteger]] = partial(_feistel, bits=bits, keys=_round_keys(seed, epoch))
    if 1 << bits <= min(2 * (stop - start), _MOST_LOOKED_UP):  # of a whole epoch: the many steps of the walk are looked up
        permuted = permuted(np.arange(1 << bits, dtype=dtype)).take
    values = permuted(np.arange(start, stop, dtype=dtype))
    outside = np.flatnonzero(values >= size)
    while outside.size:  # cycle walking: the walk is inside the permutation, so it comes back below size
        values[outside] = permuted(values[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}\x1f{epoch}".encode(), digest_size=4 * _ROUNDS).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(_ROUNDS)]


def _feistel(values: NDArray[np.unsignedinteger], bits: int, keys: list[int]) -> NDArray[np.unsignedinteger]:
    """One pass over ``bits`` bits; each round changes one half by a hash of the other, which can be undone."""
    kind = values.dtype.type
    low_bits = bits // 2
    low_mask, high_mask = kind((1 << low_bits) - 1), kind((1 << (bits - low_bits)) - 1)
    low, high = values & low_mask, values >> kind(low_bits)
    for number, key in enumerate(keys):
        if number % 2:
            high ^= _mix(low, key) & high_mask
        else:
            low ^= _mix(high, key) & low_mask
    joined: NDArray[np.unsignedinteger] = (high << kind(low_bits)) | low
    return joined


def _mix(values: NDArray[np.unsignedinteger], key: int) -> NDArray[np.unsignedinteger]:
    """A 32-bit integer hash (the multipliers of Wellons' "lowbias32"); halves of up to 32 bits fit."""
    mixed = values.astype(np.uint32)
    mixed ^= np.uint32(key)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x7FEB352D)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    return mixed.astype(values.dtype, copy=False)
