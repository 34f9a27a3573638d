"""A module's own serialize is asked beside its parameters and buffers, at any depth, and nothing of it is lost."""

import functools
import math
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from chainring import serializers, training
from chainring.cli import main
from chainring.iterators import SerialIterator
from chainring.parallel import DataParallel
from chainring.serializers import DictionaryDeserializer, DictionarySerializer
from chainring.training import extensions

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, in its compiler


class Recurrent(nn.Module):
    """Remembers its output, counts its calls, and adds them up in an array that is never assigned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.hidden, self.calls, self.sums = None, 0, np.zeros(2, np.float32)

    def forward(self, x):
        self.calls += 1
        output = self.linear(x if self.hidden is None else x + self.hidden).tanh()
        self.hidden = output.detach()
        self.mean += self.hidden.mean(0)
        self.sums += self.hidden.sum(0).cpu().numpy()
        return output

    def serialize(self, serializer):
        self.hidden = serializer("hidden", self.hidden)
        self.calls = serializer("calls", self.calls)
        serializer("sums", self.sums)


class Net(nn.Module):
    """Has a module with state of its own in a list, and another one whose serialize is not the protocol's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Recurrent(), Recurrent()])
        self.last = Unrelated(2, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


class Unrelated(nn.Linear):
    def serialize(self, stream=None):
        raise AssertionError("it is not meant for us")


class LinkStyle(nn.Module):
    """Saves its own parameter, visits one child and calls the serialize of another, as a Chain of Chainer does."""

    def __init__(self):
        super().__init__()
        self.visited, self.called = Recurrent(), Recurrent()
        self.scale = nn.Parameter(torch.rand(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (self.called(self.visited(x)) * self.scale).square().mean()

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)
        serializer("scale", self.scale)
        serializer.visit("visited", self.visited)
        self.called.serialize(serializer["called"])


class Derived(LinkStyle):
    def __init__(self):
        super().__init__()
        self.extra = 0.0

    def serialize(self, serializer):
        super().serialize(serializer)
        self.extra = serializer("extra", self.extra)


def used(model, calls=3):
    for _ in range(calls):
        model(torch.rand(4, 2))
    return model


def state_of(model):
    """Everything that the modules above remember, by path."""
    values = dict(model.state_dict())
    for path, module in model.named_modules():
        values |= {
            f"{path}:{name}": vars(module)[name] for name in ("hidden", "calls", "sums", "extra") if name in vars(module)
        }
    return values


def same(one, other):
    def equal(a, b):
        a, b = (each.cpu() if isinstance(each, torch.Tensor) else each for each in (a, b))
        return type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, (torch.Tensor, np.ndarray)) else a == b)

    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


def trainer_of(model, out):
    updater = training.StandardUpdater(SerialIterator(torch.rand(12, 2), 4), torch.optim.Adam(model.parameters()), model)
    return training.Trainer(updater, (3, "iteration"), out=str(out))


@pytest.mark.parametrize("kind", [Net, LinkStyle, Derived, Recurrent])
def test_a_model_comes_back_with_its_parameters_and_its_own_state(tmp_path, kind):
    """From a directory, which is what it is saved as, from an npz file, and from memory."""
    model = used(kind())
    serializers.save(tmp_path / "model", model)
    assert (tmp_path / "model" / "manifest.json").is_file()
    serializers.save_npz(tmp_path / "model.npz", model)
    saved = DictionarySerializer()
    saved.visit("model", model)
    for load in (
        lambda other: serializers.load(tmp_path / "model", other),
        lambda other: serializers.load_npz(tmp_path / "model.npz", other),
        lambda other: DictionaryDeserializer(saved.target).visit("model", other),
    ):
        other = kind()
        load(other)
        assert same(state_of(other), state_of(model))


@pytest.mark.parametrize("kind", [Net, LinkStyle, Derived])
def test_a_run_goes_on_with_the_own_state_of_its_modules(tmp_path, kind):
    """And so does a model that is loaded alone out of the snapshot, or a part of it."""
    trainer = trainer_of(used(model := kind()), tmp_path / "out")
    trainer.run()
    serializers.save(tmp_path / "saved", trainer)
    resumed, alone = kind(), kind()
    serializers.load(tmp_path / "saved", trainer_of(resumed, tmp_path / "again"))
    serializers.load(tmp_path / "saved", alone)
    assert same(state_of(resumed), state_of(model))
    assert same(state_of(alone), state_of(model))
    path, part = ("layers/1", model.layers[1]) if kind is Net else ("visited", model.visited)
    serializers.load(tmp_path / "saved", other := Recurrent(), f"updater/model:main/{path}")
    assert same(state_of(other), state_of(part))


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: DataParallel(model, ["cpu"]), AveragedModel])
def test_wrappers_show_in_no_key_of_own_state(tmp_path, wrap):
    """A wrapped model is loaded into a plain one and the reverse, each module being asked once."""
    model = used(Net())
    plain, wrapped = DictionarySerializer(), DictionarySerializer()
    plain.visit("", model)
    wrapped.visit("", wrap(model))
    assert wrapped.target.keys() - {"n_averaged", "_orig_mod/n_averaged"} == plain.target.keys()
    assert {"layers/0/calls", "layers/1/hidden"} < wrapped.target.keys()
    serializers.save(tmp_path / "saved", wrap(model))
    if wrap is not AveragedModel:
        serializers.load(tmp_path / "saved", other := Net())
        assert same(state_of(other), state_of(model))
    serializers.load(tmp_path / "saved", wrap(other := Net()))


def test_a_shared_module_is_asked_once(tmp_path):
    """Under its first path, as its parameters are tied under both."""
    model = nn.Sequential(shared := Recurrent(), shared)
    used(model)
    serializers.save(tmp_path / "saved", model)
    other = nn.Sequential(shared := Recurrent(), shared)
    serializers.load(tmp_path / "saved", other)
    assert same(state_of(other), state_of(model))
    assert other[0].calls == 6


@pytest.mark.parametrize(
    "signature", ["self", "self, stream=None", "self, *streams", "self, a, b", "self, *, stream", "self, **streams"]
)
def test_a_serialize_of_another_signature_is_not_called(tmp_path, signature):
    """The module is saved as one file by its state_dict, and an object without one is refused in words."""
    classes = {}
    code = f"def serialize({signature}): raise AssertionError"
    exec(f"class Module(nn.Linear):\n    {code}\nclass Thing:\n    {code}", {"nn": nn}, classes)
    serializers.save(tmp_path / "model", model := classes["Module"](2, 2))
    serializers.load(tmp_path / "model", other := classes["Module"](2, 2))
    assert torch.equal(other.weight, model.weight)
    trainer = trainer_of(nn.Sequential(model, nn.Flatten(0), MeanSquare()), tmp_path / "out")
    trainer.extend(extensions.snapshot(asynchronous=False), trigger=(1, "iteration"))
    trainer.run()
    with pytest.raises(TypeError, match=r"Thing has no state .* does not take a serializer alone"):
        serializers.save(tmp_path / "thing", classes["Thing"]())


class MeanSquare(nn.Module):
    def forward(self, x):
        return x.square().mean()


def test_static_and_class_methods_and_a_child_of_that_name_are_not_the_protocols(tmp_path):
    """They know nothing of the object's state."""

    class Static(nn.Linear):
        @staticmethod
        def serialize(stream):
            raise AssertionError

    class OfClass(nn.Linear):
        @classmethod
        def serialize(cls, stream):
            raise AssertionError

    model = nn.Sequential(Static(1, 1), OfClass(1, 1))
    model.add_module("serialize", nn.Linear(1, 1))
    serializers.save(tmp_path / "model", model)
    assert (tmp_path / "model").is_file()


def test_an_object_with_another_serialize_is_saved_by_its_state_dict():
    """As a scheduler would be that also writes itself to a stream."""

    class Thing:
        value = 3

        def serialize(self):
            raise AssertionError

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    saved = DictionarySerializer()
    saved.visit("thing", Thing())
    assert saved.target == {"thing/state_dict": {"value": 3}}


def test_a_snapshot_of_the_model_holds_its_own_state_too(tmp_path):
    """`snapshot_object` writes a directory of a model that has some."""
    trainer = trainer_of(model := Net(), tmp_path)
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.iteration}"), trigger=(3, "iteration"))
    trainer.run()
    serializers.load(tmp_path / "model_3", other := Net())
    assert same(state_of(other), state_of(model))


def test_a_file_of_parameters_is_loaded_with_a_warning_that_names_what_it_lacks(tmp_path):
    """As `chainring export` writes it; the parameters come in, the modules' own state stays."""

    class Plain(Recurrent):
        serialize = None

    serializers.save(tmp_path / "file", plain := Plain())
    model = used(Recurrent())
    with pytest.warns(UserWarning, match="only parameters and buffers: .* Recurrent at ''"):
        serializers.load(tmp_path / "file", model)
    assert torch.equal(model.linear.weight, plain.linear.weight)
    assert model.calls == 3


def test_export_writes_parameters_and_buffers_alone(tmp_path):
    """For readers that know nothing of the modules' own state, also where it is a tensor or that of another object."""

    class Memory:
        last = torch.ones(2)

        def serialize(self, serializer):
            serializer("last", self.last)

    class Remembering(Net):
        def serialize(self, serializer):
            serializer.visit("memory", Memory())

    trainer = trainer_of(used(model := Remembering()), tmp_path / "out")
    serializers.save(tmp_path / "saved", trainer)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "file")]) == 0
    assert load_file(tmp_path / "file").keys() == model.state_dict().keys()


def test_a_frozen_parameter_that_a_module_saves_itself_may_be_left_out(tmp_path):
    """Of a snapshot with ``frozen=False``; it stays what it is."""
    model = LinkStyle()
    model.scale.requires_grad_(False)
    trainer = trainer_of(model, tmp_path)
    trainer.extend(extensions.snapshot("taken", frozen=False), trigger=(3, "iteration"))
    trainer.run()
    other = LinkStyle()
    scale = other.scale.detach().clone()
    serializers.load(tmp_path / "taken", other)
    assert torch.equal(other.scale, scale)
    assert torch.equal(other.visited.linear.weight, model.visited.linear.weight)


def test_an_update_with_nan_is_replayed_from_the_modules_own_state(tmp_path):
    """As it was before the forward of that update."""

    class Divergent(Recurrent):
        def forward(self, x):
            output = super().forward(x).square().mean()
            return output * math.nan if self.calls == 3 else output

    def made(out):
        trainer = trainer_of(model := Divergent(), out)
        return trainer, model

    trainer, model = made(tmp_path / "out")
    trainer.extend(extensions.FailOnNonNumber("skip"))
    trainer.run()
    replayed, other = made(tmp_path / "again")
    extensions.FailOnNonNumber.replay(tmp_path / "out" / "non_number_iter_3", replayed.updater)
    assert same(state_of(other), state_of(model))
    assert not torch.isfinite(other.linear.weight.grad).any()


def test_an_extension_that_is_a_module_too_keeps_its_parameters(tmp_path):
    """Although the state_dict that it has from `Extension` is made of its serialize alone."""

    class Critic(training.Extension, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            self.linear, self.calls = nn.Linear(1, 1), 0

        def serialize(self, serializer):
            self.calls = serializer("calls", self.calls)

    critic, other = Critic(), Critic()
    critic.calls = 3
    serializers.save(tmp_path / "saved", critic)
    serializers.load(tmp_path / "saved", other)
    assert other.calls == 3
    assert torch.equal(other.linear.weight, critic.linear.weight)


def test_what_is_unexpected_or_missing_is_an_error_with_own_state_too(tmp_path):
    """A key that serialize asks for only sometimes does not get lost without a word."""

    class Sometimes(nn.Linear):
        hidden = None

        def serialize(self, serializer):
            if self.hidden is not None:
                self.hidden = serializer("hidden", self.hidden)

    model = Sometimes(1, 1)
    model.hidden = torch.ones(1)
    serializers.save(tmp_path / "saved", model)
    with pytest.raises(RuntimeError, match="hidden") as caught:
        serializers.load(tmp_path / "saved", Sometimes(1, 1))
    assert "asks for the keys that it saves" in caught.value.__notes__[0]
    serializers.save(tmp_path / "plain", nn.Sequential(nn.Linear(1, 1)))


NAMES = ["a", "b", "w", "a/b", "b/w", "0", "é", "a b", "~", "module", "_orig_mod", "count", "serialize"]


class Node(nn.Module):
    """A module that a generator fills."""


class OwnNode(Node):
    def __init__(self):
        super().__init__()
        self.own = {}

    def serialize(self, serializer):
        for name, value in self.own.items():
            if isinstance(value, np.ndarray):
                serializer(name, value)
            else:
                self.own[name] = serializer(name, value)


def grow(draw, values, depth=0):
    """A tree whose structure follows from ``draw`` and its numbers from ``values``; some tensors are tied."""
    node = OwnNode() if draw.random() < 0.5 else Node()
    names = draw.sample(NAMES, draw.randint(0, 4))
    for name in names:
        kind = draw.choice(["module", "parameter", "buffer", "tied"])
        if hasattr(node, name) and name not in node._modules:
            continue
        if kind == "module" and depth < 3:
            node.add_module(name, grow(draw, values, depth + 1))
        elif kind == "buffer":
            node.register_buffer(name, torch.tensor(values.random()))
        else:
            tensors = list(node.parameters())
            node.register_parameter(
                name, tensors[0] if kind == "tied" and tensors else nn.Parameter(torch.tensor(values.random()))
            )
    if isinstance(node, OwnNode):
        for name in draw.sample(NAMES, draw.randint(0, 3)):
            make = draw.choice([int, float, str, lambda n: np.array([n]), torch.tensor, lambda n: [n], lambda n: None])
            node.own[name] = make(values.randint(0, 10**6))
        tensors = dict(node.named_parameters(recurse=False))
        if tensors and draw.random() < 0.3:
            node.own |= tensors
    return node


def content(node):
    values = {f"entry {name}": value.tolist() for name, value in node.state_dict().items()}
    for path, module in node.named_modules():
        for name, value in getattr(module, "own", {}).items():
            values[f"own {path}:{name}"] = repr(value.tolist() if hasattr(value, "tolist") else value)
    return values


def test_any_tree_of_modules_comes_back_or_is_refused_when_it_is_saved(tmp_path):
    """Odd names, state of one's own at any depth, tied parameters: whatever has been written can be loaded."""
    outcomes = Counter()
    for seed in range(200):
        tree, other = grow(random.Random(seed), random.Random(seed)), grow(random.Random(seed), random.Random(-1 - seed))
        try:
            serializers.save(tmp_path / f"{seed}", tree)
        except ValueError as error:
            outcomes["refused"] += "have one path" in str(error) or "is saved twice" in str(error)
            continue
        with warnings.catch_warnings(action="error"):
            serializers.load(tmp_path / f"{seed}", other)
        assert content(other) == content(tree)
        outcomes["equal"] += 1
    assert outcomes["equal"] + outcomes["refused"] == 200
    assert min(outcomes["equal"], outcomes["refused"]) > 10


def bare(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def of_the_object(function):
    def call(self, *args):
        return function(self, *args)

    return call


@functools.cache
def named(function):
    return functools.wraps(function)(bare(function))


class Logging:
    """A decorator that is a class, as those that count calls are."""

    def __init__(self, function):
        self.function = function
        functools.update_wrapper(self, function)

    def __get__(self, obj, owner=None):
        return functools.partial(self.function, obj)


DECORATORS = {
    "none": lambda function: function,
    "one with wraps": named,
    "one without": bare,
    "one that passes the object": of_the_object,
    "two without": lambda function: bare(bare(function)),
    "one around one with wraps": lambda function: bare(named(function)),
    "no_grad": torch.no_grad(),
    "a class": Logging,
}


def decorated(decorator):
    """A module with a count that such a method saves."""

    class Counter(nn.Linear):
        count = 0

        def serialize(self, serializer):
            self.count = serializer("count", self.count)

        serialize = decorator(serialize)

    return Counter(2, 2)


@pytest.mark.parametrize("form", DECORATORS)
def test_a_decorated_serialize_is_taken(form):
    """Also where the decorator does not tell what it decorates."""
    module, other = decorated(DECORATORS[form]), decorated(DECORATORS[form])
    module.count = 3
    saved = DictionarySerializer()
    saved.visit("model", nn.Sequential(module))
    assert saved.target["model/0/count"] == 3
    DictionaryDeserializer(saved.target).visit("model", nn.Sequential(other))
    assert other.count == 3


def test_a_serialize_that_passes_all_on_to_that_of_its_base_is_taken():
    """As a class does that only prints."""

    class Base(nn.Module):
        def serialize(self, serializer):
            serializer("key", 1)

    class Derived(Base):
        def serialize(self, *args, **kwargs):
            super().serialize(*args, **kwargs)

    saved = DictionarySerializer()
    saved.visit("model", Derived())
    assert saved.target == {"model/key": 1}


@pytest.mark.parametrize("is_module", [True, False])
def test_a_serialize_of_any_arguments_that_shows_nothing_is_refused_with_both_remedies(is_module):
    """It may be the protocol's, whose state would be lost, or another one's."""

    class Opaque(nn.Module if is_module else object):
        def serialize(self, *args, **kwargs):
            self.count = args[0]("count", 0)

    with pytest.raises(TypeError, match=r"functools\.wraps.*declare serialize\(self, serializer\)"):
        DictionarySerializer().visit("model", Opaque())


def test_a_decorated_serialize_of_other_arguments_is_not_the_protocols():
    """What it decorates shows it."""

    class Other(nn.Linear):
        @bare
        def serialize(self, stream, version):
            raise AssertionError("it is not meant for us")

    saved = DictionarySerializer()
    saved.visit("model", Other(1, 1))
    assert saved.target.keys() == {"model/weight", "model/bias"}
