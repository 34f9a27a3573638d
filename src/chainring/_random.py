"""Random numbers: the order of an epoch, and the global generators of Python, NumPy, torch and the accelerator."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]
Values = NDArray[np.unsignedinteger]

Pass = tuple[int, int, int]
"""The seed, epoch and size of an order."""

_ROUNDS = 8
_15, _16, _FIRST, _SECOND = (np.array(number, np.uint32) for number in (15, 16, 0x7FEB352D, 0x846CA68B))  # as arrays faster
_MAX_TABLE_SIZE = 2**18
"""A permutation of so many values is computed whole; a larger table would take much memory and save little time."""

# MKL chooses the kernels of its vector functions in the first call of any. If several threads make that call at once, some
# compute it with another kernel: one run in some hundreds has other last bits from its first update on. One thread is first.
torch.ones(1, device="cpu").exp()


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
    bits = _bits_of(size)
    if 1 << bits <= min(2 * (stop - start), _MAX_TABLE_SIZE):
        return epoch_orders([(seed, epoch, size)])[seed, epoch, size][start:stop]
    permute = partial(_feistel, bits=bits, keys=_keys_of(seed, epoch).reshape(_ROUNDS, 1))
    values = permute(np.arange(start, stop, dtype=np.uint32 if bits <= 32 else np.uint64))
    return _walk(values, permute, lambda values: values >= size).astype(np.int64)


def epoch_orders(passes: Iterable[Pass]) -> dict[Pass, Indices]:
    """Return the whole orders of passes, in little more time than their examples take, however short the passes are."""
    # hot path: "the same, beside one array" of benchmarks/data.py, "Chainring, as written" of benchmarks/epochs.py
    orders: dict[Pass, Indices] = {}
    groups: dict[int, list[Pass]] = {}
    for item in passes:
        groups.setdefault(_bits_of(item[2]), []).append(item)
    for bits, group in groups.items():
        sizes, places = [size for _, _, size in group], np.arange(1 << bits, dtype=np.uint32)
        keys = np.array([_keys_of(seed, epoch) for seed, epoch, _ in group]).T[..., None]
        table = _feistel(np.broadcast_to(places, (len(group), len(places))), bits, keys)
        table |= np.arange(0, table.size, len(places), dtype=np.uint32)[:, None]  # places in all tables together
        values = np.concatenate([row[:size] for row, size in zip(table, sizes, strict=True)])
        is_outside = places >= np.array(sizes)[:, None]
        order = (_walk(values, table.reshape(-1).take, is_outside.reshape(-1).take) & places[-1]).astype(np.int64)
        ends = np.cumsum(sizes).tolist()
        orders |= {item: order[end - item[2] : end] for item, end in zip(group, ends, strict=True)}
    return orders


def _bits_of(size: int) -> int:
    return max(2, (size - 1).bit_length())


def _keys_of(seed: int, epoch: int) -> Values:
    """Return the key of each round."""
    return np.frombuffer(hashlib.blake2b(f"{seed}\x1f{epoch}".encode(), digest_size=4 * _ROUNDS).digest(), "<u4")


def _walk(values: Values, permute: Callable[[Values], Values], is_outside: Callable[[Values], Any]) -> Values:
    """Permute what is outside until it is not: a walk along a cycle of the permutation comes back below the size."""
    outside = np.flatnonzero(is_outside(values))
    walked = values.take(outside)
    while outside.size:
        values[outside] = walked = permute(walked)
        still = np.flatnonzero(is_outside(walked))
        outside, walked = outside.take(still), walked.take(still)
    return values


def _feistel(values: Values, bits: int, keys: Values) -> Values:
    """Permute integers of ``bits`` bits: each round changes one half by a hash of the other, which can be undone.

    The hash has 32 bits (the multipliers of Wellons' "lowbias32"); halves of up to 32 bits fit.
    """
    low_bits = np.array(bits // 2, values.dtype)
    masks = [np.array((1 << half) - 1, np.uint32) for half in (bits // 2, bits - bits // 2)]
    low, high = values & masks[0], values >> low_bits
    mixed, shifted = np.empty((2, *values.shape), np.uint32)
    for i, key in enumerate(keys):
        changed, other = (high, low) if i % 2 else (low, high)
        np.bitwise_xor(other, key, mixed, casting="unsafe")
        mixed ^= np.right_shift(mixed, _16, shifted)
        mixed *= _FIRST
        mixed ^= np.right_shift(mixed, _15, shifted)
        mixed *= _SECOND
        mixed ^= np.right_shift(mixed, _16, shifted)
        mixed &= masks[i % 2]
        changed ^= mixed
    high <<= low_bits
    high |= low
    return high


def stable_hash(*keys: int | str) -> int:
    """Return 63 bits that depend on every key and are the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(map(str, keys)).encode(), digest_size=8).digest(), "little") >> 1


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
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
        raise ValueError(f"a seed is an integer from 0 to 2**63 - 1, got {seed!r}")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.accelerator.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def nondeterminism_reason() -> str | None:
    """Return why a run that is resumed from here would not be bit-exact, or ``None`` if it would."""
    if not accelerators() or torch.are_deterministic_algorithms_enabled():
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
    set_seed(stable_hash(*keys))


def example_keys(seed: int, epoch: int, indices: Indices) -> list[int]:
    """Return a seed for each example, to be given to `set_seed`: those that ``seed_host(seed, epoch, index)`` sets."""
    prefix, keys = hashlib.blake2b(f"{seed}\x1f{epoch}\x1f".encode(), digest_size=8), []
    for index in indices.tolist():  # hot path: "images, Pillow" of benchmarks/data.py: half of the hash is shared
        whole = prefix.copy()
        whole.update(b"%d" % index)
        keys.append(int.from_bytes(whole.digest(), "little") >> 1)
    return keys


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also visits accelerators, a hundred times slower


def accelerators(updater: Any = None) -> list[torch.device]:
    """Return the accelerators of an updater's models, in their order, then the current one; none if none is in use."""
    if not torch.accelerator.is_available():
        return []
    kind: Any = torch.accelerator.current_accelerator()
    if not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return []
    devices = list(getattr(updater, "replica_devices", ()))
    for model in getattr(updater, "get_all_models", dict)().values():
        devices += [tensor.device for tensor in (*model.parameters(), *model.buffers())] if hasattr(model, "buffers") else []
    devices.append(torch.device(kind.type, torch.accelerator.current_device_index()))
    return list(dict.fromkeys(device for device in devices if device is not None and device.type == kind.type))


def get_rng_state(updater: Any = None) -> dict[str, Any]:
    """Return the state of every generator, in plain values and tensors; those of `accelerators` in their order.

    By their order and not by their numbers, so that a run continues on another device, such as the one that is free now.
    """
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    words = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    version, python_words, gauss = random.getstate()
    state = {
        "python": {"version": version, "words": torch.from_numpy(np.array(python_words, np.int64)), "gauss": gauss},
        "numpy": {**numpy, "state": {**numpy["state"], "key": words}},
        "torch": torch.get_rng_state(),
    }
    if devices := accelerators(updater):
        state["accelerators"] = [_call("get_rng_state", device) for device in devices]
    return state


def set_rng_state(state: dict[str, Any], updater: Any = None) -> None:
    """Restore what `get_rng_state` returned; an accelerator that has no state in it is left alone."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if "accelerators" in state:
        for device, its_state in zip(accelerators(updater), state["accelerators"], strict=False):
            _call("set_rng_state", device, its_state)


def _call(name: str, device: torch.device, *arguments: Tensor) -> Any:
    """Call a function of the module of an accelerator for one device; there is one alone of Apple's, which is not named."""
    function = getattr(torch.get_device_module(device), name)
    return function(*arguments) if device.type == "mps" else function(*arguments, device)


Restore = Callable[[], None]
"""Puts the state of a generator back as it was."""


def take_generators() -> tuple[Restore, ...]:
    """Return the state of every generator for `put_generators`: in less time than `get_rng_state`, and not to be saved."""
    current = accelerators()  # of all of its kind, since `seed_all` seeds them all
    devices = [torch.device(device.type, i) for device in current for i in range(torch.accelerator.device_count())]
    return *_take_host(), *(partial(_call, "set_rng_state", device, _call("get_rng_state", device)) for device in devices)


def put_generators(state: tuple[Restore, ...]) -> None:
    """Restore what `take_generators` returned, as often as wanted."""
    for restore in state:
        restore()


def _take_host() -> tuple[Restore, ...]:
    module: Any = np.random  # whose annotations lack these functions before NumPy 2.5
    bits, numpy = module.get_bit_generator(), module.get_state(legacy=False)

    def restore_numpy() -> None:
        if module.get_bit_generator() is not bits:
            module.set_bit_generator(bits)
        module.set_state(numpy)

    return partial(random.setstate, random.getstate()), restore_numpy, partial(torch.set_rng_state, torch.get_rng_state())


@contextmanager
def preserve_rng(take: Callable[[], tuple[Restore, ...]] = take_generators) -> Iterator[None]:
    """Restore every generator at the end of the block."""
    state = take()
    try:
        yield
    finally:
        put_generators(state)


preserve_host_rng = partial(preserve_rng, _take_host)
"""Restores the generators of Python, NumPy and torch on the CPU, for code that runs there: datasets and loaders."""


WITHOUT_CUDNN = "put nn.Dropout between layers of one each, or set torch.backends.cudnn.enabled = False"


def draws_in_cudnn(module: torch.nn.Module) -> TypeGuard[torch.nn.RNNBase]:
    """Return True for a recurrent layer whose dropout does not come from the generator of the device."""
    if not isinstance(module, torch.nn.RNNBase) or module.dropout == 0 or module.num_layers < 2:
        return False
    has_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return has_cudnn and torch.backends.cudnn.enabled and bool(module.weight_hh_l0.is_cuda)


def is_generator(value: Any) -> bool:
    """Return whether this is a generator that a script may have beside the global ones."""
    return isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, torch.Generator))


def generator_state(generator: Any) -> Any:
    """Return the state of one of these generators, in plain values and arrays."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore what `generator_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def digest(*parts: Any) -> int:
    """Return 64 bits, never 0, that depend on every byte of the parts (bytes, arrays), the same on every machine."""
    # hot path: benchmarks/growth.py, recorder; one call of the hash takes half the time of one for each part
    content = parts[0] if len(parts) == 1 else b"".join(parts)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def digest_generators(not_drawn: Sequence[int] = (), updater: Any = None) -> int:
    """Return a `digest` of the states of the generators of Python, NumPy, torch and accelerators; it takes 0.1 ms.

    Those are left out whose states still are the ``not_drawn`` of `generator_digests`: nobody has drawn from them since.
    """
    # hot path: benchmarks/growth.py, recorder
    parts = _generator_parts(updater)
    drawn = zip(parts, chain(not_drawn, repeat(0)), strict=False)  # there may be other accelerators than then
    return digest(*(b"" if digest(*part) == before else b"".join(part) for part, before in drawn))


def generator_digests(updater: Any = None) -> list[int]:
    """Return a `digest` of the state of each generator, to see from which ones is drawn later."""
    return [digest(*part) for part in _generator_parts(updater)]


def _generator_parts(updater: Any) -> list[tuple[Any, ...]]:
    _, words, normal = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    numpy_words = np.asarray(numpy["state"].pop("key", ()), "<u8")
    if not numpy["has_gauss"]:
        numpy["gauss"] = 0.0  # one that was drawn ahead and is used up stays in the state
    devices = accelerators(updater)
    return [
        (torch.get_rng_state().numpy(),),
        (np.array(words, "<u4"), repr(normal).encode()),
        (numpy_words, repr(numpy).encode()),
        *([(_call("get_rng_state", device).cpu().numpy(),) for device in devices] or [(b"",)]),
    ]
