"""ExponentialMovingAverage: a copy of the model that follows it slowly, evaluated beside it, saved and resumed."""

import re
import socket
import threading
import warnings
from fractions import Fraction

import pytest
import torch
from regressions import regression_data, same_regression, updater_of
from resuming import chained, differences, whole
from sharded_averages import KINDS, find
from torch import nn

from chainring import training
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, extensions
from rank_pair import on_two_ranks

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


def test_it_lies_where_the_updater_has_moved_the_model(tmp_path, device):
    """To which it may be made before."""
    model = same_regression()
    average = Average(model)
    trainer = training.Trainer(updater_of(model=model, device=device), (2, "iteration"), out=str(tmp_path))
    trainer.extend(average)
    trainer.run()
    assert {parameter.device.type for parameter in average.model.parameters()} == {device}


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
        "extensions/ExponentialMovingAverage/start_type",
        "extensions/ExponentialMovingAverage/started",
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
def test_cut_after_every_iteration_it_is_the_same_average(tmp_path, way):
    """Bit for bit, whatever the order of load and extend, in memory and from a file; also before the first update."""

    def made():
        torch.manual_seed(3)
        return make()

    trainer, _, (average,) = whole(tmp_path, made, 5)
    resumed, _, (after,) = chained(tmp_path, made, 5, way=way)[-1]
    assert differences(trainer, resumed) == []
    for own, other in zip(average.model.state_dict().values(), after.model.state_dict().values(), strict=True):
        assert torch.equal(own, other)


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


class Growing(nn.Module):
    """Its weight is a different one after each call."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype))
        self.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [2.0, 1.5, 3.0])
def test_an_average_in_16_bits_moves_as_one_in_32(dtype, value):
    """In 16 bits a thousandth of the difference would be rounded away: the average would stay 1.0."""
    model = Growing(dtype)
    average = Average(model, decay=0.999)
    average.update()
    with torch.no_grad():
        model.weight.fill_(value)
    for _ in range(1600):
        average.update()
    exact = value + (1 - value) * 0.999**1600
    assert average.model.weight.dtype == dtype
    assert average.model.weight.double().tolist() == pytest.approx([exact, exact], rel=max(torch.finfo(dtype).eps, 1e-5))
    same = Growing(dtype)
    same.load_state_dict(model.state_dict())
    resumed = Average(same, decay=0.999)
    resumed.load_state_dict(average.state_dict())
    for each in (average, resumed):
        each.update()
    state, other = average.state_dict(), resumed.state_dict()
    assert {key: str(value) for key, value in state.items()} == {key: str(value) for key, value in other.items()}


def test_buffers_are_averaged_where_it_is_asked_for():
    """Those of floating-point numbers; so, and from the first weights, it is the average of timm."""
    model, first = Normalized(), Normalized().state_dict()
    model.load_state_dict(first)
    average = Average(model, decay=lambda count: 0.75, average_buffers=True)
    expected = {key: value.clone() for key, value in first.items()}
    for step in range(1, 4):
        model(torch.randn(8, 3, dtype=torch.float64) * step, torch.ones(8, 1, dtype=torch.float64))
        average.update()
        for key, value in model.state_dict().items():
            expected[key] = torch.lerp(expected[key], value, 0.25) if value.is_floating_point() else value.clone()
    torch.testing.assert_close(dict(average.model.state_dict()), expected)
    assert not torch.equal(average.model.norm.running_mean, model.norm.running_mean)


def normalized_in_place():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.utils.weight_norm(nn.Linear(3, 1))
    layer(torch.ones(3))
    return nn.Sequential(layer)


def with_attribute(make):
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].part = make()
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (normalized_in_place, r"0\.weight"),
        (lambda: with_attribute(threading.Lock), r"0\.part"),
        (lambda: with_attribute(lambda: (number for number in ())), r"0\.part"),
        (lambda: with_attribute(lambda: torch.ones(1, requires_grad=True) * 2), r"0\.part"),
        (lambda: with_attribute(lambda: {"sockets": [socket.socket]} | {"lock": threading.Condition()}), r"0\.part"),
        (lambda: with_attribute(lambda: memoryview(b"")), r"0\.part"),
    ],
)
def test_a_model_that_cannot_be_copied_is_refused_with_the_name_of_the_attribute(make, name):
    """PyTorch and Python say what, and not where."""
    with pytest.raises(TypeError, match=f"begins with a copy of the model, and {name} cannot be copied: .*__deepcopy__"):
        Average(make())


def test_a_model_that_has_changed_since_is_refused_at_the_start(tmp_path):
    """Its average would lack a part."""
    model = same_regression()
    average = Average(model)
    model.head = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"has changed since its average was made: \['head.bias', 'head.weight'\]"):
        train(tmp_path, model, average, 1)


def test_the_decay_may_be_a_function_of_the_updates_made_so_far(tmp_path):
    """It decides about the first too, which averages with the parameters before the training."""
    model, asked, decays = same_regression(), [], [0.5, 0.0, 0.25, 1.0]
    average, expected = Average(model, decay=lambda updates: asked.append(updates) or decays[updates]), copies(model)

    def follow(trainer):
        kept = decays[trainer.updater.iteration - 1]
        expected[:] = [kept * old + (1 - kept) * new for old, new in zip(expected, copies(model), strict=True)]
        torch.testing.assert_close(copies(average.model), expected, rtol=1e-12, atol=1e-12)

    train(tmp_path, model, average, 4, follow)
    assert asked == [0, 1, 2, 3]


def test_the_average_of_a_schedule_begins_with_the_parameters_that_the_run_begins_with(tmp_path):
    """Those that the script has loaded into the model after it was averaged."""
    model = same_regression()
    average = Average(model, decay=lambda updates: 1)
    nn.init.ones_(model.predictor.weight)
    train(tmp_path, model, average, 2)
    assert torch.equal(average.model.predictor.weight, torch.ones(1, 3).double())


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan"), None, True, "0.9"])
def test_a_decay_that_is_no_share_is_refused_in_its_update(wrong):
    """By its value and the number that the function was called with."""
    average = Average(same_regression(), decay=lambda updates: wrong if updates else 0.5)
    average.update()
    with pytest.raises(ValueError, match=f"a number from 0 to 1.*after 1 updates it has returned {wrong!r}"):
        average.update()


@pytest.mark.parametrize("start", [4, (4, "iteration"), ("4/3", "epoch"), lambda trainer: trainer.updater.iteration == 4])
def test_before_its_start_the_average_is_a_copy_of_the_parameters(tmp_path, start):
    """In the iteration in which the updater has come that far, or the trigger fires, it makes its first update."""
    start = (Fraction(start[0]), start[1]) if isinstance(start, tuple) else start
    model, seen, found = same_regression(), [], []
    average = Average(model, decay=lambda updates: 0.5 if updates else 0.75, start=start)

    def follow(trainer):
        seen.append(copies(model)[0])
        found.append(copies(average.model)[0])

    train(tmp_path, model, average, 5, follow)
    assert all(map(torch.equal, found[:3], seen))
    torch.testing.assert_close(found[3], 0.75 * seen[2] + 0.25 * seen[3])
    torch.testing.assert_close(found[4], 0.5 * found[3] + 0.5 * seen[4])


@pytest.mark.parametrize("start", [(2, "iteration"), lambda trainer: trainer.updater.iteration == 2])
def test_an_average_with_start_and_schedule_is_cut_anywhere(tmp_path, start):
    """The number of its updates, and that it has begun, are saved."""

    def made():
        model = same_regression()
        return updater_of(model=model), [Average(model, lambda updates: updates / (1 + updates) / 2, start=start)]

    trainer, _, (average,) = whole(tmp_path, made, 5)
    resumed, _, (after,) = chained(tmp_path, made, 5, way="file")[-1]
    assert differences(trainer, resumed) == []
    assert all(map(torch.equal, copies(average.model), copies(after.model)))


def test_the_average_of_an_older_snapshot_goes_on_with_a_start(tmp_path):
    """It has the number of updates and the model, as an average without a start still has."""
    model = same_regression()
    state = train(tmp_path, model, Average(model, 0.5), 3).state_dict()
    other = same_regression()
    average = Average(other, 0.5, start=2)
    trainer = training.Trainer(updater_of(model=other), (3, "iteration"), out=str(tmp_path / "b"))
    trainer.extend(average)
    trainer.load_state_dict(state)
    assert torch.equal(copies(average.model)[0], state["extensions/ExponentialMovingAverage/model/predictor/weight"])
    assert average.state_dict()["updates"] == 3


class Target(StandardUpdater):
    """Needs the average in the update, as BYOL needs its target network."""

    def update_core(self):
        super().update_core()
        self.average.update()
        self.seen.append(copies(self.average.model))


def target_of(model, **settings):
    updater = updater_of(model=model, kind=Target, **settings)
    updater.average, updater.seen = Average(model, 0.5), []
    return updater


@pytest.mark.parametrize("registers", [True, False])
def test_an_update_core_averages_itself_and_the_extension_not_again(tmp_path, registers):
    """Registered it is saved, and not averaged twice in an iteration."""
    model, plain = same_regression(), same_regression()
    updater, expected, afterwards = target_of(model), [], []
    trainer = training.Trainer(updater, (4, "iteration"), out=str(tmp_path / "a"))
    if registers:
        trainer.extend(updater.average)
    trainer.extend(lambda trainer: afterwards.append(copies(updater.average.model)), name="look")
    trainer.run()
    average = Average(plain, 0.5)
    train(tmp_path / "b", plain, average, 4, lambda trainer: expected.append(copies(average.model)))
    for found in (updater.seen, afterwards):
        assert all(
            torch.equal(*pair) for own, other in zip(found, expected, strict=True) for pair in zip(own, other, strict=True)
        )


def test_the_extension_averages_in_iterations_without_an_update_by_hand(tmp_path):
    """A call by hand counts for its own iteration only."""
    model, asked = same_regression(), []
    average = Average(model, lambda updates: asked.append(updates) or 0.5)
    trainer = training.Trainer(updater_of(model=model), (4, "iteration"), out=str(tmp_path))
    trainer.extend(lambda trainer: average.update() if trainer.updater.iteration == 2 else None, name="hand", priority=1000)
    trainer.extend(average)
    trainer.run()
    assert asked == [0, 1, 2, 3]


def test_an_update_in_each_micro_batch_is_refused(tmp_path):
    """The parameters change in the last one only, so it would average the same ones several times."""
    updater = target_of(same_regression(), accumulate=2)
    trainer = training.Trainer(updater, (1, "iteration"), out=str(tmp_path))
    trainer.extend(updater.average)
    with pytest.raises(RuntimeError, match="with accumulate leave it to the extension"):
        trainer.run()


def test_a_start_needs_a_trainer():
    """A call by hand does not know how far the training is."""
    with pytest.raises(RuntimeError, match=r"not registered in: trainer.extend\(average\)"):
        Average(same_regression(), start=3).update()


@pytest.mark.parametrize("start", [-1, True, "epoch", (1, "year"), (1,), 2.5])
def test_a_start_that_is_no_point_in_training_is_refused(start):
    """With the rule and the value."""
    with pytest.raises(ValueError, match=re.escape(f"0 or above, or a trigger; got {start!r}")):
        Average(same_regression(), start=start)


def test_a_decay_with_other_arguments_is_refused_at_construction():
    """And not after the first update."""
    with pytest.raises(TypeError, match="decay is called with the number of updates made so far"):
        Average(same_regression(), lambda: 0.5)


def test_parameters_that_are_whole_numbers_are_copied(tmp_path):
    """As buffers are: a rounded average would drift."""
    model = same_regression()
    model.code = nn.Parameter(torch.tensor([3, 5]), requires_grad=False)
    average = Average(model, 0.5)
    model.code.data += 2
    average.update()
    average.update()
    assert average.model.code.tolist() == [5, 7]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(find, str(tmp_path_factory.mktemp("averages")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_is_averaged_whichever_was_made_first(ranks, kind):
    """On two ranks, each of which holds its part of the average, also after the average was evaluated; and resumed."""
    for found in ranks:
        assert "error" not in found, found["error"]
        assert max(found[kind].pop("differences")) < 1e-6
        assert found[kind] == {
            "sharded": True,
            "modules": ["", "first", "head"],
            "tied": True,
            "own memory": True,
            "resumed": True,
        }


def test_a_sharded_average_in_16_bits_moves_as_one_in_32(ranks):
    """Whichever was sharded first; saved and loaded it moves on."""
    for found in ranks:
        assert "error" not in found, found["error"]
        for average, loaded in found["16 bits"]:
            assert average == loaded == pytest.approx([2 - 0.999**1601] * 15, rel=torch.finfo(torch.bfloat16).eps)


def test_an_average_whose_shards_are_not_those_of_the_model_is_refused(ranks):
    """Tensors that are distributed in other ways are averaged if the model was copied so, or sharded by the same calls."""
    for found in ranks:
        assert "error" not in found, found["error"]
        assert found["by tensor"]["difference"] == pytest.approx([0.5] * 5)
        assert "'head.weight' is sharded as (Shard(dim=1)" in found["by tensor"]["refusal"]
        assert "shard average.model by the same calls as the model" in found["by tensor"]["refusal"]
