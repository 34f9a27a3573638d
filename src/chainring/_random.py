"""Every random generator of this process: Python's, NumPy's, torch's and the accelerator's."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
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


def deterministic(seed: int) -> None:
    """Makes a run repeatable: seeds every generator, and asks an accelerator for deterministic kernels.

    Call it first, before models are made and before the accelerator is used. The CPU's kernels are deterministic as
    they are. Some accelerator kernels then take longer, and an operation that has no deterministic kernel raises.

    Args:
        seed: an integer from 0 to 2**63 - 1; NumPy's global generator gets its lowest 32 bits.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"a seed is an integer from 0 to 2**63 - 1, got {seed!r}")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.accelerator.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def get_rng_state() -> dict[str, Any]:
    """The state of every generator, in plain values and tensors."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    words = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    version, python_words, gauss = random.getstate()
    state = {
        "python": {"version": version, "words": torch.from_numpy(np.array(python_words, np.int64)), "gauss": gauss},
        "numpy": {**numpy, "state": {**numpy["state"], "key": words}},
        "torch": torch.get_rng_state(),
    }
    device = _accelerator()
    if device is not None:
        state["accelerator"] = device.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `get_state` returned; an accelerator that was not there then is left alone."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    device = _accelerator()
    if device is not None and "accelerator" in state:
        device.set_rng_state(state["accelerator"])


def nondeterminism_reason() -> str | None:
    """Why a run that is continued from here would not be bit for bit the run that goes on, or ``None``."""
    if _accelerator() is None or torch.are_deterministic_algorithms_enabled():
        return None
    return "made on an accelerator without chainring.deterministic(seed), which asks for deterministic kernels"


def _accelerator() -> Any:
    """The module of the accelerator in use (``torch.cuda``, say), or ``None``. One that was never used is not started."""
    if not torch.accelerator.is_available():
        return None
    device = torch.get_device_module(torch.accelerator.current_accelerator())
    return device if getattr(device, "is_initialized", lambda: True)() else None


@contextmanager
def preserve_rng() -> Iterator[None]:
    """What is drawn inside does not show outside: every generator is put back afterwards."""
    device = _accelerator()
    state = None if device is None else device.get_rng_state()
    with preserve_host_rng():
        try:
            yield
        finally:
            if device is not None:
                device.set_rng_state(state)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """`preserve_rng` for the three generators of the host, for code that runs there: datasets and loaders."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


def seed_all(*parts: int | str) -> None:
    """Seeds every generator from a hash of ``parts``, that of the accelerator too."""
    seed_host(*parts)
    torch.manual_seed(stable_hash(*parts))


def seed_host(*parts: int | str) -> None:
    """Seeds the three generators of the host from a hash of ``parts``."""
    _seed_host(stable_hash(*parts))


def example_seeder(*parts: int | str) -> Callable[[int], None]:
    """A function of one more part, which does what ``seed_host(*parts, last)`` does: for many examples of an epoch."""
    hash_of = stable_hashes(*parts)
    return lambda last: _seed_host(hash_of(last))


def _seed_host(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)  # torch.manual_seed also visits accelerators, a hundred times slower
