"""WeightedOrderSampler: an example comes as often as its weight says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from chainring.iterators.samplers._checks import as_column, as_count, require_size
from chainring.order import Indices, stable_hash


class WeightedOrderSampler:
    """An order sampler that draws examples with probabilities in proportion to their weights.

    An epoch is ``num_samples`` draws. To balance classes, an example's weight is 1 / (the number of examples of its class).

    Args:
        weights: one for each example, finite and not negative; an example of weight 0 never comes.
        num_samples: indices in an epoch, by default as many as there are examples.
        replacement: whether each draw is from all examples. Otherwise no example comes twice in an epoch, and each draw is
            from those that are left (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).

    Raises:
        ValueError: the weights are no such numbers or all 0; or ``num_samples`` is below 1, or without replacement above
            the number of examples that have a weight.
    """

    def __init__(self, weights: Any, num_samples: int | None = None, replacement: bool = True) -> None:
        self.weights = as_column("weights", weights).astype(np.float64)
        possible = int(np.count_nonzero(self.weights))
        if not possible:
            raise ValueError(f"weights need one above 0, got {len(self.weights)} without")
        self.num_samples = len(self.weights) if num_samples is None else as_count("num_samples", num_samples)
        self.replacement = replacement
        if not replacement and self.num_samples > possible:
            raise ValueError(
                f"without replacement an epoch has at most the {possible} examples that have a weight above 0, "
                f"got num_samples = {self.num_samples}"
            )

    def __call__(self, seed: int, epoch: int, size: int) -> Indices:
        """The indices of an epoch."""
        require_size("weights", self.weights, size)
        key = stable_hash("weighted", seed, epoch)
        if self.replacement:
            ends = np.cumsum(self.weights / self.weights.max())  # the sum of weights themselves may overflow
            drawn: Indices = ends.searchsorted(_uniforms(key, self.num_samples) * ends[-1], "right")
            return drawn
        # The largest u ** (1 / weight) come first, compared by logarithms, which neither overflow nor become equal.
        ranks = np.full(size, -np.inf)
        has_weight = np.flatnonzero(self.weights)
        ranks[has_weight] = np.log(self.weights[has_weight]) - np.log(-np.log(_uniforms(key, size)[has_weight]))
        return np.argsort(-ranks, kind="stable")[: self.num_samples]


def _uniforms(key: int, number: int) -> npt.NDArray[Any]:
    """Numbers above 0 and below 1. NumPy keeps the raw stream of a bit generator; the methods of Generator may change."""
    raw = np.random.Philox(key=key).random_raw(number)
    return ((raw >> np.uint64(12)) + 0.5) * 2.0**-52
