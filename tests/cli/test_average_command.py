"""`chainring average` writes the mean of models, which an independent computation gives too."""

import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from chainring import iterators, serializers, training
from chainring.cli import main
from chainring.training import extensions


class Model(nn.Module):
    """Tied weights, several dtypes, channels_last, running statistics, a counter and an empty buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(2)
        self.wide = nn.Parameter(torch.randn(50, dtype=torch.float64))
        self.brief = nn.Parameter(torch.randn(50).to(torch.bfloat16))
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("mask", torch.rand(8) > 0.5)


def make_model(number, model_class=Model):
    torch.manual_seed(number)
    model = model_class()
    if hasattr(model, "norm"):
        model.norm.num_batches_tracked.fill_(number)
    return model


def save_snapshot(model, place):
    updater = training.StandardUpdater(iterators.SerialIterator([0, 1], 2), torch.optim.SGD(model.parameters(), 0.1), model)
    serializers.save(place, training.Trainer(updater, out=place.parent))
    return str(place)


def take_over(other):
    def loss_func(model, _):
        model.load_state_dict(other.state_dict())
        return sum(parameter.sum().double() for parameter in model.parameters()) * 0

    return loss_func


def independent_mean(models, weights):
    """That of NumPy in float64, in the dtype of the last model."""
    states = [model.state_dict() for model in models]
    expected = dict(states[-1])
    for name, last in expected.items():
        if last.is_floating_point() or last.is_complex():
            wide = torch.complex128 if last.is_complex() else torch.float64
            values = [state[name].to(wide).numpy() for state in states]
            if weights is None:
                mean = np.mean(values, axis=0)
            else:
                mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
            expected[name] = torch.from_numpy(np.asarray(mean)).to(last.dtype)
    return expected


@pytest.mark.parametrize(("count", "weighted"), [(2, False), (3, True), (20, False), (20, True)])
def test_mean_of_snapshots_is_that_of_numpy_to_the_bit(tmp_path, count, weighted, capsys):
    """Tied tensors stay one, and what has no mean is that of the last."""
    models = [make_model(number) for number in range(count)]
    places = [save_snapshot(model, tmp_path / f"run{number}" / "snapshot") for number, model in enumerate(models)]
    weights = [0.1 + number / 7 for number in range(count)] if weighted else [1.0] * count
    given = ["--weights", *map(str, weights)] if weighted else []
    assert main(["average", "--json", *places, str(tmp_path / "mean"), *given]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["of"], facts["weights"]) == (places, weights)
    mean = make_model(99)
    serializers.load(tmp_path / "mean", mean)
    assert mean.last.weight is mean.first.weight
    for name, value in independent_mean(models, weights if weighted else None).items():
        found = mean.state_dict()[name]
        assert found.dtype == value.dtype
        assert torch.equal(found, value), name
    assert mean.norm.num_batches_tracked == count - 1


def test_mean_is_of_the_newest_snapshots_of_runs_and_of_the_files_of_models(tmp_path):
    """In any mixture; the directory of a run stands for its newest snapshot."""
    old, new, plain = map(make_model, range(3))
    optimizer = torch.optim.SGD(old.parameters(), 0.1)
    updater = training.StandardUpdater(iterators.SerialIterator([0, 1], 2), optimizer, old, loss_func=take_over(new))
    trainer = training.Trainer(updater, (1, "iteration"), out=tmp_path / "run")
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"), invoke_before_training=True)
    trainer.run()
    assert len(list((tmp_path / "run").glob("snapshot_iter_*"))) == 2
    serializers.save(tmp_path / "plain.safetensors", plain)
    given = [str(tmp_path / "run"), str(tmp_path / "plain.safetensors"), str(tmp_path / "deep" / "mean")]
    assert main(["average", *given]) == 0
    mean = make_model(99)
    serializers.load(tmp_path / "deep" / "mean", mean)
    for name, value in independent_mean([new, plain], None).items():
        assert torch.equal(mean.state_dict()[name], value), name


def test_parameters_that_were_frozen_and_not_saved_are_left_out_and_said(tmp_path, capsys):
    """As in an export."""
    for number in range(2):
        model = make_model(number, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        model[0].requires_grad_(False)
        iterator = iterators.SerialIterator([torch.zeros(2)] * 2, 2)
        updater = training.StandardUpdater(
            iterator, torch.optim.SGD(model[1].parameters(), 0.1), model, loss_func=lambda model, x: model(x).sum()
        )
        trainer = training.Trainer(updater, (1, "iteration"), out=tmp_path / str(number))
        trainer.extend(extensions.snapshot(frozen=False), trigger=(1, "iteration"))
        trainer.run()
    capsys.readouterr()
    assert main(["average", str(tmp_path / "0"), str(tmp_path / "1"), str(tmp_path / "mean")]) == 0
    assert "frozen=False: 2 parameters are not in it, such as 0.bias" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (lambda: nn.Linear(3, 4), r"bias is of shape \[3\] in .*, and of shape \[4\] in .*second: a mean is of models"),
        (lambda: nn.Linear(3, 3, bias=False), r"bias is of shape \[3\] in .*first, and absent in"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), "of one architecture"),
    ],
)
def test_models_that_differ_in_more_than_numbers_have_no_mean(tmp_path, capsys, others, words):
    """Names and shapes are compared, and nothing is written."""
    places = [str(tmp_path / "first"), str(tmp_path / "second")]
    for place, model in zip(places, [nn.Linear(3, 3), others()], strict=True):
        serializers.save(place, model)
    assert main(["average", *places, str(tmp_path / "mean")]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "mean").exists()


def save_masked(place, weight, mask):
    """A model with a weight, and a mask with minus infinity."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weight, 1.0]))
    model.register_buffer("mask", torch.tensor([0.0, mask]))
    serializers.save(place, model)


@pytest.mark.parametrize(
    ("first", "second", "key", "wrong"),
    [
        ((0.0, -math.inf), (math.nan, -math.inf), "weight", "second"),
        ((math.nan, -math.inf), (math.nan, -math.inf), "weight", "first"),
        ((0.0, 0.0), (math.inf, 0.0), "weight", "second"),
        ((0.0, -math.inf), (0.0, 1.0), "mask", "first"),
        ((0.0, -math.inf), (0.0, math.inf), "mask", "second"),
    ],
)
def test_numbers_that_are_not_finite_have_no_mean(tmp_path, capsys, first, second, key, wrong):
    """The key and the file are named, and nothing is written; where the weight is 0, the other's numbers are the mean."""
    places = {name: str(tmp_path / name) for name in ("first", "second")}
    for place, values in zip(places.values(), (first, second), strict=True):
        save_masked(place, *values)
    assert main(["average", *places.values(), str(tmp_path / "mean")]) == 2
    assert f"{key} of {places[wrong]} has numbers that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_a_mask_of_all_models_and_a_model_without_weight_have_a_mean(tmp_path):
    """Infinities that all have alike stay, and what does not count is not looked at."""
    for number, weight in enumerate((1.0, 4.0, math.nan)):
        save_masked(tmp_path / str(number), weight, -math.inf)
    given = [str(tmp_path / name) for name in ("2", "0", "1", "mean")]
    assert main(["average", *given, "--weights", "0", "2", "1"]) == 0
    mean = nn.Linear(2, 1, bias=False)
    mean.register_buffer("mask", torch.zeros(2))
    serializers.load(given[-1], mean)
    assert (mean.weight.tolist(), mean.mask.tolist()) == ([[2.0, 1.0]], [0.0, -math.inf])


def test_tied_and_separate_tensors_have_no_mean(tmp_path, capsys):
    """Which the model that loads it could not hold."""
    tied, free = make_model(0), make_model(1)
    free.last.weight = nn.Parameter(torch.randn(3, 3))
    places = [str(tmp_path / "tied"), str(tmp_path / "free")]
    for place, model in zip(places, [tied, free], strict=True):
        serializers.save(place, model)
    assert main(["average", *places, str(tmp_path / "mean")]) == 2
    assert "last.weight is of shape [3, 3], tied to first.weight in " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "mean"], "a mean is of two or more snapshots"),
        (["a", "a", "a"], "exists and is not overwritten"),
        (["a", "a", "mean", "--weights", "1"], "a number for each of the 2 snapshots, got 1"),
        (["a", "a", "mean", "--weights", "0", "0"], "not all 0"),
        (["a", "a", "mean", "--weights", "1", "-1"], "0 or more"),
        (["a", "a", "mean", "--weights", "nan", "1"], "finite numbers"),
        (["a", "text", "mean"], "text is text, not a model"),
        (["a", "a", "mean", "--model", "gen"], "a is of one model: leave out --model"),
    ],
)
def test_wrong_arguments_are_refused_in_words(tmp_path, monkeypatch, capsys, arguments, words):
    """With exit status 2."""
    monkeypatch.chdir(tmp_path)
    serializers.save("a", nn.Linear(1, 1))
    (tmp_path / "text").write_text("some words")
    assert main(["average", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_damaged_snapshot_has_no_mean(tmp_path, capsys):
    """With exit status 1, before anything is written."""
    places = [save_snapshot(make_model(number), tmp_path / f"run{number}" / "snapshot") for number in range(2)]
    file = next((tmp_path / "run1" / "snapshot").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["average", *places, str(tmp_path / "mean")]) == 1
    assert "other bytes than were written" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()
