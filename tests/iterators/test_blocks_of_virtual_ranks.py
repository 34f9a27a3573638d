"""Iterators that serve a block of virtual ranks: virtual rank v of V has batch[v::V], whichever rank computes it."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from chainring.datasets import TupleDataset
from chainring.iterators import (
    Batch,
    FunctionIterator,
    Iterator,
    LoaderIterator,
    MultiprocessIterator,
    SerialIterator,
)
from chainring.iterators.base import share_among_ranks
from rank_pair import on_two_ranks

SIZE = 26  # two batches of 11 and one of 4, or three of 8 and one of 2


class Drawn(Dataset):
    """Examples with a name, which draw."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return {"x": torch.full((2,), i + random.random()), "row": i, "name": f"example {i}"}


def arrays():
    return TupleDataset(np.arange(SIZE), torch.arange(SIZE * 2.0).reshape(SIZE, 2))


def lists(index):
    """A batch of a loader of one's own: arrays, a list of strings, and a number that all rows share."""
    rows = (5, 11, 2)[index % 3]
    return {"x": torch.rand(rows, 2), "name": [f"{index}.{row}" for row in range(rows)], "of all": 3.5}


SOURCES = {
    "arrays": lambda batch: SerialIterator(arrays(), batch, repeat=False, seed=0),
    "examples": lambda batch: SerialIterator(Drawn(), batch, repeat=False, seed=0),
    "batches across epochs": lambda batch: SerialIterator(arrays(), batch, seed=0),
    "workers": lambda batch: MultiprocessIterator(Drawn(), batch, repeat=False, seed=0, n_processes=2),
    "a DataLoader": lambda batch: LoaderIterator(DataLoader(Drawn(), batch), repeat=False),
    "a loader of examples": lambda batch: LoaderIterator([Batch([f"{row}" for row in range(batch)])] * 2, repeat=False),
    "a function": lambda batch: FunctionIterator(lists, 3, seed=0),
}


def examples_of(batch):
    """The examples that count, as text."""
    return [repr(example) for example in batch] if batch.weight else []


def take(iterator, rank=0, size=1, virtual_ranks=None):
    """What a rank gets in one pass, or four batches, and ``epoch_detail`` after each."""
    iterator.rewind()
    iterator.share(0, 1)
    if virtual_ranks is not None:
        iterator.use_virtual_ranks(virtual_ranks)
    iterator.share(rank, size)
    return [(examples_of(batch), iterator.epoch_detail) for batch, _ in zip(iterator, range(4), strict=False)]


def by_virtual_rank(shares, virtual_ranks):
    """The rows of each virtual rank, of the shares of all ranks: every k-th, where k of them are computed by one rank."""
    ends = [rank * virtual_ranks // len(shares) for rank in range(len(shares) + 1)]
    blocks = [last - first for first, last in itertools.pairwise(ends)]
    return [share[at::count] for share, count in zip(shares, blocks, strict=True) for at in range(count)]


CASES = [(8, 1, [1]), (8, 8, [1, 3, 8]), (11, 7, [2, 7]), (11, (drawn := random.randint(2, 6)), [random.randint(1, drawn)])]
"""Batch sizes, virtual ranks and ranks: the edges, and one that is drawn anew each time."""


@pytest.mark.parametrize(("batch", "virtual_ranks", "sizes"), CASES, ids=["one", "as many as rows", "uneven", "drawn"])
@pytest.mark.parametrize("name", SOURCES)
def test_each_virtual_rank_has_its_rows_on_any_number_of_ranks(name, batch, virtual_ranks, sizes):
    """In the order of the batch, which is uneven at the end; epochs are counted as in one process."""
    with SOURCES[name](batch) as iterator:
        whole = take(iterator)
        assert len(whole) > 1
        expected = [[rows[virtual::virtual_ranks] for virtual in range(virtual_ranks)] for rows, _ in whole]
        for size in sizes:
            taken = [take(iterator, rank, size, virtual_ranks) for rank in range(size)]
            assert [len(batches) for batches in taken] == [len(whole)] * size
            for rows, (_, detail), found in zip(expected, whole, zip(*taken, strict=True), strict=True):
                assert by_virtual_rank([share for share, _ in found], virtual_ranks) == rows
                assert {share_detail for _, share_detail in found} == {detail}


@pytest.mark.parametrize("name", ["arrays", "workers", "a DataLoader", "a function"])
def test_a_block_without_rows_repeats_an_example_of_weight_0(name):
    """The last batch has two rows, and virtual ranks 6 and 7 none of them."""
    with SOURCES[name](8) as iterator:
        iterator.use_virtual_ranks(8)
        iterator.share(3, 4)
        batches = [batch for batch, _ in zip(iterator, range(6), strict=False)]
    sizes = {(len(batch), batch.weight) for batch in batches}
    assert (1, 0) in sizes
    assert all(length == weight for length, weight in sizes - {(1, 0)})
    assert len(sizes) > 1


@pytest.mark.parametrize("name", ["examples", "workers", "a DataLoader"])
@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
def test_a_run_saved_on_three_ranks_goes_on_with_the_same_rows_on_two(name):
    """The state is that of the whole batches."""
    with SOURCES[name](8) as alone, SOURCES[name](8) as first, SOURCES[name](8) as second:
        expected = [rows for rows, _ in take(alone)]
        first.use_virtual_ranks(7)
        first.share(1, 3)
        next(first)
        saved = first.state_dict()
        found = []
        for rank in range(2):
            second.use_virtual_ranks(7)
            second.share(rank, 2)
            second.load_state_dict(saved)
            found.append([examples_of(batch) for batch in second])
    assert len(found[0]) == len(expected) - 1
    for rows, shares in zip(expected[1:], zip(*found, strict=True), strict=True):
        assert by_virtual_rank(shares, 7) == [rows[virtual::7] for virtual in range(7)]


@pytest.mark.parametrize("count", [2.0, "4", True, None])
def test_a_number_of_virtual_ranks_is_an_integer(count):
    """Anything else is refused with its value."""
    with pytest.raises(TypeError, match=f"virtual_ranks is an integer of at least 1.*{count}"):
        SOURCES["arrays"](8).use_virtual_ranks(count)


@pytest.mark.parametrize("count", [0, -3])
def test_there_is_at_least_one_virtual_rank(count):
    """A smaller number is refused."""
    with pytest.raises(ValueError, match=f"virtual_ranks is an integer of at least 1, got {count}"):
        SOURCES["arrays"](8).use_virtual_ranks(count)


@pytest.mark.parametrize("name", SOURCES)
def test_fewer_virtual_ranks_than_ranks_are_refused(name):
    """Both numbers are named, and what to do."""
    with SOURCES[name](8) as iterator:
        iterator.use_virtual_ranks(3)
        with pytest.raises(ValueError, match="virtual_ranks=3 and 4 ranks; start at most 3 ranks"):
            iterator.share(0, 4)


def test_more_virtual_ranks_than_examples_in_a_batch_are_refused_for_one_process_too():
    """Where the batch size is known and every batch is full; a pass of an evaluation may have smaller batches."""
    for iterator in (
        SerialIterator(arrays(), 6),
        LoaderIterator(DataLoader(Drawn(), 6)),
    ):
        with pytest.raises(ValueError, match="6 examples for virtual_ranks=7; raise the batch size, or take fewer"):
            iterator.use_virtual_ranks(7)
        iterator.use_virtual_ranks(6)
    SerialIterator(arrays(), 6, repeat=False).use_virtual_ranks(7)
    LoaderIterator([torch.zeros(2)]).use_virtual_ranks(7)


def test_a_loader_that_gives_each_rank_its_own_share_is_refused_on_several_ranks():
    """The rows of a batch of all ranks are not known; one process has them."""
    iterator = LoaderIterator([torch.zeros(8)], per_rank=True)
    iterator.use_virtual_ranks(4)
    iterator.share(0, 1)
    with pytest.raises(ValueError, match=r"batch\[v::4\].*per_rank=True.*leave per_rank out"):
        iterator.share(0, 2)


class Counted(Iterator):
    """A user's iterator that returns the share that every iterator has without virtual ranks."""

    batch_size = 4

    def __next__(self):
        return Batch([*range(4)][self.rank :: self.size])


class Served(Counted):
    serves_virtual_ranks = True

    def __next__(self):
        return self.take_share(Batch([*range(4)]))


class Changed(Served):
    def __next__(self):
        return Batch([*super().__next__()])


def test_iterators_of_ones_own_say_that_they_serve_virtual_ranks():
    """Otherwise several ranks refuse them, also one that is derived from one of ours with another ``__next__``."""
    for iterator, name in ((Counted(), "Counted"), (Changed(), "Changed")):
        iterator.use_virtual_ranks(4)
        iterator.share(0, 1)
        with pytest.raises(ValueError, match=rf"__next__ of {name}.*self.take_share.*serves_virtual_ranks = True"):
            iterator.share(0, 2)
    iterator = Served()
    iterator.use_virtual_ranks(4)
    iterator.share(1, 2)
    assert [*next(iterator)] == [2, 3]


class OfAnotherLibrary:
    """Has a share of its own, and no block."""

    epoch_detail = 0.0

    def __next__(self):
        return []

    def share(self, rank, size):
        pass


def share_foreign(comm):
    share_among_ranks(OfAnotherLibrary(), comm)
    share_among_ranks(OfAnotherLibrary(), comm, 2)


def test_an_iterator_of_another_library_is_refused_on_several_ranks():
    """It cannot be asked for a block; one process takes its whole batches."""
    for found in on_two_ranks(share_foreign):
        assert "cannot give; derive it from chainring.iterators.Iterator" in found.replace("\n", " ")


class Odd:
    """A column of which every n-th row can be taken."""

    def __getitem__(self, index):
        return self

    def __len__(self):
        return 6


def test_a_column_of_an_unknown_class_is_refused_where_its_rows_are_no_plain_stride():
    """It would be indexed with an array, of which nothing is known."""
    iterator = LoaderIterator([Batch(columns=(Odd(), torch.zeros(6)), length=6)])
    iterator.use_virtual_ranks(3)
    iterator.share(1, 2)
    with pytest.raises(ValueError, match="of a Odd only every n-th row can be taken; return a tuple"):
        next(iterator)


def pad(examples, device=None):
    return torch.stack([torch.as_tensor(example["x"]) for example in examples])


def test_a_converter_that_runs_ahead_is_refused_on_several_ranks():
    """It would pad to the longest example of a block, say, which depends on the number of ranks."""
    iterator = MultiprocessIterator(Drawn(), 8, n_processes=1, converter=pad)
    iterator.use_virtual_ranks(4)
    iterator.share(0, 1)
    with pytest.raises(ValueError, match=r"pad of iterator 'main'.*give it to the updater or the Evaluator"):
        iterator.share(0, 2)
    iterator = MultiprocessIterator(arrays(), 8, n_processes=1, converter=pad)  # which is gathered, and converted by nobody
    iterator.use_virtual_ranks(4)
    iterator.share(0, 2)
