"""Seeds the generators of Python, NumPy and torch for each example, in less time than their own functions take.

hot path: "images, Pillow" of benchmarks/data.py. Each of the three fills 624 words of 32 bits for a seed. NumPy's are the
same as torch's, and are copied. Python's generator, whose words are others, takes longest to seed. Once a thousand examples
of a dataset have not drawn from it, the seed of an example is set late: before the state is read, or not at all. If the
example draws from the generator first, which its position shows, the seed is set and the example is fetched again; from then
on the seed is set before each example. So what a dataset draws does not depend on any of this.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from chainring._random import PYTHON, view_of_python, views_of_numpy, views_of_torch

_PROBATION = 1000
"""Examples in each process whose seeds are all set before: enough to know a dataset that draws, and some milliseconds."""
_N_WORDS = 624


class ExampleSeeder:
    """Fetches examples of a dataset with the generators seeded for each."""

    def __init__(self) -> None:
        self._undrawn = 0  # so many examples did not draw from Python's generator; -1 after one that did
        self._seen = b""  # what the view showed after a seed was set in this batch

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Let seeds be set late in the block; at its end the generators are those of the example fetched last."""
        self._seen = b""
        if view_of_python() is None or type(PYTHON) is not random.Random:
            self._undrawn = -1
        if is_late := self._undrawn >= _PROBATION:
            PYTHON.__class__ = _LateSeeded
        try:
            yield
        finally:
            _late.set()
            if is_late:
                PYTHON.__class__ = random.Random

    def fetch(self, ask: Callable[[int], Any], index: int, seed: int) -> Any:
        """Return ``ask(index)`` as it is with every generator seeded by ``seed``."""
        _seed_arrays(seed)
        if self._undrawn >= _PROBATION and self._seen:
            _late.seed = seed
        else:
            random.seed(seed)
            if self._undrawn < 0:
                return ask(index)
            self._seen = view_of_python().raw
        try:
            example = ask(index)
        except Exception:
            if not self._was_drawn_too_early():
                raise
        else:
            if not self._was_drawn_too_early():
                return example
        _seed_arrays(seed)
        random.seed(seed)
        return ask(index)

    def _was_drawn_too_early(self) -> bool:
        """Return whether an example has drawn from Python's generator with its seed still to be set."""
        if view_of_python().raw == self._seen:
            self._undrawn += 1
            return False
        self._undrawn, was_late, _late.seed = -1, _late.seed is not None, None
        return was_late


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


class _ArraySeeder:
    """Seeds torch's generator, and NumPy's by a copy of its words."""

    def __init__(self) -> None:
        self._seed_torch = torch.default_generator.manual_seed  # torch.manual_seed visits accelerators, which takes long
        self._bits: Any = None  # NumPy's bit generator
        self._numpy = self._torch = memoryview(b"")  # the words of both, where the ones can be copied to the others
        self._position = memoryview(b"")  # of NumPy's generator
        self._first = -1  # of its words after the last seed

    def __call__(self, seed: int) -> None:
        self._seed_torch(seed)
        bits, words = np.random.get_bit_generator(), self._numpy  # type: ignore[attr-defined]
        # While it has used no word since the last seed, it has drawn no normal ahead either, which a copy would leave there.
        if bits is self._bits and words and words[0] == self._first and self._position[0] == _N_WORDS:
            with bits.lock:
                words[:] = self._torch
        else:
            np.random.seed(seed & 0xFFFFFFFF)
            if bits is not self._bits:
                self._find(bits)
        self._first = seed & 0xFFFFFFFF  # which is the first word

    def _find(self, bits: Any) -> None:
        """Find the words of both generators, which have the same seed now."""
        self._bits, self._numpy = bits, memoryview(b"")
        of_numpy, of_torch = views_of_numpy(bits), views_of_torch()
        if of_numpy and of_torch:
            start = ctypes.addressof(of_numpy[0])
            words, self._position = _words_at(start, _N_WORDS), _words_at(start + 4 * _N_WORDS, 1)
            self._torch = _words_at(ctypes.addressof(of_torch[0]) + len(of_torch[0]) - ctypes.sizeof(of_numpy[0]), _N_WORDS)
            self._numpy = words if words == self._torch else memoryview(b"")


def _words_at(address: int, number: int) -> memoryview:
    """Return words of 32 bits in memory, which can be assigned to."""
    return memoryview((ctypes.c_char * (4 * number)).from_address(address)).cast("B").cast("I")


_seed_arrays = _ArraySeeder()
