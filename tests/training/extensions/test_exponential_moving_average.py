"""ExponentialMovingAverage: a copy of the model that follows it slowly, evaluated beside it, saved and resumed."""

import pytest
import torch
from regressions import regression_data, same_regression, updater_of
from resuming import differences, parts, whole
from torch import nn

from chainring import training
from chainring.iterators import SerialIterator
from chainring.training import extensions

Average = extensions.ExponentialMovingAverage


class Normalized(nn.Module):
    """Has buffers: running statistics, and numbers that stay what they are."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.predictor = nn.Linear(3, 1).double()
        self.register_buffer("positions", torch.arange(40))

    def forward(self, x, t):
        return (self.predictor(self.norm(x)) - t).square().mean()


def train(out, model, average, length, *others):
    trainer = training.Trainer(updater_of(model=model), (length, "iteration"), out=str(out))
    for extension in (average, *others):
        trainer.extend(extension)
    trainer.run()
    return trainer


def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_it_is_the_moving_average_of_the_parameters_after_each_step(tmp_path):
    """The first is the parameters themselves; from then on decay * average + (1 - decay) * parameter."""
    model = same_regression()
    average, expected = Average(model, decay=0.75), []

    def follow(trainer):
        now = copies(model)
        expected[:] = [0.75 * old + 0.25 * new for old, new in zip(expected, now, strict=True)] if expected else now
        torch.testing.assert_close(copies(average.model), expected, rtol=1e-12, atol=1e-12)

    train(tmp_path, model, average, 6, follow)
    assert not torch.equal(copies(model)[0], copies(average.model)[0])


def test_the_model_trains_as_if_it_were_not_averaged(tmp_path):
    """Bit for bit, and the copy gets no gradients."""
    alone, averaged = same_regression(), same_regression()
    updater = updater_of(model=alone)
    for _ in range(4):
        updater.update()
    average = Average(averaged)
    train(tmp_path, averaged, average, 4)
    assert all(map(torch.equal, copies(alone), copies(averaged)))
    assert all(parameter.grad is None for parameter in average.model.parameters())


def test_buffers_are_those_of_the_model(tmp_path):
    """Running statistics and whole numbers are copied, not averaged: 0.999 * 7 + 0.001 * 7 need not be 7."""
    model = Normalized()
    average = Average(model)
    train(tmp_path, model, average, 5)
    for own, given in zip(average.model.buffers(), model.buffers(), strict=True):
        assert torch.equal(own, given)
    assert average.model.norm.num_batches_tracked == 5


def test_it_is_evaluated_in_the_iteration_of_its_update(tmp_path):
    """Beside the model, under the name that the evaluator has, wherever it was registered."""
    model = same_regression()
    average, rows = Average(model, 0.5), []
    data = SerialIterator(regression_data(), 12, repeat=False, shuffle=False)
    trainer = training.Trainer(updater_of(model=model), (3, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.Evaluator(data, average.model), name="average", trigger=(1, "iteration"))
    trainer.extend(average)
    trainer.extend(lambda trainer: rows.append(float(trainer.observation["average/main/loss"])), name="look")
    trainer.extend(lambda trainer: rows.append(average.model(*regression_data()[:]).item()), name="compute")
    trainer.run()
    assert rows[::2] == pytest.approx(rows[1::2], rel=1e-12)


def test_a_lower_trigger_averages_less_often(tmp_path):
    """As extend says."""
    model = same_regression()
    average, seen = Average(model, 0.5), []
    trainer = training.Trainer(updater_of(model=model), (4, "iteration"), out=str(tmp_path))
    trainer.extend(average, trigger=(2, "iteration"))
    trainer.extend(lambda trainer: seen.append(copies(model)), name="look")
    trainer.run()
    torch.testing.assert_close(copies(average.model), [(a + b) / 2 for a, b in zip(seen[1], seen[3], strict=True)])


def test_a_wrapper_shows_in_no_name(tmp_path):
    """The averaged copy of a compiled model is the model without it, and its keys are those of the model."""
    model = same_regression()
    average = Average(torch.compile(model, backend="eager"))
    assert average.model.state_dict().keys() == model.state_dict().keys()
    keys = train(tmp_path, model, average, 1).state_dict()
    assert sorted(key for key in keys if key.startswith("extensions/")) == [
        "extensions/ExponentialMovingAverage/model/predictor/bias",
        "extensions/ExponentialMovingAverage/model/predictor/weight",
        "extensions/ExponentialMovingAverage/updates",
    ]


def test_shared_parameters_stay_shared():
    """One tensor in two places of the model is one in the copy."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    copy = Average(model).model
    assert copy[1].weight is copy[0].weight
    assert copy[0].weight is not model[0].weight


def make():
    model = Normalized()
    return updater_of(model=model), [Average(model, 0.9)]


@pytest.mark.parametrize("way", ["load", "extend", "file"])
def test_cut_in_two_after_any_iteration_it_is_the_same_average(tmp_path, way):
    """Bit for bit, whatever the order of load and extend, in memory and from a file; also before the first update."""

    def made():
        torch.manual_seed(3)
        return make()

    trainer, _, (average,) = whole(tmp_path, made, 5)
    for k in range(6):
        _, (resumed, _, (after,)) = parts(tmp_path / str(k), made, 5, k, way=way)
        assert differences(trainer, resumed) == [], k
        for own, other in zip(average.model.state_dict().values(), after.model.state_dict().values(), strict=True):
            assert torch.equal(own, other), k


def test_a_rehearsal_leaves_no_trace(tmp_path):
    """Its two updates do not count."""
    model = same_regression()
    average = Average(model, 0.5)
    trainer = training.Trainer(updater_of(model=model), (1, "iteration"), out=str(tmp_path))
    trainer.extend(average)
    trainer.rehearse()
    trainer.run()
    assert all(map(torch.equal, copies(average.model), copies(model)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Average(same_regression().parameters()), TypeError, "takes the model first, an nn.Module; got generator"),
        (lambda: Average(same_regression(), 1.0), ValueError, "decay is from 0 to less than 1, such as 0.999; got 1.0"),
        (lambda: Average(same_regression(), -0.1), ValueError, "got -0.1"),
        (lambda: Average(nn.LazyLinear(3)), ValueError, "have no shape yet; call the model with a batch"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, error, message):
    """The error gives the rule, the value and the remedy."""
    with pytest.raises(error, match=message):
        make()


def test_a_model_that_has_changed_since_is_refused_at_the_start(tmp_path):
    """Its average would lack a part."""
    model = same_regression()
    average = Average(model)
    model.head = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"has changed since its average was made: \['head.bias', 'head.weight'\]"):
        train(tmp_path, model, average, 1)
