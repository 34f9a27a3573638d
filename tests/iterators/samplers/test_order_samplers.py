"""All order samplers: pure functions of (seed, epoch, size)."""

import pickle
import random

import numpy as np
import pytest
import torch
from streams import assert_resumes_after_every_batch

from chainring.iterators import (
    BucketOrderSampler,
    MultiprocessIterator,
    NoRepeatOrderSampler,
    SerialIterator,
    WeightedOrderSampler,
)

SIZE, BATCH = 23, 4
NUMBERS = [1 + k * k % 11 for k in range(SIZE)]

SAMPLERS = {
    "weighted": lambda: WeightedOrderSampler(NUMBERS),
    "weighted, without replacement": lambda: WeightedOrderSampler(NUMBERS, 9, replacement=False),
    "bucket": lambda: BucketOrderSampler(NUMBERS, BATCH, pool=2),
    "bucket, drop_last": lambda: BucketOrderSampler(NUMBERS, BATCH, pool=2, drop_last=True),
    "no repeat": lambda: NoRepeatOrderSampler(BATCH),
    "no repeat, nearly the whole": lambda: NoRepeatOrderSampler(SIZE - 3),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
class TestEverySampler:
    def test_it_is_a_pure_function(self, make):
        """Whatever was asked before, by whichever copy; no generator is drawn from, and nothing given is kept alive."""
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        one, other = make(), pickle.loads(pickle.dumps(make()))
        orders = {(seed, epoch): one(seed, epoch, SIZE).tolist() for seed in (0, 5) for epoch in range(3)}
        for seed, epoch in reversed(orders):
            assert other(seed, epoch, SIZE).tolist() == orders[seed, epoch]
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before

    def test_epochs_and_seeds_differ_and_are_equally_long(self, make):
        """As an iterator requires."""
        orders = [make()(seed, epoch, SIZE) for seed in (0, 5, 2**62) for epoch in range(4)]
        assert len({tuple(order.tolist()) for order in orders}) == len(orders)
        assert len({len(order) for order in orders}) == 1
        assert all(order.dtype == np.int64 for order in orders)

    def test_a_run_resumes_after_every_batch(self, make):
        """Over three epochs."""
        assert_resumes_after_every_batch(make, SIZE, BATCH, 17)

    def test_workers_give_what_one_process_gives(self, make):
        """And load one another's state."""
        data = [(k, k) for k in range(SIZE)]
        serial = SerialIterator(data, BATCH, order_sampler=make(), seed=1)
        expected = [[one for one, _ in next(serial)] for _ in range(9)]
        with MultiprocessIterator(data, BATCH, n_processes=1, order_sampler=make(), seed=1) as iterator:
            first = [[int(one) for one, _ in next(iterator)] for _ in range(4)]
            again = SerialIterator(data, BATCH, order_sampler=make(), seed=1)
            again.load_state_dict(iterator.state_dict())
        assert first + [[one for one, _ in next(again)] for _ in range(5)] == expected


@pytest.mark.parametrize("sampler", [WeightedOrderSampler([1, 2, 3]), BucketOrderSampler([1, 2, 3], 2)])
def test_a_dataset_of_another_size_is_refused(sampler):
    """At construction of the iterator, with both."""
    with pytest.raises(ValueError, match="one number for each of the 4 examples of the dataset, got 3"):
        SerialIterator([0] * 4, 2, order_sampler=sampler)


@pytest.mark.parametrize("make", [WeightedOrderSampler, lambda numbers: BucketOrderSampler(numbers, 1)])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1, -2], "at least 0, got -2 for example 1"),
        ([1.0, float("nan")], "finite and at least 0, got nan for example 1"),
        ([float("inf")], "got inf for example 0"),
        ([[1]], "one number for each example, got an array of .* and shape"),
        (["a"], "one number for each example"),
    ],
)
def test_what_are_no_numbers_are_refused(make, numbers, message):
    """At construction, with the example."""
    with pytest.raises(ValueError, match=message):
        make(numbers)


def test_numbers_may_be_a_tensor_and_are_copied():
    """A later change of them does not change the order."""
    weights = torch.tensor([1.0, 0.0])
    sampler = WeightedOrderSampler(weights)
    weights[1] = 100
    assert sampler(0, 0, 2).tolist() == [0, 0]


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("num_samples", lambda value: WeightedOrderSampler([1], value)),
        ("batch_size", lambda value: BucketOrderSampler([1], value)),
        ("pool", lambda value: BucketOrderSampler([1], 1, pool=value)),
        ("batch_size", NoRepeatOrderSampler),
    ],
)
def test_counts_are_integers_of_at_least_one(what, make, value):
    """Refused at construction, with name and value."""
    with pytest.raises(ValueError, match=f"{what} is an integer of at least 1, got {value}"):
        make(value)


def test_a_sampler_is_called_once_for_an_epoch():
    """However long it is: three stretches of the size in which shuffled orders are asked for."""
    asked = []

    def order(seed, epoch, size):
        asked.append(epoch)
        return np.arange(size)

    iterator = SerialIterator(np.zeros(200_000), 50_000, order_sampler=order, seed=1)
    for _ in range(8):
        next(iterator)
    assert asked == [0, 0, 0, 1]  # twice at construction, for the size of an epoch and to see that it is pure
