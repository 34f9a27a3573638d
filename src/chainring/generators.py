"""Every random generator of this process: Python's, NumPy's, torch's and the accelerator's."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from chainring.order import stable_hash, stable_hashes


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


def get_state() -> dict[str, Any]:
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


def set_state(state: dict[str, Any]) -> None:
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


def why_inexact() -> str | None:
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
def preserved() -> Iterator[None]:
    """What is drawn inside does not show outside: every generator is put back afterwards."""
    device = _accelerator()
    state = None if device is None else device.get_rng_state()
    with host_preserved():
        try:
            yield
        finally:
            if device is not None:
                device.set_rng_state(state)


@contextmanager
def host_preserved() -> Iterator[None]:
    """`preserved` for the three generators of the host, for code that runs there: datasets and loaders."""
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


def seeding(*parts: int | str) -> Callable[[int], None]:
    """A function of one more part, which does what ``seed_host(*parts, last)`` does: for many examples of an epoch."""
    hash_of = stable_hashes(*parts)
    return lambda last: _seed_host(hash_of(last))


def _seed_host(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)  # torch.manual_seed also visits accelerators, a hundred times slower
