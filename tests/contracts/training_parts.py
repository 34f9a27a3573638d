"""A small training: a model that classifies, its data, and updaters of them."""

import torch
from torch import nn

from chainring import iterators, training
from chainring.datasets import TupleDataset
from chainring.nn import Classifier


def data(size=10):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 3, generator=generator)
    return TupleDataset(x, (x.sum(1) > 0).long())


def model():
    return Classifier(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2)))


def updater(kind=training.StandardUpdater, batch_size=4, **settings):
    net = model()
    return kind(iterators.SerialIterator(data(), batch_size), torch.optim.Adam(net.parameters(), 0.01), net, **settings)
