"""WeightedOrderSampler: examples come as often as their weights say."""

import itertools

import numpy as np
import pytest
from scipy import stats

from chainring.iterators import WeightedOrderSampler

WEIGHTS = np.array([0.5, 0.0, 2.0, 1.0, 4.0, 0.0])


def test_draws_follow_the_weights():
    """A chi-squared test over 20 epochs of 1,000 draws; an example of weight 0 never comes."""
    sampler = WeightedOrderSampler(WEIGHTS, 1000)
    counts = np.bincount(np.concatenate([sampler(1, epoch, 6) for epoch in range(20)]), minlength=6)
    assert counts[WEIGHTS == 0].tolist() == [0, 0]
    expected = 20_000 * WEIGHTS[WEIGHTS > 0] / WEIGHTS.sum()
    assert stats.chisquare(counts[WEIGHTS > 0], expected).pvalue > 0.001


def test_successive_draws_are_independent():
    """Pairs of neighbours come as often as the products of their weights say."""
    weights = np.array([1.0, 2.0, 5.0])
    order = WeightedOrderSampler(weights, 20_000)(1, 0, 3)
    counts = np.bincount(order[0::2] * 3 + order[1::2], minlength=9)
    expected = 10_000 * np.outer(weights, weights).ravel() / 64
    assert stats.chisquare(counts, expected).pvalue > 0.001


def test_without_replacement_ordered_pairs_are_those_of_successive_draws():
    """P(i, then j) = w_i / W * w_j / (W - w_i), counted over 6,000 epochs; no example twice."""
    weights = np.array([1.0, 2.0, 0.0, 3.0])
    sampler = WeightedOrderSampler(weights, 2, replacement=False)
    drawn = [tuple(sampler(epoch % 7, epoch, 4).tolist()) for epoch in range(6000)]
    pairs = list(itertools.permutations([0, 1, 3], 2))
    chances = [weights[i] / 6 * weights[j] / (6 - weights[i]) for i, j in pairs]
    counts = [drawn.count(pair) for pair in pairs]
    assert sum(counts) == 6000
    assert stats.chisquare(counts, 6000 * np.array(chances)).pvalue > 0.001


def test_without_replacement_an_epoch_may_be_every_example_that_has_a_weight():
    """Each once."""
    sampler = WeightedOrderSampler(WEIGHTS, 4, replacement=False)
    assert all(sorted(sampler(0, epoch, 6).tolist()) == [0, 2, 3, 4] for epoch in range(20))


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_of_any_magnitude_are_drawn_by(replacement):
    """Neither a sum that overflows nor a weight that nearly vanishes breaks the order."""
    weights = [1.7e308, 1.7e308, 0.0, 5e-324]
    orders = [WeightedOrderSampler(weights, 2, replacement)(0, epoch, 4).tolist() for epoch in range(50)]
    assert {index for order in orders for index in order} == {0, 1}


def test_the_order_of_a_seed_stays_what_it_is():
    """A saved run goes on with it in later versions."""
    assert WeightedOrderSampler([1, 2, 3, 4], 8)(7, 2, 4).tolist() == [3, 1, 3, 3, 1, 1, 3, 3]
    assert WeightedOrderSampler([1, 2, 3, 4], 4, replacement=False)(7, 2, 4).tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("weights", [[0, 0], []])
def test_weights_of_zero_alone_are_refused(weights):
    """There would be nothing to draw."""
    with pytest.raises(ValueError, match=f"at least one weight must be above 0, got {len(weights)} without"):
        WeightedOrderSampler(weights)


def test_more_than_there_are_cannot_come_without_replacement():
    """Examples of weight 0 do not count."""
    with pytest.raises(ValueError, match="at most the 4 examples that have a weight above 0, got num_samples = 6"):
        WeightedOrderSampler(WEIGHTS, replacement=False)
