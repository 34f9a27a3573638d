"""NoRepeatOrderSampler: no example twice in a batch."""

import numpy as np
import pytest
from scipy import stats
from streams import batches

from chainring.iterators import NoRepeatOrderSampler, SerialIterator, epoch_order

SIZES = [(6, 5), (5, 5), (5, 1), (9, 5), (8, 5), (10, 5), (23, 7), (100, 7), (13, 12), (1, 1), (40, 20)]


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_every_epoch_has_every_example_once(size, batch_size):
    """For 30 epochs."""
    sampler = NoRepeatOrderSampler(batch_size)
    for epoch in range(30):
        assert sorted(sampler(2, epoch, size).tolist()) == list(range(size))


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_no_batch_size_indices_on_end_repeat_one(size, batch_size):
    """Wherever a batch begins, over 30 epochs: Chainer's vector is six examples in batches of five."""
    sampler = NoRepeatOrderSampler(batch_size)
    stream = np.concatenate([sampler(2, epoch, size) for epoch in range(30)]).tolist()
    for start in range(len(stream) - batch_size + 1):
        assert len(set(stream[start : start + batch_size])) == batch_size


def test_batches_that_cross_the_end_of_an_epoch_have_no_repeat():
    """Of an iterator, also after a reset amid an epoch; with plain shuffling some have."""

    def repeats(sampler):
        iterator = SerialIterator(list(range(11)), 4, order_sampler=sampler, seed=1)
        found = 0
        for number in range(60):
            found += len(set(next(iterator))) < 4
            if number == 30:
                iterator.reset()
        return found

    assert repeats(NoRepeatOrderSampler(4)) == 0
    assert repeats(None) > 0


def test_an_epoch_is_shuffled():
    """Over epochs every example is as often in the first half; beyond the first batch nothing is moved."""
    sampler = NoRepeatOrderSampler(5)
    orders = np.array([sampler(3, epoch, 20) for epoch in range(2000)])
    counts = np.bincount(orders[:, :10].ravel(), minlength=20)
    assert stats.chisquare(counts).pvalue > 0.001
    assert orders[7, 5:].tolist() == epoch_order(3, 7, 20)[5:].tolist()


def test_a_batch_larger_than_the_dataset_is_refused():
    """At construction of the iterator."""
    with pytest.raises(ValueError, match="3 examples cannot fill a batch of 4 without a repeat"):
        SerialIterator([1, 2, 3], 4, order_sampler=NoRepeatOrderSampler(4))


def test_the_order_of_a_seed_stays_what_it_is():
    """A saved run goes on with it in later versions."""
    assert epoch_order(7, 2, 8).tolist()[-2:] == [5, 0]
    assert epoch_order(7, 3, 8).tolist() == [0, 3, 5, 6, 7, 1, 2, 4]
    assert NoRepeatOrderSampler(3)(7, 3, 8).tolist() == [3, 5, 0, 6, 7, 1, 2, 4]
    assert batches(NoRepeatOrderSampler(3), 4, 3, 4, seed=7) == [[2, 0, 3], [1, 0, 2], [3, 1, 2], [0, 1, 3]]
