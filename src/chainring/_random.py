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
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    """Return the keys for `ExampleSeeder`: each seeds what ``seed_host(seed, epoch, index)`` does."""
    prefix, keys = hashlib.blake2b(f"{seed}\x1f{epoch}\x1f".encode(), digest_size=8), []
    for index in indices.tolist():  # hot path: "images, Pillow" of benchmarks/data.py: half of the hash is shared
        whole = prefix.copy()
        whole.update(b"%d" % index)
        keys.append(_to_int(whole.digest()))
    return keys


def _seed_host(seed: int) -> None:
    random.seed(seed)
    _tensor_seeder.seed(seed)


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


def take_generators() -> tuple[Any, ...]:
    """Return the state of every generator for `put_generators`: in less time than `get_rng_state`, and not to be saved."""
    device = _accelerator()
    return *_take_host(), None if device is None else device.get_rng_state()


def put_generators(state: tuple[Any, ...]) -> None:
    """Restore what `take_generators` returned."""
    *host, on_device = state
    _put_host(*host)
    device = _accelerator()
    if device is not None and on_device is not None:
        device.set_rng_state(on_device)


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
        _put_host(*state)


def _take_host() -> tuple[Any, ...]:
    return _take_python(), _numpy_states.take(), torch.get_rng_state()


def _put_host(python: Any, numpy: Any, torch_state: Tensor) -> None:
    _put_python(python)
    _numpy_states.put(numpy)
    torch.set_rng_state(torch_state)


def _take_python() -> Any:
    words = _words_of_python()
    if words is None:
        return random.getstate()
    _late.set()
    return words.tobytes(), _PYTHON.gauss_next


def _put_python(state: Any) -> None:
    words, _late.seed = _words_of_python(), None
    if words is None:
        random.setstate(state)
    else:
        words[:], _PYTHON.gauss_next = memoryview(state[0]).cast("I"), state[1]


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
        self._python = _view_of_python()
        self._torch = _views_of_torch()
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
        if seen != self._seen or not seen or _PYTHON.gauss_next is not self._gauss or self._normal != _NO_NORMAL:
            self._seen, self._host = seen, self._take_host()
        if not self._has_accelerator:
            return self._host
        device = _accelerator()
        return *self._host[:3], None if device is None else device.get_rng_state()

    def _find_views(self) -> None:
        self._bits, self._seen = np.random.get_bit_generator(), b""  # type: ignore[attr-defined]
        self._numpy = _views_of_numpy(self._bits)
        found = self._python is not None and self._torch and self._numpy
        self._views = [self._python, *self._torch, *self._numpy] if found else []

    def _take_host(self) -> tuple[Any, ...]:
        self._gauss = getattr(_PYTHON, "gauss_next", None)
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


_PYTHON: Any = getattr(random.random, "__self__", None)  # the generator behind the functions of ``random``
_FIRST_WORDS = struct.Struct("<8I")
_TORCH_STATE, _TORCH_WORDS, _TORCH_SIZE = 5056, 24, 2620  # bytes of its state, before its words there, and of the object
_NORMAL = struct.Struct("<d?")
_NO_NORMAL = struct.pack("<?d", False, 0.0)


def _normal_of(state: Any) -> bytes:
    """Return the normal that NumPy's generator has drawn ahead, of its state."""
    return struct.pack("<?d", bool(state["has_gauss"]), state["gauss"] if state["has_gauss"] else 0.0)


@cache
def _view_of_python() -> Any:
    """Return a view of the position and the first words of Python's generator; ``None`` where they are not found."""
    size, start = 4 + _FIRST_WORDS.size, object.__basicsize__
    cls = next((cls for cls in type(_PYTHON).__mro__ if cls.__module__ == "_random"), object)
    if sys.implementation.name != "cpython" or sys.byteorder != "little" or cls.__basicsize__ < start + size:
        return None
    view = (ctypes.c_char * size).from_address(id(_PYTHON) + start)
    _, words, _ = random.getstate()
    return view if view.raw == struct.pack("<i8I", words[-1], *words[:8]) else None


def _views_of_numpy(bits: Any) -> list[Any]:
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
def _views_of_torch() -> list[Any]:
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


class ExampleSeeder:
    """Fetches examples with the generators of Python, NumPy and torch seeded for each.

    hot path: "images, Pillow" of benchmarks/data.py. Python's generator takes longest to seed. Once a thousand examples have
    not drawn from it, the seed of an example is set late. If the example draws from the generator meanwhile, the seed is set
    and the example fetched again; and for all that follow it is set before, as for those of any dataset that draws.
    """

    def __init__(self) -> None:
        self._undrawn = 0  # so many examples did not draw from Python's generator; -1 after one that did
        self._seen = b""  # what Python's generator showed after a seed was set in this batch

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Let seeds be set late in the block; at its end the generators are those of the example fetched last."""
        self._seen = b""
        if _words_of_python() is None or type(_PYTHON) is not random.Random:
            self._undrawn = -1
        if is_late := self._undrawn >= _PROBATION:
            _PYTHON.__class__ = _LateSeeded
        try:
            yield
        finally:
            _late.set()
            if is_late:
                _PYTHON.__class__ = random.Random

    def fetch(self, ask: Callable[[int], Any], index: int, key: int) -> Any:
        """Return ``ask(index)`` as it is with every generator seeded by ``key``."""
        _tensor_seeder.seed(key)
        view = _view_of_python()
        if self._undrawn >= _PROBATION and self._seen:
            _late.seed = key
        else:
            random.seed(key)
            if self._undrawn < 0:
                return ask(index)
            self._seen = view.raw
        try:
            example = ask(index)
        except Exception:
            if view.raw == self._seen:
                raise
            if not self._was_late():
                raise
        else:
            if view.raw == self._seen:
                self._undrawn += 1
                return example
            if not self._was_late():
                return example
        _seed_host(key)
        return ask(index)

    def _was_late(self) -> bool:
        """Return whether an example has drawn from Python's generator with its seed still to be set."""
        self._undrawn, was_late, _late.seed = -1, _late.seed is not None, None
        return was_late


_PROBATION = 1000
"""Examples in each process whose seeds are all set before: enough to know a dataset that draws, and some milliseconds."""


class _Late:
    """A seed of Python's generator that is still to be set."""

    seed: int | None = None

    def set(self) -> None:
        """Set it, if there is one."""
        if (seed := self.seed) is not None:
            self.seed = None
            random.seed(seed)


_late = _Late()


class _LateSeeded(random.Random):
    """The class of Python's generator while a seed may be set late: whoever reads the state sets it first."""

    @property
    def VERSION(self) -> int:  # type: ignore[override]  # noqa: N802 which getstate reads before the state
        _late.set()
        return random.Random.VERSION


class _TensorSeeder:
    """Seeds torch's generator, and NumPy's by a copy of its words, since a seed gives the same 624 words in both."""

    def __init__(self) -> None:
        self._seed_torch = torch.default_generator.manual_seed  # torch.manual_seed visits accelerators, which takes long
        self._bits: Any = None  # NumPy's bit generator
        self._lock: Any = None
        self._numpy = self._torch = memoryview(b"")  # the words of both, where the ones can be copied to the others
        self._position = memoryview(b"")  # of NumPy's generator
        self.first = -1  # of its words after the last seed

    def seed(self, seed: int) -> None:
        self._seed_torch(seed)
        bits, words = np.random.get_bit_generator(), self._numpy  # type: ignore[attr-defined]
        # hot path: "images, Pillow" of benchmarks/data.py. While it has used no word, it has drawn no normal ahead either.
        if bits is self._bits and words and words[0] == self.first and self._position[0] == _N_WORDS:
            with self._lock:
                words[:] = self._torch
        else:
            np.random.seed(seed & 0xFFFFFFFF)
            if bits is not self._bits:
                self._find(bits)
        self.first = seed & 0xFFFFFFFF  # which is the first word

    def _find(self, bits: Any) -> None:
        """Find the words of both generators, which have the same seed now."""
        self._bits, self._lock, self._numpy = bits, bits.lock, memoryview(b"")
        views = _views_of_numpy(bits), _views_of_torch()
        if all(views):
            at_numpy, (of_torch, _) = ctypes.addressof(views[0][0]), views[1]
            numpy, self._torch = _words_at(at_numpy), _words_at(ctypes.addressof(of_torch) + len(of_torch) - 32)
            self._position = _words_at(at_numpy + numpy.nbytes, 1)
            self._numpy = numpy if numpy == self._torch else memoryview(b"")


class _NumpyStates:
    """Takes the state of NumPy's generator and puts it back, by a copy of its words where it has no normal drawn ahead.

    hot path: "images, Pillow" of benchmarks/data.py, once a batch. NumPy itself takes a hundredth of a small batch for both.
    """

    def __init__(self) -> None:
        self._bits: Any = None  # NumPy's bit generator
        self._words: memoryview | None = None  # of it, and the position behind them
        self._plain = b""  # words with which it had no normal drawn ahead: it draws none without using some

    def take(self) -> Any:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if bits is not self._bits:
            views = _views_of_numpy(bits)
            self._words = _words_at(ctypes.addressof(views[0]), _N_WORDS + 1) if views else None
            self._bits, self._plain = bits, b""
        content = b"" if self._words is None else self._words.tobytes()
        if content and content == self._plain:
            return bits, self._words, content
        state: Any = np.random.get_state(legacy=False)
        if content and not state["has_gauss"]:
            self._plain = content
        return state

    def put(self, state: Any) -> None:
        if isinstance(state, dict):
            np.random.set_state(state)
            return
        bits, words, content = state
        if np.random.get_bit_generator() is not bits:  # type: ignore[attr-defined]
            raise ValueError("NumPy's bit generator was replaced in between, so its state cannot be put back")
        if words[0] != _tensor_seeder.first or words[_N_WORDS] != _N_WORDS:
            np.random.seed(0)  # without a normal drawn ahead
        with bits.lock:
            words[:] = memoryview(content).cast("I")


_N_WORDS = 624


def _words_at(address: int, number: int = _N_WORDS) -> memoryview:
    """Return words of 32 bits in memory, which can be assigned to."""
    return memoryview((ctypes.c_char * (4 * number)).from_address(address)).cast("B").cast("I")


@cache
def _words_of_python() -> memoryview | None:
    """Return the position and the words of Python's generator; ``None`` where they are not found."""
    view = _view_of_python()
    words = None if view is None else _words_at(ctypes.addressof(view), 1 + _N_WORDS)
    _, known, _ = random.getstate()
    return words if words is not None and words.tolist() == [known[-1], *known[:-1]] else None


_numpy_states = _NumpyStates()
_tensor_seeder = _TensorSeeder()
