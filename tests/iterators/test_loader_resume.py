"""LoaderIterator: the same pass again, for evaluations and for runs that are resumed."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from chainring.iterators import LoaderIterator

DATA = TensorDataset(torch.arange(10), torch.arange(10) * 0.5)


def firsts(iterator, number):
    return [next(iterator).columns[0].tolist() for _ in range(number)]


def resumed(make, state):
    iterator = make()
    iterator.load_state_dict(state)
    return iterator


class TestEvaluation:
    """repeat=False, rewound before each pass."""

    def test_every_pass_gives_the_same(self):
        """Shuffled and drawing, from the global generator or its own."""
        for generator in (None, torch.Generator().manual_seed(3)):
            loader = DataLoader(DATA, 4, shuffle=True, generator=generator)
            iterator = LoaderIterator(loader, repeat=False)
            passes = []
            for _ in range(3):
                iterator.rewind()
                passes.append([batch.columns[0].tolist() for batch in iterator])
            assert passes[0] == passes[1] == passes[2]
            assert sorted(index for batch in passes[0] for index in batch) == list(range(10))

    @pytest.mark.parametrize("taken", [1, 3])
    def test_a_generator_shared_with_training_is_left_as_it_was(self, taken):
        """Training goes on as if there had been no evaluation, finished or broken off."""
        shared = torch.Generator().manual_seed(3)
        iterator = LoaderIterator(DataLoader(DATA, 4, shuffle=True, generator=shared), repeat=False)
        before = shared.get_state()
        firsts(iterator, taken)
        iterator.rewind()
        assert torch.equal(shared.get_state(), before)

    def test_it_ends_as_long_as_epoch_length(self):
        """The rest of the pass is left."""
        iterator = LoaderIterator([torch.tensor([k]) for k in range(5)], epoch_length=2, repeat=False)
        for _ in range(2):
            assert [batch.columns.item() for batch in iterator] == [0, 1]
            assert list(iterator) == []
            iterator.rewind()

    def test_data_that_have_ended_stay_so_and_go_on_from_a_state_before_their_end(self):
        """In another iterator, whose data are there, and in the same one."""
        iterator, other = (LoaderIterator(iter([torch.tensor([k]) for k in range(3)])) for _ in range(2))
        assert [batch.columns.item() for batch in iterator] == [0, 1, 2]
        other.load_state_dict(iterator.state_dict())
        assert list(other) == []
        again = LoaderIterator([torch.tensor([k]) for k in range(3)], repeat=False)
        next(again)
        state = again.state_dict()
        for _ in range(2):
            assert [batch.columns.item() for batch in again] == [1, 2]
            again.load_state_dict(state)

    @pytest.mark.parametrize("kind", ["sized", "function"])
    def test_resuming_after_a_pass_fetches_nothing(self, kind):
        """Neither warnings nor a whole validation set fetched in vain; it still is at its end."""
        fetched = []

        def begin():
            for k in range(3):
                fetched.append(k)
                yield torch.tensor([k])

        class Sized:
            def __len__(self):
                return 3

            def __iter__(self):
                return begin()

        source = Sized() if kind == "sized" else begin
        iterator = LoaderIterator(source, repeat=False)
        assert len(list(iterator)) == 3
        fetched.clear()
        again = resumed(lambda: LoaderIterator(source, repeat=False), iterator.state_dict())
        assert (list(again), fetched) == ([], [])
        again.rewind()
        assert len(list(again)) == 3


class TestResume:
    def test_amid_an_epoch_it_warns_how_many_batches_are_fetched_again(self):
        """A DataLoader has no state."""
        iterator = LoaderIterator(DataLoader(DATA, 4))
        firsts(iterator, 2)
        again = resumed(lambda: LoaderIterator(DataLoader(DATA, 4)), iterator.state_dict())
        with pytest.warns(UserWarning, match="fetches 2 batches again and skips them.*DataLoader has no state_dict"):
            assert firsts(again, 1) == [[8, 9]]

    def test_between_epochs_nothing_is_fetched_again(self):
        """Warnings are errors here."""
        iterator = LoaderIterator(DataLoader(DATA, 4, shuffle=True))
        firsts(iterator, 3)
        again = resumed(lambda: LoaderIterator(DataLoader(DATA, 4, shuffle=True)), iterator.state_dict())
        assert firsts(again, 4) == firsts(iterator, 4)

    def test_a_list_is_not_warned_about(self):
        """To skip its batches costs nothing."""
        iterator = LoaderIterator([torch.tensor([k]) for k in range(3)])
        next(iterator)
        again = resumed(lambda: LoaderIterator([torch.tensor([k]) for k in range(3)]), iterator.state_dict())
        assert next(again).columns.item() == 1

    @pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
    @pytest.mark.parametrize("place", ["loader", "sampler", "batch_sampler"])
    def test_a_generator_of_the_loaders_own_goes_on_where_it_was(self, place):
        """Wherever it was given, and after every batch of two epochs."""

        def make():
            generator = torch.Generator().manual_seed(8)
            sampler = RandomSampler(DATA, generator=generator)
            if place == "loader":
                loader = DataLoader(DATA, 4, shuffle=True, generator=generator)
            elif place == "sampler":
                loader = DataLoader(DATA, 4, sampler=sampler)
            else:
                loader = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
            return LoaderIterator(loader)

        whole = firsts(make(), 10)
        for taken in range(7):
            iterator = make()
            firsts(iterator, taken)
            assert firsts(resumed(make, iterator.state_dict()), 10 - taken) == whole[taken:]

    def test_a_loader_with_a_state_fetches_nothing_again(self):
        """And is told of the epoch before it is told of its place in it."""

        class Own:
            def __init__(self):
                self.at, self.fetched, self.epochs = 0, [], []

            def set_epoch(self, epoch):
                self.epochs.append(epoch)
                self.at = 0

            def __iter__(self):
                while self.at < 3:
                    self.at += 1
                    self.fetched.append(self.at)
                    yield torch.tensor([self.at])

            def state_dict(self):
                return {"at": self.at}

            def load_state_dict(self, state):
                self.at = state["at"]

        iterator = LoaderIterator(Own(), epoch_length=3)
        firsts = [next(iterator).columns.item() for _ in range(5)]
        again = resumed(lambda: LoaderIterator(Own(), epoch_length=3), iterator.state_dict())
        assert [next(again).columns.item() for _ in range(2)] == [3, 1]
        assert (firsts, again.loader.fetched, again.loader.epochs) == ([1, 2, 3, 1, 2], [3, 1], [1, 2])


class Lazy:
    """A sampler that draws an index whenever it is asked for one."""

    def __len__(self):
        return 10

    def __iter__(self):
        return (random.randrange(10) for _ in range(10))


def test_workers_of_a_loader_neither_disturb_generators_nor_change_the_batches_on_resume():
    """Two worker processes, a sampler that draws in this one, and a resume amid the epoch."""

    def make():
        return LoaderIterator(DataLoader(DATA, 4, sampler=Lazy(), num_workers=2))

    iterator = make()
    before = random.getstate(), torch.get_rng_state().tolist()
    taken = firsts(iterator, 1)
    state = iterator.state_dict()
    taken += firsts(iterator, 2)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    again = resumed(make, state)
    with pytest.warns(UserWarning, match="fetches 1 batches again"):
        assert firsts(again, 2) == taken[1:]
    iterator.finalize()
    again.finalize()


class Noisy(torch.utils.data.Dataset):
    """Draws from a generator of its own."""

    def __init__(self):
        self.random = np.random.default_rng(5)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.random.normal()


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7])
def test_a_generator_that_an_evaluation_shares_goes_on_where_training_was(cut):
    """An evaluation begins with the state that the generator had at first, and restores the one that it finds."""

    def iterators_over(data):
        return LoaderIterator(DataLoader(data, 4)), LoaderIterator(DataLoader(data, 4), repeat=False)

    def run(pair, start, stop):
        train, test = pair
        batches = []
        for number in range(start, stop):
            batches.append(next(train).columns.tolist())
            if number % 2 == 0:
                test.reset()
                batches += [batch.columns.tolist() for batch in test]
        return batches

    pair = iterators_over(Noisy())
    run(pair, 0, cut)
    states = [iterator.state_dict() for iterator in pair]
    after = run(pair, cut, 10)
    resumed = iterators_over(Noisy())
    for iterator, state in zip(resumed, states, strict=True):
        iterator.load_state_dict(state)
    with pytest.warns(UserWarning, match="fetches") if cut % 6 else nullcontext():
        assert run(resumed, cut, 10) == after
