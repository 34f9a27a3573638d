"""What virtual ranks refuse: the rule, the value, the remedy."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from toys import ByClosure, Regression, regression_data, same_regression, updater_of

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, UpdateCallbacks
from rank_pair import on_two_ranks


@pytest.mark.parametrize("count", [0, -3])
def test_there_is_at_least_one(count):
    with pytest.raises(ValueError, match=rf"virtual_ranks .*got {count}.*take at least 1"):
        updater_of(6, virtual_ranks=count)


@pytest.mark.parametrize("count", [2.0, "2", True, [1, 2]])
def test_their_number_is_an_integer(count):
    with pytest.raises(TypeError, match=r"virtual_ranks .*an integer, got "):
        updater_of(6, virtual_ranks=count)


def test_batch_has_a_row_for_each():
    with pytest.raises(ValueError, match=r"iterator 'main' has 4 examples for virtual_ranks=5; .*fewer virtual ranks"):
        updater_of(4, virtual_ranks=5)


def test_batches_of_other_iterators_have_a_row_for_each():
    model = same_regression()
    iterators = {"main": SerialIterator(regression_data(), 6), "other": SerialIterator(regression_data(), 2)}
    with pytest.raises(ValueError, match="iterator 'other' has 2 examples for virtual_ranks=3"):
        ByClosure(iterators, torch.optim.SGD(model.parameters(), 0.1), model, virtual_ranks=3)


def with_layer(layer):
    model = same_regression()
    model.predictor = nn.Sequential(layer, model.predictor)
    return model


class Recurrent(nn.Linear):
    def serialize(self, serializer):
        self.hidden = serializer("hidden", None)


def test_a_state_of_ones_own_which_they_would_share_is_warned_about():
    with pytest.warns(UserWarning, match=r"model 'main' has predictor/0, which keeps a state of its own"):
        updater_of(6, model=with_layer(Recurrent(3, 3)), virtual_ranks=3)


def test_batch_statistics_that_ranks_exchange_themselves_are_refused():
    model = with_layer(nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match=r"model 'main' has predictor\.0 of type SyncBatchNorm, .*take nn\.BatchNorm"):
        updater_of(6, model=model, virtual_ranks=3)


def test_layer_whose_shape_is_not_known_is_refused():
    model = with_layer(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"predictor\.0 of type LazyLinear.*not known yet; call the model"):
        updater_of(6, model=model, virtual_ranks=3)


def test_optimizer_that_needs_a_closure_is_refused():
    model = same_regression()
    with pytest.raises(ValueError, match=r"optimizer 'main' is LBFGS; .*take another optimizer, or leave virtual_ranks out"):
        StandardUpdater(SerialIterator(regression_data(), 6), torch.optim.LBFGS(model.parameters()), model, virtual_ranks=3)


def test_step_with_a_closure_is_refused():
    updater = updater_of(6, kind=ByClosure, virtual_ranks=3)
    updater.start()
    with pytest.raises(ValueError, match="take another optimizer, or leave virtual_ranks out"):
        updater.update()


def test_sparse_gradients_are_refused():
    class Embedding(Regression):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 1, sparse=True, dtype=torch.float64)

        def forward(self, x, t):
            return super().forward(x, t) + self.table((x[:, 0] > 0).long()).mean()

    with pytest.raises(ValueError, match=r"'table' of model 'main' has sparse ones; give its layer sparse=False"):
        updater_of(6, model=Embedding(), virtual_ranks=3)


def test_backward_that_the_updater_does_not_know_of_is_refused():
    class Own(StandardUpdater):
        def update_core(self):
            self.get_model("main")(*self.next_batch()).backward()
            self.step()

    updater = updater_of(6, kind=Own, virtual_ranks=3)
    updater.start()
    with pytest.raises(RuntimeError, match=r"write self\.backward\(loss\) in update_core"):
        updater.update()


def test_step_of_an_optimizer_by_hand_is_refused():
    class Own(StandardUpdater):
        def update_core(self):
            self.backward(self.get_model("main")(*self.next_batch()))
            self.get_optimizer("main").step()

    updater = updater_of(6, kind=Own, virtual_ranks=3)
    updater.start()
    with pytest.raises(RuntimeError, match=r"self\.step"):
        updater.update()


def refused_on_rank(comm):
    """What is said of one virtual rank for two ranks, and of a communication hook."""
    said = []
    hooked = DistributedDataParallel(same_regression())
    hooked.register_comm_hook(None, fp16_compress_hook)
    for model, count in ((same_regression(), 1), (hooked, 3)):
        with pytest.raises(ValueError, match="virtual_ranks") as refused:
            updater_of(6, model=model, comm=comm, virtual_ranks=count)
        said.append(str(refused.value))
    return said


def test_fewer_than_ranks_and_communication_hooks_are_refused():
    for said in on_two_ranks(refused_on_rank):
        assert isinstance(said, list), said
        few, hook = said
        assert "got 1 with 2 ranks; take at least 2" in few
        assert "model 'main' has itself of type DistributedDataParallel with a communication hook" in hook
        assert "leave it out" in hook


class Growing(nn.Module):
    """Has a buffer that a forward makes."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind in ("none", "none, registered"):
            self.register_buffer("mean", None)
        if kind in ("reshaped", "resized"):
            self.register_buffer("mean", torch.zeros(1))
        if kind == "of another dtype":
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float32))

    def forward(self, x):
        value = x.detach().mean(0)
        if self.kind == "resized":
            self.mean.resize_(3).copy_(value)
        elif self.kind in ("none", "reshaped", "of another dtype"):
            self.mean = value
        else:
            self.register_buffer("mean", value, persistent=self.kind != "not saved")
        return x - self.mean


GROWING = ["none", "none, registered", "missing", "not saved", "reshaped", "resized", "of another dtype"]


@pytest.mark.parametrize("kind", GROWING)
def test_buffer_that_a_forward_makes_is_refused(kind):
    updater = updater_of(6, model=with_layer(Growing(kind)), virtual_ranks=3)
    updater.start()
    with pytest.raises(RuntimeError, match=r"'main\.predictor\.0\.mean' of shape \(3,\).*register it with its shape"):
        updater.update()


@pytest.mark.parametrize("kind", ["none", "none, registered", "missing", "not saved"])
def test_buffer_that_a_forward_makes_is_that_of_the_only_virtual_rank(kind):
    model = with_layer(Growing(kind))
    updater_of(6, model=model, virtual_ranks=1).update()
    torch.testing.assert_close(model.predictor[0].mean.double(), regression_data().tensors[0][:6].mean(0))


def test_buffer_that_is_replaced_between_updates_is_that_with_which_the_next_one_begins():
    model = with_layer(nn.BatchNorm1d(3, dtype=torch.float64))
    expected = with_layer(nn.BatchNorm1d(3, dtype=torch.float64))
    updaters = [updater_of(6, model=each, virtual_ranks=3) for each in (model, expected)]
    for updater in updaters:
        updater.update()
    model.predictor[0].running_mean = torch.full((3,), 5.0, dtype=torch.float64)
    expected.predictor[0].running_mean.fill_(5.0)
    for updater in updaters:
        updater.update()
    assert torch.equal(model.predictor[0].running_mean, expected.predictor[0].running_mean)


class Changing(nn.Module):
    """A layer whose forward changes its weight."""

    def __init__(self, change):
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(3, dtype=torch.float64)), change

    def forward(self, x):
        y = x * self.weight.clone()
        with torch.no_grad():
            self.change(self.weight, x)
        return y


def add_and_subtract(weight, x):
    weight.add_(x.mean() / 3)
    weight.sub_(x.mean() / 3).mul_(1 + 1e-15)


IN_A_FORWARD = {
    "an average of the rows": lambda weight, x: weight.lerp_(x.mean(0), 0.1),
    "by its data": lambda weight, x: weight.data.add_(x.mean()),
    "by data that are replaced": lambda weight, x: setattr(weight, "data", weight.data + x.mean()),
    "a copy": lambda weight, x: weight.copy_(x.mean(0)),
    "one row": lambda weight, x: weight.__setitem__(0, x.mean()),
    "renormalised": lambda weight, _: weight.div_(weight.norm()),
    "clamped": lambda weight, _: weight.clamp_(max=0.5),
    "added and subtracted": add_and_subtract,
    "random": lambda weight, _: weight.add_(torch.randn_like(weight)),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("change", IN_A_FORWARD)
def test_parameter_that_a_forward_changes_is_refused_in_the_first_update(change, count):
    updater = updater_of(6, model=with_layer(Changing(IN_A_FORWARD[change])), virtual_ranks=count)
    updater.start()
    with pytest.raises(
        RuntimeError, match=r"model 'main', predictor\.0\.weight\. What happens once an update.* is a buffer"
    ):
        updater.update()


class Moving(StandardUpdater):
    """Changes parameters after the step."""

    def update_core(self):
        x, t = self.next_batch()
        self.backward(self.get_model("main")(x, t))
        self.step()
        self.move(x)


def follow(updater, weight):
    for target, source in zip(*(updater.get_model(name).parameters() for name in ("target", "main")), strict=True):
        weight(target, source)


AFTER_THE_STEP = {
    "lerp": lambda target, source: target.data.lerp_(source.data, 0.1),
    "mul and add": lambda target, source: target.data.mul_(0.9).add_(0.1 * source.data),
    "copy": lambda target, source: target.data.copy_(source.data),
    "in place": lambda target, source: target.detach().lerp_(source.detach(), 0.1),
    "assigned": lambda target, source: setattr(target, "data", 0.9 * target.data + 0.1 * source.data),
    "weights scaled": lambda _, source: source.data.mul_(0.99),
    "weights clipped": lambda _, source: source.data.clamp_(-0.01, 0.01),
}


@pytest.mark.parametrize("move", AFTER_THE_STEP)
def test_parameters_that_change_after_the_step_are_refused_in_the_first_update(move):
    """In a callback of the update they change once."""
    models = {"main": same_regression(), "target": same_regression()}
    settings = {"callbacks": UpdateCallbacks(update_on_finish=lambda c: follow(c.updater, AFTER_THE_STEP[move]))}
    for kind, given in ((StandardUpdater, settings), (Moving, {})):
        optimizer = torch.optim.SGD(models["main"].parameters(), 0.1)
        updater = kind(SerialIterator(regression_data(), 6), optimizer, models, virtual_ranks=3, **given)
        updater.move = lambda _: follow(updater, AFTER_THE_STEP[move])  # noqa: B023
        updater.start()
        if kind is StandardUpdater:
            updater.update()
            continue
        with pytest.raises(RuntimeError, match=r"UpdateCallbacks\(update_on_finish=function\)"):
            updater.update()


def test_parameter_that_changes_in_a_later_update_is_refused_there():
    updater = updater_of(6, kind=Moving, virtual_ranks=3)
    updater.move = lambda _: None
    for _ in range(4):
        updater.update()
    updater.move = lambda _: torch.nn.init.zeros_(updater.get_model("main").predictor.bias)
    with pytest.raises(RuntimeError, match=r"model 'main', predictor\.bias"):
        updater.update()


class Sharpness(StandardUpdater):
    """Computes the gradient a step uphill, as SAM does."""

    def update_core(self):
        model = self.get_model("main")
        x, t = self.next_batch()
        self.backward(model(x, t))
        saved = [p.detach().clone() for p in model.parameters()]
        uphill = [0.05 * p.grad / 3 for p in model.parameters()]
        with torch.no_grad():
            for parameter, change in zip(model.parameters(), uphill, strict=True):
                parameter.add_(change)
                parameter.grad = None
        self.backward(model(x, t))
        with torch.no_grad():
            for parameter, change, value in zip(model.parameters(), uphill, saved, strict=True):
                if self.puts_back(self.iteration):
                    parameter.copy_(value)
                else:  # nearly, as rounding does on most processors
                    parameter.sub_(change).mul_(1 + 1e-15)
        self.step()


def test_parameters_that_are_put_back_from_a_copy_may_change_in_between():
    updater = updater_of(6, kind=Sharpness, virtual_ranks=3)
    updater.puts_back = lambda iteration: iteration < 4
    for _ in range(4):
        updater.update()
    with pytest.raises(RuntimeError, match="put back from a copy"):
        updater.update()


@pytest.mark.parametrize("count", [3, 6])
def test_parameters_that_are_subtracted_back_are_refused(count):
    updater = updater_of(6, kind=Sharpness, virtual_ranks=count)
    updater.puts_back = lambda _: False
    with pytest.raises(RuntimeError, match="put back from a copy"):
        updater.update()


@pytest.mark.parametrize("layer", [nn.Embedding(4, 3, max_norm=0.5), nn.EmbeddingBag(4, 3, max_norm=1.0, norm_type=1)])
def test_rows_that_are_scaled_when_they_are_looked_up_are_refused(layer):
    with pytest.raises(ValueError, match=r"predictor\.0 of type Embedding.*max_norm=.*leave max_norm out, and scale once"):
        updater_of(6, model=with_layer(layer), virtual_ranks=3)


def set_by_loss(updater, loss):
    updater.get_optimizer("main").param_groups[0]["lr"] = float(loss.detach())


def decay_in_place(updater, _):
    updater.get_optimizer("main").param_groups[0]["lr"] *= 0.9


def momentum_by_loss(updater, loss):
    updater.get_optimizer("main").param_groups[0]["momentum"] = float(loss.detach()) / 100


def schedule(updater, _):
    updater.scheduler.step()


def plateau(updater, loss):
    updater.plateau.step(float(loss.detach()))


@pytest.mark.parametrize("change", [set_by_loss, decay_in_place, momentum_by_loss, schedule, plateau])
def test_settings_that_differ_between_virtual_ranks_are_refused(change):
    class Setting(StandardUpdater):
        def update_core(self):
            loss = self.get_model("main")(*self.next_batch())
            self.backward(loss)
            if change is not schedule:
                change(self, loss)
            self.step()
            if change is schedule:
                change(self, loss)

    updater = updater_of(6, kind=Setting, virtual_ranks=3)
    updater.scheduler = torch.optim.lr_scheduler.StepLR(updater.get_optimizer("main"), 10)
    updater.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(updater.get_optimizer("main"))
    with pytest.raises(RuntimeError, match=r"has left '.*trainer\.extend\(extensions\.LRScheduler\(scheduler\)\)"):
        updater.update()


def test_setting_that_is_the_same_in_each_virtual_rank_is_taken():
    class Setting(StandardUpdater):
        def update_core(self):
            self.get_optimizer("main").param_groups[0]["lr"] = 1 / (1 + self.iteration)
            self.backward(self.get_model("main")(*self.next_batch()))
            self.step()

    updater = updater_of(6, kind=Setting, virtual_ranks=3)
    for _ in range(3):
        updater.update()
    assert updater.get_optimizer("main").param_groups[0]["lr"] == 1 / 3


class Noisy(nn.Module):
    """Adds numbers of its own generator."""

    def __init__(self, generator, draw):
        super().__init__()
        self.generator, self.draw = generator, draw

    def forward(self, x):
        return x + float(self.draw(self.generator))


DRAWS = {
    "torch": (torch.Generator(), lambda generator: torch.rand((), generator=generator)),
    "NumPy": (np.random.default_rng(0), lambda generator: generator.random()),
    "NumPy, of old": (np.random.RandomState(0), lambda generator: generator.rand()),
    "Python": (random.Random(0), lambda generator: generator.random()),
    "in a list": ([random.Random(0)], lambda generators: generators[0].random()),
    "in a partial": (partial(random.Random(0).uniform, 0, 1), lambda draw: draw()),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_generator_of_a_module_is_refused_when_it_is_drawn_from(draw):
    updater = updater_of(6, model=with_layer(Noisy(*DRAWS[draw])), virtual_ranks=3)
    with pytest.raises(RuntimeError, match=r"model 'main'.*was drawn from.*draw from the global ones"):
        updater.update()


class Augmented(torch.utils.data.Dataset):
    def __init__(self, generator, draw):
        self.generator, self.draw = generator, draw

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x, t = regression_data()[index]
        return x + float(self.draw(self.generator)), t


@pytest.mark.parametrize("kind", [StandardUpdater, Moving])
@pytest.mark.parametrize("draw", DRAWS)
def test_generator_of_a_data_set_is_refused_when_it_is_drawn_from(draw, kind):
    data = torch.utils.data.Subset(Augmented(*DRAWS[draw]), range(12))
    updater = updater_of(6, kind=kind, data=data, virtual_ranks=3)
    updater.move = lambda _: None
    with pytest.raises(RuntimeError, match=r"the data set of iterator 'main'.*was drawn from.*default_rng\(index\)"):
        updater.update()


def test_generators_that_are_not_drawn_from_or_are_the_global_ones_are_taken():
    layer = Noisy([np.random.mtrand._rand, random._inst], lambda generators: generators[0].rand() + random.random())
    layer.unused = torch.Generator()
    updater = updater_of(6, model=with_layer(layer), virtual_ranks=3)
    for _ in range(3):
        updater.update()
