"""Every iterator over every source, as functions that make it anew; another ``size`` is that of another dataset."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from chainring.datasets import TransformDataset, TupleDataset
from chainring.iterators import (
    FunctionIterator,
    LoaderIterator,
    MixtureIterator,
    MultiprocessIterator,
    PackingIterator,
    SerialIterator,
)

SIZE, BATCH = 10, 4


def arrays(size=SIZE):
    return TupleDataset(np.arange(size), torch.arange(size) * 0.5)


class Drawn(Dataset):
    """A user's dataset, whose examples draw from all three generators."""

    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return i, random.random() + float(np.random.rand()) + float(torch.rand(()))


class Counting:
    """A loader with a state of its own, the number of its next batch, from which a pass goes on after loading."""

    def __init__(self, length=3):
        self.length, self.at, self.is_loaded, self.fetched = length, 0, False, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.at, self.is_loaded = self.at if self.is_loaded else 0, False
        return self.rest()

    def rest(self):
        while self.at < self.length:
            self.at += 1
            self.fetched += 1
            yield torch.arange(4) + 10 * self.at, torch.rand(4)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.is_loaded = state["at"], True


class Streaming:
    """The same without a length."""

    def __init__(self):
        self.source = Counting()

    def __iter__(self):
        return iter(self.source)

    def state_dict(self):
        return self.source.state_dict()

    def load_state_dict(self, state):
        self.source.load_state_dict(state)


def batches(length=3):
    return [(torch.arange(4) + 10 * k, np.ones(4) * k) for k in range(length)]


def passes(length=3):
    def begin():
        return ((torch.arange(4) + 10 * k, torch.rand(4) + random.random()) for k in range(length))

    return begin


def sampled(seed, epoch, size):
    return [*np.random.default_rng((seed, epoch)).permutation(size), 0, 1]


def loader(size=SIZE, workers=0):
    return DataLoader(Drawn(size), BATCH, shuffle=True, num_workers=workers)


def drawing_batch(index):
    return torch.arange(BATCH) + 10 * index, torch.rand(BATCH) + random.random() + np.random.rand()


SERIAL = {
    "arrays": lambda size=SIZE: SerialIterator(arrays(size), BATCH),
    "arrays in order": lambda size=SIZE: SerialIterator(arrays(size), BATCH, shuffle=False),
    "a user's dataset": lambda size=SIZE: SerialIterator(Drawn(size), BATCH),
    "a user's dataset in order": lambda size=SIZE: SerialIterator(Drawn(size), BATCH, shuffle=False),
    "a list": lambda size=SIZE: SerialIterator([(i, i * 0.5) for i in range(size)], BATCH),
    "an order sampler": lambda size=SIZE: SerialIterator(
        TransformDataset(arrays(size), lambda example: example), BATCH, order_sampler=sampled
    ),
}
WORKERS = {
    "two workers": lambda size=SIZE: MultiprocessIterator(Drawn(size), BATCH, n_processes=2),
    "one worker, in order": lambda size=SIZE: MultiprocessIterator(
        Drawn(size), BATCH, shuffle=False, n_processes=1, n_prefetch=0
    ),
}
LOADER = {
    "DataLoader": lambda size=SIZE: LoaderIterator(loader(size)),
    "DataLoader with a generator": lambda size=SIZE: LoaderIterator(
        DataLoader(Drawn(size), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    ),
    "a list of batches": lambda size=SIZE: LoaderIterator(batches((size + 2) // 4)),
    "a function": lambda size=SIZE: LoaderIterator(passes()),
    "a function with epoch_length": lambda size=SIZE: LoaderIterator(passes(), epoch_length=2 if size == SIZE else 5),
    "a loader with state_dict": lambda size=SIZE: LoaderIterator(Counting()),
    "a loader with state_dict and no length": lambda size=SIZE: LoaderIterator(Streaming()),
}


def mixed(source, weights=None, **settings):
    """A mixture in which the sizes of the sources are 4 and the rest."""

    def make(size=SIZE):
        sources = {"small": source(4), "large": source(size - 4)}
        return MixtureIterator(sources, BATCH, weights=weights or {"small": 3, "large": 2}, **settings)

    return make


def ramp(count):
    return {"small": 1 + count / 7, "large": 2}


MIXTURE = {
    "a mixture of arrays": mixed(arrays),
    "a mixture in order": mixed(arrays, shuffle=False),
    "a mixture of a user's datasets": mixed(Drawn),
    "a mixture whose weights change": mixed(Drawn, ramp),
    "a mixture in two workers": mixed(Drawn, ramp, n_processes=2),
}


def documents(size=SIZE):
    """Of 1 to 6 tokens."""
    return [np.arange(1 + 7 * i % 6) + 10 * i for i in range(size)]


def packed(source=documents, length=6, **settings):
    return lambda size=SIZE: PackingIterator(source(size), length, BATCH, **settings)


PACKED = {
    "packed documents": packed(separator=7),
    "packed documents in order": packed(shuffle=False),
    "packed whole documents": packed(split=False),
    "packed documents of a mixture": packed(mixed(documents)),
    "packed whole documents of a mixture whose weights change": packed(mixed(documents, ramp), split=False),
}
FUNCTION = {"a function of the index": lambda size=SIZE: FunctionIterator(drawing_batch, 3)}
ONCE = {
    "a user's dataset once": lambda size=SIZE: SerialIterator(Drawn(size), BATCH, repeat=False),
    "a worker once": lambda size=SIZE: MultiprocessIterator(Drawn(size), BATCH, repeat=False, n_processes=1),
    "DataLoader once": lambda size=SIZE: LoaderIterator(loader(size), repeat=False),
    "packed documents once": packed(length=3, repeat=False),
    "a mixture once": mixed(Drawn, repeat=False, drop_finished=True),
}
ALL = SERIAL | WORKERS | LOADER | MIXTURE | PACKED | FUNCTION
KINDS = [
    "arrays",
    "a user's dataset",
    "an order sampler",
    "two workers",
    "DataLoader",
    "a function",
    "a loader with state_dict and no length",
    "a mixture whose weights change",
    "a mixture in two workers",
    "a mixture once",
    "a function of the index",
    "a user's dataset once",
    "DataLoader once",
]
"""One source of each kind, for rules that take time."""
STATELESS = [name for name in ALL if not name.startswith("a loader with state_dict")]
