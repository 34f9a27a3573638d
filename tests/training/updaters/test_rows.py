"""The number of examples of a batch, by which means and micro-batches are weighted: the rows of its arrays."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from chainring.converters import concat_examples, to_device
from chainring.iterators import Batch, Iterator, LoaderIterator
from chainring.training import StandardUpdater, Trainer, extensions
from chainring.training.updaters import ParallelUpdater

Pair = namedtuple("Pair", ["x", "weight"])
X, T = torch.arange(12.0).view(6, 2), torch.arange(6.0)


class Batches(Iterator):
    """An iterator of one's own, which returns batches as they are given."""

    batch_size = 6

    def __init__(self, *batches):
        self.batches, self.taken = batches, 0

    def __next__(self):
        if self.taken == len(self.batches):
            raise StopIteration
        self.taken += 1
        return self.batches[self.taken - 1]

    def reset(self):
        self.taken = 0

    def serialize(self, serializer):
        self.taken = serializer("taken", self.taken)


class Mean(nn.Module):
    """Its loss is the mean of all numbers in the first array that it is given, times a parameter of 1."""

    def __init__(self, weight=None):
        super().__init__()
        self.factor, self.weight = nn.Parameter(torch.ones(())), weight

    def forward(self, *args, **kwargs):
        values = [*args, *kwargs.values()][0]
        while not isinstance(values, torch.Tensor):
            values = values[0] if isinstance(values, (tuple, list)) else next(iter(values.values()))
        loss = self.factor * values.mean()
        return loss if self.weight is None else {"loss": loss, "weight": self.weight}


def updater_of(iterator, kind=StandardUpdater, model=None, **settings):
    model = Mean() if model is None else model
    return kind(iterator, torch.optim.SGD(model.parameters(), lr=0.0), model, **settings)


def on_the_device(batch, device):
    return to_device(device, getattr(batch, "columns", batch))


COLUMNS = {
    "a tuple": (X, T),
    "arrays": (X.numpy(), T.numpy()),
    "a named tuple whose field is called weight": Pair(X, T),
    "a mapping": {"input_ids": X, "labels": T},
    "a mapping that is no dict": UserDict(input_ids=X, weight=T),
    "nested": ({"x": X, "length": (T, T)}, T),
    "with numbers that all rows share": (X, torch.tensor(3.0), 0.5, "text", None),
    "with lists of something of each example": {"pixels": X, "boxes": [{"box": torch.ones(n, 4)} for n in range(6)]},
    "one array": X,
}


@pytest.mark.parametrize("converter", [concat_examples, on_the_device])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("wrap", [Batches, lambda batch: LoaderIterator([batch])], ids=["own iterator", "loader"])
def test_a_batch_of_arrays_counts_its_rows(columns, converter, wrap):
    """From any iterator, and with any converter; the default one passes it on."""
    updater = updater_of(wrap(columns), converter=converter)
    updater.update()
    assert updater.weight == 6


def test_the_default_converter_passes_columns_on():
    """It stacks examples, which are in a list; a tuple of arrays is the columns, also where they could be stacked."""
    x, t = concat_examples((T.numpy(), T))
    assert torch.equal(x, T)
    assert t is T
    assert torch.equal(concat_examples(UserDict(x=X))["x"], X)
    assert torch.equal(concat_examples([(T, T), (T, T)])[0], torch.stack([T, T]))
    assert torch.equal(concat_examples((1, 2)), torch.tensor([1, 2]))


def test_a_list_stays_a_list_of_examples():
    """Two tuples of arrays in a list are two examples, whatever their rows."""
    updater = updater_of(Batches([(X, T), (X, T)]))
    updater.update()
    assert updater.weight == 2


def test_log_means_weigh_tuples_of_arrays_by_their_rows(tmp_path):
    """Today a tuple of two arrays would weigh 2."""
    model = Mean()
    trainer = Trainer(updater_of(Batches((torch.ones(3), T[:3]), (torch.zeros(1), T[:1])), model=model), out=str(tmp_path))
    log = extensions.LogReport(trigger=(2, "iteration"))
    trainer.extend(log)
    trainer.run()
    assert log.log[0]["main/loss"] == 0.75


def test_micro_batches_that_are_tuples_of_arrays_are_weighed_by_their_rows():
    """Accumulated they are one batch of all rows."""
    updater = updater_of(Batches((torch.ones(3), T[:3]), (torch.zeros(1), T[:1])), accumulate=2)
    updater.update()
    assert updater.weight == 4
    assert updater.get_model("main").factor.grad == 0.75


def test_an_evaluation_weighs_tuples_of_arrays_by_their_rows():
    """As the training does."""
    data = Batches((torch.ones(3), T[:3]), (torch.zeros(1), T[:1]))
    data.repeat = False
    assert extensions.Evaluator(data, Mean()).evaluate() == {"main/loss": 0.75}


def test_replicas_share_the_rows_of_a_tuple_of_arrays():
    """And not its arrays."""
    updater = updater_of(Batches((X, T)), kind=ParallelUpdater, devices={"main": "cpu", "second": "cpu"})
    updater.update()
    assert updater.weight == 6
    assert updater.get_model("main").factor.grad == X.mean()


DIFFERENT = {"pixels": torch.ones(24, 2), "input_ids": X}
REMEDY = r'24 and 6 rows. Give its number: let the model return a "weight" beside "loss", or .* a chainring.iterators.Batch'
SOURCES = {
    "own iterator": lambda: Batches(DIFFERENT, DIFFERENT),
    "loader": lambda: LoaderIterator([DIFFERENT, DIFFERENT]),
}


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_arrays_of_different_rows_are_refused_where_their_number_is_needed(source, settings):
    """The first array may hold patches of all images. The remedies work: a weight beside the loss, and a Batch."""
    with pytest.raises(ValueError, match=REMEDY):
        updater_of(source(), **settings).update()
    updater = updater_of(source(), model=Mean(weight=5), **settings)
    updater.update()
    assert updater.weight == 5 * settings.get("accumulate", 1)


@pytest.mark.parametrize("wrap", [Batches, lambda *batches: LoaderIterator(batches)], ids=["own iterator", "loader"])
def test_a_batch_says_how_many_examples_its_columns_are(wrap):
    """Whatever the rows of its arrays."""
    updater = updater_of(wrap(Batch(columns=DIFFERENT, length=6)))
    updater.update()
    assert updater.weight == 6


def test_an_evaluation_of_arrays_of_different_rows_needs_a_weight():
    """As an update does."""
    with pytest.raises(ValueError, match=REMEDY):
        extensions.Evaluator([DIFFERENT], Mean()).evaluate()
    assert extensions.Evaluator([DIFFERENT], Mean(weight=2)).evaluate()["main/loss"] == 1


def test_ranks_do_not_cut_arrays_of_different_rows():
    """Every n-th row of each would mix examples."""
    iterator = LoaderIterator([DIFFERENT])
    iterator.share(0, 2)
    with pytest.raises(ValueError, match=REMEDY):
        next(iterator)


def test_throughput_without_a_number_of_examples_gives_none(tmp_path):
    """It has iterations and, of the weights, tokens."""
    trainer = Trainer(updater_of(Batches(DIFFERENT), model=Mean(weight=5)), (1, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.Throughput(trigger=(1, "iteration")))
    trainer.run()
    names = {key.partition("/")[2] for key in trainer.observation if key.startswith("throughput/")}
    assert names == {"iterations_per_second", "tokens_per_second", "peak_memory_mib", "goodput"}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_share_of_a_rank_lies_in_memory_without_gaps(rank):
    """So that view(-1) works on several ranks as on one. The order of rows stays, and so does the layout of images."""
    images = torch.arange(7 * 3 * 2 * 2.0).view(7, 3, 2, 2).to(memory_format=torch.channels_last)
    given = {"x": torch.arange(14).view(7, 2), "images": images, "y": np.arange(14).reshape(7, 2)}
    iterator = LoaderIterator([given])
    iterator.share(rank, 3)
    share = concat_examples(next(iterator))
    assert share["x"].view(-1).tolist() == given["x"][rank::3].reshape(-1).tolist()
    assert share["y"].view(-1).tolist() == given["x"][rank::3].reshape(-1).tolist()
    assert share["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(share["images"], images[rank::3])


def test_a_data_loader_of_nested_examples_counts_its_rows():
    """``default_collate`` makes lists of lists of them."""
    loader = DataLoader([((torch.ones(2), i), (torch.ones(3), i)) for i in range(5)], batch_size=5)
    assert len(next(LoaderIterator(loader))) == 5
