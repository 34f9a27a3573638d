"""The same training by a loop of one's own and by Chainring, for the tests of checkpoints of other libraries."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring import training
from chainring.training import extensions


class Net(nn.Module):
    """Two layers with BatchNorm between them; its forward is that of other libraries, without a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def mean_squared_error(model, x, t):
    return nn.functional.mse_loss(model(x), t)


def data():
    """Ten batches of four."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 4, generator=generator), torch.randn(40, 2, generator=generator))


def loader():
    return DataLoader(data(), 4)


def make(seed=0, optimizer=torch.optim.Adam, gamma=0.5):
    """A model, its optimizer and its scheduler."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = optimizer(model.parameters(), 1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)


def train(model, optimizer, scheduler, batches):
    """A loop of one's own, from the beginning of an epoch; the scheduler steps at the end of each of ten batches."""
    for index in range(batches):
        x, t = data()[4 * (index % 10) : 4 * (index % 10) + 4]
        optimizer.zero_grad()
        mean_squared_error(model, x, t).backward()
        optimizer.step()
        if index % 10 == 9:
            scheduler.step()


def trainer_of(model, optimizer, scheduler, out, stop=(4, "epoch"), scheduler_trigger=(1, "epoch")):
    updater = training.StandardUpdater(loader(), optimizer, model, loss_func=mean_squared_error)
    trainer = training.Trainer(updater, stop, out=out)
    trainer.extend(extensions.LRScheduler(scheduler), trigger=scheduler_trigger)
    return trainer


def moments(optimizer):
    """Its state by the position of the parameter."""
    return optimizer.state_dict()["state"]


def assert_same(one, other):
    """Equal to the bit, also in dtype and in nested containers."""
    assert type(one) is type(other) or {type(one), type(other)} <= {dict, *type(one).__mro__, *type(other).__mro__}
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_close(one, other):
    """Parameters and buffers to float tolerance."""
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name])
