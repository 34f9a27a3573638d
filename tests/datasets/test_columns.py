"""Columns: counting and selecting rows."""

import numpy as np
import pytest
import torch

from chainring.datasets._batches import count_rows, select_rows


@pytest.mark.parametrize(
    ("columns", "number"),
    [
        (np.zeros((3, 2)), 3),
        (torch.zeros(4), 4),
        ((None, "x", [torch.zeros(5)], torch.zeros(5)), 5),
        ({"a": 1, "b": {"c": np.zeros(6)}}, 6),
        ((torch.tensor(1.0), torch.zeros(2)), 2),
        (torch.tensor(1.0), None),
        (["a", "b"], None),
        ([], None),
        (7, None),
    ],
)
def test_the_number_of_rows_is_the_first_dimension_of_the_first_array(columns, number):
    """Depth first; what has no dimension is passed over; without an array there is no number."""
    assert count_rows(columns) == number


def test_rows_of_an_array_are_selected_by_number_and_slice():
    """As the array itself would."""
    array = np.arange(6).reshape(3, 2)
    assert select_rows(array, 1).tolist() == [2, 3]
    assert select_rows(array, slice(0, 3, 2)).tolist() == [[0, 1], [4, 5]]
