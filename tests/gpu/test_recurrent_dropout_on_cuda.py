"""Dropout between recurrent layers, for which cuDNN draws from a state of its own."""

import pytest
import torch
from torch import nn

from chainring import iterators, training
from chainring.nn import Classifier
from chainring.training.extensions import snapshot

DATA = [(row, label % 3) for label, row in enumerate(torch.randn(32, 7, 5, generator=torch.Generator().manual_seed(3)))]


class Recurrent(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.layers, self.last = nn.RNN(5, 8, batch_first=True, **settings), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.layers(x)[0][:, -1])


def trainer_of(out, stop=8, virtual_ranks=None, **settings):
    torch.manual_seed(0)
    model = Classifier(Recurrent(**settings))
    optimizer, source = torch.optim.Adam(model.parameters(), 0.01), iterators.SerialIterator(DATA, 8, seed=1)
    updater = training.StandardUpdater(source, optimizer, model, device="cuda", virtual_ranks=virtual_ranks)
    trainer = training.Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(snapshot(autoload=True), trigger=(4, "iteration"))
    return trainer


@pytest.fixture
def cudnn(monkeypatch):
    """As on an NVIDIA GPU, whose PyTorch has it; the words are the same on the stand-in."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


def test_a_run_says_that_it_does_not_go_on_with_the_same_numbers(tmp_path, cudnn):
    """By the path of the layer; the remedy is in the same line."""
    trainer = trainer_of(tmp_path, num_layers=2, dropout=0.5)
    with pytest.warns(UserWarning, match=r"main/predictor/layers is RNN\(dropout=0\.5\).*torch\.backends\.cudnn\.enabled"):
        trainer.rehearse()


def test_virtual_ranks_refuse_it_when_the_updater_is_made(tmp_path, cudnn):
    with pytest.raises(ValueError, match="all virtual ranks would share"):
        trainer_of(tmp_path, virtual_ranks=2, num_layers=2, dropout=0.5)


@pytest.mark.parametrize("settings", [{"num_layers": 2}, {"num_layers": 1}])
def test_layers_without_dropout_between_them_are_no_such_case(tmp_path, cudnn, settings):
    """Warnings are errors here."""
    trainer_of(tmp_path, virtual_ranks=2, **settings).rehearse()


@pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="it is about the numbers, not the words")
def test_without_cudnn_a_resumed_run_has_the_same_bits(tmp_path):
    """Which is the remedy."""
    ends = []
    with torch.backends.cudnn.flags(enabled=False, deterministic=True):
        for stops in ((8,), (4, 8)):
            for stop in stops:
                trainer = trainer_of(tmp_path / str(len(stops)), stop, num_layers=2, dropout=0.5)
                trainer.run()
            ends.append([parameter.cpu() for parameter in trainer.updater.get_model("main").parameters()])
    assert all(map(torch.equal, *ends))
