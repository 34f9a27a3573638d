"""What a ParallelUpdater is made from, and what it refuses."""

import pytest
import torch
from parallel_toys import TWO, rows, sgd
from torch import nn
from toys import Regression, same_regression, updater_of

from chainring.training import ParallelUpdater

MODEL = same_regression()


@pytest.mark.parametrize("devices", [{"main": None, "b": None}, {"main": -1, "b": "cpu"}, {"main": torch.device("cpu")}])
def test_devices_are_spelled_as_elsewhere(devices):
    """None, a negative number, a string, a torch.device."""
    seen = []

    def convert(batch, device):
        seen.append(device)
        return batch.columns

    updater_of(4, kind=ParallelUpdater, devices=devices, converter=convert).update()
    assert seen == [None if device is None else torch.device("cpu") for device in devices.values()]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({}, ValueError, "needs replicas: devices="),
        ({"model": MODEL}, ValueError, "needs replicas: devices="),
        ({"model": MODEL, "devices": {"second": "cpu"}}, KeyError, r"devices must contain 'main'.*\['second'\]"),
        ({"models": {"second": MODEL}}, KeyError, r"models must contain 'main'.*\['second'\]"),
        ({"model": MODEL, "devices": ["cpu"]}, TypeError, r"devices is a mapping.*\['cpu'\]"),
        ({"devices": TWO}, TypeError, "third the model"),
        ({"models": {"main": MODEL, "second": "cpu"}}, TypeError, "Model 'second' is str"),
        ({"models": {"main": MODEL, "b": same_regression()}, "devices": TWO}, ValueError, "name the same replicas"),
        ({"model": same_regression(), "models": {"main": MODEL}}, ValueError, "leave model out"),
        ({"models": {"main": MODEL, "b": Regression(2)}}, ValueError, r"differ in \['predictor.weight'\]"),
        ({"models": {"main": MODEL, "b": same_regression().float()}}, ValueError, r"differ in \['predictor.weight', "),
        ({"models": {"main": MODEL, "b": nn.Sequential(same_regression())}}, ValueError, "models\\['b'\\] differ in"),
    ],
)
def test_what_cannot_be_replicated_is_refused_at_construction(settings, error, text):
    """With the rule and the value."""
    with pytest.raises(error, match=text):
        ParallelUpdater(rows(), sgd(MODEL), **settings)


def test_an_optimizer_of_a_replica_is_refused():
    """Only the main model's parameters are trained."""
    other = same_regression()
    with pytest.raises(ValueError, match=r"belong to none of \['main'\]"):
        ParallelUpdater(rows(), sgd(other), models={"main": MODEL, "second": other})


def test_what_the_default_update_cannot_work_with_is_refused():
    """As by StandardUpdater: an iterator of another name."""
    with pytest.raises(ValueError, match='works with the iterator "main"'):
        ParallelUpdater({"other": rows()}, sgd(MODEL), MODEL, devices=TWO)


def test_a_model_that_cannot_be_copied_says_what_to_do():
    """The error of the copy, with the remedy as a note."""
    model = same_regression()
    model.held = model.predictor.weight * 2
    with pytest.raises(RuntimeError, match="deepcopy") as caught:
        ParallelUpdater(rows(), sgd(model), model, devices=TWO)
    assert "hand over models={'main': ...}" in caught.value.__notes__[0]
