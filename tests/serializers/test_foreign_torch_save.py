"""Files of ``torch.save``, as scripts and tutorials write them, are loaded into a model or continued by a trainer."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_runs import Net, assert_close, assert_same, make, moments, train, trainer_of
from torch import nn

from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.training import extensions


@pytest.fixture
def saved(tmp_path):
    """A run of two epochs, and the file that it has saved."""
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 20)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "epoch": 2, "iteration": 20, "best": 0.5}, tmp_path / "any name")
    return tmp_path / "any name", (model, optimizer, scheduler)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_is_loaded_into_a_model(tmp_path, capsys, legacy):
    """Of a file of either form that torch has written."""
    model, other = make()[0], make(1)[0]
    torch.save(model.state_dict(), tmp_path / "weights", _use_new_zipfile_serialization=not legacy)
    serializers.load(tmp_path / "weights", other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert "a file of torch.save" in capsys.readouterr().out


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_that_a_wrapper_has_put_before_all_names_is_found(tmp_path, prefix):
    """That of DDP, of an attribute, of torch.compile."""
    model, other = make()[0], make(1)[0]
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "weights")
    serializers.load(tmp_path / "weights", other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_part_is_loaded_by_its_path(tmp_path):
    """Of two parts that are alike, the one that is named."""
    both = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    torch.save(both.state_dict(), tmp_path / "both")
    model = nn.Linear(2, 2)
    serializers.load(tmp_path / "both", model, "b")
    assert_same(dict(model.state_dict()), dict(both["b"].state_dict()))
    with pytest.raises(ValueError, match="nothing under 'c'"):
        serializers.load(tmp_path / "both", model, "c")


def test_what_does_not_fit_is_an_error_and_changes_nothing(tmp_path):
    """Another shape, other numbers, a missing and an unexpected entry."""
    model = make(1)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    good = dict(make()[0].state_dict())
    for name, value, message in (
        ("last.weight", torch.zeros(3, 8), r"last.weight: shape \[3, 8\] there, \[2, 8\] here"),
        ("last.weight", torch.zeros(2, 8, dtype=torch.int64), "last.weight: torch.int64 there, torch.float32 here"),
        ("last.weight", None, "missing: last.weight"),
        ("more", torch.zeros(2), "unexpected: more"),
    ):
        torch.save({key: entry for key, entry in {**good, name: value}.items() if entry is not None}, tmp_path / "bad")
        with pytest.raises(RuntimeError, match=message):
            serializers.load(tmp_path / "bad", model)
        assert_same(dict(model.state_dict()), before)
    serializers.load(tmp_path / "bad", model, strict=False)
    assert_same(dict(model.state_dict()), good)


def test_parameters_moments_scheduler_and_counts_come_into_a_trainer(saved, tmp_path, capsys):
    """To the bit; it prints what was taken, and what is not there."""
    path, (model, optimizer, scheduler) = saved
    own = make(1)
    trainer = trainer_of(*own, tmp_path / "out")
    serializers.load(path, trainer)
    assert_same(dict(own[0].state_dict()), dict(model.state_dict()))
    assert_same(moments(own[1]), moments(optimizer))
    assert own[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert own[2].last_epoch == scheduler.last_epoch == 2
    assert (trainer.updater.iteration, trainer.updater.epoch, trainer.updater.epoch_detail) == (20, 2, 2.0)
    said = capsys.readouterr().out
    for line in (
        "9 of 9 parameters and buffers",
        "6 of 6 parameters, 20 updates",
        "StepLR after 2 steps",
        "iteration 20, epoch 2",
    ):
        assert line in said
    assert "not loaded: best" in said
    assert "missing: random generators" in said


def test_the_continued_run_follows_the_loop_that_goes_on(saved, tmp_path):
    """Two more epochs, the scheduler's steps included; each trigger fires where it did."""
    path, theirs = saved
    train(*theirs, 20)
    own = make(1)
    trainer = trainer_of(*own, tmp_path / "out")
    seen = []
    trainer.extend(lambda t: seen.append(t.updater.iteration), name="seen", trigger=(1, "epoch"))
    serializers.load(path, trainer)
    trainer.run()
    assert (trainer.updater.iteration, seen) == (40, [30, 40])
    assert_close(own[0], theirs[0])
    assert own[1].param_groups[0]["lr"] == theirs[1].param_groups[0]["lr"]


def test_the_same_command_again_continues_from_the_snapshots_of_the_run_itself(saved, tmp_path):
    """And not from where the other library had stopped."""

    def run(stop):
        trainer = trainer_of(*make(1), tmp_path / "out", stop)
        trainer.extend(extensions.snapshot(autoload=True))
        begun = []
        trainer.extend(lambda t: begun.append(t.updater.iteration), name="begun", trigger=(1, "iteration"))
        serializers.load(saved[0], trainer)
        trainer.run()
        return begun[0]

    assert run((3, "epoch")) == 21
    assert run((4, "epoch")) == 31
    assert not (tmp_path / "out" / "abandoned").exists()


def test_an_optimizer_saved_by_names_is_loaded_by_names(tmp_path):
    """Also where its groups have the parameters in another order."""
    model, _, scheduler = make()
    named = torch.optim.Adam(list(model.named_parameters()), 1e-2)
    train(model, named, scheduler, 3)
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "file")
    own = Net()
    reversed_optimizer = torch.optim.Adam(list(own.parameters())[::-1], 1e-2)
    updater = training.StandardUpdater(SerialIterator([(0, 0)] * 4, 2), reversed_optimizer, own)
    serializers.load(tmp_path / "file", training.Trainer(updater, out=tmp_path / "out"))
    theirs = {name: named.state[parameter] for name, parameter in model.named_parameters()}
    assert_same({name: reversed_optimizer.state[parameter] for name, parameter in own.named_parameters()}, theirs)
    assert updater.iteration == 3


def two_groups(model, order=1):
    """Weights and biases of `Net`, decayed and not."""
    groups = [([p for p in model.parameters() if p.ndim > 1], 0.1), ([p for p in model.parameters() if p.ndim < 2], 0.0)]
    return torch.optim.AdamW([{"params": params, "weight_decay": decay} for params, decay in groups[::order]], 1e-2)


def equal_groups(model, order=1):
    """The two layers of a pair of equal ones, with learning rates of their own."""
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(model, (0.1, 0.2), strict=True)]
    return torch.optim.Adam(groups[::order])


def pair():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Wrapping(torch.optim.Optimizer):
    """Saves the optimizer that it wraps below a name of its own, as some Lookaheads and SAMs do."""

    def __init__(self, optimizer):
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.state, self.param_groups = optimizer.state, optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"base": self.optimizer.state_dict(), "slow": 3}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["base"])


@pytest.mark.parametrize(
    ("net", "theirs", "ours", "message"),
    [
        (
            Net,
            lambda model: torch.optim.Adam(model.parameters()),
            lambda model: Wrapping(torch.optim.Adam(model.parameters())),
            r"state_dict\(\) of Wrapping has another form, \['base', 'slow'\]: load it into an updater with the optimizer",
        ),
        (Net, two_groups, lambda model: torch.optim.AdamW(model.parameters(), 1e-2), r"\[2, 4\] parameters .* \[6\]"),
        (Net, two_groups, lambda model: two_groups(model, -1), r"\[2, 4\] parameters .* \[4, 2\]"),
        (pair, equal_groups, lambda model: equal_groups(model, -1), "group 0 in group 1"),
        (Net, two_groups, lambda model: torch.optim.SGD(two_groups(model).param_groups, 1e-2), "another one than SGD"),
        (
            Net,
            lambda model: torch.optim.Adam(model.parameters()),
            lambda model: torch.optim.AdamW(model.parameters()),
            "Adam and AdamW are not the same",
        ),
        (
            Net,
            lambda model: torch.optim.Adam(model.parameters()),
            lambda model: torch.optim.Adam(list(model.parameters())[::-1]),
            r"shape \[8, 4\], and the parameter here is .* \[2\]",
        ),
    ],
)
def test_an_optimizer_of_numbers_is_refused_where_their_order_is_not_certain(tmp_path, net, theirs, ours, message):
    """Or their form: groups of other sizes, exchanged, of another optimizer. Without strict, the rest alone is loaded."""
    model = net()
    optimizer = theirs(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file")
    own = net()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    updater = training.StandardUpdater(SerialIterator([0, 1], 2), ours(own), own)
    trainer = training.Trainer(updater, out=tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        serializers.load(tmp_path / "file", trainer)
    assert_same(dict(own.state_dict()), before)
    assert updater.iteration == 0
    serializers.load(tmp_path / "file", trainer, strict=False)
    assert_same(dict(own.state_dict()), dict(model.state_dict()))
    assert not updater.get_optimizer("main").state


def test_numbers_are_refused_where_the_saved_model_had_its_modules_in_another_order(tmp_path):
    """Layers of one shape, which nothing else tells apart."""

    def make_model(*names):
        return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    model = make_model("a", "b")
    optimizer = torch.optim.Adam(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file")
    own = make_model("b", "a")
    updater = training.StandardUpdater(SerialIterator([0, 1], 2), torch.optim.Adam(own.parameters()), own)
    with pytest.raises(ValueError, match=r"'a.weight' where this one has 'b.weight'"):
        serializers.load(tmp_path / "file", training.Trainer(updater, out=tmp_path / "out"))


def below(**models):
    """One state dict of several models, each below its name."""
    return {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}


def apart(**models):
    return {name: model.state_dict() for name, model in models.items()}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (below(generator=pair(), discriminator=pair()), ("discriminator", "generator")),
        (below(model=pair(), ema=pair()), ("ema", "model")),
        (below(student=pair(), teacher=pair()), ("student", "teacher")),
        (below(module=pair(), model_ema=pair()), ("model_ema", "module")),
        ({"state_dict": below(online=pair(), target=pair())}, ("online", "target")),
        (apart(generator=pair(), discriminator=pair()), ("discriminator", "generator")),
        (apart(model=pair(), net=pair()), ("model", "net")),
        (apart(state_dict=pair(), module=pair(), ema=pair()), ("module", "state_dict")),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else "",
)
def test_of_several_models_that_fit_one_is_taken_by_its_name_alone(tmp_path, content, names):
    """None is taken because its name comes first, whether they stand in one state dict or in several."""
    torch.save(content, tmp_path / "file")
    own = pair()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"{names[0]}.*{names[1]}.* by path_in_snapshot"):
            serializers.load(tmp_path / "file", own, strict=strict)
    assert_same(dict(own.state_dict()), before)
    for name in names:
        serializers.load(tmp_path / "file", own, name)
        part = content.get(name) or {key: content.get("state_dict", content)[f"{name}.{key}"] for key in before}
        assert_same(dict(own.state_dict()), dict(part))


@pytest.mark.parametrize(("usual", "other"), [("model", "ema"), ("state_dict", "state_dict_ema"), ("model", "critic")])
def test_the_model_of_the_usual_name_is_taken_beside_others_and_they_are_named(tmp_path, capsys, usual, other):
    """An average of the parameters is loaded by its name."""
    model, average = pair(), pair()
    torch.save({usual: model.state_dict(), other: average.state_dict(), "epoch": 2}, tmp_path / "file")
    own = pair()
    serializers.load(tmp_path / "file", own)
    assert_same(dict(own.state_dict()), dict(model.state_dict()))
    assert f"not loaded: {other}" in capsys.readouterr().out
    serializers.load(tmp_path / "file", own, other)
    assert_same(dict(own.state_dict()), dict(average.state_dict()))


@pytest.mark.parametrize(
    ("first", "second"),
    [("_orig_mod.", ""), ("", "_orig_mod."), ("module._orig_mod.", "module."), ("_orig_mod.", "_orig_mod._orig_mod.")],
)
def test_a_name_with_and_without_the_prefix_of_a_compiled_module_is_refused(tmp_path, first, second):
    """Two models in one state dict, of which the second would take the place of the first."""
    content = {prefix + key: value for prefix in (first, second) for key, value in pair().state_dict().items()}
    torch.save(content, tmp_path / "file")
    with pytest.raises(ValueError, match="with and without '_orig_mod"):
        serializers.load(tmp_path / "file", pair())


class Holding(nn.Module):
    """A buffer of some dtype."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("value", value)


@pytest.mark.parametrize(
    ("number", "saved", "own"),
    [
        (70000.0, torch.float32, torch.float16), (1e39, torch.float64, torch.float32), (3e38, torch.bfloat16, torch.float16),
        (1e300, torch.float64, torch.bfloat16), (1e39 + 1j, torch.complex128, torch.complex64),
        (300, torch.int64, torch.int8), (2**40, torch.int64, torch.int32), (-1, torch.int64, torch.uint8),
        (200, torch.uint8, torch.int8), (-1, torch.int64, torch.uint64),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_the_dtype_of_the_model_lacks_are_refused(tmp_path, number, saved, own):
    """They would become infinite, or another integer; nothing is changed."""
    torch.save({"value": torch.tensor([number], dtype=saved)}, tmp_path / "file")
    model = Holding(torch.ones(1, dtype=own))
    with pytest.raises(RuntimeError, match=f"{saved} there, {own} here, which lacks its values"):
        serializers.load(tmp_path / "file", model)
    assert model.value.tolist() == [1]


@pytest.mark.parametrize(
    ("number", "saved", "own", "is_rounded"),
    [
        (0.1, torch.float32, torch.float16, True), (0.1, torch.float32, torch.bfloat16, True),
        (0.1, torch.float16, torch.bfloat16, True), (1e-30, torch.float32, torch.float16, True),
        (0.1, torch.float64, torch.float32, True), (1e-20, torch.bfloat16, torch.float16, True),
        (0.5, torch.float32, torch.float16, False), (float("inf"), torch.float32, torch.float16, False),
        (float("nan"), torch.float64, torch.float32, False), (0.1, torch.float16, torch.float32, False),
        (100, torch.int64, torch.int8, False),
    ],
    ids=str,
)  # fmt: skip
def test_each_conversion_that_changes_a_value_is_printed(tmp_path, capsys, number, saved, own, is_rounded):
    value = torch.tensor([number], dtype=saved)
    torch.save({"value": value}, tmp_path / "file")
    model = Holding(torch.ones(1, dtype=own))
    serializers.load(tmp_path / "file", model)
    assert repr(model.value) == repr(value.to(own))
    assert ("rounded: " in capsys.readouterr().out) == is_rounded


@pytest.mark.parametrize(
    "order", [("1.weight", "1.bias", "0.weight", "0.bias"), ("0.weight", "1.bias", "1.weight", "0.bias")]
)
def test_parameters_of_one_shape_in_another_order_than_the_model_are_refused(tmp_path, order):
    """Saved by number, in the order of the model: their moments would be exchanged."""
    model, own = pair(), pair()
    optimizer = torch.optim.Adam(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file")
    named = dict(own.named_parameters())
    updater = training.StandardUpdater(SerialIterator([0, 1], 2), torch.optim.Adam([named[name] for name in order]), own)
    with pytest.raises(ValueError, match="parameters of one shape in another order than the model"):
        serializers.load(tmp_path / "file", training.Trainer(updater, out=tmp_path / "out"))


def test_names_that_control_a_terminal_are_printed_as_text(tmp_path, capsys):
    """Those of entries and of what is not loaded, in reports and in errors."""
    torch.save({"model": pair().state_dict(), "\x1b[31m": 3}, tmp_path / "file")
    serializers.load(tmp_path / "file", pair())
    torch.save({**pair().state_dict(), "\x1b[2Jmore": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(RuntimeError, match=r"unexpected: \\x1b\[2Jmore") as refused:
        serializers.load(tmp_path / "other", pair())
    shown = capsys.readouterr().out + str(refused.value)
    assert "\\x1b[31m" in shown
    assert "\x1b" not in shown


def test_several_optimizers_with_names_are_found_by_them(tmp_path):
    """Of a snapshot of pytorch-pfn-extras; other names are refused, because nothing else tells them apart."""
    model = pair()
    optimizers = {"a": torch.optim.Adam(model[0].parameters()), "b": torch.optim.Adam(model[1].parameters())}
    for parameter in model.parameters():
        parameter.grad = torch.rand(parameter.shape)
    for optimizer in optimizers.values():
        optimizer.step()
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    torch.save({"_start_iteration": 1, "models": {"main": model.state_dict()}, "optimizers": states}, tmp_path / "file")

    def load(one, other):
        own = pair()
        made = {one: torch.optim.Adam(own[1].parameters()), other: torch.optim.Adam(own[0].parameters())}
        updater = training.StandardUpdater(SerialIterator([0, 1], 2), made, own)
        serializers.load(tmp_path / "file", training.Trainer(updater, out=tmp_path / "out"))
        return made

    assert_same(moments(load("b", "a")["a"]), moments(optimizers["a"]))
    with pytest.raises(ValueError, match="has the state of the optimizers a, b, and the updater has c, d"):
        load("c", "d")


def test_settings_that_the_script_has_made_otherwise_are_printed(saved, tmp_path, capsys):
    """Those of the checkpoint hold, as in the other library."""
    model, _, _ = own = make(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.5, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    serializers.load(saved[0], trainer_of(own[0], optimizer, scheduler, tmp_path / "out"))
    said = capsys.readouterr().out
    assert "lr 0.01 is taken, the script has 0.5" in said
    assert "betas (0.9, 0.999) is taken, the script has (0.8, 0.99)" in said
    assert "gamma 0.5 is taken, the script has 0.9" in said


def test_moments_keep_their_dtype_beside_parameters_of_another(tmp_path):
    """PyTorch's own load_state_dict would round them."""
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.rand(p.shape), "exp_avg_sq": torch.rand(p.shape)}
        for i, p in enumerate(model.parameters())
    }
    torch.save({"model": model.state_dict(), "optimizer": {**optimizer.state_dict(), "state": state}}, tmp_path / "file")
    updater = training.StandardUpdater(SerialIterator([0, 1], 2), optimizer, model)
    serializers.load(tmp_path / "file", training.Trainer(updater, out=tmp_path / "out"))
    assert_same(moments(optimizer), state)


def test_a_path_in_the_file_becomes_text_and_an_object_of_a_class_is_refused_by_name(tmp_path):
    """A path cannot run anything; what can is named, with a remedy."""
    model = Net()
    torch.save({"model": model.state_dict(), "data": Path("a") / "b", "epoch": 3}, tmp_path / "file")
    serializers.load(tmp_path / "file", Net())
    torch.save({"model": model.state_dict(), "args": Fraction(1, 2)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"it holds fractions.Fraction, which only unpickling could make"):
        serializers.load(tmp_path / "file", Net())


def test_numbers_of_numpy_become_pythons_and_arrays_are_left_out(tmp_path, capsys):
    """As scripts put them beside the model; those of other dtypes are refused."""
    model, optimizer, _ = make()
    optimizer.param_groups[0]["lr"] = np.float32(0.25)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": np.int64(3), "best": np.float64(0.5)}
    torch.save({**state, "curve": np.arange(3.0)}, tmp_path / "file")
    own = make(1)
    trainer = trainer_of(*own, tmp_path / "out")
    serializers.load(tmp_path / "file", trainer)
    assert type(own[1].param_groups[0]["lr"]) is float
    assert own[1].param_groups[0]["lr"] == 0.25
    assert trainer.updater.epoch == 3
    assert "not loaded: best, curve" in capsys.readouterr().out
    torch.save({**state, "time": np.datetime64("2020-01-01")}, tmp_path / "file")
    with pytest.raises(ValueError, match="value of NumPy that is no number"):
        serializers.load(tmp_path / "file", Net())


def test_a_file_without_a_model_is_refused_as_before(tmp_path):
    """As is a pickle that torch has not written."""
    torch.save({"numbers": [1, 2, 3]}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"is a file such as torch\.save or NumPy write, which is not opened"):
        serializers.load(tmp_path / "file", Net())
