"""A module with everything that may go wrong on several devices, and the numbers of rows and devices to try."""

import pytest
import torch
from torch import nn

from chainring import report

GRID = pytest.mark.parametrize(("number", "rows"), [(n, r) for n in range(1, 6) for r in range(18)])


def hosts(number):
    return ["cpu"] * number


class Net(nn.Module):
    """Two layers, a buffer, an attribute, a tied weight; takes a mask by keyword and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 4).double()
        self.head = nn.Linear(3, 4).double()
        self.head.weight = self.hidden.weight
        self.register_buffer("scale", torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64))
        self.width = 4

    def forward(self, x, *, mask=None):
        y = torch.tanh(self.hidden(x * self.scale)) * (1 if mask is None else mask)
        report({"size": y.abs().sum(1).mean() if len(x) else 0.0}, self.hidden)
        return {"y": y, "both": (y + self.head(x), None)}

    def twice(self):
        return 2 * self.width


def net():
    torch.manual_seed(3)
    return Net()


def batch(rows):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64), torch.arange(rows * 4.0).reshape(rows, 4) % 3


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
