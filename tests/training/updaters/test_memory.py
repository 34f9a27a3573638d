"""Where memory runs out in a virtual rank, it is computed again to the same bits, or refused with numbers and a remedy."""

import functools
import itertools

import pytest
import torch

import memory_errors
from chainring import training
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
    "a batch that is changed in place": (lambda model, x: x.mul_(0.5), "changes its batch in place"),
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
    calls, model = itertools.count(1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.turns, model.seen, model.total = 0, [], torch.zeros(1)

    class Changing(training.StandardUpdater):
        def update_core(self):
            (x,) = self.next_batch()
            change(self.get_model("main"), self.get_optimizer("main"))
            if next(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.backward(model(x).square().mean())
            self.step()

    updater = Changing([(torch.ones(4, 2),)] * 3, optimizer, model, virtual_ranks=1)
    updater.start()
    updater.update()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        updater.update()
    assert said in "".join(caught.value.__notes__)


def test_other_errors_are_raised_as_they_are():
    def act(model, x):
        raise ValueError("broken")

    updater = training.StandardUpdater(
        [(torch.ones(4, 2),)], torch.optim.SGD((model := Failing(act)).parameters(), lr=0.1), model, virtual_ranks=1
    )
    updater.start()
    with pytest.raises(ValueError, match="broken"):
        updater.update()
