"""DevicePrefetcher in an updater and an Evaluator, and what may be handed to it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring.iterators import DevicePrefetcher, SerialIterator
from chainring.training.extensions import Evaluator
from chainring.training.updaters import StandardUpdater

SIZE, BATCH = 10, 4


def points():
    return TensorDataset(torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1)), torch.arange(SIZE) % 2)


def trained(wrap, updates, accumulate):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    updater = StandardUpdater(
        wrap(SerialIterator(points(), BATCH, repeat=False)),
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        loss_func=lambda model, x, t: nn.functional.cross_entropy(model(x), t),
        accumulate=accumulate,
    )
    for _ in range(updates):
        updater.update()
    return updater, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 3), (2, 2), (3, 1)])
def test_training_takes_the_same_path(accumulate, updates):
    """Also where the data end inside an update, which is then made of what there is."""
    alone, parameters = trained(lambda iterator: iterator, updates, accumulate)
    ahead, same = trained(lambda iterator: DevicePrefetcher(iterator, "cpu"), updates, accumulate)
    assert same == parameters
    assert ahead.weight == alone.weight
    with pytest.raises(StopIteration):
        ahead.update()


def test_an_evaluation_has_the_same_means_each_time():
    """The short last batch and the end of the pass included."""
    model = nn.Linear(3, 2)

    def evaluate(wrap):
        def loss(x, t):
            return {"loss": nn.functional.cross_entropy(model(x), t)}

        evaluator = Evaluator(wrap(SerialIterator(points(), BATCH, repeat=False, shuffle=False)), model, eval_func=loss)
        return [evaluator.evaluate(), evaluator.evaluate()]

    assert evaluate(lambda iterator: DevicePrefetcher(iterator, "cpu")) == evaluate(lambda iterator: iterator)


def test_a_loader_is_wrapped_at_the_door():
    """A DataLoader may be handed over as it is."""
    assert next(DevicePrefetcher(DataLoader(points(), BATCH), "meta")).columns[0].shape == (BATCH, 3)


@pytest.mark.parametrize(
    ("source", "settings", "says"),
    [
        (SimpleNamespace(__next__=list, epoch_detail=0.0), {}, "got SimpleNamespace; derive it from"),
        (points(), {}, "got the dataset TensorDataset"),
        ([torch.zeros(2)], {"converter": 5}, "a converter is called with"),
    ],
)
def test_what_is_of_another_kind_is_refused(source, settings, says):
    """At construction, with the remedy."""
    with pytest.raises(TypeError, match=says):
        DevicePrefetcher(source, "cpu", **settings)
