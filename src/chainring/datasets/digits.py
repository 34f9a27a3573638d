"""The handwritten digits that scikit-learn ships: real data without a download."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainring._random import preserve_host_rng
from chainring.datasets.tuple_dataset import TupleDataset


def get_digits(withlabel: bool = True, ndim: int = 1, scale: float = 1.0) -> tuple[Any, Any]:
    """1,797 handwritten digits of 8 x 8 pixels, as 1,437 examples to train on and 360 to test with.

    The split is fixed: every fifth image is a test image, since the file is sorted by who wrote them.

    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.

    Args:
        withlabel: examples are pairs of an image and its label (int64), otherwise images alone.
        ndim: the form of an image (float32): 1 is (64,), 2 is (8, 8), 3 is (1, 8, 8).
        scale: the value of a black pixel; pixels are from 0 to it.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: ``ndim`` is another number.
    """
    shapes = {1: (64,), 2: (8, 8), 3: (1, 8, 8)}
    if ndim not in shapes:
        raise ValueError(f"ndim is 1, 2 or 3, got {ndim!r}")
    digits = _load()
    images = (digits.images * (scale / 16)).astype(np.float32).reshape(-1, *shapes[ndim])
    tests = np.arange(len(images)) % 5 == 0
    if not withlabel:
        return images[~tests], images[tests]
    labels = digits.target.astype(np.int64)
    return TupleDataset(images[~tests], labels[~tests]), TupleDataset(images[tests], labels[tests])


def _load() -> Any:
    try:
        with preserve_host_rng():  # what scikit-learn imports draws from Python's generator, once a process
            from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install "chainring[examples]"') from error
    return load_digits()
