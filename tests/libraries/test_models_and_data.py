"""Models of peft and data of pandas in a run that is stopped and goes on."""

import logging
import warnings

import pytest
import torch
from torch import nn

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

pytest.importorskip("bitsandbytes", reason="make libraries installs them", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):
    logging.disable(logging.WARNING)
    import pandas
    import peft

    logging.disable(logging.NOTSET)

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, t):
        return (self.second(self.first(x).tanh())[:, 0] - t).square().mean()


def lora():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["first", "second"], r=2, lora_dropout=0.5))
    return model, TupleDataset(x, x.sum(1))


def frame():
    table = pandas.DataFrame({"x": range(12), "t": range(12, 24)}, dtype="float32").sample(frac=1, random_state=1)
    return Net(), TupleDataset(table[["x", "t", "x"]].to_numpy(), table["t"].to_numpy())


@pytest.mark.parametrize("make", [lora, frame])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, make):
    """With LoRA and its dropout, and with columns of a frame."""

    def run(out, epochs):
        torch.manual_seed(5)
        model, data = make()
        optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad])
        trainer = Trainer(StandardUpdater(SerialIterator(data, 4), optimizer, model), (epochs, "epoch"), out=str(out))
        trainer.extend(extensions.snapshot(autoload=True))
        trainer.run()
        return [parameter.detach() for parameter in model.parameters()]

    whole, _ = run(tmp_path / "whole", 2), run(tmp_path / "run", 1)
    assert all(map(torch.equal, whole, run(tmp_path / "run", 2)))
