"""The Recorder on an accelerator: the digests are those of the host, and nothing is read in between."""

import pytest
import torch
from torch import nn

from chainring import datasets, iterators, training
from chainring._distributed.digests import sum_whole
from chainring.nn import Classifier
from chainring.training._ledger import Ledger
from chainring.training.extensions import Recorder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_a_tensor_has_the_same_digest_on_the_accelerator(dtype):
    """Of less than a row of numbers, of some rows, of more than are multiplied at once."""
    for shape in ((), (3, 5), (100, 333), (3, 700_001)):
        tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
        assert int(sum_whole(tensor.to("cuda"))) == int(sum_whole(tensor))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_device_is_waited_for_once_in_32_iterations(tmp_path):
    """Torch raises where anything else would; digests of parameters are taken in between."""
    draw = torch.Generator().manual_seed(0)
    data = datasets.TupleDataset(torch.randn(800, 8, generator=draw).numpy(), torch.zeros(800, dtype=torch.int64).numpy())
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    source = iterators.SerialIterator(data, 8)
    updater = training.StandardUpdater(source, optimizer, model, device="cuda")
    trainer = training.Trainer(updater, (200, "iteration"), str(tmp_path))
    trainer.extend(Recorder((5, "iteration")))

    def watch(trainer):
        # What comes next is watched, but for the iterations after 32, 64, ..., and those in which memory is allocated.
        is_silent = 40 < trainer.updater.iteration < 200 and trainer.updater.iteration % 32 not in (31, 0)
        torch.cuda.set_sync_debug_mode("error" if is_silent else "default")

    trainer.extend(watch, trigger=(1, "iteration"), priority=-1000)
    try:
        trainer.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ledger = Ledger.read(tmp_path / "recorder.bin")
    assert len(ledger.iterations) == 200
    assert list(ledger.digests) == list(range(0, 201, 5))
    assert len({str(digests) for digests in ledger.digests.values()}) == 41  # they had arrived
