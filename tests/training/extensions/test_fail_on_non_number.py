"""A NaN stops the run, is left out or undone, never saved as good, and can be repeated bit for bit."""

import contextlib
import json
import math
import os
import pickle

import pytest
import torch
from torch import nn

import chainring
from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.serializers._store import CorruptError
from chainring.training import extensions
from chainring.training.extensions import FailOnNonNumber, NonNumberError

BAD = 5  # the iteration whose batch has a NaN


class Net(nn.Module):
    """Dropout and BatchNorm, so that a step depends on more than its batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))

    def forward(self, x, t):
        return ((self.body(x) - t) ** 2).mean()


def examples(bad=BAD):
    """Batches of 4; in that of iteration ``bad`` the target of one example is no number."""
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        data[4 * (bad - 1) + 1, 3] = math.nan
    return [(row[:3], row[3:]) for row in data]


def updater_of(seed=0, bad=BAD, **settings):
    chainring.deterministic(seed)
    net = Net()
    iterator = SerialIterator(examples(bad), 4 // settings.get("accumulate", 1), shuffle=False)
    return training.StandardUpdater(iterator, torch.optim.Adam(net.parameters(), 0.01), net, **settings)


def trainer_of(out, policy, every=2, stop=9, **settings):
    trainer = training.Trainer(updater_of(**settings), (stop, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    if every is not None:
        trainer.extend(extensions.snapshot(), trigger=(every, "iteration"))
    trainer.extend(FailOnNonNumber(policy))
    return trainer


def final(trainer):
    """All that training has made of the models, as bytes."""
    updater = trainer.updater
    return pickle.dumps(
        [
            {k: v.tolist() for k, v in updater.get_model("main").state_dict().items()},
            updater.get_optimizer("main").state_dict()["state"][0]["exp_avg"].tolist(),
        ]
    )


def is_finite(net):
    return all(bool(torch.isfinite(value).all()) for value in net.state_dict().values())


def left_out_by_hand(accumulate=1):
    """The same training in a loop without the library, which does not step where the loss is no number."""
    chainring.deterministic(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = examples()
    for start in range(0, 36, 4):
        optimizer.zero_grad()
        x, t = (torch.stack(column) for column in zip(*data[start : start + 4], strict=True))
        loss = net(x, t)
        loss.backward()
        if bool(torch.isfinite(loss)):
            optimizer.step()
    return net


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_step_is_left_out_as_in_a_loop_written_by_hand(tmp_path, capsys, policy):
    """The generators go on as they did; only the step is missing. It is said, with the parameters."""
    trainer = trainer_of(tmp_path, policy)
    trainer.run()
    expected = left_out_by_hand().state_dict()
    for name, value in trainer.updater.get_model("main").state_dict().items():
        assert torch.equal(value, expected[name]), name
    said = capsys.readouterr().out
    assert f"iteration {BAD} has NaN or infinity in the gradients of main/body/0/weight" in said
    assert ("goes back to iteration 4" in said) == (policy == "rollback")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_log_has_every_iteration_once(tmp_path, policy):
    """What a run going back had written is cut off."""
    trainer = trainer_of(tmp_path, policy)
    trainer.run()
    assert [row["iteration"] for row in trainer.get_extension("LogReport").log] == [*range(1, 10)]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 9


def test_the_record_tells_a_run_that_went_back_from_one_that_was_started(tmp_path):
    """The entry has the reason; a start has none."""
    trainer_of(tmp_path, "rollback").run()
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [(start["iteration"], "rollback" in start) for start in starts] == [(0, False), (4, True)]
    assert f"iteration {BAD} had NaN or infinity" in starts[1]["rollback"]


def test_stop_ends_the_run_and_no_snapshot_is_poisoned(tmp_path):
    """With a snapshot every iteration: the newest is of the iteration before."""
    trainer = trainer_of(tmp_path, "stop", every=1)
    with pytest.raises(NonNumberError, match=f"iteration {BAD} has NaN or infinity in the gradients of main/body/0/weight"):
        trainer.run()
    taken = sorted(name for name in os.listdir(tmp_path) if name.startswith("snapshot"))
    assert taken == [f"snapshot_iter_{k}" for k in range(1, BAD)]
    net = Net()
    serializers.load(tmp_path / taken[-1], net)
    assert is_finite(net)


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_without_a_snapshot_the_run_ends_one_iteration_later(tmp_path, policy):
    """There is nothing to go back to."""
    trainer = trainer_of(tmp_path, policy, every=None)
    with pytest.raises(NonNumberError, match=f"iteration {BAD} had NaN") as caught:
        trainer.run()
    assert caught.type is NonNumberError  # and not a class that no script knows
    assert trainer.updater.iteration == BAD + 1


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_update_can_be_repeated_bit_for_bit(tmp_path, policy, accumulate):
    """From what was saved, in fresh objects made with another seed: the same gradients, NaN by NaN."""
    trainer = trainer_of(tmp_path, policy, accumulate=accumulate)
    gradients = {}

    def look(optimizer, *_):
        if trainer.updater.iteration + 1 == BAD:
            net = trainer.updater.get_model("main")
            gradients.update({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})

    trainer.updater.get_optimizer("main").register_step_pre_hook(look)
    try:
        trainer.run()
    except NonNumberError as error:
        assert "non_number_iter_5" in str(error)  # noqa: PT017 - two of the three policies raise nothing
    fresh = updater_of(seed=77, accumulate=accumulate)
    FailOnNonNumber.replay(tmp_path / f"non_number_iter_{BAD}", fresh)
    repeated = {name: p.grad for name, p in fresh.get_model("main").named_parameters()}
    assert repeated.keys() == gradients.keys()
    assert all(torch.equal(repeated[name].nan_to_num(7), gradients[name].nan_to_num(7)) for name in gradients)
    assert any(bool(gradient.isnan().any()) for gradient in gradients.values())
    assert fresh.iteration == 0


def test_an_update_is_repeated_on_the_device_of_the_updater(tmp_path, device):
    """The saved batch is on the host, and goes where the batches of the new updater are."""

    def make():
        torch.manual_seed(0)
        net, iterator = Net(), SerialIterator(examples(), 4, shuffle=False)
        return training.StandardUpdater(iterator, torch.optim.SGD(net.parameters(), 0.1), net, device=device)

    trainer = training.Trainer(make(), (BAD, "iteration"), out=str(tmp_path))
    trainer.extend(FailOnNonNumber("skip"))
    trainer.run()
    fresh = make()
    FailOnNonNumber.replay(tmp_path / f"non_number_iter_{BAD}", fresh)
    gradients = [parameter.grad for parameter in fresh.get_model("main").parameters()]
    assert {gradient.device.type for gradient in gradients} == {device}
    assert any(gradient.isnan().any() for gradient in gradients)


def test_a_damaged_record_is_not_repeated(tmp_path):
    """Its bytes are verified as those of any snapshot."""
    trainer_of(tmp_path, "skip").run()
    path = tmp_path / f"non_number_iter_{BAD}" / "state.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        FailOnNonNumber.replay(path.parent, updater_of())


def test_a_loss_that_is_no_number_counts_though_its_gradients_are_finite(tmp_path):
    """A constant NaN in the loss, say."""
    updater = updater_of(bad=None)
    updater.loss_func = lambda model, x, t: model(x, t) + (math.nan if updater.iteration == 3 else 0)
    trainer = training.Trainer(updater, (6, "iteration"), out=str(tmp_path))
    trainer.extend(FailOnNonNumber("stop"))
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    with pytest.raises(NonNumberError, match="iteration 4 has NaN or infinity in the loss"):
        trainer.run()


def test_infinity_counts_and_large_numbers_do_not(tmp_path):
    """Gradients of 1e30, whose squares are beyond float32, are numbers."""
    for factor, is_bad in ((1e30, False), (1e39, True)):
        updater = updater_of(bad=None)
        updater.loss_func = lambda model, x, t, factor=factor: model.body[0].weight.sum() * factor
        trainer = training.Trainer(updater, (2, "iteration"), out=str(tmp_path / str(factor)))
        trainer.extend(FailOnNonNumber("skip"))
        trainer.run()
        assert (tmp_path / str(factor) / "non_number_iter_1").exists() == is_bad


def test_a_parameter_that_was_poisoned_otherwise_is_not_saved(tmp_path):
    """By an extension, say, after the step."""

    def poison(trainer):
        if trainer.updater.iteration == 3:
            trainer.updater.get_model("main").body[0].weight.data[0, 0] = math.inf

    trainer = trainer_of(tmp_path, "skip", every=1, bad=None)
    trainer.extend(poison)
    with pytest.raises(NonNumberError, match="a parameter is NaN or infinite after iteration 3"):
        trainer.run()
    assert not (tmp_path / "snapshot_iter_3").exists()


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_run_without_nan_is_the_run_without_it(tmp_path, policy):
    """Bit for bit."""
    watched = trainer_of(tmp_path / "a", policy, bad=None)
    watched.run()
    plain = training.Trainer(updater_of(bad=None), (9, "iteration"), out=str(tmp_path / "b"))
    plain.run()
    assert final(watched) == final(plain)


def test_rolling_back_survives_a_resume(tmp_path):
    """A run that is ended behind the step that was left out, and one that is ended before it, come to the same end."""
    whole = trainer_of(tmp_path / "whole", "rollback")
    whole.run()
    for k in (4, 7):
        trainer_of(tmp_path / str(k), "rollback", every=1, stop=k).run()
        rest = trainer_of(tmp_path / str(k), "rollback", every=1)
        serializers.load(tmp_path / str(k) / f"snapshot_iter_{k}", rest)
        rest.run()
        assert final(rest) == final(whole)


@pytest.mark.parametrize(("policy", "ends"), [("stop", True), ("rollback", False)])
def test_a_nan_that_does_not_come_again_stops_the_run_all_the_same(tmp_path, policy, ends):
    """It depends on something that is not saved, here a count of calls, and that is said."""
    calls = []

    def loss_func(model, x, t):
        calls.append(None)
        return model(x, t) * (math.nan if len(calls) == BAD else 1)

    updater = updater_of(bad=None)
    updater.loss_func = loss_func
    trainer = training.Trainer(updater, (9, "iteration"), out=str(tmp_path))
    trainer.extend(FailOnNonNumber(policy))
    trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
    with pytest.raises(NonNumberError, match="not when it was repeated") if ends else contextlib.nullcontext():
        trainer.run()
    assert trainer.updater.iteration == (BAD if ends else 9)


def test_nothing_of_it_stays_behind(tmp_path):
    """Neither in the optimizer nor in the updater."""
    trainer = trainer_of(tmp_path, "skip")
    converter = trainer.updater.converter
    trainer.run()
    assert trainer.updater.converter is converter
    weight = trainer.updater.get_model("main").body[0].weight
    weight.grad = torch.full_like(weight, math.nan)
    trainer.updater.get_optimizer("main").step()
    assert bool(weight.isnan().all())


def test_another_policy_is_refused():
    """With those that there are."""
    with pytest.raises(ValueError, match=r"'stop', 'skip', 'rollback'.*'warn'"):
        FailOnNonNumber("warn")
