"""Tensors of every format and layout go on from the disk bit for bit, and so does what optimizers keep of them."""

import math
from collections import Counter

import pytest
import torch
from on_disk import Closing, Recorder, bits, check_every_iteration, data, everything, place, trainer_of
from safetensors import safe_open
from torch import nn

import chainring
from chainring import serializers, training


def real_parameters():
    """One of every format and layout, each to be found by its name."""
    cube = torch.randn(2, 3, 2, 2)
    return {
        "bf16": torch.randn(3, 2).bfloat16(),
        "f16": torch.randn(3).half(),
        "f64": torch.randn(2, 2).double(),
        "scalar": torch.randn(()),
        "bf16_scalar": torch.randn(()).bfloat16(),
        "empty": torch.randn(0, 3),
        "channels_last": cube.to(memory_format=torch.channels_last),
        "channels_last_of_one": torch.randn(2, 1, 3, 3).to(memory_format=torch.channels_last),
        "bf16_channels_last": cube.bfloat16().to(memory_format=torch.channels_last),
        "turned": torch.randn(3, 2).t(),
        "permuted": torch.randn(2, 3, 4).permute(1, 2, 0),
    }


def complex_parameters():
    return {
        "complex64": torch.randn(3, 2, dtype=torch.complex64),
        "complex128": torch.randn(2, 2, dtype=torch.complex128),
        "scalar": torch.randn((), dtype=torch.complex64),
        "empty": torch.randn(0, 3, dtype=torch.complex128),
        "turned": torch.randn(3, 2, dtype=torch.complex128).t(),
        "channels_last": torch.randn(2, 3, 2, 2, dtype=torch.complex64).to(memory_format=torch.channels_last),
    }


class Values(nn.Module):
    """Draws each of its parameters towards a number of the batch."""

    def __init__(self, values):
        super().__init__()
        self.values = nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})

    def forward(self, x):
        target = x.mean()
        parts = [(value - target.to(value.dtype)).abs().square().sum().double() for value in self.values.values()]
        return torch.stack(parts).sum()


class Conv(nn.Module):
    """Convolutions, a normalization with running statistics, and buffers of all kinds that follow the batches."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("signs", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("average", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("bytes", torch.zeros(2, 2, dtype=torch.uint8))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("none", torch.zeros(0, 3, dtype=torch.int32))
        self.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(3) > 0.5, requires_grad=False)

    def forward(self, x):
        self.seen += len(x)
        self.signs.copy_(x.mean((1, 2, 3)) > 0)
        self.average.add_(x.mean())
        self.bytes += 100  # wraps around
        self.wave *= complex(0.6, 0.8)
        return self.body(x.to(memory_format=torch.channels_last)).square().mean()


class Master(torch.optim.Optimizer):
    """SGD with momentum in float32 beside parameters of fewer bits, as mixed precision keeps it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    master = parameter.detach().float()
                    counts = {"updates": torch.tensor(0), "moved": torch.zeros_like(master, dtype=torch.bool)}
                    state.update(master=master, momentum=torch.zeros_like(master), counts=counts, past=[])
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(group["lr"] * state["momentum"])
                state["counts"]["updates"] += 1
                state["counts"]["moved"] |= state["momentum"] != 0
                state["past"] = [*state["past"][-2:], state["momentum"].double().norm()]
                parameter.copy_(state["master"])


OPTIMIZERS = {
    "ASGD": {"t0": 2},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True, "lr": 0.01},
    "AdamW": {"foreach": True, "lr": 0.01},
    "Adamax": {},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 2},
    "NAdam": {},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}


def taken_by(name, values):
    """The parameters that an optimizer of torch takes: two have limits of their own."""
    if name == "LBFGS":  # it views each gradient as a row
        return {key: value for key, value in values.items() if value.is_contiguous()}
    if name == "Adafactor":  # it divides by the number of values
        return {key: value for key, value in values.items() if value.numel()}
    return values


def builder(model, name, inputs=None, **settings):
    def build(stop, out):
        made = model()
        trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
        optimizer = Master(trained) if name == "Master" else getattr(torch.optim, name)(trained, **settings)
        kind = Closing if name == "LBFGS" else training.StandardUpdater
        return trainer_of(made, optimizer, stop, out, inputs=inputs, kind=kind)

    return build


def through(directory, build, prepare=lambda trainer: None):
    """A trainer, prepared, and a fresh one into which it was loaded from the disk."""
    chainring.deterministic(1)
    saved = build(3, directory / "saved")
    prepare(saved)
    serializers.save(directory / "snapshot", saved)
    chainring.deterministic(2)
    loaded = build(3, directory / "loaded")
    serializers.load(directory / "snapshot", loaded)
    return saved, loaded


def tensors_in(snapshot):
    """The names under which tensors are stored, and the bytes of the file."""
    (path,) = snapshot.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        return sorted(file.keys()), path.stat().st_size


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS.items())
def test_real_parameters_of_every_format_and_layout_go_on_bit_for_bit(tmp_path, name, settings):
    """Formats of 16, 32 and 64 bits, no dimension, no values, channels last, turned: with the optimizer's state."""
    check_every_iteration(tmp_path, builder(lambda: Values(taken_by(name, real_parameters())), name, **settings))


@pytest.mark.parametrize(("name", "settings"), [item for item in OPTIMIZERS.items() if item[0] != "Adafactor"])
def test_complex_parameters_of_every_layout_go_on_bit_for_bit(tmp_path, name, settings):
    """With every optimizer that takes them; complex128 too, which other readers see as pairs."""
    check_every_iteration(tmp_path, builder(lambda: Values(taken_by(name, complex_parameters())), name, **settings))


def test_parameters_in_bfloat16_go_on_with_state_in_float32(tmp_path):
    """Torch alone would round the copies in float32 to the parameter's format, and booleans and counts with them."""
    build = builder(lambda: Values(real_parameters()), "Master")
    seen = check_every_iteration(tmp_path, build)
    for entry, dtype in {"master": torch.float32, "counts'/'updates": torch.int64, "counts'/'moved": torch.bool}.items():
        assert seen[3][f"/'optimizer'/'state'/0/'{entry}'"][0] is dtype


def test_state_that_was_made_float32_by_hand_comes_back_as_such(tmp_path):
    """In the format and the bits in which it was saved, although Adam itself keeps bfloat16."""

    def widen(trainer):
        optimizer = trainer.updater.get_optimizer("main")
        for parameter in trainer.updater.get_model("main").parameters():
            wide = {key: torch.rand_like(parameter, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **wide}

    values = {"line": torch.randn(3).bfloat16(), "cube": real_parameters()["bf16_channels_last"]}
    saved, loaded = through(tmp_path, builder(lambda: Values(values), "Adam"), widen)
    assert everything(loaded) == everything(saved)
    states = loaded.updater.get_optimizer("main").state.values()
    assert {entries["exp_avg"].dtype for entries in states} == {torch.float32}


def test_words_and_counts_in_an_optimizers_state_come_back(tmp_path):
    """Torch alone would take a word for a list of letters, and make a dict of a Counter."""

    def add(trainer):
        for parameter in trainer.updater.get_model("main").parameters():
            entries = {"phase": "warm-up", "visits": Counter({3: 2}), "none": None, "few": (1, torch.tensor([True]))}
            trainer.updater.get_optimizer("main").state[parameter] = entries

    saved, loaded = through(tmp_path, builder(lambda: Values({"line": torch.randn(3)}), "SGD"), add)
    assert everything(loaded) == everything(saved)


@pytest.mark.parametrize("shape", [(2, 0, 2, 2), (0, 3, 2, 2)])
def test_an_empty_tensor_keeps_its_strides(tmp_path, shape):
    """So that what is asked for in channels_last is found in channels_last, with values or without."""
    build = builder(lambda: Values({"empty": torch.zeros(shape).to(memory_format=torch.channels_last)}), "Adam")
    check_every_iteration(tmp_path, build)


@pytest.mark.parametrize(("name", "settings"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"amsgrad": True})])
def test_convolutions_in_channels_last_go_on_with_all_their_buffers(tmp_path, name, settings):
    """Weights and momenta in the same strides; running statistics, counts, flags, and parameters that are no floats."""
    build = builder(lambda: Conv().to(memory_format=torch.channels_last), name, data(1, 5, 5), **settings)
    seen = check_every_iteration(tmp_path, build)
    strides = torch.empty(2, 4, 1, 1).to(memory_format=torch.channels_last).stride()
    momentum = "momentum_buffer" if name == "SGD" else "exp_avg"
    assert seen[3]["/'parameters'/'body.3.weight'"][2] == seen[3][f"/'optimizer'/'state'/4/'{momentum}'"][2] == strides


def test_a_tied_parameter_is_stored_once_and_is_one_tensor_afterwards(tmp_path):
    """The file has its bytes once, as it has those of its momentum; a step of the resumed run moves both names."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 50)
            self.out = nn.Linear(50, 100, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x):
            return self.out(self.table((x[:, 0].abs() * 8).long())).square().mean()

    build = builder(Tied, "SGD", lr=0.1, momentum=0.9)
    check_every_iteration(tmp_path, build)
    names, size = tensors_in(place(tmp_path, 3))
    assert [name for name in names if "weight" in name] == [
        "updater/model:main/table/weight",
        "updater/optimizer:main/state/main/table/weight/momentum_buffer",
    ]
    assert 2 * 100 * 50 * 4 < size < 3 * 100 * 50 * 4
    resumed = build(5, tmp_path / "again")
    resumed.extend(Recorder())
    serializers.load(place(tmp_path, 3), resumed)
    resumed.run()
    model = resumed.updater.get_model("main")
    assert model.out.weight is model.table.weight


def test_every_bit_of_what_is_no_number_comes_back(tmp_path):
    """The sign and the payload of a NaN, the sign of zero, infinities, the smallest numbers."""
    words = torch.tensor([0x7FC01234, -0x3FEDCC, -0x80000000, 0x7F800000, 0x00000001], dtype=torch.int32)

    def poison(trainer):
        for parameter in trainer.updater.get_model("main").parameters():
            parameter.data.copy_(words.view(torch.float32))
            trainer.updater.get_optimizer("main").state[parameter]["momentum_buffer"] = words.view(torch.float32).clone()

    saved, loaded = through(tmp_path, builder(lambda: Values({"line": torch.randn(5)}), "SGD", momentum=0.9), poison)
    assert everything(loaded) == everything(saved)
    (parameter,) = loaded.updater.get_model("main").parameters()
    assert torch.equal(parameter.detach().view(torch.int32), words)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(0.0), torch.tensor(0)),
        (torch.tensor(1.0), torch.tensor([1.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(0, 3), torch.zeros(0, 2)),
        (torch.zeros(2), torch.zeros(2).bfloat16()),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
    ],
)
def test_the_comparison_of_these_tests_notices(one, other):
    """Sign, kind, shape, strides and format; and a NaN is equal to itself."""
    assert bits(one) != bits(other)
    assert bits(torch.tensor(math.nan)) == bits(torch.tensor(math.nan))
