"""DictDataset: datasets side by side, by name."""

import numpy as np
import pytest
import torch
from gathering import assert_gathers_alike

from chainring.converters import concat_examples
from chainring.datasets import DictDataset
from chainring.datasets.base import make_gather
from chainring.iterators import SerialIterator


def test_an_example_is_a_dict():
    """A slice, a list and an array of indices give lists of dicts alike."""
    dataset = DictDataset(x=[1, 2, 3], t="abc")
    assert len(dataset) == 3
    assert dataset[-1] == {"x": 3, "t": "c"}
    assert dataset[1:] == dataset[[1, 2]] == dataset[np.array([1, 2])] == [{"x": 2, "t": "b"}, {"x": 3, "t": "c"}]


def test_columns_of_unequal_length_are_refused():
    """At construction, with the names."""
    with pytest.raises(ValueError, match=r"same length, got \{'x': 3, 't': 2\}"):
        DictDataset(x=[1, 2, 3], t=[1, 2])


def test_a_dict_dataset_of_nothing_is_refused():
    """It needs one."""
    with pytest.raises(ValueError, match="at least one dataset"):
        DictDataset()


def test_whole_arrays_are_gathered_by_name():
    """The same tensors as from examples one by one."""
    assert_gathers_alike(DictDataset(x=np.arange(8.0).reshape(4, 2), t=torch.arange(4)), np.array([3, 0, 3]))


def test_what_is_no_array_is_asked_one_by_one():
    """A list beside an array; and a subclass that makes other examples."""

    class Doubled(DictDataset):
        def get_example(self, i):
            return {key: 2 * value for key, value in super().get_example(i).items()}

    assert make_gather(DictDataset(x=np.arange(3), t=[1, 2, 3])) is None
    assert make_gather(Doubled(x=np.arange(3))) is None
    assert SerialIterator(Doubled(x=np.arange(3)), 3, shuffle=False).next()[2] == {"x": 4}


def test_an_iterator_gives_a_dict_of_columns():
    """As concat_examples hands them to a model."""
    batch = SerialIterator(DictDataset(x=np.arange(4), t=np.arange(4) * 2), 2, shuffle=False).next()
    assert {key: column.tolist() for key, column in concat_examples(batch).items()} == {"x": [0, 1], "t": [0, 2]}
