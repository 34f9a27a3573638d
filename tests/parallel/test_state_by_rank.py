"""State of the script that differs by rank is saved for each rank, and given back where there are as many."""

import numpy as np
import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks

STOP, CUT = 5, 3


class Counting(nn.Module):
    """Counts its rank's examples in a serialize of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 1), 0

    def forward(self, x):
        self.seen += int(x.sum())
        return self.layer(x).square().mean()

    def serialize(self, serializer):
        self.seen = serializer("seen", self.seen)


class Noise:
    """An extension that draws from its rank's generator; a key of it is of one rank alone, one is the same on all."""

    def __init__(self, rank):
        self.rank, self.generator, self.drawn, self.calls = rank, np.random.default_rng(rank), [], 0

    def __call__(self, trainer):
        self.drawn.append(float(self.generator.normal()))
        self.calls += 1

    def serialize(self, serializer):
        self.drawn = list(serializer("drawn", self.drawn))
        self.calls = serializer("calls", self.calls)
        if self.rank == 1:
            self.generator.bit_generator.state = serializer("generator", self.generator.bit_generator.state)
        else:
            self.generator.bit_generator.state = serializer("of rank 0", self.generator.bit_generator.state)


class Bank:
    """Large tensors of the rank's examples, with PyTorch's pair."""

    def __init__(self):
        self.rows = torch.zeros(5000)

    def __call__(self, trainer):
        self.rows[trainer.updater.iteration] = float(trainer.observation["main/loss"]) + trainer.comm.rank

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows.copy_(state["rows"])


class Halting:
    """A trigger that fires by what its rank has seen."""

    def __init__(self, rank):
        self.calls = rank

    def __call__(self, trainer):
        self.calls += 1
        return self.calls % 3 == 0

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


class Centre(nn.Module):
    """A loss that keeps a mean of its rank's outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def forward(self, model, x):
        loss = model(x)
        self.centre = self.centre * 0.5 + loss.detach()
        return loss


def after(comm, out, stop):
    """What each rank holds after a run, or after one that continues it."""
    torch.manual_seed(0)
    model, noise, bank, trigger, centre = Counting(), Noise(comm.rank), Bank(), Halting(comm.rank), Centre()
    fired = []
    iterator = SerialIterator([torch.tensor([float(i), 1.0]) for i in range(8)], 4, seed=0)
    loss = lambda model, x: centre(model, x)  # noqa: E731
    updater = StandardUpdater(iterator, torch.optim.SGD(model.parameters(), 1e-3), model, loss_func=loss, comm=comm)
    trainer = Trainer(updater, (stop, "iteration"), out=out)
    trainer.extend(noise, name="noise")
    trainer.extend(bank, name="bank")
    trainer.extend(lambda trainer: fired.append(trainer.updater.iteration), name="fired", trigger=trigger)
    trainer.extend(extensions.snapshot(autoload=True), trigger=(100, "iteration"))
    trainer.run()
    return {
        "a module": model.seen, "an extension": noise.drawn, "calls": noise.calls, "a trigger": trigger.calls,
        "large tensors": bank.rows[:STOP].tolist(), "a loss": centre.centre.tolist(),
        "parameters": [parameter.tolist() for parameter in model.parameters()],
    }  # fmt: skip


def whole_and_resumed(comm, out):
    whole = after(comm, f"{out}/whole", STOP)
    after(comm, f"{out}/cut", CUT)
    return whole, after(comm, f"{out}/cut", STOP)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    ranks = on_ranks(2, whole_and_resumed, str(out))
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    return ranks, out


@pytest.mark.parametrize("form", ["a module", "an extension", "a trigger", "large tensors", "a loss"])
def test_each_rank_gets_back_what_it_had(two_ranks, form):
    """Equal to that of the run that was not cut, and different on the two ranks."""
    (first, second), _ = two_ranks
    for whole, resumed in (first, second):
        assert resumed[form] == whole[form]
        assert resumed["parameters"] == whole["parameters"]
    assert first[0][form] != second[0][form]


def test_another_number_of_ranks_is_told_which_state_was_another_on_each(two_ranks, capsys):
    """All continue with that of rank 0; what was the same on all ranks is not named."""
    from chainring.parallel import Communicator

    after(Communicator(), str(two_ranks[1] / "cut"), STOP + 1)
    shown = capsys.readouterr().out
    assert "all continue with the state of rank 0 where ranks had their own" in shown
    for path in ("extensions/noise/drawn", "updater/model:main/seen", "extension_triggers/fired/calls"):
        assert path in shown
    assert "extensions/noise/calls" not in shown
