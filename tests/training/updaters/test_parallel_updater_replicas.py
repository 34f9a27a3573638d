"""The replicas of a ParallelUpdater: where they come from, what they are called, what they know."""

import pytest
import torch
from parallel_toys import TWO, assert_same_updates, pair, rows, sgd
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from toys import Regression, assert_close, observed_update, parameters_of, same_regression, updater_of

from chainring import Reporter
from chainring.serializers.protocol import named_submodules
from chainring.training import ParallelUpdater, StandardUpdater


@pytest.mark.parametrize("model", [None, "main"])
def test_models_may_be_given_without_devices(model):
    """Each stays where it is; their parameters are those of the main one."""
    ours, (other, third) = same_regression(), (Regression(), Regression())
    models = {"second": other, "main": ours, "third": third}
    updater = ParallelUpdater(rows(), sgd(ours), model and models[model], models=models)
    whole = updater_of(4)
    assert updater.device == torch.device("cpu")
    assert_same_updates(updater, whole)


def test_models_and_devices_may_both_be_given():
    """Each model is moved to its device."""
    moves = []

    class Moved(Regression):
        def to(self, device):
            moves.append((self, device))
            return super().to(device)

    models = {"main": Moved(), "second": Moved()}
    ParallelUpdater(rows(), sgd(models["main"]), models=models, devices={"second": -1, "main": "cpu"}).update()
    assert moves == [(models[name], torch.device("cpu")) for name in ("main", "second")]


def test_the_main_model_comes_first_and_the_others_in_their_order():
    """Of a batch of three, the fourth gets nothing."""
    seen = []

    def loss_func(model, x, t):
        seen.append(model)
        return model(x, t)

    models = {name: same_regression() for name in ("second", "third", "main", "fourth")}
    ParallelUpdater(rows(3), sgd(models["main"]), models=models, loss_func=loss_func).update()
    assert seen == [models[name] for name in ("main", "second", "third")]


@pytest.mark.parametrize("shared", ["models", "layers"])
def test_replicas_that_share_parameters_with_the_main_model_count_them_once(shared):
    """The same object under two names, or a part of one inside the other."""
    model = same_regression()
    other = model
    if shared == "layers":
        other = Regression()
        other.predictor.weight = model.predictor.weight
    updater = ParallelUpdater(rows(), sgd(model), models={"main": model, "second": other, "third": other})
    assert_same_updates(updater, updater_of(4))


def test_an_optimizer_is_found_in_a_mapping():
    """As the only one, and one for each half of the model, which all step."""
    model, halves = same_regression(), same_regression()
    updater = ParallelUpdater({"main": rows()}, {"main": sgd(model)}, model, devices=TWO)
    assert updater.get_optimizer("main").param_groups[0]["params"][0] is model.predictor.weight
    assert_same_updates(updater, updater_of(4))
    optimizers = {
        name: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for name, parameter in halves.predictor.named_parameters()
    }
    assert_same_updates(ParallelUpdater(rows(), optimizers, halves, devices=TWO), updater_of(4))


@pytest.mark.parametrize("saved_by", [{"devices": TWO}, None])
def test_a_resumed_run_begins_with_the_main_models_parameters_everywhere(saved_by):
    """Bit for bit where the run goes on as it was; and from a run on one device, whose state has the same keys."""
    kind = StandardUpdater if saved_by is None else ParallelUpdater
    first = updater_of(5, kind=kind, **(saved_by or {}))
    torch.manual_seed(99)
    resumed = updater_of(5, kind=ParallelUpdater, devices=TWO, model=Regression())
    for _ in range(2):
        first.update()
    resumed.load_state_dict(first.state_dict())
    for _ in range(2):
        seen, expected = observed_update(resumed), observed_update(first)
        assert_close(seen, expected)
    assert_close(parameters_of(resumed), parameters_of(first))
    if saved_by is not None:
        assert all(map(torch.equal, parameters_of(resumed), parameters_of(first)))
        assert resumed.state_dict().keys() == first.state_dict().keys()


def test_what_is_written_to_the_main_model_between_updates_reaches_the_replicas():
    """A change of parameters by hand, and a part that is put into evaluation mode."""

    class Halving(Regression):
        def forward(self, x, t):
            return super().forward(x, t) if self.training else super().forward(x / 2, t)

    ours, whole = pair(Halving)
    for updater in (ours, whole):
        with torch.no_grad():
            updater.get_model("main").predictor.weight.mul_(3)
        updater.get_model("main").eval()
    assert_same_updates(ours, whole)


def test_a_layer_without_a_shape_is_refused_with_the_remedy():
    """A copy of it would get a shape, and an initialization, of its own."""
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="call the model with one batch before the updater is made"):
        ParallelUpdater(rows(5), torch.optim.SGD(model.parameters()), model, devices={"main": "cpu", "second": "cpu"})


def test_a_loss_func_is_handed_the_replica():
    """Another model for each part, of which the main is the first, and their gradients count."""
    seen = []

    def loss_func(model, x, t):
        seen.append(model)
        return (model.predictor(x) - t).square().mean()

    ours, whole = pair(Regression, loss_func=loss_func)
    assert_same_updates(ours, whole)
    assert seen[0] is ours.get_model("main")
    assert seen[1] is not seen[0]
    assert {type(model) for model in seen} == {Regression}


def test_every_replica_begins_with_the_buffers_of_the_main_model():
    """A vector that each forward improves, and a cache that grows with the input."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.predictor = spectral_norm(nn.Linear(3, 1).double())
            self.register_buffer("cache", None)
            self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

        def forward(self, x, t):
            if self.cache is None or len(self.cache) < len(x):
                self.cache = torch.arange(len(x)) + self.steps
            self.steps += 1
            return ((self.predictor(x) - t) * self.steps).square().mean() + self.cache[0]

    ours, whole = pair(Normed)
    assert_same_updates(ours, whole)
    assert ours.get_model("main").steps == 3
    for updater in (ours, whole):
        updater.get_model("main").steps.fill_(10)
    assert_same_updates(ours, whole)


def test_a_compiled_model_is_replicated():
    """Its wrapper shows neither in names nor in state."""

    def make():
        return torch.compile(Regression(), backend="eager")

    seen = []
    ours, whole = pair(make)
    for updater in (ours, whole):
        reporter, observation = Reporter(), {}
        for name, part in named_submodules("main", updater.get_model("main")):
            reporter.add_observer(name, part)
        with reporter.scope(observation):
            updater.update()
        seen.append(observation)
    assert_close(*seen)
    assert_close(parameters_of(ours), parameters_of(whole))
    assert ours.state_dict().keys() == pair(Regression)[0].state_dict().keys()


def test_an_update_core_of_ones_own_works_with_whole_batches_on_the_main_device():
    """It replaces the division; what it is written from is as in StandardUpdater."""

    class Own(ParallelUpdater):
        def update_core(self):
            self.backward(self.get_model("main")(*self.next_batch()))
            self.step()

    assert_same_updates(updater_of(4, kind=Own, devices=TWO), updater_of(4))
