"""BucketOrderSampler: batches of like lengths."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from streams import batches

from chainring.converters import concat_examples
from chainring.iterators import BucketOrderSampler, SerialIterator

LENGTHS = np.random.default_rng(0).integers(1, 200, 1003)


def padding(batches):
    """How much of the padded batches is padding."""
    padded = sum(len(batch) * max(LENGTHS[batch]) for batch in batches)
    return 1 - sum(LENGTHS[batch].sum() for batch in batches) / padded


def test_an_epoch_has_every_example_and_fills_its_last_batch():
    """1,003 examples in batches of 8 are 126 batches; 5 examples come twice, other ones each epoch."""
    sampler, twice = BucketOrderSampler(LENGTHS, 8), []
    for epoch in range(3):
        counts = Counter(sampler(1, epoch, 1003).tolist())
        assert set(counts) == set(range(1003))
        twice.append({index for index, count in counts.items() if count == 2})
        assert (len(twice[-1]), counts.total()) == (5, 1008)
    assert twice[0] != twice[1] != twice[2]


def test_drop_last_leaves_out_what_fills_no_batch():
    """Other examples each epoch, none twice."""
    sampler = BucketOrderSampler(LENGTHS, 8, drop_last=True)
    left = []
    for epoch in range(3):
        order = sampler(1, epoch, 1003).tolist()
        assert len(order) == len(set(order)) == 1000
        left.append(set(range(1003)) - set(order))
    assert left[0] != left[1] != left[2]


def test_batches_stay_buckets_in_every_epoch():
    """Less than 3% is padding where shuffling alone pads 40%; an epoch does not shift the next one's batches."""
    epochs = batches(BucketOrderSampler(LENGTHS, 8), 1003, 8, 3 * 126)
    for epoch in range(3):
        assert padding(epochs[epoch * 126 : (epoch + 1) * 126]) < 0.03
    assert padding(batches(None, 1003, 8, 126)) > 0.4


def test_a_pool_is_sorted_within_itself():
    """Each batch is a stretch of its sorted pool: an independent computation from the epoch's set of examples."""
    order = BucketOrderSampler(LENGTHS[:96], 8, pool=1000)(1, 0, 96).reshape(12, 8)
    assert sorted(map(tuple, LENGTHS[order].tolist())) == [tuple(row) for row in np.sort(LENGTHS[:96]).reshape(12, 8)]


def test_a_smaller_pool_mixes_more():
    """One batch as its own pool is plain shuffling."""
    pads = [padding(batches(BucketOrderSampler(LENGTHS, 8, pool=pool), 1003, 8, 126)) for pool in (1, 4, 100)]
    assert pads[0] > 0.4
    assert pads[0] > pads[1] > pads[2]


def test_batches_come_in_random_order():
    """Long ones are not at the end: over epochs the longest batch is at every twelfth of an epoch alike."""
    sampler = BucketOrderSampler(np.arange(96), 8)
    places = [int(np.argmax(sampler(1, epoch, 96).reshape(12, 8).max(1))) for epoch in range(1200)]
    assert stats.chisquare(np.bincount(places, minlength=12)).pvalue > 0.001


def test_examples_of_one_length_meet_others_each_epoch():
    """Equal lengths stay shuffled."""
    sampler = BucketOrderSampler([5] * 64, 4)
    first, second = ({frozenset(row) for row in sampler(1, epoch, 64).reshape(16, 4).tolist()} for epoch in (0, 1))
    assert not first & second


def test_fewer_examples_than_a_batch_fill_it():
    """And with drop_last are refused at construction."""
    assert Counter(BucketOrderSampler([3, 1, 2], 7)(1, 0, 3).tolist()).total() == 7
    with pytest.raises(ValueError, match="leaves no batch of 7 out of 3 examples; take a smaller batch_size"):
        BucketOrderSampler([3, 1, 2], 7, drop_last=True)


def test_sequences_of_tokens_are_padded_by_the_converter():
    """As one trains on them."""
    sequences = [torch.full((1 + k % 5,), k) for k in range(20)]
    sampler = BucketOrderSampler([len(one) for one in sequences], 4)
    iterator = SerialIterator(sequences, 4, order_sampler=sampler, seed=1)
    widths = [concat_examples(next(iterator), padding=-1).shape[1] for _ in range(5)]
    assert sorted(widths) == [1, 2, 3, 4, 5]


def test_the_order_of_a_seed_stays_what_it_is():
    """A saved run goes on with it in later versions."""
    assert BucketOrderSampler([5, 1, 4, 2, 3], 2)(7, 2, 5).tolist() == [2, 0, 1, 3, 4, 2]
