"""A model, data and an optimizer whose stages take as long as one says: ``milliseconds`` by stage, which may change."""

import time

import torch
from torch import nn

from chainring.datasets import TupleDataset


def spin(milliseconds):
    """Keeps a core busy."""
    until = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < until:
        pass


def rest(milliseconds):
    """Leaves the core to others, for numbers that must not depend on them."""
    time.sleep(milliseconds / 1000)


class Data(TupleDataset):
    """Each example takes a quarter of the time."""

    def __init__(self, milliseconds, *arrays, spend=spin):
        super().__init__(*arrays)
        self.milliseconds, self.spend = milliseconds, spend

    def __getitem__(self, index):
        self.spend(self.milliseconds["data"] / 4)
        return super().__getitem__(index)


class Backward(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx, x, spend, milliseconds):
        ctx.spend, ctx.milliseconds = spend, milliseconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.spend(ctx.milliseconds["backward"])
        return gradient, None, None


class Model(nn.Module):
    """A layer."""

    def __init__(self, milliseconds, spend=spin):
        super().__init__()
        self.layer, self.milliseconds, self.spend = nn.Linear(3, 1), milliseconds, spend

    def forward(self, x):
        self.spend(self.milliseconds["forward"])
        return Backward.apply(self.layer(x).square().mean(), self.spend, self.milliseconds)


class Steps(torch.optim.SGD):
    """Plain steps."""

    def __init__(self, parameters, milliseconds, spend=spin):
        super().__init__(parameters, 0.01)
        self.milliseconds, self.spend = milliseconds, spend

    def step(self, closure=None):
        self.spend(self.milliseconds["step"])
        return super().step(closure)
