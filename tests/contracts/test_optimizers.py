"""What an optimizer's state is: each form in which libraries keep it comes back bit for bit, or is refused at the start."""

import copy
import enum
import itertools
import re
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions


class Norm(enum.Enum):
    """A setting, as of pytorch_optimizer's Scion."""

    SIGN = 1
    SPECTRAL = 2


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum; what it remembers of a parameter is made and read by two methods."""

    def __init__(self, parameters, lr=0.1, **settings):
        super().__init__(parameters, {"lr": lr, **settings})

    def begin(self, parameter):
        return {"step": 0, "average": torch.zeros_like(parameter, dtype=torch.float32)}

    def advance(self, state, grad):
        state["step"] += 1
        state["average"] = state["average"] * 0.9 + grad
        return state["average"] / state["step"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter].update(self.begin(parameter))
                    parameter.sub_(group["lr"] * self.advance(self.state[parameter], parameter.grad))


class Nested(Momentum):
    """Hides its tensors one dict deeper in its state_dict, as bitsandbytes does."""

    def state_dict(self):
        saved = super().state_dict()
        for key, entries in saved["state"].items():
            saved["state"][key] = {"step": entries["step"], "hidden": {"average": entries["average"]}}
        return saved

    def load_state_dict(self, state):
        state = copy.deepcopy(state)
        for entries in state["state"].values():
            entries.update(entries.pop("hidden"))
        super().load_state_dict(state)


class Codes(torch.Tensor):
    """A tensor made of others, as torchao's quantized ones are."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes, scale, dtype):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, tensors, settings, size, stride):
        return cls(tensors["codes"], tensors["scale"], *settings)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        parts = [func(part, *args[1:], **(kwargs or {})) for part in (args[0].codes, args[0].scale)]
        return cls(args[0].codes.clone(), parts[1], args[0].dtype)


class Quantized(Momentum):
    """Keeps its averages as bytes and a scale."""

    def pack(self, value):
        scale = value.abs().max().clamp(min=1e-8)
        return Codes((value / scale * 100).round().to(torch.int8), scale, torch.float32)

    def begin(self, parameter):
        return {"average": self.pack(torch.zeros_like(parameter))}

    def advance(self, state, grad):
        average = state["average"].codes * state["average"].scale / 100 * 0.9 + grad
        state["average"] = self.pack(average)
        return average


class Queued(Momentum):
    """Remembers the last gradients in a queue of a length, as AdaShift does."""

    def begin(self, parameter):
        return {"queue": deque(maxlen=2)}

    def advance(self, state, grad):
        state["queue"].append(grad.clone())
        return sum(state["queue"])


class Measured(Momentum):
    """Keeps arrays of NumPy, one of no dimension and one in a list."""

    def begin(self, parameter):
        return {**super().begin(parameter), "scale": np.array(1.0), "past": [np.zeros(2, np.float16), (torch.zeros(2),)]}

    def advance(self, state, grad):
        state["scale"] *= 0.9
        state["past"][0] += 1
        return super().advance(state, grad) * float(state["scale"] * state["past"][0][1])


class Described(Momentum):
    """Keeps a dtype beside its tensors."""

    def begin(self, parameter):
        return {**super().begin(parameter), "dtype": torch.float64, "shape": parameter.shape, "by": OrderedDict(a=(1, 2.5))}

    def advance(self, state, grad):
        assert state["shape"] == grad.shape
        return super().advance(state, grad.to(state["dtype"])).float()


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer; its state is that of the other, as of timm's Lookahead."""

    def __init__(self, inner):
        self.inner, self.defaults, self.state = inner, inner.defaults, defaultdict(dict)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class Lookahead(Wrapper):
    """Its state_dict has a form of its own, as that of pytorch_optimizer's wrappers."""

    def __init__(self, inner):
        super().__init__(inner)
        self.count = 0
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for slow, parameter in zip(self.slow, self.inner.param_groups[0]["params"], strict=True):
                parameter.lerp_(slow, 0.5)
                slow.copy_(parameter)

    def state_dict(self):
        slow = {(0, index): {"slow": slow} for index, slow in enumerate(self.slow)}
        return {"lookahead": slow, "count": self.count, "base": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["base"])
        self.count, self.slow = state["count"], [entries["slow"] for entries in state["lookahead"].values()]


class Averaging(torch.optim.Optimizer):
    """Trains other weights than those to use, as schedule-free optimizers do; eval() and train() change between them."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "train_mode": False, "k": 0})

    def _move(self, weight, mode):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"] if group["train_mode"] is not mode else ():
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = mode

    def eval(self):
        self._move(1 - 1 / 0.7, False)

    def train(self):
        self._move(1 - 0.7, True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                parameter.lerp_(z, 1 / (group["k"] + 1)).sub_(group["lr"] * parameter.grad * 0.3)
                z.sub_(group["lr"] * parameter.grad)


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype)

    def forward(self, x):
        return self.second(self.first(x.to(self.first.weight.dtype)).tanh()).float().square().mean()


def of(kind, /, **settings):
    return lambda model: kind(model.parameters(), **settings)


FORMS = {
    "plain": of(Momentum),
    "nested in its state_dict": of(Nested),
    "tensors of a subclass": of(Quantized),
    "a queue": of(Queued),
    "arrays": of(Measured),
    "a dtype, a shape, an ordered dict": of(Described),
    "a wrapper": lambda model: Wrapper(Momentum(model.parameters())),
    "a wrapper around a nested one": lambda model: Wrapper(Nested(model.parameters())),
    "a wrapper of a form of its own": lambda model: Lookahead(torch.optim.Adam(model.parameters())),
    "two wrappers": lambda model: Lookahead(Wrapper(Momentum(model.parameters()))),
    "two sets of weights": of(Averaging),
    "an Enum among the settings": of(Momentum, norm=Norm.SPECTRAL),
    "a dtype among the settings": of(Momentum, compute_dtype=torch.bfloat16),
    "a device among the settings": of(Momentum, offload=torch.device("cpu")),
    "a function among the settings": of(Momentum, scale=torch.sign),
    "a class among the settings": of(Momentum, kind=Norm),
    "a queue among the settings": of(Momentum, last=deque([1.0, 2.0], 3)),
}


def trainer_of(make, out, epochs=2, dtype=torch.float32, trigger=(1, "epoch"), saves=True):
    model = Net(dtype)
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(StandardUpdater(SerialIterator(data, 4), make(model), model), (epochs, "epoch"), out=str(out))
    if saves:
        trainer.extend(extensions.snapshot(autoload=True), trigger=trigger)
    return trainer


def values(trainer):
    return [parameter.detach().clone() for parameter in trainer.updater.get_model("main").parameters()]


def settings(trainer):
    groups = trainer.updater.get_optimizer("main").param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_each_form_of_an_optimizers_state_goes_on_from_the_disk_bit_for_bit(tmp_path, make):
    """Stopped after an epoch and started again, it ends with the parameters and settings of a run that saved nothing."""
    whole = trainer_of(make, tmp_path / "whole", saves=False)
    first, second = (trainer_of(make, tmp_path / "run", epochs) for epochs in (1, 2))
    for trainer in (whole, first, second):
        trainer.run()
    assert second.is_resumed
    assert all(map(torch.equal, values(whole), values(second)))
    assert settings(whole) == settings(second)


class Projecting(Momentum):
    def begin(self, parameter):
        return {**super().begin(parameter), "projector": object()}


class Keyed(Momentum):
    def begin(self, parameter):
        return {**super().begin(parameter), "average \udc80": torch.zeros(2)}


class Opaque(torch.Tensor):
    """Of a subclass that does not say what it is made of."""


class Hiding(Momentum):
    def begin(self, parameter):
        return {**super().begin(parameter), "hidden": torch.zeros(2).as_subclass(Opaque)}


class Rounding(Lookahead):
    """Gives what it loads the dtype of the parameters."""

    def __init__(self, inner):
        super().__init__(inner)
        self.slow = [slow.float() for slow in self.slow]

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.slow = [slow.bfloat16() for slow in self.slow]

    def step(self, closure=None):
        self.inner.step(closure)


class Forgetting(Momentum):
    """Does not load all that it saves."""

    def load_state_dict(self, state):
        for entries in state["state"].values():
            entries.pop("average", None)
        super().load_state_dict(state)


REFUSED = {
    "an object in the state": (of(Projecting), TypeError, r"first/weight/projector: builtins.object cannot be saved"),
    "an object among the settings": (of(Momentum, at=object()), TypeError, r"param_groups/0/at: builtins.object cannot"),
    "a generator among the settings": (of(Momentum, at=itertools.count()), TypeError, r"0/at: itertools.count cannot"),
    "a key with half a surrogate": (of(Keyed), TypeError, r"average \\udc80': a tensor cannot be saved under a key with"),
    "an opaque tensor": (of(Hiding), TypeError, r"hidden: a Opaque of layout torch.strided.* cannot be saved"),
    "a key that is a parameter": (
        lambda model: Momentum(model.parameters(), by={model.first.weight: 1}),
        TypeError,
        "a key of type Parameter cannot be saved",
    ),
    "rounded by its own loading": (
        lambda model: Rounding(torch.optim.SGD(model.parameters(), 0.1)),
        ValueError,
        r"does not load its own state as it was saved.*\['slow'\] becomes .*bfloat16.*was .*float32",
    ),
    "forgotten by its own loading": (of(Forgetting), ValueError, r"does not load its own state.*\['average'\] becomes None"),
}


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_state_that_cannot_be_saved_ends_a_run_at_its_first_update(tmp_path, make, error, words):
    """Not at the first snapshot, after hours; and only a run that takes snapshots."""
    dtype = torch.bfloat16 if "bfloat16" in words else torch.float32
    trainer = trainer_of(make, tmp_path, 3, dtype, trigger=(3, "epoch"))
    with pytest.raises(error, match=words):
        trainer.run()
    assert trainer.updater.iteration == 1


def test_a_constant_setting_that_an_extension_changes_is_refused(tmp_path):
    """It would not be set again by a resumed run."""
    trainer = trainer_of(FORMS["an Enum among the settings"], tmp_path)
    trainer.extend(lambda trainer: trainer.updater.get_optimizer("main").param_groups[0].update(norm=Norm.SIGN), name="set")
    with pytest.raises(
        ValueError, match=r"norm was Norm.SPECTRAL when the updater was made and is now Norm.SIGN.*number or str"
    ):
        trainer.run()
    assert trainer.updater.iteration == 1


def test_a_constant_setting_that_the_script_changes_holds_and_is_printed(tmp_path, capsys):
    """As a learning rate does."""
    trainer_of(FORMS["an Enum among the settings"], tmp_path, 1).run()
    changed = trainer_of(of(Momentum, norm=Norm.SIGN), tmp_path)
    changed.run()
    assert settings(changed)[0]["norm"] is Norm.SIGN
    row = r"norm of optimizer 'main', group 0 +'Norm\.SPECTRAL' +-> 'Norm\.SIGN'"
    assert re.search(row, capsys.readouterr().out)


class Own(torch.optim.Adam):
    """A user's."""


SGD, ADAM = of(torch.optim.SGD, lr=0.1), of(torch.optim.Adam)
OTHERS = {
    "SGD as Adam": (SGD, ADAM),
    "SGD with momentum as Adam": (of(torch.optim.SGD, lr=0.1, momentum=0.9), ADAM),
    "Adam as SGD": (ADAM, SGD),
    "Adam as Adamax": (ADAM, of(torch.optim.Adamax)),
    "Adam as a wrapper of it": (ADAM, FORMS["a wrapper of a form of its own"]),
    "a wrapper as what it wraps": (FORMS["a wrapper of a form of its own"], ADAM),
    "one's own as SGD": (FORMS["plain"], SGD),
}


@pytest.mark.parametrize(("before", "now"), OTHERS.values(), ids=OTHERS)
def test_an_optimizer_of_another_class_is_refused_with_both_names(tmp_path, before, now):
    """Its state would mean something else, or nothing."""
    trainer_of(before, tmp_path, 1).run()
    names = [type(make(Net())).__qualname__ for make in (before, now)]
    with pytest.raises(ValueError, match=rf"is a \w+\.{names[0]}, and this one is a \w+\.{names[1]}.*serializers\.load"):
        trainer_of(now, tmp_path).run()


@pytest.mark.parametrize("now", [of(torch.optim.AdamW), of(Own)], ids=["AdamW", "derived"])
def test_an_optimizer_of_a_related_class_goes_on_and_is_printed(tmp_path, capsys, now):
    """Its state is the same."""
    trainer_of(ADAM, tmp_path, 1).run()
    resumed = trainer_of(now, tmp_path)
    resumed.run()
    assert resumed.updater.iteration == 6
    assert "class of optimizer 'main'" in capsys.readouterr().out


def test_a_form_of_its_own_goes_by_the_order_of_the_parameters(tmp_path):
    """So another order is refused."""
    trainer_of(FORMS["a wrapper of a form of its own"], tmp_path, 1).run()
    turned = trainer_of(lambda model: Lookahead(torch.optim.Adam([*model.parameters()][::-1])), tmp_path)
    with pytest.raises(ValueError, match=r"goes by the order of its parameters, which were .*resume with the same model"):
        turned.run()


def test_an_evaluation_sees_the_weights_to_use_and_leaves_those_that_are_trained(tmp_path):
    """The validation loss is that of the averages, and the run is bit for bit that without an evaluation."""
    plain, evaluated = (trainer_of(of(Averaging), tmp_path / name, 1) for name in "ab")
    model, optimizer = evaluated.updater.get_model("main"), evaluated.updater.get_optimizer("main")
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))
    evaluated.extend(extensions.Evaluator(SerialIterator(data, 8, repeat=False, shuffle=False), model, eval_func=model))
    evaluated.extend(extensions.LogReport())
    plain.run()
    evaluated.run()
    assert all(map(torch.equal, values(plain), values(evaluated)))
    assert optimizer.param_groups[0]["train_mode"] is True
    optimizer.eval()
    with torch.no_grad():
        expected = float(model(data))
    reported = evaluated.get_extension("validation")
    assert evaluated.observation.get("validation/main/loss", expected) == pytest.approx(expected)
    assert reported.evaluate()["main/loss"] == pytest.approx(expected)
    assert optimizer.param_groups[0]["train_mode"] is False


def test_a_saved_model_has_the_weights_to_use(tmp_path):
    """A snapshot of the model alone is for use; that of the trainer is for training further."""
    trainer = trainer_of(of(Averaging), tmp_path, 1)
    model = trainer.updater.get_model("main")
    trainer.extend(extensions.snapshot_object(model, "file"), trigger=(1, "epoch"))
    trainer.extend(extensions.snapshot("best", target=model), trigger=(1, "epoch"))
    trainer.run()
    trained = values(trainer)
    trainer.updater.get_optimizer("main").eval()
    for path in ("file", "best"):
        loaded = Net()
        serializers.load(str(tmp_path / path), loaded)
        assert all(map(torch.equal, values(trainer), [p.detach() for p in loaded.parameters()]))
        assert not all(map(torch.equal, trained, [p.detach() for p in loaded.parameters()]))


def test_a_run_that_resumes_a_state_for_use_trains_in_train_mode(tmp_path):
    """Also where the script has left the optimizer, or the snapshot, in eval mode."""
    first = trainer_of(of(Averaging), tmp_path / "a", 1)
    first.run()
    first.updater.get_optimizer("main").eval()
    serializers.save(tmp_path / "for use", first)
    second = trainer_of(of(Averaging), tmp_path / "b", 2)
    serializers.load(tmp_path / "for use", second)
    second.run()
    assert second.updater.get_optimizer("main").param_groups[0]["train_mode"] is True
