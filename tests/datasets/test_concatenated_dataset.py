"""ConcatenatedDataset: datasets one after the other."""

import numpy as np
import pytest
import torch
from gathering import assert_gathers_alike

from chainring.converters import concat_examples
from chainring.datasets import ConcatenatedDataset, DictDataset, SubDataset, TupleDataset
from chainring.datasets.base import make_gather
from chainring.iterators import SerialIterator

INDICES = np.array([4, 0, 2, 2, 1, 3])


def arrays(start, stop):
    return np.arange(start, stop, dtype=np.float32).reshape(-1, 1) * [1, 10]


def test_a_negative_index_counts_from_the_end_of_all():
    """Indexing works as for every dataset."""
    dataset = ConcatenatedDataset("ab", [], "cde")
    assert "".join(dataset[i] for i in range(-5, 5)) == "abcdeabcde"
    assert dataset[-4:-1] == ["b", "c", "d"]


def test_of_nothing_is_refused():
    """It needs one dataset."""
    with pytest.raises(ValueError, match="at least one dataset"):
        ConcatenatedDataset()


@pytest.mark.parametrize(
    "dataset",
    [
        ConcatenatedDataset(arrays(0, 2), arrays(2, 2), arrays(2, 5)),
        ConcatenatedDataset(np.zeros((1, 3, 2), bool), np.ones((1, 3, 2), bool), np.eye(6).reshape(6, 3, 2)[:3] > 0),
        ConcatenatedDataset(arrays(0, 4)[::2], np.asfortranarray(arrays(4, 7))),
        ConcatenatedDataset(torch.arange(2), torch.arange(2, 5)),
        ConcatenatedDataset(*[TupleDataset(arrays(a, b), torch.arange(a, b)) for a, b in ((0, 3), (3, 5))]),
        ConcatenatedDataset(*[DictDataset(x=arrays(a, b), t=np.arange(a, b)) for a, b in ((0, 3), (3, 5))]),
        ConcatenatedDataset(ConcatenatedDataset(np.arange(1), np.arange(1, 2)), SubDataset(np.arange(9), 2, 5)),
    ],
    ids=["arrays", "arrays of several axes", "arrays with gaps", "tensors", "tuples", "dicts", "nested"],
)
class TestColumns:
    def test_a_gather_over_all_is_that_of_the_examples(self, dataset):
        """Bit for bit, in the order that was asked for."""
        assert_gathers_alike(dataset, INDICES)

    def test_a_gather_within_one_dataset_is_that_of_its_examples(self, dataset):
        """Whichever one holds them."""
        assert_gathers_alike(dataset, np.array([0, 0]))
        assert_gathers_alike(dataset, np.array([4]))


def test_datasets_of_different_dtypes_are_joined_example_by_example():
    """So that integers meet floats as they do in any batch, and no dtype is forced upon the other."""
    dataset = ConcatenatedDataset(np.arange(2), np.arange(2) + 0.5)
    assert make_gather(dataset) is None
    batch = concat_examples(SerialIterator(dataset, 4, shuffle=False).next())
    assert (batch.dtype, batch.tolist()) == (torch.float64, [0, 1, 0.5, 1.5])


def test_datasets_of_different_shapes_are_refused_by_the_converter():
    """With the position, and not by half a batch of garbage."""
    dataset = ConcatenatedDataset(np.zeros((1, 2)), np.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"of shape \(2,\).*example 1 is of shape \(3,\)"):
        concat_examples(SerialIterator(dataset, 2, shuffle=False).next())


@pytest.mark.parametrize("second", [[5, 6], TupleDataset(np.arange(2)), DictDataset(x=np.arange(2)), torch.arange(2)])
def test_of_other_structures_are_asked_one_by_one(second):
    """Where one holds no arrays, or not the same ones."""
    assert make_gather(ConcatenatedDataset(np.arange(2), second)) is None


def test_a_subclass_makes_its_own_examples():
    """A gather would pass it by."""

    class Doubled(ConcatenatedDataset):
        def get_example(self, i):
            return 2 * super().get_example(i)

    assert list(SerialIterator(Doubled(np.arange(2), np.arange(2)), 4, shuffle=False).next()) == [0, 2, 0, 2]
