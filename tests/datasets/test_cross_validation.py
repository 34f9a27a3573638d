"""Cross validation: every example is tested with once."""

import numpy as np
import pytest
import torch

from chainring.datasets import get_cross_validation_datasets, get_cross_validation_datasets_random
from chainring.datasets.base import make_gather


def contents(splits):
    return [(list(train), list(test)) for train, test in splits]


@pytest.mark.parametrize(("size", "n_folds"), [(10, 3), (7, 7), (9, 2), (23, 5), (100, 7)])
@pytest.mark.parametrize("split", [get_cross_validation_datasets, get_cross_validation_datasets_random])
def test_every_example_is_tested_with_in_one_fold_and_trained_on_in_the_others(split, size, n_folds):
    """No remainder is dropped; the sizes of the test sets differ by at most one."""
    folds = contents(split(list(range(size)), n_folds))
    assert len(folds) == n_folds
    assert sorted(x for _, test in folds for x in test) == list(range(size))
    for train, test in folds:
        assert sorted(train + test) == list(range(size))
    sizes = [len(test) for _, test in folds]
    assert max(sizes) - min(sizes) <= 1


def test_the_folds_are_chainers():
    """The vector of Chainer 7 for ten examples in three folds: the end of the order is tested with first."""
    assert contents(get_cross_validation_datasets(list(range(10)), 3)) == [
        ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9]),
        ([6, 7, 8, 9, 0, 1, 2], [3, 4, 5]),
        ([3, 4, 5, 6, 7, 8, 9], [0, 1, 2]),
    ]


def test_an_order_says_who_is_tested_with_when():
    """Indices may be negative."""
    assert contents(get_cross_validation_datasets(list("abcd"), 2, [3, 0, -2, 1])) == [
        (["d", "a"], ["c", "b"]),
        (["c", "b"], ["d", "a"]),
    ]


@pytest.mark.parametrize("n_folds", [-1, 0, 1, 5])
def test_as_many_folds_as_there_cannot_be_are_refused(n_folds):
    """One fold would leave nothing to train on."""
    with pytest.raises(ValueError, match=f"n_folds is from 2 to 4, the number of examples, got {n_folds}"):
        get_cross_validation_datasets([1, 2, 3, 4], n_folds)


def test_an_order_that_is_none_of_the_dataset_is_refused():
    """At once, and not when its fold comes."""
    with pytest.raises(ValueError, match="from 0 to 2, got some from 0 to 3"):
        get_cross_validation_datasets([1, 2, 3], 3, [0, 1, 3])


def test_a_seed_fixes_the_folds():
    """Another seed gives others; without one they follow torch's, and no generator is drawn from."""
    data = list(range(50))
    one, same, other = (contents(get_cross_validation_datasets_random(data, 5, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    torch.manual_seed(5)
    before = torch.get_rng_state().tolist()
    unseeded = contents(get_cross_validation_datasets_random(data, 5))
    assert torch.get_rng_state().tolist() == before
    torch.rand(1)
    assert contents(get_cross_validation_datasets_random(data, 5)) == unseeded


def test_whole_arrays_stay_gathered():
    """Both parts of a fold."""
    for part in get_cross_validation_datasets(np.arange(10) * 2, 3)[1]:
        assert make_gather(part)(np.arange(len(part))).tolist() == list(part)
