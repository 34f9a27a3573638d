"""Small models and data in double precision, so that two ways to one number agree to the last digits."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from chainring import Reporter, report
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater


class Regression(nn.Module):
    """Returns and reports the mean squared error of a linear predictor."""

    def __init__(self, inputs=3):
        super().__init__()
        self.predictor = nn.Linear(inputs, 1).double()

    def forward(self, x, t):
        loss = (self.predictor(x) - t).square().mean()
        report({"loss": loss}, self)
        return loss


class Valley(nn.Module):
    """A point, and as its loss a height that is measured with noise."""

    def __init__(self):
        super().__init__()
        self.point = nn.Parameter(torch.tensor([3.0, -2.0]))

    def forward(self):
        return (self.point * torch.tensor([1.0, 4.0])).square().sum() + 0.1 * torch.randn(()) * self.point.sum()


def regression_data(size=12):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(*(torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (3, 1)))


def same_regression():
    """A model with the same parameters at every call."""
    torch.manual_seed(3)
    return Regression()


class ByClosure(StandardUpdater):
    """Gives the optimizer a closure, by which it computes its gradients."""

    def update_core(self):
        x, t = self.next_batch()

        def closure():
            loss = self.get_model("main")(x, t)
            self.backward(loss)
            return loss

        self.step(closure=closure)


def updater_of(batch_size=4, *, data=None, model=None, kind=StandardUpdater, lr=0.1, repeat=True, **settings):
    model = same_regression() if model is None else model
    iterator = SerialIterator(regression_data() if data is None else data, batch_size, repeat=repeat, shuffle=False)
    return kind(iterator, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), model, **settings)


def observed_update(updater):
    """One update inside a reporter that knows the main model; what was reported."""
    reporter, observation = Reporter(), {}
    reporter.add_observers("main", updater.get_model("main").named_modules())
    with reporter.scope(observation):
        updater.update()
    return observation


def parameters_of(updater, name="main"):
    return [parameter.detach().clone() for parameter in updater.get_model(name).parameters()]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
