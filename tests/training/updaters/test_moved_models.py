"""A model that an updater moves is trained by the optimizer that was made before: the order of the README."""

import gc
import weakref

import pytest
import torch
from torch import nn

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.training import StandardUpdater, Trainer, extensions


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


class Recurrent(nn.Module):
    """A layer that has references to its own parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.GRU(6, 6, batch_first=True)

    def forward(self, x):
        return self.body(x[:, None])[0][:, 0]


class Scaled(nn.Linear):
    """Has a parameter of no dimension."""

    def __init__(self):
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def make_updater(device, optimizer=torch.optim.SGD, network=Tied, **keywords):
    torch.manual_seed(0)
    x, t = torch.randn(40, 6), torch.randint(6, (40,))
    model = Classifier(network())
    iterator = SerialIterator(TupleDataset(x, t), 8, seed=1)
    return StandardUpdater(iterator, optimizer(model.parameters(), lr=0.1, **keywords), model, device=device)


def trained(updater, updates=3):
    for _ in range(updates):
        updater.update()
    return [parameter.tolist() for parameter in updater.get_model("main").parameters()]


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_what_an_optimizer_has_for_a_parameter_of_no_dimension_moves_with_it(device, settings):
    """A sum of squares of Adagrad, which is as little as a count of steps."""
    updater = make_updater(device, torch.optim.Adagrad, Scaled, **settings)
    assert trained(updater) == trained(make_updater("cpu", torch.optim.Adagrad, Scaled, **settings))
    state = updater.get_optimizer("main").state[updater.get_model("main").predictor.scale]
    assert state["sum"].device.type == torch.device(device).type


@pytest.fixture
def new_parameters():
    """PyTorch makes new parameters of a module that moves, as it does for every device that is not its own."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_where_a_move_would_make_new_parameters_the_old_ones_are_trained(device, new_parameters):
    """Weights that are shared stay shared."""
    updater = make_updater(device)
    model, optimizer = updater.get_model("main"), updater.get_optimizer("main")
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
    assert model.predictor.first.weight is model.predictor.last.weight
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert trained(updater) == trained(make_updater(device))


def test_a_recurrent_layer_that_moves_computes_with_the_parameters_of_the_optimizer(new_parameters):
    updater = make_updater("cpu", network=Recurrent)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert trained(updater) == trained(make_updater(None, network=Recurrent))


def test_parameters_that_cannot_stay_the_same_objects_are_refused_with_a_remedy(device, new_parameters):
    """Here because something else has a weak reference to one."""
    model = Classifier(nn.Linear(6, 6))
    kept = weakref.ref(model.predictor.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"before its optimizer is made, by model\.to"):
        StandardUpdater(None, optimizer, model, device=device)
    assert kept() is not None


class Unfaithful(nn.Linear):
    """Makes new parameters itself when it moves."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.weight = nn.Parameter(self.weight.detach().clone())
        return self


def test_a_model_that_replaces_its_parameters_when_it_moves_is_refused(device):
    model = Classifier(Unfaithful(6, 6))
    with pytest.raises(ValueError, match="would train the old ones"):
        StandardUpdater(None, torch.optim.SGD(model.parameters(), lr=0.1), model, device=device)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_what_an_optimizer_has_for_its_parameters_moves_with_them(optimizer, device):
    """Adagrad has it from the start, Adam after a step by hand; the run is that of an optimizer made on the device."""
    updates = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = Classifier(nn.Linear(6, 6)).to("cpu" if moves else device)
        made = optimizer(model.parameters(), lr=0.1)
        if optimizer is torch.optim.Adam:
            model.predictor(torch.ones(2, 6, device="cpu" if moves else device)).square().sum().backward()
            made.step()
        data = TupleDataset(torch.randn(40, 6), torch.randint(6, (40,)))
        updates.append(trained(StandardUpdater(SerialIterator(data, 8, seed=1), made, model, device=device)))
        states = [value for state in made.state.values() for value in state.values()]
        assert {value.device.type for value in states if value.ndim} == {torch.device(device).type}
        assert {value.device.type for value in states if not value.ndim} == {"cpu"}  # counts, which the optimizer reads
    assert updates[0] == updates[1]


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=str)
def test_a_deleted_updater_is_gone_without_the_collector(settings, device):
    """And so is the memory of its model on the device."""
    make_updater(device).update()  # what PyTorch does once may leave cycles
    gc.collect()
    gc.disable()
    try:
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        data = TupleDataset(torch.randn(40, 6), torch.randint(6, (40,)))
        optimizer = torch.optim.Adam(model.parameters())
        updater = StandardUpdater(SerialIterator(data, 8), optimizer, Classifier(model), device=device, **settings)
        updater.update()
        gone = weakref.ref(updater), weakref.ref(model)
        del updater, optimizer, model
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_deleted_trainer_is_gone_without_the_collector(tmp_path, device):
    gc.collect()
    gc.disable()
    try:
        updater = make_updater(device)
        trainer = Trainer(updater, (2, "iteration"), out=str(tmp_path))
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
        trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
        trainer.run()
        gone = weakref.ref(trainer), weakref.ref(updater.get_model("main"))
        del trainer, updater
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_move_draws_no_random_number(device):
    torch.manual_seed(4)
    before = torch.get_rng_state()
    model = Classifier(Tied())
    torch.set_rng_state(before)
    StandardUpdater(None, torch.optim.SGD(model.parameters(), lr=0.1), model, device=device)
    assert torch.equal(torch.get_rng_state(), before)
