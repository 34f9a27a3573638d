"""What iterations compute, taken down by hooks, and the first module of which the output differs."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import planted
from chainring._runs.comparison import first_difference
from chainring.testing._live_traces import Capture, differing_settings, first_module, first_step_apart

FIRST_LAYER = "main/first"
MODULES = {
    "one label": "main",
    "one ulp of a bias": "main/last",
    "one ulp of a scale": "main/norm",
    "a weight in the middle": "main/last",
    "a buffer in the middle": None,  # of running statistics, from which only an evaluation computes
    "a moment in the middle": "main/last",
    "a number drawn in the middle": "main/drop",
    "a number that nothing uses": None,
    "a kernel": "main/act",
    "an activation": "main/act",
    "the rate of dropout": "main/drop",
    "no dropout": "main/drop",
    "the momentum of running statistics": None,
    "the epsilon of a norm": "main/norm",
    "a layer without a bias": "main/drop",  # after initial values for which other numbers were drawn
    "a loss": "main",
    "a penalty": "main",
    "the initial values": "main/last",
    "another frozen layer": "main/last",
    "the decay of an average": None,
}
FIRST_STEPS = {
    "learning rate": (1, "tensor"),
    "one pixel": (1, "module"),
    "one pixel that comes later": (10, "module"),
    "one ulp of a weight": (0, "tensor"),
    "a weight in the middle": (13, "tensor"),
    "a buffer in the middle": (9, "tensor"),
    "a moment in the middle": (5, "tensor"),
    "weight decay in the middle": (12, "tensor"),
    "a number drawn in the middle": (17, "generators"),
    "a number that nothing uses": (17, "generators"),
    "the momentum of running statistics": (1, "tensor"),
    "a frozen layer": (1, "gradient"),
    "another frozen layer": (1, "gradient"),
    "the steps of a schedule": (10, "tensor"),
}


def captured(out, *, in_detail=True, **changes):
    """What each iteration of a run has computed."""
    trainer = planted.make_trainer(str(out), recorded=False, **changes)
    capture = Capture(trainer, 1, planted.LENGTH, in_detail=in_detail)
    capture.look(0)
    trainer.extend(lambda t: capture.look(t.updater.iteration), trigger=(1, "iteration"), name="look", priority=-1000)
    trainer.run()
    return capture.steps


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What a run computes, to which others are compared."""
    return captured(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", planted.DIFFERENCES)
def test_the_first_module_whose_output_differs_is_named(base, tmp_path, name):
    """And the first step that differs: a module's output, the loss, a gradient, a tensor or a generator."""
    steps = captured(tmp_path / "run", **planted.DIFFERENCES[name][0])
    module, first = first_module(base, steps), first_step_apart(base, steps)
    assert (module and module.name) == MODULES.get(name, FIRST_LAYER)
    assert (first is None) == (name == "the decay of an average")
    if name in FIRST_STEPS:
        assert (first.iteration, first.what) == FIRST_STEPS[name]


@pytest.mark.parametrize("name", planted.NUMBERS)
def test_one_ulp_is_seen_where_it_is_changed(base, tmp_path, name):
    """Whatever becomes of it in the iterations that follow, which depends on how a processor rounds."""
    first = first_step_apart(base, captured(tmp_path / "run", later=(13, f"ulp {name}")))
    assert (first.iteration, first.what) == (13, "tensor")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one pixel", "of another input"),
        ("a kernel", "of the same input"),
        ("one ulp of a bias", "of the same input and with other parameters"),
        ("accumulation", "called are nothing -> main/first"),
    ],
)
def test_why_its_output_differs_is_said(base, tmp_path, name, text):
    """By its input and its parameters; or other modules are called."""
    steps = captured(tmp_path / "run", **planted.DIFFERENCES[name][0])
    assert first_module(base, steps).text == text


def test_the_settings_of_the_optimizers_are_compared(base, tmp_path):
    """From the first iteration in which they differ; equal ones are not named."""
    changed = captured(tmp_path / "run", lr=0.021)
    assert differing_settings(base, changed) == (0, ["main/0/lr: 0.02 -> 0.021", "main/0/initial_lr: 0.02 -> 0.021"])
    assert differing_settings(base, base) is None


def test_in_less_detail_the_iteration_is_the_same(tmp_path):
    """Of many iterations no modules are kept, and one digest of all tensors."""
    one = captured(tmp_path / "one", in_detail=False)
    other = captured(tmp_path / "other", in_detail=False, later=(13, "ulp weight"))
    assert first_step_apart(one, other).iteration == first_difference(one, other, ["tensor"]).iteration == 13
    assert first_module(one, other) is None
    assert len(str(one)) < 40_000


def test_hooks_change_nothing_and_are_gone_in_the_end(tmp_path):
    """The model is as it was."""
    trainer = planted.make_trainer(str(tmp_path / "run"), recorded=False)
    Capture(trainer, 1, planted.LENGTH, in_detail=True)
    trainer.run()
    plain = planted.make_trainer(str(tmp_path / "plain"), recorded=False)
    plain.run()
    model, other = (each.updater.get_model("main") for each in (trainer, plain))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in other.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@dataclass
class Output:
    """As libraries of models return it."""

    logits: torch.Tensor


class Nested(nn.Module):
    """Returns a dataclass, a dict with a sparse tensor, or an object that nothing is known of."""

    def __init__(self, kind, factor):
        super().__init__()
        self.kind, self.factor, self.scale = kind, factor, nn.Parameter(torch.ones(2))

    def forward(self, x):
        value = self.scale * x * self.factor
        return {"dataclass": Output(value), "dict": {"a": [value.to_sparse(), 3]}, "object": object()}[self.kind]


class Outer(nn.Module):
    """Has a module whose output is no tensor."""

    def __init__(self, kind, factor):
        super().__init__()
        self.inner = Nested(kind, factor)

    def forward(self, x):
        self.inner(x)
        return self.inner.scale.sum() * self.inner.factor


@pytest.mark.parametrize(("kind", "module"), [("dataclass", "main/inner"), ("dict", "main/inner"), ("object", "main")])
def test_outputs_of_any_kind_are_compared_as_far_as_they_can_be(tmp_path, kind, module):
    """Of what has no values, only the class."""
    found = []
    for factor in (1.0, 1.5):
        model = Outer(kind, factor)
        updater = planted.training.StandardUpdater(
            planted.iterators.SerialIterator([torch.ones(2)] * 8, 4, seed=0), torch.optim.SGD(model.parameters(), 0.1), model
        )
        trainer = planted.training.Trainer(updater, (1, "iteration"), out=str(tmp_path / f"{factor}"))
        capture = Capture(trainer, 1, 1, in_detail=True)
        trainer.run()
        found.append(capture.steps)
    assert first_module(*found).name == module
