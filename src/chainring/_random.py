"""Random numbers: the order of an epoch, and the global generators of Python, NumPy, torch and the accelerator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 8
_MAX_TABLE_SIZE = 2**18
"""A permutation of so many values is computed whole; a larger table would take much memory and save little time."""


def epoch_order(seed: int, epoch: int, size: int, start: int = 0, stop: int | None = None) -> Indices:
    """Return the indices at positions ``start`` to ``stop`` of the shuffled order of one epoch.

    Args:
        seed: any integer.
        epoch: each epoch has its own order.
        size: the number of examples.
        start: the first position.
        stop: one past the last position, by default ``size``.

    Returns:
        An int64 array of ``stop - start`` indices. Over the whole epoch every index below ``size`` comes exactly once.

    Raises:
        ValueError: the positions do not satisfy ``0 <= start <= stop <= size``.
    """
    # FROZEN: a saved run has a position in this order and no indices. Another result would break every resumed run.
    stop = size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise ValueError(f"positions must satisfy 0 <= start <= stop <= size, got {start}, {stop}, {size}")
    bits = max(2, (size - 1).bit_length())
    dtype = np.uint32 if bits <= 32 else np.uint64
    permute: Callable[..., NDArray[np.unsignedinteger]] = partial(_feistel, bits=bits, keys=_round_keys(seed, epoch))
    if 1 << bits <= min(2 * (stop - start), _MAX_TABLE_SIZE):
        # hot path: "Chainring, as written" of benchmarks/epochs.py
        permute = permute(np.arange(1 << bits, dtype=dtype)).take
    values = permute(np.arange(start, stop, dtype=dtype))
    outside = np.flatnonzero(values >= size)
    while outside.size:  # cycle walking: the walk is inside the permutation, so it comes back below size
        values[outside] = permute(values[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}\x1f{epoch}".encode(), digest_size=4 * _ROUNDS).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(_ROUNDS)]


def _feistel(values: NDArray[np.unsignedinteger], bits: int, keys: list[int]) -> NDArray[np.unsignedinteger]:
    """Permute integers of ``bits`` bits: each round changes one half by a hash of the other, which can be undone."""
    dtype = values.dtype.type
    low_bits = bits // 2
    low_mask, high_mask = dtype((1 << low_bits) - 1), dtype((1 << (bits - low_bits)) - 1)
    low, high = values & low_mask, values >> dtype(low_bits)
    for i, key in enumerate(keys):
        if i % 2:
            high ^= _mix(low, key) & high_mask
        else:
            low ^= _mix(high, key) & low_mask
    joined: NDArray[np.unsignedinteger] = (high << dtype(low_bits)) | low
    return joined


def _mix(values: NDArray[np.unsignedinteger], key: int) -> NDArray[np.unsignedinteger]:
    """Hash to 32 bits (the multipliers of Wellons' "lowbias32"); halves of up to 32 bits fit."""
    mixed = values.astype(np.uint32)
    mixed ^= np.uint32(key)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x7FEB352D)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    return mixed.astype(values.dtype, copy=False)


def stable_hash(*keys: int | str) -> int:
    """Return 63 bits that depend on every key and are the same in every process and on every machine."""
    return _to_int(hashlib.blake2b("\x1f".join(map(str, keys)).encode(), digest_size=8).digest())


def _to_int(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> 1


def deterministic(seed: int) -> None:
    """Make a run repeatable: seed every generator, and ask an accelerator for deterministic kernels.

    Call it first, before models are made and before the accelerator is used. The CPU's kernels are deterministic by
    default. Some accelerator kernels become slower, and an operation that has no deterministic kernel raises.

    Args:
        seed: an integer from 0 to 2**63 - 1; NumPy's global generator gets its lowest 32 bits.

    Raises:
        ValueError: ``seed`` is not such an integer.

    Example::

        chainring.deterministic(0)
        model = Classifier(MLP(50, 10))  # the same parameters in every run
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


def nondeterminism_reason() -> str | None:
    """Return why a run that is resumed from here would not be bit-exact, or ``None`` if it would."""
    if _accelerator() is None or torch.are_deterministic_algorithms_enabled():
        return None
    return "made on an accelerator without chainring.deterministic(seed), which asks for deterministic kernels"


def seed_all(*keys: int | str) -> None:
    """Seed every generator, the accelerator's too, from a hash of ``keys``."""
    seed_host(*keys)
    if torch.accelerator.is_available():
        # hot path: the table of benchmarks/virtual_ranks.py, which seeds once for each of them. Where
        # there is no accelerator, PyTorch notes the seed and the stack for when there is one, which takes 0.9 ms.
        torch.manual_seed(stable_hash(*keys))


def seed_host(*keys: int | str) -> None:
    """Seed the generators of Python, NumPy and torch on the CPU from a hash of ``keys``."""
    _seed_host(stable_hash(*keys))


def example_keys(seed: int, epoch: int, indices: Indices) -> list[int]:
    """Return the seeds of examples: those that ``seed_host(seed, epoch, index)`` sets."""
    prefix, keys = hashlib.blake2b(f"{seed}\x1f{epoch}\x1f".encode(), digest_size=8), []
    for index in indices.tolist():  # hot path: "images, Pillow" of benchmarks/data.py: half of the hash is shared
        whole = prefix.copy()
        whole.update(b"%d" % index)
        keys.append(_to_int(whole.digest()))
    return keys


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also visits accelerators, a hundred times slower


def get_rng_state() -> dict[str, Any]:
    """Return the state of every generator, in plain values and tensors."""
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
    """Restore what `get_rng_state` returned; an accelerator that has no state in it is left alone."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    device = _accelerator()
    if device is not None and "accelerator" in state:
        device.set_rng_state(state["accelerator"])


Restore = Callable[[], None]
"""Puts the state of a generator back as it was."""


def take_generators() -> tuple[Restore, ...]:
    """Return the state of every generator for `put_generators`: in less time than `get_rng_state`, and not to be saved."""
    device = _accelerator()
    if device is None:
        return _take_host()
    return *_take_host(), partial(device.set_rng_state, device.get_rng_state())


def put_generators(state: tuple[Restore, ...]) -> None:
    """Restore what `take_generators` returned, as often as wanted."""
    for restore in state:
        restore()


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore every generator at the end of the block."""
    state = take_generators()
    try:
        yield
    finally:
        put_generators(state)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch on the CPU, for code that runs there: datasets and loaders."""
    state = _take_host()
    try:
        yield
    finally:
        put_generators(state)


def _take_host() -> tuple[Restore, ...]:
    return _take_python(), _take_numpy(), partial(torch.set_rng_state, torch.get_rng_state())


def _take_python() -> Restore:
    view = _memory_of_python()
    generator = PYTHON
    if view is None or type(generator) is not random.Random:  # of another class, reading a state may do something
        return partial(random.setstate, random.getstate())
    content, normal = view.raw, generator.gauss_next  # type: ignore[attr-defined]

    def restore() -> None:
        view.raw, generator.gauss_next = content, normal  # type: ignore[attr-defined]

    return restore


def _take_numpy() -> Restore:
    # hot path: "images, Pillow" of benchmarks/data.py. NumPy's own functions take 70 us to read a state and put it back.
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    views = _memory_of_numpy(bits)
    if not views:
        return partial(np.random.set_state, np.random.get_state(legacy=False))
    with bits.lock:
        contents = [view.raw for view in views]

    def restore() -> None:
        if np.random.get_bit_generator() is not bits:  # type: ignore[attr-defined]
            np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
        with bits.lock:
            for view, content in zip(views, contents, strict=True):
                view.raw = content

    return restore


def _accelerator() -> Any:
    """Return the module of the accelerator in use, such as ``torch.cuda``, or ``None``; an unused one is not started."""
    if not torch.accelerator.is_available():
        return None
    device = torch.get_device_module(torch.accelerator.current_accelerator())
    return device if getattr(device, "is_initialized", lambda: True)() else None


def digest(*parts: Any) -> int:
    """Return 64 bits, never 0, that depend on every byte of the parts (bytes, arrays), the same on every machine."""
    # hot path: benchmarks/growth.py, recorder; one call of the hash takes half the time of one for each part
    content = parts[0] if len(parts) == 1 else b"".join(parts)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


class GeneratorStates:
    """Takes what tells the states of the global generators of Python, NumPy, torch and the accelerator from others.

    That has to be cheap beside an iteration, after which no code of this one is in the processor's caches: it is little
    memory and few calls, and `digest` makes the digest later. Of a Mersenne twister the position counts, and the first of
    its 624 words: all of them change together, when the generator is seeded and each time that the words are used up, so
    that two states that were ever reached differ in those as well.
    """

    def __init__(self) -> None:
        self._has_accelerator = torch.accelerator.is_available()
        self._python = view_of_python()
        self._torch = views_of_torch()
        self._bits: Any = None  # NumPy's bit generator
        self._numpy: list[Any] = []  # views of its first words and of its position, where these are known
        self._views: list[Any] = []  # of all three, where these are known
        self._host: tuple[Any, ...] = ()  # the states when they were read last
        self._seen = b""  # what the views showed then
        self._gauss: Any = None  # the normals that were drawn ahead then
        self._normal = _NO_NORMAL

    def take(self) -> tuple[Any, ...]:
        """Return the states as they are, for `digest`: the same tuple while no state on the host changes."""
        # hot path: benchmarks/growth.py, recorder
        if np.random.get_bit_generator() is not self._bits:  # type: ignore[attr-defined]
            self._find_views()
        seen = b"".join(self._views)
        # NumPy's normal drawn ahead lies elsewhere. It comes and goes only if there was one, or words were used.
        if seen != self._seen or not seen or PYTHON.gauss_next is not self._gauss or self._normal != _NO_NORMAL:
            self._seen, self._host = seen, self._take_host()
        if not self._has_accelerator:
            return self._host
        device = _accelerator()
        return *self._host[:3], None if device is None else device.get_rng_state()

    def _find_views(self) -> None:
        self._bits, self._seen = np.random.get_bit_generator(), b""  # type: ignore[attr-defined]
        self._numpy = views_of_numpy(self._bits)
        found = self._python is not None and self._torch and self._numpy
        self._views = [self._python, *self._torch, *self._numpy] if found else []

    def _take_host(self) -> tuple[Any, ...]:
        self._gauss = getattr(PYTHON, "gauss_next", None)
        numpy: Any = np.random.get_state(legacy=False)
        if self._numpy:
            self._normal = _normal_of(numpy)
            numpy = b"".join(self._numpy), self._normal
        python = random.getstate() if self._python is None else (self._python.raw, self._gauss)
        return torch.default_generator.get_state(), python, numpy, None

    @staticmethod
    def digest(taken: tuple[Any, ...]) -> int:
        """Return 64 bits of what `take` has returned, the same on every machine."""
        state, python, numpy, on_device = taken
        if len(python) > 2:
            python = struct.pack("<i8I", python[1][-1], *python[1][:8]), python[2]
        if isinstance(numpy, dict) and numpy["bit_generator"] == "MT19937":
            words = numpy["state"]["key"][:8].astype("<u4").tobytes()
            numpy = words + struct.pack("<i", numpy["state"]["pos"]), _normal_of(numpy)
        content = memoryview(state.numpy())
        return digest(
            content[:96],  # the seed, the position, and the first words
            content[-64:],  # the normals drawn ahead
            python[0],
            _NORMAL.pack(python[1] or 0.0, python[1] is not None),
            repr(numpy).encode() if isinstance(numpy, dict) else b"".join(numpy),
            b"" if on_device is None else on_device.cpu().numpy(),
        )


PYTHON: Any = getattr(random.random, "__self__", None)  # the generator behind the functions of ``random``
_TWISTER_SIZE = 2500  # bytes of 624 words and a position
_FIRST_WORDS = struct.Struct("<8I")
_TORCH_STATE, _TORCH_WORDS, _TORCH_SIZE = 5056, 24, 2620  # bytes of its state, before its words there, and of the object
_NORMAL = struct.Struct("<d?")
_NO_NORMAL = struct.pack("<?d", False, 0.0)


def _normal_of(state: Any) -> bytes:
    """Return the normal that NumPy's generator has drawn ahead, of its state."""
    return struct.pack("<?d", bool(state["has_gauss"]), state["gauss"] if state["has_gauss"] else 0.0)


@cache
def view_of_python() -> Any:
    """Return a view of the position and the first words of Python's generator; ``None`` where they are not found."""
    size, start = 4 + _FIRST_WORDS.size, object.__basicsize__
    cls = next((cls for cls in type(PYTHON).__mro__ if cls.__module__ == "_random"), object)
    if sys.implementation.name != "cpython" or sys.byteorder != "little" or cls.__basicsize__ < start + size:
        return None
    view = (ctypes.c_char * size).from_address(id(PYTHON) + start)
    _, words, _ = random.getstate()
    return view if view.raw == struct.pack("<i8I", words[-1], *words[:8]) else None


def views_of_numpy(bits: Any) -> list[Any]:
    """Return views of the first words and of the position of a Mersenne twister; none where they are not found."""
    if type(bits) is not np.random.MT19937 or sys.byteorder != "little":
        return []
    address, state = int(bits.ctypes.state_address), np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    words = (ctypes.c_char * _FIRST_WORDS.size).from_address(address)
    position = (ctypes.c_char * 4).from_address(address + 4 * 624)
    key, place = state["state"]["key"], state["state"]["pos"]
    is_found = words.raw + position.raw == _FIRST_WORDS.pack(*key[:8].tolist()) + struct.pack("<i", place)
    return [words, position] if is_found else []


@cache
def _memory_of_python() -> Any:
    """Return a view of the whole state of Python's generator but its normal; ``None`` where it is not found."""
    view = view_of_python()
    return None if view is None else (ctypes.c_char * _TWISTER_SIZE).from_address(ctypes.addressof(view))


@lru_cache(8)
def _memory_of_numpy(bits: Any) -> tuple[Any, ...]:
    """Return views of the state of NumPy's generator and of its normal drawn ahead; none where they are not found."""
    generator = getattr(np.random.random, "__self__", None)  # behind the functions of ``numpy.random``
    found, place = views_of_numpy(bits), _place_of_normal()
    if not found or place is None or type(generator) is not np.random.RandomState:
        return ()
    words = (ctypes.c_char * _TWISTER_SIZE).from_address(ctypes.addressof(found[0]))
    return words, (ctypes.c_char * 16).from_address(id(generator) + place)


@cache
def _place_of_normal() -> int | None:
    """Return where in a generator of NumPy the normal that it has drawn ahead lies, behind the flag that there is one.

    The place is that in a generator of its own, of which the normal is known, to see the flag change.
    """
    if sys.implementation.name != "cpython":
        return None
    own = np.random.RandomState(5)
    own.standard_normal()
    state: Any = own.get_state(legacy=False)
    with_normal = ctypes.string_at(id(own), type(own).__basicsize__)
    own.standard_normal()
    without = ctypes.string_at(id(own), type(own).__basicsize__)
    place = with_normal.find(struct.pack("<d", state["gauss"])) - 8
    flags = [struct.unpack_from("<i", memory, place)[0] for memory in (with_normal, without)] if place >= 0 else []
    return place if flags == [1, 0] else None


@cache
def views_of_torch() -> list[Any]:
    """Return views of the seed, position, first words and normals of torch's generator; none where they are not found.

    The places are those of a generator of its own, which can be seeded, and draws a normal ahead, to see them change.
    """
    own = torch.Generator()
    torch.randn(1, generator=own.manual_seed(5))
    if sys.byteorder != "little" or len(state := own.get_state().numpy().tobytes()) != _TORCH_STATE:
        return []
    words = struct.pack("<624I", *struct.unpack_from("<624Q", state, _TORCH_WORDS))
    memory = ctypes.string_at(own._cdata, _TORCH_SIZE)  # type: ignore[attr-defined]
    start, place = memory.find(state[:12]), memory.find(words)
    normals, known = place + len(words), state[-32:-24] + b"\x01"
    if not 0 <= start < place <= start + 64 or memory[normals + 12 : normals + 21] != known:
        return []
    address: int = torch.default_generator._cdata  # type: ignore[attr-defined]
    spans = [(start, place + _FIRST_WORDS.size), (normals, normals + 24)]
    views = [(ctypes.c_char * (end - begin)).from_address(address + begin) for begin, end in spans]
    return views if views[0].raw[:12] == torch.default_generator.get_state().numpy()[:12].tobytes() else []
