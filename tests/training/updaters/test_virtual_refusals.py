"""What virtual ranks refuse: the rule, the value, the remedy."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from toys import ByClosure, Regression, regression_data, same_regression, updater_of

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater
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
