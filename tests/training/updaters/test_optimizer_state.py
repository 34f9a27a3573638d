"""The state of optimizers goes by the names of parameters, and comes back bit for bit."""

import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater


class Net(nn.Module):
    """A matrix and, on request, a vector and a part that nothing reaches."""

    def __init__(self, bias=True, idle=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4, bias=bias, dtype=dtype)
        self.second = nn.Linear(4, 2, bias=bias, dtype=dtype)
        if idle:
            self.idle = nn.Linear(2, 2, dtype=dtype)

    def forward(self, x):
        return self.second(self.first(x.to(self.first.weight.dtype)).tanh()).float().square().mean()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(8, 2, sparse=True)

    def forward(self, x):
        return self.table((x[:, 0].abs() * 8).long() % 8).square().mean()


class Closing(StandardUpdater):
    """For an optimizer that evaluates the loss itself."""

    def update_core(self):
        batch, optimizer = self.next_batch(), self.get_optimizer("main")

        def closure():
            optimizer.zero_grad()
            loss = self.get_model("main")(batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def updater_of(model, optimizer, kind=StandardUpdater):
    data = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    return kind(SerialIterator(data, 4, shuffle=False), optimizer, model)


def build(name, **settings):
    """An updater with that optimizer of torch.optim, ready for what is peculiar to it."""
    model = Sparse() if name == "SparseAdam" else Net(bias=name != "Muon")
    kind = Closing if name == "LBFGS" else StandardUpdater
    return updater_of(model, getattr(torch.optim, name)(model.parameters(), **settings), kind)


def adam(model, **settings):
    return updater_of(model, torch.optim.Adam(model.parameters(), lr=0.01, **settings))


def run(updater, updates):
    for _ in range(updates):
        updater.update()
    return updater


def values(updater):
    return [parameter.detach().clone() for parameter in updater.get_model("main").parameters()]


def same(ours, theirs):
    return all(map(torch.equal, values(ours), values(theirs)))


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_bit_for_bit(name):
    """Saved after 3 steps and loaded into fresh objects, it makes the 5 further steps of the run that went on."""
    through = run(build(name), 3)
    resumed = build(name)
    resumed.load_state_dict(through.state_dict())
    assert same(run(resumed, 5), run(through, 5))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "lr": 0.1}),
        ("Adam", {"amsgrad": True}),
        ("Adam", {"lr": torch.tensor(0.01)}),
        ("Adam", {"fused": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("LBFGS", {"line_search_fn": "strong_wolfe"}),
    ],
)
def test_settings_that_bring_more_state_go_on_bit_for_bit(name, settings):
    """Momentum buffers, maxima, histories."""
    through = run(build(name, **settings), 3)
    resumed = build(name, **settings)
    resumed.load_state_dict(through.state_dict())
    assert same(run(resumed, 5), run(through, 5))


def test_a_parameter_is_found_among_those_of_its_group_without_a_search():
    """PyTorch asks for each whether it is in the list: of 50,000 that would be a billion comparisons."""
    asked = []

    class Asking(torch.optim.SGD):
        def load_state_dict(self, state):
            asked.extend(group["params"] for group in state["param_groups"])
            super().load_state_dict(state)

    def made():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": layer.parameters()} for layer in net]
        return StandardUpdater(SerialIterator(torch.ones(4, 2), 2), Asking(groups, 0.1, momentum=0.9), net, loss_func=loss)

    def loss(net, x):
        return net(x).sum()

    updater = made()
    updater.update()
    again = made()
    again.load_state_dict(updater.state_dict())
    assert asked == [[0, 1], [2, 3]]
    assert [[number in part for number in (-1, 0, 1, 2, 3, 4, "0")] for part in asked] == [
        [False, True, True, False, False, False, False],
        [False, False, False, True, True, False, False],
    ]
    assert all(type(part).__contains__ is not list.__contains__ for part in asked)


def test_state_is_saved_under_the_names_of_the_parameters():
    """So neither order nor position can mix it up."""
    state = run(adam(Net()), 1).state_dict()
    names = [f"main/{layer}/{part}" for layer in ("first", "second") for part in ("weight", "bias")]
    assert list(state["optimizer:main/state"]) == names
    assert state["optimizer:main/param_groups"][0]["params"] == names


@pytest.mark.parametrize("named", [False, True])
def test_parameters_in_another_order_get_their_own_state(named):
    """The saved first is not loaded into the first at hand."""

    def build(turned):
        model = Net()
        given = list(model.named_parameters() if named else model.parameters())
        return updater_of(model, torch.optim.Adam(given[::-1] if turned else given))

    through, resumed = run(build(False), 3), build(True)
    resumed.load_state_dict(through.state_dict())
    group = resumed.get_optimizer("main").param_groups[0]
    assert group.get("param_names", ["second.bias"])[0] == "second.bias"
    assert same(run(resumed, 5), run(through, 5))


def test_several_groups_keep_their_settings_and_their_parameters():
    """Also where a group has another learning rate than the script's default."""

    def build():
        model = Net()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "lr": 0.5}]
        return updater_of(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))

    through, resumed = run(build(), 3), build()
    through.get_optimizer("main").param_groups[1]["lr"] = 0.25
    resumed.load_state_dict(through.state_dict())
    assert [group["lr"] for group in resumed.get_optimizer("main").param_groups] == [0.1, 0.25]
    assert same(run(resumed, 5), run(through, 5))


def test_state_in_float32_over_parameters_in_bfloat16_keeps_its_format():
    """A load by torch alone would round it to the parameter's."""

    def build():
        model = Net(dtype=torch.bfloat16)
        updater = adam(model)
        for parameter in model.parameters():  # what a mixed-precision optimizer keeps
            state = {key: torch.full_like(parameter, 1e-4, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
            state["history"] = [torch.full((2,), 1.0 + 2**-20)]
            updater.get_optimizer("main").state[parameter] = {"step": torch.tensor(3.0), **state}
        return updater

    through, resumed = build(), adam(Net(dtype=torch.bfloat16))
    resumed.load_state_dict(through.state_dict())
    for ours, theirs in zip(*(u.get_optimizer("main").state.values() for u in (resumed, through)), strict=True):
        assert ours["exp_avg"].dtype == torch.float32
        assert all(torch.equal(ours[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
        assert torch.equal(ours["history"][0], theirs["history"][0])


def test_state_before_the_first_step_is_empty_and_changes_nothing():
    """Saving makes no state up, and loading it gives the path of a run that was never saved."""
    through, resumed = adam(Net()), adam(Net())
    saved = through.state_dict()
    assert saved["optimizer:main/state"] == {}
    resumed.load_state_dict(saved)
    assert same(run(resumed, 5), run(through, 5))


def test_loading_state_from_before_the_first_step_forgets_later_state():
    """What was not there when it was saved is not there afterwards."""
    saved = adam(Net()).state_dict()
    updater = run(adam(Net()), 3)
    updater.load_state_dict(saved)
    assert not updater.get_optimizer("main").state
    assert same(run(updater, 3), run(adam(Net()), 3))


def test_a_parameter_that_never_got_a_gradient_has_no_state_and_stays_so():
    """The next one's state does not slip into its place."""
    through, resumed = run(adam(Net(idle=True)), 3), adam(Net(idle=True))
    saved = through.state_dict()
    assert [name for name in saved["optimizer:main/state"] if "idle" in name] == []
    resumed.load_state_dict(saved)
    assert same(run(resumed, 5), run(through, 5))
    assert resumed.get_model("main").idle.weight not in resumed.get_optimizer("main").state


def test_saving_takes_a_copy_and_leaves_the_optimizer_alone():
    """Later training does not reach what was saved."""
    updater = run(adam(Net()), 2)
    state = updater.state_dict()["optimizer:main/state"]["main/first/weight"]
    before = state["exp_avg"].clone()
    run(updater, 2)
    assert torch.equal(state["exp_avg"], before)


def test_other_parameters_are_refused_by_their_names():
    """The error names what only one side has, and the remedy."""
    saved = {key: value for key, value in run(adam(Net(idle=True)), 1).state_dict().items() if "idle" not in key}
    with pytest.raises(ValueError, match=r"only in the saved one: .*main/idle/weight.*only here: \[\].*the same model"):
        adam(Net()).load_state_dict(saved)


def test_other_groups_are_refused_by_their_number():
    """Two groups do not fit into one."""
    model = Net()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
    saved = updater_of(model, torch.optim.Adam(groups)).state_dict()
    with pytest.raises(ValueError, match="2 groups of parameters and this one 1"):
        adam(Net()).load_state_dict(saved)


def test_a_missing_model_parameter_is_refused_by_its_name():
    """A module's own strict loading speaks."""
    saved = adam(Net()).state_dict()
    del saved["model:main/second/bias"]
    with pytest.raises(RuntimeError, match=r"second\.bias"):
        adam(Net()).load_state_dict(saved)


def test_a_submodule_with_a_slash_in_its_name_comes_back():
    """Paths have slashes for dots, and a name may have slashes of its own."""

    class Slashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a/b": nn.Linear(3, 1)})

        def forward(self, x):
            return self.parts["a/b"](x).square().mean()

    through, resumed = run(adam(Slashed()), 2), adam(Slashed())
    resumed.load_state_dict(through.state_dict())
    assert same(run(resumed, 3), run(through, 3))
