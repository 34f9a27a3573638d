"""Updaters of which an epoch ends with a short update, on one rank or two, for test_accumulate_epochs.py."""

import torch
from closure_ranks import REPLICATED
from torch.utils.data import DataLoader
from toys import parameters_of, regression_data, same_regression

from chainring.iterators import LoaderIterator, SerialIterator
from chainring.training import StandardUpdater


def updater_over(
    size, batch_size, accumulate, *, kind=StandardUpdater, wrapping="plain", shuffle=False, comm=None, **settings
):
    """Over a loader, whose epochs end with a short batch if need be, or in an order of its own for each epoch."""
    model = REPLICATED[wrapping](same_regression())
    data = regression_data(size)
    iterator = SerialIterator(data, batch_size) if shuffle else LoaderIterator(DataLoader(data, batch_size))
    if comm is not None:
        iterator.share(comm.rank, comm.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"accumulate_across_epochs": False, **settings}
    return kind(iterator, optimizer, model, accumulate=accumulate, comm=comm, **settings)


def train_on_rank(comm, wrapping):
    """Two epochs of 11 rows in batches of 2; the parameters, the number of updates, the epochs."""
    updater = updater_over(11, 2, 2, wrapping=wrapping, comm=comm)
    updater.start()
    while updater.epoch < 2:
        updater.update()
    return [parameter.tolist() for parameter in parameters_of(updater)], updater.iteration, updater.epoch_detail
