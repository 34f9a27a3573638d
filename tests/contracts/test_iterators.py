"""Every public iterator keeps to what `check_iterator` asks."""

import inspect
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from chainring import iterators
from chainring.datasets import TupleDataset
from chainring.iterators import DevicePrefetcher, LoaderIterator, MultiprocessIterator, SerialIterator
from chainring.testing import check_iterator

ARRAYS = TupleDataset(np.arange(10), torch.arange(10) * 0.5)


class Drawn(Dataset):
    """Ten examples that draw from all three global generators."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i, random.random() + float(np.random.rand()) + float(torch.rand(()))


class Stateful:
    """Three batches a pass, and a state: how many have been given."""

    at = 0

    def __iter__(self):
        while self.at < 3:
            self.at += 1
            yield torch.arange(4) + 10 * self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


ITERATORS = {
    "SerialIterator": lambda: SerialIterator(ARRAYS, 4),
    "SerialIterator in order": lambda: SerialIterator(ARRAYS, 4, shuffle=False),
    "SerialIterator over a list": lambda: SerialIterator(list(range(10)), 5, seed=3),
    "SerialIterator over examples that draw": lambda: SerialIterator(Drawn(), 4),
    "SerialIterator once": lambda: SerialIterator(Drawn(), 4, repeat=False),
    "SerialIterator with an order sampler": lambda: SerialIterator(
        ARRAYS, 4, order_sampler=iterators.WeightedOrderSampler(np.arange(1.0, 11.0))
    ),
    "MultiprocessIterator": lambda: MultiprocessIterator(Drawn(), 4, n_processes=2),
    "MultiprocessIterator once": lambda: MultiprocessIterator(Drawn(), 4, repeat=False, n_processes=1),
    "LoaderIterator": lambda: LoaderIterator(DataLoader(Drawn(), 4, shuffle=True)),
    "LoaderIterator over a list": lambda: LoaderIterator([torch.arange(4), torch.arange(4) + 4]),
    "LoaderIterator with epoch_length": lambda: LoaderIterator([torch.arange(4) + k for k in range(3)], epoch_length=2),
    "LoaderIterator over a loader with state": lambda: LoaderIterator(Stateful()),
    "DevicePrefetcher": lambda: DevicePrefetcher(SerialIterator(ARRAYS, 4), "cpu"),
}


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
@pytest.mark.parametrize("name", ITERATORS)
def test_it_is_resumed_anywhere_and_counts_epochs(name):
    """Over two epochs, or one."""
    check_iterator(ITERATORS[name])


def test_every_public_iterator_is_tried():
    """None is left out."""
    classes = {name: getattr(iterators, name) for name in iterators.__all__ if inspect.isclass(getattr(iterators, name))}
    public = {name for name, kind in classes.items() if issubclass(kind, iterators.Iterator)} - {"Iterator"}
    assert public == {name.partition(" ")[0] for name in ITERATORS}
