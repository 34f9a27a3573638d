"""Where memory runs out in a virtual rank, it is computed again to the same bits, or refused with numbers and a remedy."""

import functools
import itertools

import numpy as np
import pytest
import torch

import memory_errors
from chainring import training
from chainring.training.updaters import UpdateCallbacks
from memory_errors import BITS, Own, Plan, trained

turns = itertools.count()


@functools.cache
def expected(virtual_ranks=3, accumulate=1, updater_class=training.StandardUpdater):
    return trained(None, Plan(), virtual_ranks=virtual_ranks, accumulate=accumulate, updater_class=updater_class)


def assert_same_bits(found, reference, but=()):
    assert isinstance(found, dict), found
    for key in BITS:
        assert key in but or found[key] == reference[key], key


@pytest.mark.parametrize("settings", [(1, 1), (3, 1), (2, 2), (3, 1, Own)])
@pytest.mark.parametrize("stage", memory_errors.RETRIED)
def test_run_in_which_memory_runs_out_ends_with_the_bits_of_the_run_without(stage, settings):
    """Parameters, moments, running statistics, rows, the recorder, all generators and what a metric has counted."""
    reference, number = expected(*settings), next(turns)
    count, core = reference["calls"][stage], (*settings, training.StandardUpdater)[2]
    plan = Plan(stage, (1, count // 2, count)[number % 3], kind=number % 2)
    found = trained(None, plan, virtual_ranks=settings[0], accumulate=settings[1], updater_class=core)
    assert_same_bits(found, reference)
    assert found["said"].count("memory ran out, and virtual rank") == 1
    assert found["said"].count("after caches were freed; this is said once") == 1


def test_second_error_is_answered_with_saved_tensors_on_the_host():
    """From then on for all updates of as many examples: the line is printed once, and the bits are the same."""
    found = trained(None, Plan("last", 4, times=2))
    assert_same_bits(found, expected())
    assert (
        found["said"].count("virtual rank 0 of update 2 was computed again, to the same bits, with its saved tensors on")
        == 1
    )


def test_third_error_ends_the_run_with_the_numbers_and_the_settings():
    found = trained(None, Plan("first", 4, times=3))
    assert "out of memory" in found
    assert "after caches were freed, and with the saved tensors of virtual rank 0 of update 2 on the host, it ran" in found
    assert "hint: this machine has " in found
    assert 'virtual_ranks, precision="bf16"' in found


@pytest.mark.parametrize("stage", ["step", "evaluation", "snapshot"])
def test_what_cannot_be_repeated_ends_the_run_with_the_numbers_and_the_settings(stage):
    found = trained(None, Plan(stage, 2))
    assert "out of memory" in found
    assert "GiB are free now; a smaller batch with accumulate=k" in found
    assert ("in extension 'validation' so does a smaller batch" in found) == (stage == "evaluation")


def test_without_virtual_ranks_the_error_says_that_they_let_it_be_repeated():
    assert "with virtual_ranks=1 a forward or backward is computed again" in trained(
        None, Plan("last", 2), virtual_ranks=None
    )


class Failing(torch.nn.Module):
    """A regression; its second forward fails, after what a test does with the model and the inputs."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act, self.calls = torch.nn.Linear(2, 1), act, 0
        self.generator = torch.Generator()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.act(self, x)
        if self.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return (self.layer(x) + self.unused).square().mean()


def test_what_the_allocator_keeps_is_given_back_before_the_second_try(device, monkeypatch):
    """And the virtual rank computes there again."""
    kept = lambda: 0 if device == "cpu" else torch.get_device_module(device).memory_reserved()  # noqa: E731
    calls, model, linear = [], torch.nn.Linear(2, 1), torch.nn.functional.linear

    def fail_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return linear(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", fail_at_the_second)
    data = torch.randn(8, 2).split(4)
    updater = training.StandardUpdater(
        data, torch.optim.SGD(model.parameters()), model, loss_func=lambda model, x: model(x).square().mean(), device=device,
        virtual_ranks=1,
    )  # fmt: skip
    updater.start()
    updater.update()
    torch.empty(2**22, device=device)
    before = kept()
    updater.update()
    assert updater.iteration == 2
    assert kept() < before or device == "cpu"


def make_a_buffer(model, x):
    if model.calls == 2:
        model.register_buffer("made", torch.zeros(1))


def change_a_parameter(model, x):
    with torch.no_grad():
        model.layer.weight += 1
        if model.calls != 2:
            model.layer.weight -= 1


REFUSED = {
    "a buffer that was made": (make_a_buffer, "made or reshaped a buffer"),
    "a parameter that is changed": (change_a_parameter, "layer.weight has changed"),
    "a generator of one's own": (lambda model, x: torch.rand(1, generator=model.generator), "generator has changed"),
    "a batch that is changed in place": (lambda model, x: x.mul_(0.5), "changed its batch in place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_have_other_bits_is_refused_by_name(case):
    act, said = REFUSED[case]
    model, rows = Failing(act), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = training.StandardUpdater([(rows,)] * 3, optimizer, model, virtual_ranks=1)
    updater.start()
    updater.update()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        updater.update()
    assert said in "".join(caught.value.__notes__)


CHANGES = {
    "a number": (lambda model, optimizer: setattr(model, "turns", model.turns + 1), "main.turns"),
    "a list": (lambda model, optimizer: model.seen.append(1), "main.seen"),
    "a tensor in an attribute": (lambda model, optimizer: model.total.add_(1), "main.total"),
    "the mode": (lambda model, optimizer: model.train(not model.training), "training"),
    "what is trained": (
        lambda model, optimizer: model.bias.requires_grad_(not model.bias.requires_grad),
        "requires_grad of",
    ),
    "a hook": (lambda model, optimizer: model.register_forward_hook(lambda *_: None), "_forward_hooks"),
    "a learning rate": (
        lambda model, optimizer: optimizer.param_groups[0].update(lr=0.9 * optimizer.param_groups[0]["lr"]),
        "lr",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_an_update_core_changes_besides_tensors_is_refused_where_memory_runs_out(kind):
    """Nobody has a copy of it from before, so the virtual rank would be computed with other settings."""
    change, said = CHANGES[kind]
    plan, model = Plan("first", 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.turns, model.seen, model.total = 0, [], torch.zeros(1)

    class Changing(training.StandardUpdater):
        def update_core(self):
            (x,) = self.next_batch()
            change(self.get_model("main"), self.get_optimizer("main"))
            plan.passes("first")
            self.backward(model(x).square().mean())
            self.step()

    updater = Changing([(torch.ones(4, 2),)] * 3, optimizer, model, virtual_ranks=1)
    updater.start()
    updater.update()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        updater.update()
    assert said in "".join(caught.value.__notes__)


NOISE = itertools.cycle([1.0, 2.0])


def scaled_by(noise):
    return lambda model, x: model(x).square().mean() * next(noise)


def counted():
    turns = 0

    def loss(model, x):
        nonlocal turns
        turns += 1
        return model(x).square().mean() * turns

    return loss


def scale_by_assignment(model, x):
    model.layer.weight.data = model.layer.weight.data * 2
    return model(x).square().mean()


def acting(act):
    """A loss that acts on the layer of the model or on the inputs first."""
    return lambda model, x: (act(model.layer, x), model(x).square().mean())[1]


class Turns:
    """An object with a state that nothing saves, of which an instance may be a loss, a converter or a callback."""

    of_all = 0

    def __init__(self):
        self.number = 0

    def step(self):
        self.number += 1

    def __call__(self, first, second=None):
        self.number += 1
        if isinstance(second, torch.Tensor):
            return first(second).square().mean() * self.number
        return getattr(first, "columns", first)


class Slotted:
    __slots__ = ("number",)


def turn(layer, x):
    Turns.of_all += 1


def turn_slot(layer, x):
    layer.slotted.number += 1


def carry(layer, x):
    layer.carried = 0.9 * layer.carried + x.mean()


def swap(layer, x):
    layer.kinds.add(layer.kinds.pop() + 1)


STATE = {"turns": 0}
UNSEEN = {  # a loss, and how what it changes is named
    "the data of a parameter": (lambda: acting(lambda layer, x: layer.weight.data.mul_(2)), "layer.weight"),
    "the data of a parameter, replaced": (lambda: scale_by_assignment, "layer.weight"),
    "a parameter through NumPy": (
        lambda: acting(lambda layer, x: np.multiply(array := layer.weight.detach().numpy(), 2, out=array)),
        "layer.weight",
    ),
    "the data of a tensor in an attribute": (lambda: acting(lambda layer, x: layer.total.data.add_(1)), "layer.total"),
    "an array in an attribute": (lambda: acting(lambda layer, x: np.add(layer.array, 1, out=layer.array)), "layer.array"),
    "a number in a list": (lambda: acting(lambda layer, x: layer.seen.__setitem__(0, layer.seen[0] + 1)), "layer.seen"),
    "a number of a global dict": (
        lambda: acting(lambda layer, x: STATE.update(turns=STATE["turns"] + 1)),
        "STATE.turns",
    ),
    "an object in an attribute": (lambda: acting(lambda layer, x: layer.turns.step()), "layer.turns.number"),
    "an object with slots": (lambda: acting(turn_slot), "layer.slotted.number"),
    "an attribute of a class": (lambda: acting(turn), "Turns.of_all"),
    "an object that is the loss": (Turns, "number"),
    "a tensor that is made of the one before": (lambda: acting(carry), "layer.carried"),
    "a set of as many": (lambda: acting(swap), "layer.kinds"),
    "a variable outside of the loss": (counted, "loss_func.turns"),
    "an iterator in the closure": (lambda: scaled_by(iter([1.0, 2.0, 3.0, 4.0])), "loss_func.noise"),
    "a generator in the closure": (lambda: scaled_by(1.0 * n for n in range(9)), "loss_func.noise"),
    "an iterator in an argument": (
        lambda: functools.partial(lambda model, x, noise: model(x).mean() * next(noise), noise=map(float, range(9))),
        "loss_func.noise",
    ),
    "a global iterator": (lambda: lambda model, x: model(x).square().mean() * next(NOISE), "loss_func.NOISE"),
    "the data of the batch": (lambda: acting(lambda layer, x: x.data.mul_(2)), "its batch in place"),
    "what has a gradient in the batch": (
        lambda: lambda model, x: model(x.requires_grad_()).square().mean() * (1.0 if x.grad is None else 2.0),
        "the gradient of value",
    ),
    "the batch through NumPy": (
        lambda: acting(lambda layer, x: np.multiply(array := x.numpy(), 2, out=array)),
        "its batch in place",
    ),
}


def out_of_memory_once(loss, is_own=False, call=2):
    """The updater that computes it, with a model in which memory runs out in a call."""
    model, plan = torch.nn.Module(), Plan("first", call)
    model.layer = torch.nn.Linear(2, 1)
    model.layer.total, model.layer.array, model.layer.seen = torch.zeros(1), np.zeros(1), [0]
    model.layer.turns, model.layer.slotted, model.layer.carried, model.layer.kinds = Turns(), Slotted(), torch.ones(()), {0}
    model.layer.slotted.number = 0

    def forward(x):
        plan.passes("first")
        return model.layer(x)

    model.forward = forward

    class Own(training.StandardUpdater):
        def update_core(self):
            self.backward(loss(self.get_model("main"), *self.next_batch()))
            self.step()

    settings = {} if is_own else {"loss_func": loss}
    updater_class = Own if is_own else training.StandardUpdater
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = updater_class([(torch.ones(4, 2),)] * 4, optimizer, model, virtual_ranks=1, **settings)
    updater.start()
    return updater


@pytest.mark.parametrize("is_own", [False, True], ids=["default", "update_core"])
@pytest.mark.parametrize("kind", UNSEEN)
def test_what_a_forward_changes_without_a_count_of_it_is_refused_where_memory_runs_out(kind, is_own):
    """Data, arrays, variables and iterators have no version: they are compared where a virtual rank is computed again."""
    make, said = UNSEEN[kind]
    updater = out_of_memory_once(make(), is_own)
    updater.update()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        updater.update()
    assert f"{said.rpartition('.')[2]}" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("stage", ["forward_on_start", "converter"])
def test_what_a_callback_or_a_converter_has_counted_is_refused_where_memory_runs_out(stage):
    """It would count the virtual rank twice."""
    plan, model, turns = Plan("first", 2), torch.nn.Linear(2, 1), Turns()
    settings = {"converter": turns} if stage == "converter" else {"callbacks": UpdateCallbacks(forward_on_start=turns)}

    def loss(model, x):
        plan.passes("first")
        return model(x).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(4, 2),)] * 3
    updater = training.StandardUpdater(data, optimizer, model, virtual_ranks=1, loss_func=loss, **settings)
    updater.start()
    updater.update()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        updater.update()
    assert "number, of which nobody has a copy" in "".join(caught.value.__notes__)


HARMLESS = {
    "weights that are clamped": acting(lambda layer, x: layer.weight.data.clamp_(-0.1, 0.1)),
    "another tensor in an attribute": acting(lambda layer, x: setattr(layer, "last", x * 2)),
    "a constant in the closure": acting(lambda layer, x: STATE["turns"] + next(iter([1, 2]))),
}


@pytest.mark.parametrize("is_own", [False, True], ids=["default", "update_core"])
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_has_the_same_effect_twice_is_computed_again(kind, is_own):
    ends = []
    for call in (0, 2):
        torch.manual_seed(0)
        updater = out_of_memory_once(HARMLESS[kind], is_own, call)
        for _ in range(3):
            updater.update()
        ends.append(updater.get_model("main").layer.weight.detach().clone())
    assert torch.equal(*ends)


def wrap(raise_it):
    """Raise an error because of that of a function."""
    try:
        raise_it()
    except Exception as error:
        raise RuntimeError("the model has failed") from error


def wrap_without_saying_so(raise_it):
    try:
        raise_it()
    except Exception:
        raise ValueError("the model has failed")  # noqa: B904


@pytest.mark.parametrize("wrapper", [wrap, wrap_without_saying_so, lambda raise_it: wrap(lambda: wrap(raise_it))])
@pytest.mark.parametrize("kind", range(3))
def test_an_error_that_comes_of_memory_is_taken_as_that(kind, wrapper):
    """A model may wrap it, several times, in an error of its own."""

    class Wrapping(Plan):
        def passes(self, stage):
            wrapper(functools.partial(super().passes, stage))

    found = trained(None, Wrapping("first", 4, kind=kind))
    assert_same_bits(found, expected())
    assert "hint: this machine has " in trained(None, Wrapping("first", 4, times=3, kind=kind))


def test_other_errors_are_raised_as_they_are():
    def act(model, x):
        raise ValueError("broken")

    updater = training.StandardUpdater(
        [(torch.ones(4, 2),)], torch.optim.SGD((model := Failing(act)).parameters(), lr=0.1), model, virtual_ranks=1
    )
    updater.start()
    with pytest.raises(ValueError, match="broken"):
        updater.update()
