"""SerialIterator: what is refused at construction."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from chainring.iterators import (
    BucketOrderSampler,
    LoaderIterator,
    MixtureIterator,
    MultiprocessIterator,
    PackingIterator,
    SerialIterator,
    TokenOrderSampler,
    WeightedOrderSampler,
)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "2", None])
def test_a_batch_size_is_an_integer_of_at_least_one(batch_size):
    """Refused at construction, with the value."""
    with pytest.raises(ValueError, match=f"batch size.*{batch_size}"):
        SerialIterator([1, 2], batch_size)


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("dataset", [5, iter([1]), DataLoader([1, 2]), Stream(), {"x": [1]}, "abc"])
def test_what_is_no_dataset_is_refused_with_the_remedy(dataset):
    """The error names the kind and LoaderIterator."""
    with pytest.raises(TypeError, match=rf"got {type(dataset).__name__}; .*LoaderIterator"):
        SerialIterator(dataset, 2)


@pytest.mark.parametrize("kwargs", [{"seed": 1.5}, {"seed": True}, {"order_sampler": [0, 1]}])
def test_settings_of_another_kind_are_refused(kwargs):
    """A seed is an integer, a sampler is called."""
    with pytest.raises(TypeError, match="got"):
        SerialIterator([1, 2], 1, **kwargs)


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (partial(SerialIterator, [1, 2], 1), ("repeat", "shuffle", "example_rng")),
        (partial(MixtureIterator, {"a": [1, 2]}, 1, weights={"a": 1}), ("repeat", "shuffle", "drop_finished")),
        (partial(PackingIterator, [[1, 2]], 4, 1), ("split", "repeat", "shuffle")),
        (partial(LoaderIterator, [[1, 2]]), ("per_rank", "repeat")),
        (partial(BucketOrderSampler, [1, 2], 1), ("drop_last",)),
        (partial(TokenOrderSampler, [1, 2], 4), ("padded",)),
        (partial(WeightedOrderSampler, [1, 2]), ("replacement",)),
    ],
    ids=["serial", "mixture", "packing", "loader", "buckets", "tokens", "weighted"],
)
def test_what_is_true_or_false_is_not_guessed_of_a_word(make, flags):
    """Of a configuration, for example, where "no" would count as true; numbers and NumPy's bools are taken."""
    for flag in flags:
        with pytest.raises(TypeError, match=f"^{flag} is True or False, got 'no'$"):
            make(**{flag: "no"})
        make(**{flag: np.bool_(flag == "repeat")})
        make(**{flag: int(flag == "repeat")})


class _Remembering:
    """Orders that follow from the number of calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, seed, epoch, size):
        self.calls += 1
        return np.random.default_rng(self.calls).permutation(size)


@pytest.mark.parametrize("cls", [SerialIterator, MultiprocessIterator])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda seed, epoch, size: np.random.permutation(size),
        lambda seed, epoch, size: random.sample(range(size), size),
        lambda seed, epoch, size: torch.randperm(size),
        lambda seed, epoch, size: np.random.default_rng().permutation(size),
        _Remembering(),
    ],
    ids=["numpy", "random", "torch", "unseeded", "remembering"],
)
def test_an_order_sampler_that_is_not_a_pure_function_is_refused_at_construction(cls, sampler):
    """The error shows both orders and the remedy, even if the script seeds the generators; they are left as they were."""
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(
        ValueError, match=r"pure function of .*called twice with \(0, 0, 50\).*default_rng\(\(seed, epoch\)\)"
    ):
        cls([*range(50)], 5, order_sampler=sampler)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_an_order_sampler_that_seeds_a_global_generator_is_pure_and_leaves_it_as_it_was():
    """As many write it; the generator goes on where it was."""

    def order(seed, epoch, size):
        np.random.seed((seed + epoch) % 2**32)
        return np.random.permutation(size)

    np.random.seed(3)
    expected = np.random.rand(2)
    np.random.seed(3)
    iterator = SerialIterator([*range(50)], 50, order_sampler=order, seed=1)
    assert sorted(next(iterator)) == [*range(50)]
    assert np.random.rand(2).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (lambda current_order, current_position: current_order, r"that is Chainer's.* write order_sampler\(seed, epoch"),
        (lambda current_order, current_position, size: [0], "that is Chainer's"),
        (lambda size: range(size), r"takes \(size\); write order_sampler\(seed, epoch, size\)"),
        (lambda epoch, seed, size: range(size), r"takes \(epoch, seed, size\); write"),
        (lambda seed, epoch, size, more: range(size), r"takes \(seed, epoch, size, more\); write"),
    ],
)
def test_an_order_sampler_with_other_arguments_is_refused_at_construction(sampler, message):
    """Chainer's own among them, with the remedy."""
    with pytest.raises(TypeError, match=message):
        SerialIterator([1, 2, 3], 2, order_sampler=sampler)


@pytest.mark.parametrize("cls", [SerialIterator, MultiprocessIterator])
def test_shuffle_none_shuffles_unless_there_is_an_order_sampler(cls):
    """As in Chainer."""
    data = np.arange(50)
    assert next(cls(data, 50, shuffle=None, seed=1)).columns.tolist() == next(cls(data, 50, seed=1)).columns.tolist()
    assert next(cls(data, 50, shuffle=None, seed=1)).columns.tolist() != [*range(50)]
    reverse = cls(data, 50, shuffle=None, order_sampler=lambda seed, epoch, size: range(size)[::-1])
    assert next(reverse).columns.tolist() == [*range(50)][::-1]
