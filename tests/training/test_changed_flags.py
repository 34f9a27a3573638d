"""What a run freezes, unfreezes or puts into evaluation mode is restored on resume; what the script sets otherwise holds."""

import pytest
import torch
from torch import nn

from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.training import extensions


class Net(nn.Module):
    """A body that a script may freeze, with dropout and running statistics, and a head."""

    def __init__(self, frozen=True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.body.requires_grad_(not frozen)

    def forward(self, x):
        return self.head(self.body(x)).square().mean()


def unfreeze(model):
    """An extension that unfreezes the body in the second iteration, and lets its statistics be."""

    def act(trainer):
        if trainer.updater.iteration == 2:
            model.body.requires_grad_(True)
            model.body[1].eval()

    return training.make_extension()(act)


def trainer_of(out, stop, frozen=True, prepare=None, make=unfreeze, lr=0.01):
    torch.manual_seed(0)
    model = Net(frozen)
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    trainer = training.Trainer(training.StandardUpdater(SerialIterator(data, 4, seed=1), optimizer, model), stop, str(out))
    trainer.extend(make(model))
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    if prepare is not None:
        prepare(model)
    return trainer, model


def flags(model):
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained, {name for name, module in model.named_modules() if module.training}


def same(one, other):
    state, other_state = one.state_dict(), other.state_dict()
    return all(torch.equal(value, other_state[key]) for key, value in state.items())


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("prepare", [None, lambda model: model.head.eval()], ids=["", "set after the trainer was made"])
def test_a_run_that_unfreezes_and_evaluates_continues_bit_for_bit(tmp_path, at, prepare, capsys):
    """Before, at and after the change, which is not a setting and not printed."""
    whole, model = trainer_of(tmp_path / "whole", (6, "iteration"), prepare=prepare)
    whole.run()
    resumed, own = trainer_of(tmp_path / "resumed", (6, "iteration"), prepare=prepare)
    serializers.load(tmp_path / f"whole/snapshot_iter_{at}", resumed)
    resumed.run()
    assert same(model, own)
    assert flags(model) == flags(own)
    assert "body.0.weight" in flags(own)[0]
    assert "body.1" not in flags(own)[1]
    assert "resumed with" not in capsys.readouterr().out


def test_flags_that_the_run_did_not_change_are_as_the_script_now_sets_them(tmp_path):
    """Before or after the trainer is made, before or after the state is loaded; what the run has changed is restored."""
    trainer_of(tmp_path, (2, "iteration"))[0].run()
    trainer, model = trainer_of(tmp_path, (3, "iteration"), prepare=lambda model: model.head.bias.requires_grad_(False))
    model.body[2].eval()
    serializers.load(tmp_path / "snapshot_iter_2", trainer)
    model.head.eval()
    trainer.run()
    changed = {"head.weight", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"}, {"", "body", "body.0"}
    assert flags(model) == changed
    again, other = trainer_of(tmp_path, (3, "iteration"))
    serializers.load(tmp_path / "snapshot_iter_3", again)
    assert flags(other) == (changed[0] | {"head.bias"}, changed[1] | {"body.2", "head"})  # settings, which are not state


def test_an_earlier_snapshot_without_flags_leaves_them_alone(tmp_path):
    """As the script has set them."""
    trainer, model = trainer_of(tmp_path, (2, "iteration"))
    trainer.run()
    state = {key: value for key, value in trainer.state_dict().items() if "changed_flags" not in key}
    assert len(state) < len(trainer.state_dict())
    again, model = trainer_of(tmp_path, (2, "iteration"), prepare=lambda model: model.body[2].eval())
    before = flags(model)
    again.load_state_dict(state)
    assert flags(model) == before


def test_a_rollback_puts_flags_back(tmp_path):
    """To what they were at the snapshot, though the run has changed them since."""
    trainer, model = trainer_of(tmp_path, (4, "iteration"))
    seen = []

    def roll_back(trainer):
        if len(seen) == 2:
            raise training.RollBack("again")

    trainer.extend(lambda trainer: seen.append((trainer.updater.iteration, flags(model))), name="see", priority=1000)
    trainer.extend(roll_back)
    trainer.run()
    assert [iteration for iteration, _ in seen] == [1, 2, 2, 3, 4]
    assert seen[0][1] == seen[1][1] == seen[2][1] != seen[3][1]


def test_a_rehearsal_puts_flags_back(tmp_path):
    """As they were before, whoever has set them."""
    trainer, model = trainer_of(tmp_path, (3, "iteration"), prepare=lambda model: model.head.eval())
    before = flags(model)

    def spoil(trainer):
        model.requires_grad_(True)
        model.train()

    trainer.extend(spoil)
    trainer.rehearse()
    assert flags(model) == before
