"""A linear regression in double precision and an updater of it, for extensions that look at a model."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from chainring import report
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater


class Regression(nn.Module):
    """Returns and reports the mean squared error of a linear predictor."""

    def __init__(self):
        super().__init__()
        self.predictor = nn.Linear(3, 1).double()

    def forward(self, x, t):
        loss = (self.predictor(x) - t).square().mean()
        report({"loss": loss}, self)
        return loss


def same_regression():
    """A model with the same parameters at every call."""
    torch.manual_seed(3)
    return Regression()


def regression_data(size=12):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(*(torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (3, 1)))


def updater_of(model=None, batch_size=4, kind=StandardUpdater, **settings):
    model = same_regression() if model is None else model
    iterator = SerialIterator(regression_data(), batch_size, shuffle=False)
    return kind(iterator, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, **settings)
