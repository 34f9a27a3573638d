"""Columns of pandas: an example is asked by its position, whatever the labels of its row are."""

import pandas
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from chainring.converters import concat_examples
from chainring.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
    get_cross_validation_datasets,
    split_dataset_random,
)
from chainring.iterators import LoaderIterator, MultiprocessIterator, SerialIterator

TABLE = pandas.DataFrame({"x": [0.0, 1.0, 2.0, 3.0, 4.0], "y": [0, 10, 20, 30, 40]})
TABLES = {
    "as it was made": TABLE,
    "sampled": TABLE.sample(frac=1, random_state=0),
    "sorted": TABLE.sort_values("y", ascending=False),
    "filtered": TABLE[TABLE["y"] != 10],
    "labelled": TABLE.set_index(pandas.Index(list("abcde"))),
    "with labels twice": pandas.concat([TABLE, TABLE]),
}
every_table = pytest.mark.parametrize("name", TABLES)


@every_table
def test_columns_stay_side_by_side(name):
    """One as a column and one as an array, as a script has them after shuffling its table."""
    table = TABLES[name]
    expected = list(zip(table["x"].to_numpy(), table["y"].to_numpy(), strict=True))
    assert list(TupleDataset(table["x"], table["y"].values)) == expected
    assert [tuple(example.values()) for example in DictDataset(x=table["x"], y=table["y"])] == expected


@every_table
def test_other_datasets_ask_by_position_too(name):
    """Each that is made of others."""
    column = TABLES[name]["y"]
    values = column.tolist()
    assert list(ConcatenatedDataset(column, [7])) == [*values, 7]
    assert list(TransformDataset(column, lambda y: y + 1)) == [value + 1 for value in values]
    assert list(SubDataset(column, 1, 3)) == values[1:3]
    assert sorted(y for half in split_dataset_random(column, 2, seed=0) for y in half) == sorted(values)
    assert sorted(y for _, test in get_cross_validation_datasets(column, 2) for y in test) == sorted(values)


@pytest.mark.parametrize(
    ("iterator", "name"), [*((SerialIterator, name) for name in TABLES), (MultiprocessIterator, "sampled")]
)
def test_iterators_ask_by_position(iterator, name):
    """Of a column, and of a dataset of columns."""
    table = TABLES[name]
    settings = {"n_processes": 1} if iterator is MultiprocessIterator else {}
    with iterator(table["y"], len(table), shuffle=False, **settings) as batches:
        assert concat_examples(next(batches)).tolist() == table["y"].tolist()


def test_the_numbers_are_those_of_a_plain_table():
    """Neither dtype nor value is another than that of an example that is asked of the column itself."""
    (x, y), (a, b) = TupleDataset(TABLE["x"], TABLE["y"])[1], (TABLE["x"][1], TABLE["y"][1])
    assert (x, y, type(x), type(y)) == (a, b, type(a), type(b))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TupleDataset(TABLE, TABLE["y"]),
        lambda: DictDataset(x=TABLE),
        lambda: ConcatenatedDataset(TABLE),
        lambda: SubDataset(TABLE, 0, 2),
        lambda: TransformDataset(TABLE, len),
        lambda: SerialIterator(TABLE, 2),
    ],
)
def test_a_whole_table_is_refused_with_the_lines_to_write(make):
    """Its index means a column."""
    with pytest.raises(
        TypeError, match=r"dataset\[i\] of a DataFrame is a column; write dataset.to_numpy\(\), or TupleDataset"
    ):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialIterator(Subset(TABLE["y"], range(3)), 2),
        lambda: SerialIterator(Subset(ConcatDataset([TABLE["y"], [1]]), range(3)), 2),
        lambda: LoaderIterator(DataLoader(TABLE["y"], 2)),
        lambda: LoaderIterator(DataLoader(Subset(TABLE["y"], [0]), 2)),
    ],
)
def test_a_container_of_torchs_over_a_column_is_refused(make):
    """It asks by labels."""
    with pytest.raises(TypeError, match=r"the index of a Series of pandas has labels.*give it .to_numpy\(\)"):
        make()


def test_a_dataset_that_keeps_a_table_of_its_own_is_left_alone():
    """It knows how it asks it."""

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.dataset = TABLE

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, i):
            return self.dataset["y"].iloc[i]

    assert len(next(SerialIterator(Rows(), 2))) == len(next(LoaderIterator(DataLoader(Rows(), 2)))) == 2
