"""``compile=True`` on an NVIDIA accelerator, where the update is captured as a graph."""

import importlib.util

import pytest
import torch
from torch import nn

from chainring import iterators, training
from chainring.nn import Classifier
from chainring.training.extensions import LogReport

DATA = [(row, label % 4) for label, row in enumerate(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="graphs are made of what Triton compiles")
def test_losses_and_parameters_are_those_of_the_plain_update(tmp_path):
    """Reports outlive the next replay of the graph, which writes over its results."""
    ends = []
    for compiles in (False, True):
        torch.manual_seed(1)
        model = Classifier(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        model.to("cuda")
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        updater = training.StandardUpdater(
            iterators.SerialIterator(DATA, 8, seed=1), optimizer, model, device="cuda", compile=compiles
        )
        trainer = training.Trainer(updater, (16, "iteration"), out=str(tmp_path / str(compiles)))
        trainer.extend(LogReport(trigger=(4, "iteration")))
        trainer.run()
        rows = [row["main/loss"] for row in trainer.get_extension("LogReport").log]
        ends.append((rows, [parameter.detach().cpu() for parameter in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)
