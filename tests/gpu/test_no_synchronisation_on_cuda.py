"""On an accelerator nothing in an iteration waits for the device."""

import io

import pytest
import torch
from torch import nn

from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training.extensions import LogReport, ProgressBar, snapshot


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_hundred_iterations_do_not_synchronise(tmp_path):
    """Torch raises where something would; the ends of epochs, where rows are written, are left out."""
    draw = torch.Generator().manual_seed(0)
    data = datasets.TupleDataset(torch.randn(800, 8, generator=draw).numpy(), torch.zeros(800, dtype=torch.int64).numpy())
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    source = iterators.SerialIterator(data, 8)
    updater = training.StandardUpdater(source, optimizer, model, device="cuda")
    trainer = training.Trainer(updater, (300, "iteration"), str(tmp_path))
    for extension in (LogReport(), ProgressBar(out=io.StringIO()), snapshot()):
        trainer.extend(extension, trigger=(1, "epoch"))

    def watch(trainer):
        within = 10 < trainer.updater.iteration % 100 < 90
        torch.cuda.set_sync_debug_mode("error" if within else "default")

    trainer.extend(watch, trigger=(1, "iteration"), priority=-1000)
    try:
        trainer.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.updater.iteration == 300
