"""LoaderIterator: what makes batches already."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from chainring.datasets import TupleDataset
from chainring.iterators import LoaderIterator, SerialIterator, as_iterator
from chainring.training import StandardUpdater, Trainer

DATA = TensorDataset(torch.arange(10), torch.arange(10) * 0.5)


def firsts(iterator, number):
    return [next(iterator).columns[0].tolist() for _ in range(number)]


def test_batches_are_passed_on_as_they_are():
    """The very tensors; a list counts as a tuple, a mapping stays one."""
    x, t = torch.zeros(3, 2), torch.zeros(3)
    batches = LoaderIterator([[x, t], {"x": x}, x])
    columns = [next(batches).columns for _ in range(3)]
    assert type(columns[0]) is tuple
    assert columns[0][0] is columns[1]["x"] is columns[2] is x


def test_the_number_of_examples_is_the_first_dimension_of_the_first_tensor():
    """Also of a short last batch."""
    iterator = LoaderIterator(DataLoader(DATA, 4))
    assert [len(next(iterator)) for _ in range(4)] == [4, 4, 2, 4]


def test_a_table_of_plain_lists_has_as_many_examples_as_its_first_column():
    """As Hugging Face's ``dataset.iter(batch_size=3)`` gives it."""
    (batch,) = LoaderIterator([{"text": ["a", "b", "c"], "label": [0, 1, 0]}], repeat=False)
    assert len(batch) == 3


def test_an_epoch_is_one_pass():
    """Counters are exact where the loader has a length."""
    iterator = LoaderIterator(DataLoader(DATA, 5))
    rows = []
    for _ in range(4):
        next(iterator)
        rows.append((iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail, iterator.is_new_epoch))
    assert rows == [(0, 0.5, 0.0, False), (1, 1.0, 0.5, True), (1, 1.5, 1.0, False), (2, 2.0, 1.5, True)]


def test_epoch_length_counts_batches_over_passes():
    """Three batches in a pass, epochs of two."""
    iterator = LoaderIterator([torch.tensor([k]) for k in range(3)], epoch_length=2)
    rows = [(next(iterator).columns.item(), iterator.epoch_detail, iterator.is_new_epoch) for _ in range(4)]
    assert rows == [(0, 0.5, False), (1, 1.0, True), (2, 1.5, False), (0, 2.0, True)]


def counted(length, begun=None, fetched=None):
    """A function that begins a pass of so many batches, or an endless one, and takes down what it does."""
    begun, fetched = [] if begun is None else begun, [] if fetched is None else fetched

    def begin():
        begun.append(len(begun))
        for k in itertools.count() if length is None else range(length):
            fetched.append(k)
            yield torch.tensor([k])

    return begin


def test_without_a_length_an_epoch_ends_with_the_last_batch_of_the_pass():
    """It is read one batch ahead; whole epochs only, so progress has no size."""
    iterator = LoaderIterator(counted(2))
    rows = [(next(iterator).columns.item(), iterator.epoch_detail, iterator.is_new_epoch) for _ in range(5)]
    assert rows == [(0, 0, False), (1, 1, True), (0, 1, False), (1, 2, True), (0, 2, False)]
    assert iterator.progress[2] is None


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_of_whole_epochs_over_a_loader_without_a_length_ends_with_their_last_batch(tmp_path, stop):
    """Eight batches are eight updates, and what is triggered by an epoch comes after the eighth."""
    model = torch.nn.Linear(1, 1)

    def batches():
        return (torch.ones(2, 1) * k for k in range(8))

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updater = StandardUpdater(batches, optimizer, model, loss_func=lambda model, x: model(x).mean())
    trainer = Trainer(updater, (stop, "epoch"), out=tmp_path)
    fired = []
    trainer.extend(lambda trainer: fired.append(trainer.updater.iteration), trigger=(1, "epoch"))
    trainer.run()
    assert updater.iteration == 8 * stop
    assert fired == [8 * (k + 1) for k in range(stop)]


def test_an_error_in_a_batch_that_is_read_ahead_comes_when_it_is_its_turn():
    """The batch before it is returned first, and its state is that of a run that never looked ahead."""

    def begin():
        yield torch.tensor([0])
        yield torch.tensor([1])
        raise OSError("no third batch")

    iterator = LoaderIterator(begin)
    assert [next(iterator).columns.item() for _ in range(2)] == [0, 1]
    assert iterator.epoch == 0
    with pytest.raises(OSError, match="no third batch"):
        next(iterator)


def test_a_batch_that_was_read_ahead_is_not_lost_by_a_reset():
    """The next pass is a whole one, and so is an evaluation that was broken off."""
    for again in ("reset", "rewind"):
        iterator = LoaderIterator(counted(3), repeat=False)
        next(iterator)
        getattr(iterator, again)()
        assert [batch.columns.item() for batch in iterator] == [0, 1, 2]
        assert (iterator.epoch, iterator.is_new_epoch) == (1, True)


class TestEndless:
    """A loader that has no length, with epoch_length."""

    def test_each_epoch_begins_a_new_pass(self):
        """A new iter(), and nothing is read ahead."""
        begun, fetched = [], []
        iterator = LoaderIterator(counted(None, begun, fetched), epoch_length=3)
        rows = [(next(iterator).columns.item(), iterator.epoch_detail, len(begun)) for _ in range(7)]
        assert [row[0] for row in rows] == fetched == [0, 1, 2, 0, 1, 2, 0]
        assert [row[2] for row in rows] == [1, 1, 1, 2, 2, 2, 3]
        assert (iterator.epoch, iterator.epoch_detail) == (2, 2 + 1 / 3)

    @pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
    @pytest.mark.parametrize("place", range(9))
    def test_a_resume_fetches_one_epoch_again_at_most(self, place):
        """What was taken of the current one; nothing between epochs."""

        def make(fetched):
            return LoaderIterator(counted(None, fetched=fetched), epoch_length=3)

        iterator = make([])
        taken = [next(iterator).columns.item() for _ in range(place)]
        again = make(fetched := [])
        again.load_state_dict(iterator.state_dict())
        assert [*taken, next(again).columns.item()] == ([0, 1, 2] * 3)[: place + 1]
        assert len(fetched) == place % 3 + 1
        assert [next(again).columns.item() for _ in range(8 - place)] == ([0, 1, 2] * 3)[place + 1 :]

    def test_passes_that_end_before_the_epoch_are_read_to_their_ends(self):
        """Over the ends of epochs, so that every batch comes equally often."""
        iterator = LoaderIterator(counted(2), epoch_length=3)
        assert [next(iterator).columns.item() for _ in range(7)] == [0, 1, 0, 1, 0, 1, 0]


def test_a_generator_gives_one_pass_and_the_data_end_with_it():
    """StopIteration, again and again, though repeat is true."""
    iterator = LoaderIterator(torch.tensor([k]) for k in range(2))
    assert [batch.columns.item() for batch in iterator] == [0, 1]
    assert list(iterator) == []


@pytest.mark.parametrize("again", ["reset", "rewind"])
def test_a_generator_that_was_begun_cannot_begin_again(again):
    """A second evaluation over a spent generator is no evaluation of nothing, but an error with the remedy."""
    iterator = LoaderIterator((torch.tensor([k]) for k in range(2)), repeat=False)
    getattr(iterator, again)()
    assert len(list(iterator)) == 2
    with pytest.raises(ValueError, match=r"gives one pass.*function that returns a new iterable"):
        getattr(iterator, again)()


def test_a_loader_without_batches_cannot_be_repeated():
    """It is refused at construction where its length is known."""
    with pytest.raises(ValueError, match="this list has none: its data are empty"):
        LoaderIterator([])
    assert list(LoaderIterator([], repeat=False)) == []


def test_a_pass_without_batches_is_an_error():
    """A function that keeps returning the same spent generator neither loops for ever nor ends the run in silence."""
    spent = (torch.tensor([k]) for k in range(2))
    iterator = LoaderIterator(lambda: spent)
    assert len([next(iterator), next(iterator)]) == 2
    with pytest.raises(ValueError, match=r"no batch in a whole pass; a function must return a new iterable"):
        next(iterator)


@pytest.mark.parametrize("loader", [5, "abc", b"abc", None, {"x": 1}])
def test_what_gives_no_batches_is_refused(loader):
    """With the kind that it is."""
    with pytest.raises(TypeError, match=f"got {type(loader).__name__}"):
        LoaderIterator(loader)


@pytest.mark.parametrize("length", [0, -1, 2.0, True])
def test_epoch_length_is_an_integer_of_at_least_one(length):
    """Refused at construction, with the value."""
    with pytest.raises(ValueError, match=f"at least 1, got {length}"):
        LoaderIterator([1], epoch_length=length)


def test_set_epoch_is_called_for_every_pass():
    """Of the loader, its sampler and its dataset, before the pass."""
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=True, seed=1)
    iterator = LoaderIterator(DataLoader(DATA, 10, sampler=sampler))
    orders = firsts(iterator, 2)
    for epoch, order in enumerate(orders):
        sampler.set_epoch(epoch)
        assert order == list(sampler)


def test_a_sampler_that_already_splits_by_rank_is_refused_for_several():
    """Otherwise each rank would see a part of its part."""
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    iterator = LoaderIterator(DataLoader(DATA, 4, sampler=sampler))
    with pytest.raises(ValueError, match="DistributedSampler has already split the data: leave the sampler out"):
        iterator.share(0, 2)


def test_an_empty_share_repeats_one_example_that_does_not_count():
    """A last batch of two over three ranks."""
    iterator = LoaderIterator(DataLoader(DATA, 4))
    iterator.share(2, 3)
    batches = [next(iterator) for _ in range(3)]
    assert [batch.columns[0].tolist() for batch in batches] == [[2], [6], [8]]
    assert [batch.weight for batch in batches] == [1, 1, 0]


class TestTheDoor:
    """as_iterator, where an iterator is expected."""

    def test_an_iterator_stays_itself(self):
        """Ours, and a user's that counts epochs."""

        class Own:
            epoch_detail = 0.0

            def __next__(self):
                return [1]

        for iterator in (SerialIterator([1, 2], 1), LoaderIterator([1]), Own()):
            assert as_iterator(iterator) is iterator

    @pytest.mark.parametrize(
        "source", [DataLoader(DATA, 2), [torch.zeros(2)], lambda: [torch.zeros(2)], iter([torch.zeros(2)])]
    )
    def test_what_gives_batches_is_wrapped(self, source):
        """Loaders, lists, functions and generators."""
        assert type(as_iterator(source)) is LoaderIterator
        assert len(next(as_iterator(source))) == 2

    @pytest.mark.parametrize("repeat", [True, False])
    def test_repeat_is_handed_on(self, repeat):
        """An evaluation is one pass."""
        assert as_iterator([torch.zeros(2)], repeat=repeat).repeat is repeat

    @pytest.mark.parametrize("name", ["TensorDataset", "TupleDataset", "ndarray", "Tensor", "Plain"])
    def test_a_dataset_is_refused(self, name):
        """Its items are examples and not batches; the remedy is SerialIterator."""

        class Plain:
            def __len__(self):
                return 2

            def __getitem__(self, i):
                return i

        sources = (DATA, TupleDataset([1]), np.zeros((4, 2)), torch.zeros(4, 2), Plain())
        source = {type(one).__name__: one for one in sources}[name]
        with pytest.raises(TypeError, match=rf"got the dataset {name}.*SerialIterator\(dataset, batch_size\)"):
            as_iterator(source)

    @pytest.mark.parametrize("source", [torch.nn.Linear(1, 1), {"main": [1]}, "abc", 5, None])
    def test_anything_else_is_refused(self, source):
        """With its kind."""
        with pytest.raises(TypeError, match=f"got {type(source).__name__}"):
            as_iterator(source)


def test_a_loader_longer_than_its_length_loses_nothing():
    """Batches past the length are returned all the same."""

    class Longer:
        def __len__(self):
            return 2

        def __iter__(self):
            return (torch.tensor([k]) for k in range(3))

    iterator = LoaderIterator(Longer())
    with pytest.warns(UserWarning, match="a len of 2, and a pass had more batches"):
        assert [next(iterator).columns.item() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
