"""SystemMetrics on an NVIDIA accelerator."""

import torch
from torch import nn

from chainring import iterators, training
from chainring.nn import Classifier
from chainring.training import extensions

DATA = [(row, label % 4) for label, row in enumerate(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))]


def test_the_accelerator_is_in_the_log(tmp_path):
    """The memory that the process has allocated there, and how busy it was."""
    model = Classifier(nn.Linear(8, 4)).to("cuda")
    held = torch.zeros(2**20, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updater = training.StandardUpdater(iterators.SerialIterator(DATA, 8, seed=1), optimizer, model, device="cuda")
    trainer = training.Trainer(updater, (4, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.SystemMetrics((2, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    trainer.run()
    (row,) = trainer.get_extension("LogReport").log
    assert row["system/accelerator_memory_mib"] > held.nbytes / 2**20
    assert 0 <= row["system/accelerator_percent"] <= 100
