"""predict: a row for each example, in order, and a model that is as it was."""

import collections

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chainring
from chainring import nn as cnn
from chainring import report, serializers, training
from chainring.converters import concat_examples
from chainring.iterators import SerialIterator
from chainring.training import extensions
from chainring.training.extensions import predict

DATA = TensorDataset(torch.arange(22.0).view(11, 2), torch.arange(11) % 3)
Pair = collections.namedtuple("Pair", "double info")


class Net(nn.Module):
    """Has all that an evaluation mode changes, draws, and returns a structure."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()

    def forward(self, x, t=None):
        report({"noise": torch.rand(())}, self)
        return Pair(2 * x, {"modes": x[:, 0] * self.training, "y": [self.drop(self.norm(x))]})


def in_order(batch_size=4):
    return SerialIterator(DATA, batch_size, repeat=False, shuffle=False)


def test_batches_go_to_the_device_of_the_model_and_rows_come_to_the_host(device):
    model = nn.Linear(2, 3).to(device)
    rows = predict(model, in_order(), device=device, predict_func=lambda model, x, t: (model(x), t))
    assert [part.device.type for part in rows] == ["cpu", "cpu"]
    assert torch.equal(rows[1], DATA.tensors[1])
    torch.testing.assert_close(rows[0], model.to("cpu")(DATA.tensors[0]).detach())


@pytest.mark.parametrize("make", [in_order, lambda: DataLoader(DATA, 4), lambda: list(DataLoader(DATA, 4))])
def test_it_returns_the_row_of_every_example_in_order(make):
    """In the structure of the model's output, of the incomplete last batch too, in evaluation mode and without gradients."""
    net = Net()
    found = predict(net, make())
    expected = DATA.tensors[0]
    assert type(found) is Pair
    assert torch.equal(found.double, 2 * expected)
    assert not found.info["modes"].any()
    assert (len(found.info["y"][0]), found.info["y"][0].requires_grad) == (11, False)


def test_it_leaves_model_generators_and_reports_as_they_were():
    """Modes of each module, parameters, buffers and what is drawn next; what the model reports goes nowhere."""
    net = Net()
    net.drop.eval()
    before, drawn = {key: value.clone() for key, value in net.state_dict().items()}, torch.get_rng_state()
    with chainring.Reporter().scope(observation := {}):
        predict(net, in_order())
    assert [net.training, net.norm.training, net.drop.training] == [True, True, False]
    assert observation == {}
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_a_function_chooses_inputs_and_a_converter_makes_them():
    """predict_func has the model first; the converter is that of an Evaluator."""
    model = cnn.Classifier(nn.Linear(2, 3))
    found = predict(model, in_order(), predict_func=lambda model, x, t: model.predictor(x))
    assert torch.equal(found, torch.cat([model.predictor(x) for x in DATA.tensors[0].split(4)]))
    halved = predict(nn.Identity(), in_order(), lambda batch, device: concat_examples(batch, device)[0] / 2)
    assert torch.equal(halved, DATA.tensors[0] / 2)


def test_between_updates_it_changes_no_bit_of_a_run(tmp_path):
    """In an extension of a run that uses the same iterator, also where this is cut and resumed; and out of its snapshot."""

    def scores(model, x, t):
        return model.predictor(x)

    def run(out, epochs, predicts):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 3))
        model, tests = cnn.Classifier(net), in_order()
        updater = training.StandardUpdater(SerialIterator(DATA, 4), torch.optim.Adam(model.parameters()), model)
        trainer = training.Trainer(updater, (epochs, "epoch"), out=str(tmp_path / out))
        trainer.extend(extensions.Evaluator(tests, model))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "epoch"))
        if predicts:
            trainer.extend(
                lambda trainer: predict(net, tests, lambda batch, _: torch.stack([x for x, _ in batch])), "predict"
            )
        trainer.run()
        log = trainer.get_extension("LogReport").log
        return model, [{key: row[key] for key in row if key != "elapsed_time"} for row in log]

    plain, log = run("plain", 4, predicts=False)
    run("cut", 2, predicts=True)
    _, resumed = run("cut", 4, predicts=True)
    assert resumed == log
    loaded = cnn.Classifier(nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 3)))
    serializers.load(tmp_path / "cut" / "snapshot_iter_11", loaded)
    assert torch.equal(predict(loaded, in_order(), predict_func=scores), predict(plain, in_order(), predict_func=scores))


@pytest.mark.parametrize(
    ("model", "make", "error", "text"),
    [
        (cnn.Classifier(nn.Linear(2, 3)), in_order, ValueError, "a row for each of the 4 examples"),
        (nn.Linear(2, 3), in_order, TypeError, "give predict_func="),
        (Net(), lambda: SerialIterator(DATA, 4), ValueError, "repeat"),
        (Net(), list, ValueError, "the prediction has no data"),
        (lambda: None, in_order, TypeError, "nn.Module"),
    ],
)
def test_it_refuses_what_has_no_rows_in_order(model, make, error, text):
    """A loss instead of rows, other inputs, an endless iterator, no batch, no model: with the remedy."""
    with pytest.raises(error, match=text):
        predict(model, make())


def test_it_refuses_rows_that_cannot_be_joined():
    """Sequences of several lengths, and what are no tensors."""
    ragged = [torch.zeros(2, 3), torch.zeros(2, 4)]
    with pytest.raises(ValueError, match="padded or reduced"):
        predict(nn.Identity(), ragged)
    with pytest.raises(TypeError, match="returned str"):
        predict(nn.Identity(), ragged, predict_func=lambda model, x: "text")
