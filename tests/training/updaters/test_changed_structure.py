"""What changes its form during a run, buffers and parameter groups, comes back in a freshly made program, or is refused."""

import pytest
import torch
from torch import nn

from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.serializers import DictionaryDeserializer, DictionarySerializer


class Net(nn.Module):
    """Its buffers are ``None`` at first, grow, change their dtype, appear, and vanish."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_buffer("last", None)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("start", torch.ones(2))
        self.register_buffer("scratch", None, persistent=False)

    def forward(self, x):
        output = self.head(self.body(x))
        self.last = output.detach()
        self.seen = torch.cat([self.seen, self.last.flatten()])
        self.count = self.count + 0.5
        self.start = None
        self.scratch = self.last
        if not hasattr(self.body, "late"):
            self.body.register_buffer("late", torch.rand(3))
        return output.square().mean()


def made(tmp_path, seed, stop=9):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.body.parameters())
    updater = training.StandardUpdater(SerialIterator(torch.arange(24.0).reshape(12, 2), 4, seed=0), optimizer, model)
    return training.Trainer(updater, (stop, "iteration"), out=str(tmp_path / f"out{seed}")), model, optimizer


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


def saved_and_loaded(tmp_path, trainer, seed=1):
    serializers.save(tmp_path / f"saved{seed}", trainer)
    loaded = made(tmp_path, seed)
    serializers.load(tmp_path / f"saved{seed}", loaded[0])
    return loaded


def test_buffers_that_were_none_that_grew_appeared_or_vanished_come_back(tmp_path):
    """In shape and dtype, and they go on from there; also in a run that was itself resumed."""
    trainer, model, _ = made(tmp_path, 0)
    trainer.updater.update()
    again, loaded, _ = saved_and_loaded(tmp_path, trainer)
    assert same(model, loaded)
    assert loaded.count.dtype == torch.float32
    trainer.updater.update()
    again.updater.load_state_dict(trainer.updater.state_dict())
    again.updater.update()
    trainer.updater.update()
    assert same(model, loaded)
    assert same(model, saved_and_loaded(tmp_path, again, seed=2)[1])


def test_a_model_or_a_part_alone_takes_the_changed_buffers_too(tmp_path):
    """Out of the snapshot of a run."""
    trainer, model, _ = made(tmp_path, 0)
    trainer.updater.update()
    serializers.save(tmp_path / "saved", trainer)
    serializers.load(tmp_path / "saved", alone := Net())
    serializers.load(tmp_path / "saved", part := nn.Linear(2, 2), "updater/model:main/body")
    assert same(model, alone)
    assert same(model.body, part)


@pytest.mark.filterwarnings("ignore:two updates")  # a buffer that is not to be saved
def test_state_from_before_a_change_is_loaded_into_a_changed_model(tmp_path):
    """As a rehearsal does, and a run that goes back."""
    trainer, model, optimizer = made(tmp_path, 0)
    before = trainer.updater.state_dict()
    trainer.rehearse()
    trainer.updater.update()
    optimizer.add_param_group({"params": list(model.head.parameters())})
    trainer.updater.load_state_dict(before)
    assert (model.last, model.seen.numel(), model.count.dtype, hasattr(model.body, "late")) == (None, 0, torch.int64, False)
    assert len(optimizer.param_groups) == 1
    trainer.updater.update()


def test_a_buffer_that_the_script_changes_itself_before_it_loads_is_filled(tmp_path):
    """By a first batch, say, before the run; also from a snapshot of a version that did not record such changes."""

    def warm(seed):
        trainer, model, _ = made(tmp_path, seed)
        model(torch.ones(4, 2))
        return trainer, model

    trainer, model = warm(0)
    state = trainer.updater.state_dict()
    assert state.pop("changed_buffers:main")
    other, loaded = warm(1)
    loaded.body.late += 1
    other.updater.load_state_dict(state)
    assert same(model, loaded)


def test_a_buffer_of_another_shape_in_the_script_is_still_an_error(tmp_path):
    """It has not grown in the run: the model is another one."""
    trainer, *_ = made(tmp_path, 0)
    other, other_model, _ = made(tmp_path, 1)
    other_model.register_buffer("start", torch.ones(3))
    changed = training.Trainer(other.updater, (9, "iteration"), out=str(tmp_path / "changed"))
    serializers.save(tmp_path / "saved", trainer)
    with pytest.raises(RuntimeError, match="size mismatch for start"):
        serializers.load(tmp_path / "saved", changed)


def test_a_parameter_group_that_was_added_is_made_again(tmp_path):
    """With its settings and its state, by the names of its parameters; training goes on alike."""
    trainer, model, optimizer = made(tmp_path, 0)
    trainer.updater.update()
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.5})
    trainer.updater.update()
    again, loaded, restored = saved_and_loaded(tmp_path, trainer)
    assert [group["lr"] for group in restored.param_groups] == [0.001, 0.5]
    for each in (trainer, again):
        each.updater.update()
    assert same(model, loaded)
    assert len(restored.state) == 4


def test_a_group_that_was_added_to_an_optimizer_of_named_parameters_is_made_again(tmp_path):
    """PyTorch demands names of all or of none."""

    def named(seed):
        trainer, model, _ = made(tmp_path, seed)
        optimizer = torch.optim.Adam(list(model.body.named_parameters(prefix="body")))
        updater = training.StandardUpdater(trainer.updater.get_iterator("main"), optimizer, model)
        return training.Trainer(updater, (9, "iteration"), out=str(tmp_path / f"named{seed}")), model, optimizer

    trainer, model, optimizer = named(0)
    optimizer.add_param_group({"params": list(model.head.named_parameters(prefix="head"))})
    trainer.updater.update()
    serializers.save(tmp_path / "saved", trainer)
    other, loaded, restored = named(1)
    serializers.load(tmp_path / "saved", other)
    assert [group["param_names"] for group in restored.param_groups] == [
        ["body.weight", "body.bias"],
        ["head.weight", "head.bias"],
    ]
    for each in (trainer, other):
        each.updater.update()
    assert same(model, loaded)


def test_a_parameter_that_left_its_group_stays_out(tmp_path):
    """A resumed run trains what the saved one trained."""
    trainer, _, optimizer = made(tmp_path, 0)
    trainer.updater.update()
    del optimizer.state[optimizer.param_groups[0]["params"].pop()]
    _, loaded, restored = saved_and_loaded(tmp_path, trainer)
    assert [parameter is loaded.body.weight for parameter in restored.param_groups[0]["params"]] == [True]


def test_other_groups_in_the_script_are_still_an_error(tmp_path):
    """Nothing was added in the run."""
    trainer, *_ = made(tmp_path, 0)
    serializers.save(tmp_path / "saved", trainer)
    other, model, optimizer = made(tmp_path, 1)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    changed = training.Trainer(other.updater, (9, "iteration"), out=str(tmp_path / "changed"))
    with pytest.raises(ValueError, match=r"only here: .*main/head/bias"):
        serializers.load(tmp_path / "saved", changed)


def test_state_of_an_optimizer_under_a_name_of_its_own_comes_back(tmp_path):
    """Beside that of its parameters."""
    trainer, _, optimizer = made(tmp_path, 0)
    trainer.updater.update()
    optimizer.state["shared"] = {"norm": torch.rand(2), "steps": 3}
    _, _, restored = saved_and_loaded(tmp_path, trainer)
    assert restored.state["shared"]["steps"] == 3
    assert torch.equal(restored.state["shared"]["norm"], optimizer.state["shared"]["norm"])
    assert len(restored.state) == 3


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda model, optimizer: optimizer.state.update({torch.ones(2): {}}),
            r"optimizer:main/state .* tensor of shape \[2\]",
        ),
        (lambda model, optimizer: optimizer.state.update({model.head.bias: {}}), r"optimizer:main/state .* main/head/bias"),
        (lambda model, optimizer: optimizer.state.update({5: {}}), r"optimizer:main/state has the key 5"),
        (
            lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            r"optimizer:main/param_groups/1 .* belongs to no model",
        ),
    ],
    ids=["a tensor", "a parameter of no group", "a number", "a parameter of no model"],
)
def test_what_could_not_be_loaded_again_is_refused_at_the_snapshot(tmp_path, spoil, match):
    """With its path; nothing is written."""
    trainer, model, optimizer = made(tmp_path, 0)
    spoil(model, optimizer)
    with pytest.raises(ValueError, match=match):
        serializers.save(tmp_path / "saved", trainer)
    assert not (tmp_path / "saved").exists()


def test_an_unchanged_run_saves_nothing_more(tmp_path):
    """Snapshots have the keys that they always had."""
    trainer, *_ = made(tmp_path, 0)
    assert not [key for key in trainer.updater.state_dict() if "changed" in key or "initial" in key or "other" in key]


class Twice:
    def serialize(self, serializer):
        serializer("count", 1)
        serializer("count", 1)


class Two:
    def serialize(self, serializer):
        serializer.visit("part", Once())
        serializer.visit("part", Other())


class Once:
    def serialize(self, serializer):
        serializer("count", 1)


class Other(Once):
    pass


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def serialize(self, serializer):
        serializer("weight", torch.zeros(2))


def colliding():
    model = nn.Module()
    model.add_module("a", nn.Module())
    model.a.add_module("b", nn.Linear(1, 1))
    model.add_module("a/b", nn.Bilinear(1, 1, 1))
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Twice, "'x/count' is saved twice, by the serialize of Twice, "),
        (Two, "'x/part/count' is saved twice, by the serialize of Once and the serialize of Other"),
        (Hides, "'x/weight' is saved twice, by the parameters and buffers of Hides and the serialize of Hides"),
        (colliding, r"'a\.b\.weight' of a Linear and 'a/b\.weight' of a Bilinear, have one path .* 'x/a/b/weight'"),
    ],
)
def test_one_path_for_two_values_is_refused_with_both_owners(make, match):
    """Only one of them could be loaded."""
    with pytest.raises(ValueError, match=match):
        DictionarySerializer().visit("x", make())


def test_a_serializer_that_saved_once_can_be_read_often():
    """What is refused is a second value, not a second reader."""
    saved = DictionarySerializer()
    saved.visit("x", Once())
    for _ in range(2):
        DictionaryDeserializer(saved.target).visit("x", Once())
