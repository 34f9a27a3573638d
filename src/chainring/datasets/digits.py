"""The handwritten digits that scikit-learn ships: real data without a download."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainring._random import preserve_host_rng
from chainring.datasets.tuple_dataset import TupleDataset


def get_digits(withlabel: bool = True, ndim: int = 1, scale: float = 1.0) -> tuple[Any, Any]:
    """Return 1,797 handwritten digits of 8 x 8 pixels, 1,437 training and 360 test examples.

    The split is fixed: every fifth image is a test image, since the file is sorted by who wrote them. Source:
    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.

    Args:
        withlabel: examples are pairs of an image and its label (int64), otherwise images alone.
        ndim: the dimensions of an image (float32): 1 is (64,), 2 is (8, 8), 3 is (1, 8, 8).
        scale: the value of a black pixel; pixels are from 0 to it.

    Returns:
        The training and the test dataset, each a `TupleDataset` or an array.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: ``ndim`` is not 1, 2 or 3.

    Example::

        train, test = get_digits()
        image, label = train[0]
    """
    shapes = {1: (64,), 2: (8, 8), 3: (1, 8, 8)}
    if ndim not in shapes:
        raise ValueError(f"ndim is 1, 2 or 3, got {ndim!r}")
    try:
        with preserve_host_rng():  # the first import of scikit-learn draws from Python's generator
            from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install "chainring[examples]"') from error
    digits: Any = load_digits()
    images = (digits.images * (scale / 16)).astype(np.float32).reshape(-1, *shapes[ndim])
    is_test = np.arange(len(images)) % 5 == 0
    if not withlabel:
        return images[~is_test], images[is_test]
    labels = digits.target.astype(np.int64)
    return TupleDataset(images[~is_test], labels[~is_test]), TupleDataset(images[is_test], labels[is_test])
