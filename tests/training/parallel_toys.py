"""Pairs of a ParallelUpdater and the StandardUpdater that it must equal."""

import torch
from toys import assert_close, observed_update, parameters_of, regression_data

from chainring.iterators import SerialIterator
from chainring.training import ParallelUpdater, StandardUpdater

TWO = {"main": "cpu", "second": "cpu"}


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **settings)


def rows(batch_size=4, **settings):
    return SerialIterator(regression_data(), batch_size, shuffle=False, **settings)


def pair(make, batch_size=5, **settings):
    """A ParallelUpdater of two and a StandardUpdater, with models made from the same random numbers."""
    made = []
    for kind, extra in ((ParallelUpdater, {"devices": TWO}), (StandardUpdater, {})):
        torch.manual_seed(4)
        model = make()
        made.append(kind(rows(batch_size), sgd(model), model, **settings, **extra))
    return made


def assert_same_updates(ours, whole, updates=3):
    for _ in range(updates):
        seed = torch.random.get_rng_state()
        seen = observed_update(ours)
        torch.random.set_rng_state(seed)
        assert_close(seen, observed_update(whole))
        assert_close(parameters_of(ours), parameters_of(whole))
