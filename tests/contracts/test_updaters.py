"""Every public updater keeps to what `check_updater` asks."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training_parts import data, model, updater

from chainring import iterators, training
from chainring.testing import FakeUpdater, check_updater
from chainring.training import UpdateCallbacks, updaters


class Adversarial(training.StandardUpdater):
    """Two models and two optimizers, stepped in turn."""

    def update_core(self):
        x, _ = self.next_batch()
        for name, sign in (("main", 1), ("other", -1)):
            with self.autocast():
                loss = sign * self.get_model("other")(self.get_model("main")(x)).mean()
            self.backward(loss)
            self.step(name)


def adversarial(**settings):
    models = {"main": nn.Linear(3, 3), "other": nn.Linear(3, 1)}
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in models.items()}
    return Adversarial(iterators.SerialIterator(data(), 4), optimizers, models, **settings)


def over_a_loader():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return training.StandardUpdater(DataLoader(data(), 5, shuffle=True), optimizer, net)


def clipped():
    return updater(callbacks=UpdateCallbacks(update_on_start=training.clip_grad_norm(0.5)))


UPDATERS = {
    "StandardUpdater": updater,
    "StandardUpdater that accumulates": lambda: updater(batch_size=2, accumulate=3),
    "StandardUpdater in bfloat16": lambda: updater(precision="bf16"),
    "StandardUpdater that clips": clipped,
    "StandardUpdater over a DataLoader": over_a_loader,
    "StandardUpdater with an update_core": adversarial,
    "StandardUpdater with an update_core that accumulates": lambda: adversarial(accumulate=2),
    "ParallelUpdater": lambda: updater(training.ParallelUpdater, devices={"main": "cpu", "other": "cpu"}),
    "FakeUpdater": lambda: FakeUpdater(2.5, {"main/loss": [3, 2, 1]}),
}


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
@pytest.mark.parametrize("name", UPDATERS)
def test_it_counts_and_is_resumed(name):
    """After every iteration."""
    check_updater(UPDATERS[name])


def test_every_public_updater_is_tried():
    """None is left out."""
    classes = {name: kind for name, kind in vars(updaters).items() if inspect.isclass(kind)}
    public = {name for name, kind in classes.items() if issubclass(kind, updaters.Updater)} - {"Updater"}
    assert public == {name.partition(" ")[0] for name in UPDATERS} - {"FakeUpdater"}
