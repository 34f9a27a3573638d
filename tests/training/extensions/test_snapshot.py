"""The snapshot: when it is taken, what it holds, and that a run continues from it."""

import math

import pytest
import safetensors.torch
import torch
from scripted import Counting
from snapshots import EVERY, Net, Witness, differing, holds, names, only, run, trainer_of, weights_of

from chainring import serializers, training
from chainring.cli import main
from chainring.serializers._loading import read_state
from chainring.training.extensions import snapshot, snapshot_object
from chainring.training.triggers import MinValueTrigger


def test_by_default_it_is_taken_each_epoch_after_all_else_and_all_are_kept(tmp_path):
    """Named after the iteration; the state is that after the last extension of the iteration."""
    taken, witness = snapshot(), Witness()
    run(tmp_path, 7, taken, witness)
    assert (taken.trigger, taken.priority, taken.default_name) == ((1, "epoch"), -100, "snapshot")
    assert names(tmp_path) == ["snapshot_iter_3", "snapshot_iter_6"]
    assert all(holds(tmp_path / f"snapshot_iter_{k}", witness.states[k]) for k in (3, 6))


def test_two_in_a_trainer_have_names_of_their_own(tmp_path):
    """The second of the default name is snapshot_1, and a snapshot_object is called by its own."""
    model = Net()
    trainer = trainer_of(tmp_path, 1, snapshot(), snapshot("b"), snapshot_object(model, "m"), model=model)
    for name in ("snapshot", "snapshot_1", "snapshot_object"):
        assert trainer.get_extension(name).is_snapshot


@pytest.mark.parametrize("resumed_from", ["a_3", "b_3", "b_2"])
def test_from_either_of_two_snapshots_of_an_iteration_the_run_fires_as_the_uninterrupted_one(tmp_path, resumed_from):
    """Both triggers were asked before the first was taken, so both hold the same state."""

    def both(out, seed=0):
        a, b = snapshot("a_{.updater.iteration}"), snapshot("b_{.updater.iteration}")
        return trainer_of(out, 9, (a, (1, "epoch")), (b, (0.5, "epoch")), seed=seed)

    both(tmp_path / "whole").run()
    whole = names(tmp_path / "whole")
    assert whole == ["a_3", "a_6", "a_9", "b_2", "b_3", "b_5", "b_6", "b_8", "b_9"]
    assert holds(tmp_path / "whole/a_3", read_state(tmp_path / "whole/b_3"))
    resumed = both(tmp_path / "resumed", seed=7)
    serializers.load(tmp_path / "whole" / resumed_from, resumed)
    resumed.run()
    assert names(tmp_path / "resumed") == [name for name in whole if int(name[2:]) > int(resumed_from[2:])]
    for name in names(tmp_path / "resumed"):
        assert holds(tmp_path / "resumed" / name, read_state(tmp_path / "whole" / name))


def test_nothing_is_saved_where_the_condition_is_false(tmp_path):
    """It is asked each time that the trigger fires."""
    answers = iter([True, False, True])
    run(tmp_path, 3, (snapshot(condition=lambda: next(answers)), EVERY))
    assert names(tmp_path) == ["snapshot_iter_1", "snapshot_iter_3"]


def test_a_condition_that_is_a_false_object_is_asked_too(tmp_path):
    """An empty list of reasons to save, which can be called."""

    class Reasons(list):
        def __call__(self):
            return len(self) > 0

    run(tmp_path, 3, (snapshot(condition=Reasons()), EVERY))
    assert names(tmp_path) == []


class Own:
    """Something of the user's that has state."""

    def __init__(self, value):
        self.value = value

    def serialize(self, serializer):
        self.value = serializer("value", self.value)


def test_a_target_is_saved_in_place_of_the_trainer(tmp_path):
    """An object with serialize, a model, and an optimizer with PyTorch's pair; each in a directory."""
    own, model = Own([1, (2, math.inf)]), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run(
        tmp_path,
        2,
        *((snapshot(f"{name}_{{.updater.iteration}}", target=target), only(2)) for name, target in
          [("own", own), ("model", model), ("optimizer", optimizer)]),
        model=model,
    )  # fmt: skip
    fresh, other = Own(None), Net()
    serializers.load(tmp_path / "own_2", fresh)
    serializers.load(tmp_path / "model_2", other)
    assert fresh.value == [1, (2, math.inf)]
    assert differing(other.state_dict(), model.state_dict()) == []
    again = torch.optim.SGD(other.parameters(), lr=0.1)
    serializers.load(tmp_path / "optimizer_2", again)
    assert again.param_groups[0]["lr"] == 0.5


def test_with_frozen_false_what_needs_no_gradient_keeps_its_values_on_load(tmp_path):
    """Frozen parameters are left out; their buffers, which may change, are not. The trainer continues bit for bit."""

    def start(out, stop, *extensions, body):
        torch.manual_seed(2)
        model = Net(frozen=True)
        torch.manual_seed(body)
        model.body.reset_parameters()
        return trainer_of(out, stop, *extensions, model=model)

    whole, full = Witness(), snapshot("full_{.updater.iteration}")
    start(tmp_path, 4, whole, (full, only(2)), (snapshot(frozen=False), only(2)), body=3).run()
    resumed, kept = start(tmp_path / "resumed", 2, body=4), weights_of(start(tmp_path, 1, body=4).updater.get_model("main"))
    serializers.load(tmp_path / "snapshot_iter_2", resumed)
    loaded = resumed.updater.get_model("main").state_dict()
    saved = {key[19:]: value for key, value in whole.states[2].items() if key.startswith("updater/model:main/")}
    for name in loaded:
        is_frozen = name in ("body.weight", "body.bias", "norm.weight", "norm.bias")
        assert torch.equal(loaded[name], kept[name] if is_frozen else saved[name.replace(".", "/")]), name
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")) for name in names(tmp_path)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1]


def test_a_model_is_loaded_alone_from_a_snapshot_without_frozen_parameters(tmp_path):
    """By the path of the snapshot; what was left out stays as it is."""
    trainer = run(tmp_path, 3, snapshot(frozen=False), model=Net(frozen=True))
    trained, other = trainer.updater.get_model("main"), Net()
    before = weights_of(other)
    serializers.load(tmp_path / "snapshot_iter_3", other)
    assert torch.equal(other.head.weight, trained.head.weight)
    assert torch.equal(other.norm.running_mean, trained.norm.running_mean)
    assert torch.equal(other.body.weight, before["body.weight"])


def test_export_says_that_frozen_parameters_were_left_out(tmp_path, capsys):
    """The file is not the whole model, and whoever exports it learns so."""
    run(tmp_path, 3, snapshot(frozen=False), model=Net(frozen=True))
    capsys.readouterr()
    assert main(["export", str(tmp_path), str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert "body.weight" not in safetensors.torch.load_file(tmp_path / "model")
    assert "snapshot_iter_3 was taken with frozen=False: 4 parameters" in said.out + said.err


def test_the_best_value_is_under_a_fixed_name(tmp_path):
    """MinValueTrigger: the link leads to the iteration of the least loss, and no other is kept."""
    losses = [{"loss": value} for value in (5.0, 3.0, 4.0, 2.0, math.nan, 6.0)]
    trainer = training.Trainer(Counting(losses), (6, "iteration"), str(tmp_path))
    trainer.extend(snapshot(filename="best"), trigger=MinValueTrigger("loss", EVERY))
    trainer.run()
    assert names(tmp_path) == ["best", "best_iter_4"]
    again = training.Trainer(Counting(losses), (4, "iteration"), str(tmp_path / "again"))
    again.extend(snapshot(filename="best"), trigger=MinValueTrigger("loss", EVERY))
    serializers.load(tmp_path / "best", again)
    assert again.updater.iteration == 4
    assert again.observation == {"loss": 2.0}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_snapshot_object_of_a_model_is_a_file_that_any_reader_opens(tmp_path, asynchronous):
    """Each replaces the one before by a rename; damage is noticed."""
    model, path, seen = Net(), tmp_path / "model.safetensors", []

    def look(trainer):
        if path.exists():
            file = path.open("rb")
            seen.append((file, file.read()))

    saving = snapshot_object(model, "model.safetensors", asynchronous=asynchronous)
    run(tmp_path, 4, (saving, EVERY), look, model=model)
    for file, content in seen:
        with file:
            file.seek(0)
            assert file.read() == content  # still, though another has its name by now
        assert safetensors.torch.load(content).keys() == model.state_dict().keys()
    if not asynchronous:
        assert len({content for _, content in seen}) == 3
    assert differing(safetensors.torch.load_file(path), model.state_dict()) == []
    assert names(tmp_path) == ["model.safetensors"]
    other = Net()
    serializers.load(path, other)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        serializers.load(path, other)


def test_snapshot_object_of_anything_else_is_a_directory(tmp_path):
    """Under its own name by iteration, or as a link to the newest."""
    own = Own({"a": 1})
    run(tmp_path, 2, (snapshot_object(own, "own"), EVERY), (snapshot_object(own, "own_{.updater.iteration}"), EVERY))
    assert names(tmp_path) == ["own", "own_1", "own_2", "own_iter_2"]
    for name in names(tmp_path):
        fresh = Own(None)
        serializers.load(tmp_path / name, fresh)
        assert fresh.value == {"a": 1}


def test_the_state_before_the_first_run_can_be_saved(tmp_path):
    """By save, and by a snapshot that is called by hand, before there is an out."""
    out, witness = tmp_path / "result", Witness()
    trainer = trainer_of(out, 3, (snapshot("end"), only()), (witness, EVERY))
    trainer.get_extension("snapshot")(trainer)
    serializers.save(tmp_path / "initial", trainer)
    assert holds(out / "end", trainer.state_dict())
    trainer.run()
    for number, path in enumerate([out / "previous/1/end", tmp_path / "initial"]):
        again, seen = trainer_of(tmp_path / str(number), 3, (snapshot("end"), only()), seed=9), Witness()
        again.extend(seen)
        serializers.load(path, again)
        assert again.elapsed_time == 0.0
        again.run()
        assert differing(seen.states[3], witness.states[3]) == []


@pytest.mark.parametrize(
    ("error", "match", "settings"),
    [
        (TypeError, "filename is a name in out", {"filename": 3}),
        (TypeError, "filename is a name in out", {"filename": None}),
        (ValueError, "got ''", {"filename": ""}),
        (ValueError, "without a slash", {"filename": "a/b"}),
        (ValueError, "without a slash", {"filename": "../b"}),
        (ValueError, "a dot at its beginning", {"filename": ".hidden"}),
        (ValueError, "got 'a{': ", {"filename": "a{"}),
        (ValueError, r"several fields.*{0\.updater", {"filename": "{.updater.epoch}_{.updater.iteration}"}),
        (ValueError, "several fields", {"filename": "{epoch}"}),
        (ValueError, "at least 1, or -1 for all; got 0", {"n_retains": 0}),
        (ValueError, "got -2", {"n_retains": -2}),
        (ValueError, "got 1.5", {"n_retains": 1.5}),
        (ValueError, "got True", {"n_retains": True}),
        (TypeError, "condition is a function without arguments, got bool", {"condition": True}),
        (TypeError, "target is an object with serialize.*object has neither", {"target": object()}),
    ],
)
def test_bad_arguments_are_refused_at_construction(error, match, settings):
    """With rule, value and remedy."""
    with pytest.raises(error, match=match):
        snapshot(**settings)


def test_snapshot_object_refuses_what_has_no_state():
    """Also a name that is none."""
    with pytest.raises(TypeError, match="neither"):
        snapshot_object(object(), "a")
    with pytest.raises(TypeError, match="filename"):
        snapshot_object(Net(), 3)
    with pytest.raises(TypeError, match="NoneType has neither"):
        snapshot_object(None, "a")
