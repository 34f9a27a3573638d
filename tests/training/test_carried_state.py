"""State that reaches a trainer in a function alone is saved with it: loss modules, triggers in functions, schedulers."""

import functools

import pytest
import torch
from torch import nn

from chainring import iterators, training
from chainring.datasets import TupleDataset
from chainring.training import extensions, triggers

STOP, CUT = 8, 5


class Centre(nn.Module):
    """DINO's: a running mean of what the model returns, which is taken off."""

    def __init__(self, in_place=False):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("scale", torch.ones(1))
        self.in_place = in_place

    def forward(self, y, t):
        loss = nn.functional.cross_entropy(y - self.centre * self.scale, t)
        mean = y.detach().mean(0)
        if self.in_place:
            self.centre.data.mul_(0.9).add_(mean)  # which its version does not show
        else:
            self.centre = self.centre * 0.9 + mean
        return loss

    def of_model(self, model, x, t):
        return self(model(x), t)


class Counting(nn.Module):
    """Keeps a number in a serialize of its own."""

    calls = 0

    def forward(self, model, x, t):
        self.calls += 1
        return nn.functional.cross_entropy(model(x), t) / self.calls

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


class Experiment:
    """An object of the script that holds the loss, and calls it."""

    def __init__(self, loss):
        self.parts = {"loss": loss, "names": ["a", "b"]}

    def __call__(self, model, x, t):
        return self.parts["loss"](model(x), t)

    compute = __call__


class Curriculum:
    """A loss that is no module, with PyTorch's pair."""

    step = 0

    def __call__(self, model, x, t):
        self.step += 1
        return nn.functional.cross_entropy(model(x) * (1 + self.step / 10), t)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def logged(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def in_default(centre):
    def loss(model, x, t, centre=centre):
        return centre(model(x), t)

    return loss


def of_two(centre):
    weights = nn.CrossEntropyLoss(weight=torch.ones(3))
    return lambda model, x, t: centre(model(x), t) + weights(model(x), t)


LOSSES = {
    "a lambda": lambda: of_two(Centre()),
    "in place": lambda: of_two(Centre(in_place=True)),
    "a partial": lambda: functools.partial(lambda centre, model, x, t: centre(model(x), t), Centre()),
    "a bound method": lambda: Centre().of_model,
    "the module itself": Counting,
    "a callable object": lambda: Experiment(Centre()),
    "a method of an object": lambda: Experiment(Centre(in_place=True)).compute,
    "a decorated function": lambda: logged(of_two(Centre())),
    "a default": lambda: in_default(Centre()),
    "a list": lambda: (lambda parts: lambda model, x, t: parts[0](model(x), t))([Centre()]),
    "an object with the pair": Curriculum,
}


def made(out, loss_func, stop, *extended, model=None, **settings):
    """A trainer over 24 examples with a snapshot at its end."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3) if model is None else model
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    data = TupleDataset(torch.randn(24, 4), torch.randint(3, (24,)))
    iterator = iterators.SerialIterator(data, 4, seed=0)
    updater = training.StandardUpdater(iterator, optimizer, net, loss_func=loss_func, **settings)
    trainer = training.Trainer(updater, (stop, "iteration"), out=str(out))
    for extension, trigger in extended:
        trainer.extend(extension(optimizer) if trigger is None else extension, trigger=trigger or (1, "iteration"))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(100, "iteration"))
    return trainer


def plain_loss(model, x, t):
    return nn.functional.cross_entropy(model(x), t)


def weights_of(trainer):
    return [parameter.tolist() for parameter in trainer.updater.get_model("main").parameters()]


class Holding(training.Extension):
    """An extension of the script that keeps a loss, and has no serialize."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, trainer):
        pass


class Observing(Holding):
    """It has a state of its own, which is not that of the loss."""

    calls = 0

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


def evaluating(loss):
    torch.manual_seed(1)
    test = iterators.SerialIterator(
        TupleDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)), 4, repeat=False, shuffle=False
    )
    return extensions.Evaluator(test, nn.Linear(4, 3), loss_func=loss)


@pytest.mark.parametrize("holder", [Holding, Observing, evaluating])
@pytest.mark.parametrize("form", [Counting, lambda: Centre().of_model])
def test_the_state_of_a_loss_is_saved_though_an_extension_holds_it_too(tmp_path, form, holder):
    """An Evaluator is given the loss that is trained with; that it has it does not mean that it saves it."""

    def run(name, *stops):
        for stop in stops:
            loss = form()
            trainer = made(tmp_path / name, loss, stop, (holder(loss), (1, "iteration")))
            trainer.run()
        return weights_of(trainer)

    assert run("cut", CUT, STOP) == run("whole", STOP)


class Stepping(training.Extension):
    """An extension of the script that holds a scheduler, and declares no state."""

    def __init__(self, optimizer):
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def __call__(self, trainer):
        self.scheduler.step()


def test_an_extension_without_a_state_of_its_own_is_looked_into(tmp_path):
    """Its class inherits a serialize that saves nothing."""

    def run(name, *stops):
        for stop in stops:
            trainer = made(tmp_path / name, plain_loss, stop, (Stepping, None))
            trainer.run()
        return weights_of(trainer)

    assert run("cut", CUT, STOP) == run("whole", STOP)


@pytest.mark.parametrize("rehearses", [False, True])
@pytest.mark.parametrize("form", LOSSES)
def test_the_state_of_a_loss_is_resumed_exactly_wherever_the_function_has_it(tmp_path, form, rehearses):
    """Parameters are those of the run that was not cut; a rehearsal before it puts the state back."""
    whole = made(tmp_path / "whole", LOSSES[form](), STOP)
    whole.run()
    cut = made(tmp_path / "cut", LOSSES[form](), CUT)
    if rehearses:
        cut.rehearse()
    cut.run()
    resumed = made(tmp_path / "cut", LOSSES[form](), STOP)
    resumed.run()
    assert weights_of(resumed) == weights_of(whole)


def test_what_does_not_change_and_what_is_saved_elsewhere_is_not_saved_with_a_function(tmp_path):
    """The weights of classes, a frozen network, the model itself, a buffer that stays: snapshots hold what they held."""
    teacher, weights, net = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.ones(3)), nn.Linear(4, 3)
    centre = Centre()
    around = nn.ModuleDict({"model": net, "teacher": teacher})

    def loss(model, x, t):
        assert model is net is around["model"]
        return weights(model(x), t) + (model(x) - teacher(x).detach()).square().mean() + centre(model(x), t)

    trainer = made(tmp_path, loss, 2, model=net)
    trainer.extend(lambda trainer: (trainer.updater, net, around), name="look")
    trainer.run()
    carried = [key for key in trainer.state_dict() if key.startswith(("carried", "extensions/look"))]
    assert carried == ["carried/loss_func/centre/centre"]


def test_a_buffer_that_appears_is_refused_at_the_snapshot_with_the_line_to_write(tmp_path):
    """It could not be loaded into the module that the script makes."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, y, t):
            self.mean = y.detach().mean(0)
            return nn.functional.cross_entropy(y, t)

    late = Late()
    with pytest.raises(ValueError, match=r'model=\{"main": model, "loss": loss\}'):
        made(tmp_path, lambda model, x, t: late(model(x), t), 2).run()


@pytest.mark.parametrize("form", ["a lambda", "a partial", "a bound method", "a callable object", "a default"])
def test_virtual_ranks_refuse_buffers_of_a_loss_that_is_not_registered(tmp_path, form):
    """Each would change them in turn; those of a registered module are put back for each."""
    with pytest.raises(ValueError, match=r'write model=\{"main": model, "loss": loss\}'):
        made(tmp_path, LOSSES[form](), 2, virtual_ranks=2)


def test_virtual_ranks_take_the_weights_of_classes_and_a_registered_loss(tmp_path):
    """Nothing changes the former, and the latter is the model's."""
    weights = nn.CrossEntropyLoss(weight=torch.ones(3))
    made(tmp_path / "a", lambda model, x, t: weights(model(x), t), 2, virtual_ranks=2).run()
    net, centre = nn.Linear(4, 3), Centre()
    data = [(torch.ones(4) * i, i % 3) for i in range(8)]
    updater = training.StandardUpdater(
        iterators.SerialIterator(data, 4), torch.optim.SGD(net.parameters(), 0.1), {"main": net, "loss": centre},
        loss_func=lambda model, x, t: centre(model(x), t), virtual_ranks=2,
    )  # fmt: skip
    training.Trainer(updater, (2, "iteration"), out=str(tmp_path / "b")).run()


def improving(patience):
    """A trigger with state: it fires when the loss has not fallen for a while."""
    return triggers.EarlyStoppingTrigger((1, "iteration"), "main/loss", patience, mode="min", max_trigger=None)


class Either:
    """Triggers joined in an object that has no state of its own."""

    def __init__(self, *joined):
        self.joined = joined

    def __call__(self, trainer):
        return sum(trigger(trainer) for trigger in self.joined) > 0

    def ask(self, trainer):
        return self(trainer)


def by_name(trainer, first, second):
    return first(trainer) | second(trainer)


def in_function(first, second):
    @logged
    def either(trainer):
        return first(trainer) | second(trainer)

    return either


class Halving:
    """Fires with every second call, and has PyTorch's pair."""

    calls = 0

    def __call__(self, trainer):
        self.calls += 1
        return self.calls % 2 == 0

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def inside(a, b):
    return triggers.MinValueTrigger("main/loss", trigger=lambda trainer: a(trainer) | b(trainer))


JOINED = {
    "a lambda": lambda a, b: lambda trainer: a(trainer) | b(trainer),
    "a partial": lambda a, b: functools.partial(by_name, first=a, second=b),
    "a decorated function": in_function,
    "an object": Either,
    "a bound method": lambda a, b: Either(a, b).ask,
    "a list": lambda a, b: lambda trainer, joined=[a, b]: sum(each(trainer) for each in joined) > 0,
    "a function in a function": lambda a, b: lambda trainer: in_function(a, b)(trainer),
    "a trigger in a trigger": inside,
    "not": lambda a, b: lambda trainer: not (a(trainer) | b(trainer)),
}


@pytest.mark.parametrize("form", JOINED)
def test_triggers_joined_in_a_function_are_resumed_exactly(tmp_path, form):
    """They fire in the iterations in which they do without an interruption."""

    def fired_of(out, stop):
        fired = []
        trainer = made(out, plain_loss, stop)
        trainer.extend(
            lambda trainer: fired.append(trainer.updater.iteration), "fires", JOINED[form](improving(2), Halving())
        )
        trainer.run()
        return fired

    whole = fired_of(tmp_path / "whole", STOP)
    assert fired_of(tmp_path / "cut", CUT) + fired_of(tmp_path / "cut", STOP) == whole
    assert whole


def test_a_stop_trigger_in_a_function_is_resumed_exactly(tmp_path):
    """The run ends where it does without an interruption."""
    calls = Halving()
    updater = made(tmp_path, plain_loss, 1).updater
    trainer = training.Trainer(updater, lambda trainer: calls(trainer) and calls.calls > 6, out=str(tmp_path))
    calls.calls = 3
    saved = trainer.state_dict()
    calls.calls = 0
    trainer.load_state_dict(saved)
    assert calls.calls == 3
    trainer.run()
    assert calls.calls == 8


def decaying(optimizer):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return lambda trainer: schedule.step()


def averaging(optimizer):
    average = nn.Linear(4, 3)

    def average_weights(trainer):
        model = trainer.updater.get_model("main")
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.5).add_(parameter.data, alpha=0.5)
        model.bias.data.add_(average.bias.data, alpha=0.01)

    return average_weights


def second_optimizer(optimizer):
    second = torch.optim.SGD(optimizer.param_groups[0]["params"], 0.01, momentum=0.9)
    return lambda trainer: second.step()


EXTENDED = {"a scheduler": decaying, "an average": averaging, "an optimizer": second_optimizer}


@pytest.mark.parametrize("form", EXTENDED)
def test_what_an_extension_that_is_a_function_carries_is_resumed_exactly(tmp_path, form):
    """A scheduler that it steps, a module that it averages, an optimizer."""
    results = []
    for out, stops in (("whole", [STOP]), ("cut", [CUT, STOP])):
        for stop in stops:
            trainer = made(tmp_path / out, plain_loss, stop, (EXTENDED[form], None))
            trainer.run()
        results.append(weights_of(trainer))
    assert results[0] == results[1]
