"""The indices of the examples of an update, as `chainring batch` and `chainring bisect` tell them."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import chainring
from chainring import iterators, training
from chainring.testing.replay import BatchIndices

SIZE = 23


class Numbers(torch.utils.data.Dataset):
    """Examples that are their indices."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    """The same without indices."""

    def __iter__(self):
        return (torch.tensor([float(index)]) for index in range(SIZE))


def loader_of(dataset, **settings):
    return iterators.LoaderIterator(DataLoader(dataset, batch_size=4, **settings))


class Reused:
    """A sampler of batches that yields one list again and again, and does not know how many batches there are."""

    def __init__(self, says):
        self.says = says

    def __len__(self):
        return self.says

    def __iter__(self):
        batch = []
        for begin in range(0, SIZE, 4):
            batch[:] = torch.randperm(SIZE).tolist()[begin % 3 :][:4]
            yield batch


def loader_of_batches(says):
    return iterators.LoaderIterator(DataLoader(Numbers(), batch_sampler=Reused(says)))


ITERATORS = {
    "serial": lambda: iterators.SerialIterator(Numbers(), 4, seed=1),
    "workers": lambda: iterators.MultiprocessIterator(Numbers(), 4, seed=1, n_processes=2),
    "loader": lambda: loader_of(Numbers(), shuffle=True),
    "loader with workers": lambda: loader_of(Numbers(), shuffle=True, num_workers=2),
    "loader that drops": lambda: loader_of(Numbers(), shuffle=True, drop_last=True),
    "one list of indices": lambda: loader_of_batches(6),
    "too short a length": lambda: loader_of_batches(4),
    "too long a length": lambda: loader_of_batches(9),
    "much too short a length": lambda: loader_of_batches(1),
}


def updater_of(iterator, seen, accumulate=1):
    """An updater that notes the examples of each update."""

    def loss_func(model, x):
        seen.extend(x.reshape(-1).int().tolist())
        return model(x).sum()

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return training.StandardUpdater(iterator, optimizer, model, loss_func=loss_func, accumulate=accumulate)


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches:UserWarning", "ignore:the loader of iterator 'main':UserWarning")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ITERATORS)
def test_they_are_those_that_the_update_was_given(name, accumulate):
    """Over the ends of epochs; also by a run that goes on in the midst of one."""
    seen = []
    updater = updater_of(ITERATORS[name](), seen, accumulate)
    indices = BatchIndices(updater)
    for _ in range(9):
        seen.clear()
        indices.mark()
        updater.update()
        assert indices.taken() == {"main": seen}
    resumed = updater_of(ITERATORS[name](), again := [], accumulate)
    indices = BatchIndices(resumed)
    resumed.load_state_dict(updater.state_dict())
    for _ in range(4):
        seen.clear()
        again.clear()
        updater.update()
        indices.mark()
        resumed.update()
        assert again == seen
        assert indices.taken() == {"main": again}
    updater.finalize()
    resumed.finalize()


def test_of_a_stream_the_place_is_told():
    """It has no indices."""
    updater = updater_of(loader_of(Stream()), [])
    indices = BatchIndices(updater)
    indices.mark()
    updater.update()
    assert indices.taken() == {"main": {"from": [0, 0], "to": [0, 1]}}


def test_of_a_function_the_number_of_the_batch_is_told():
    """It is called with it; without epochs it is the position as well."""
    batches = iterators.FunctionIterator(lambda index: torch.ones(2, 1), seed=0)
    updater = updater_of(batches, [])
    indices = BatchIndices(updater)
    for number in range(3):
        indices.mark()
        updater.update()
        assert indices.taken() == {"main": {"from": [0, number], "to": [0, number + 1]}}


def test_a_loader_that_another_reads_too_is_not_guessed_at():
    """Which pass is the updater's is not certain then."""
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    updater = updater_of(iterators.LoaderIterator(loader), [])
    indices = BatchIndices(updater)
    list(loader)
    indices.mark()
    updater.update()
    assert indices.taken() == {"main": {"from": [0, 0], "to": [0, 1]}}


def test_an_update_that_failed_would_have_been_given_them():
    """The iterators stand where they stood before it."""

    class PlannedError(Exception):
        pass

    seen = []

    def loss_func(model, x):
        seen.extend(x.reshape(-1).int().tolist())
        raise PlannedError

    chainring.deterministic(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = training.StandardUpdater(ITERATORS["serial"](), optimizer, model, loss_func=loss_func)
    indices = BatchIndices(updater)
    indices.mark()
    with pytest.raises(PlannedError):
        updater.update()
    assert indices.taken(is_undone=True) == {"main": seen}
