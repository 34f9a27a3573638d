"""Batch: a sequence of examples, held one by one or as columns."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from chainring.iterators import Batch

Pair = namedtuple("Pair", "x t")
X, T = np.arange(10).reshape(5, 2), torch.arange(5)


def as_values(example):
    return [np.asarray(part).tolist() for part in example]


BATCHES = {
    "examples": Batch([(X[i], T[i]) for i in range(5)]),
    "columns": Batch(columns=(X, T), length=5),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
class TestBatch:
    def test_it_is_a_sequence(self, batch):
        """Length, index from either end and iteration give the examples in order."""
        assert len(batch) == 5
        assert as_values(batch[1]) == as_values(batch[-4]) == [[2, 3], 1]
        assert [as_values(example) for example in batch] == [[[2 * i, 2 * i + 1], i] for i in range(5)]

    def test_a_slice_is_a_batch(self, batch):
        """Every r-th example, as replicas take them, with its number as length and weight."""
        for rank in range(3):
            part = batch[rank::3]
            assert type(part) is Batch
            assert [int(example[1]) for example in part] == list(range(rank, 5, 3))
            assert len(part) == part.weight == len(range(rank, 5, 3))

    @pytest.mark.parametrize("index", [5, -6])
    def test_an_index_out_of_range_is_refused(self, batch, index):
        """So that iteration ends, and with the rule."""
        with pytest.raises(IndexError):
            batch[index]

    def test_its_weight_is_its_length(self, batch):
        """Unless told otherwise every example counts."""
        assert batch.weight == 5

    def test_a_part_of_a_batch_of_weight_zero_counts_nothing(self, batch):
        """A batch that only keeps a rank in step does so in slices too."""
        filler = batch[:2]
        filler.weight = 0
        assert filler[::2].weight == 0


def test_examples_have_the_structure_of_the_columns():
    """Mappings give mappings, named tuples named tuples, nested ones nested ones."""
    batch = Batch(columns={"pair": Pair(X, T), "x": X}, length=5)
    example = batch[3]
    assert type(example["pair"]) is Pair
    assert as_values(example["pair"]) == [[6, 7], 3]
    assert example["x"].tolist() == [6, 7]


def test_a_list_of_columns_inside_a_batch_is_entered():
    """As default_collate makes them of nested tuples."""
    part = Batch(columns=(X, [T, T + 1]), length=5)[1::2]
    assert [column.tolist() for column in part.columns[1]] == [[1, 3], [2, 4]]


def test_a_list_of_strings_is_a_column():
    """It is what default_collate makes of strings."""
    part = Batch(columns=(T, ["a", "b", "c", "d", "e"]), length=5)[1::2]
    assert part.columns[1] == ["b", "d"]


def test_what_has_no_rows_comes_with_every_part():
    """A number, a name or None that a whole batch shares."""
    part = Batch(columns={"x": T, "scale": 2.5, "name": "train", "mask": None, "one": torch.tensor(1)}, length=5)[1:3]
    assert part.columns["x"].tolist() == [1, 2]
    assert [part.columns[key] for key in ("scale", "name", "mask", "one")] == [2.5, "train", None, torch.tensor(1)]
