"""ParallelUpdater is StandardUpdater on the whole batch: parameters and reports, for every split."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring import DictSummary, report
from chainring.iterators import LoaderIterator, SerialIterator
from chainring.training import ParallelUpdater, StandardUpdater


def cpus(count):
    return dict.fromkeys(("main", "second", "third", "fourth")[:count], "cpu")


def pair(batch_size, replicas=2, *, model=same_regression, **settings):
    """A ParallelUpdater and a StandardUpdater on the same data, each with a model of its own."""
    parallel = updater_of(batch_size, kind=ParallelUpdater, devices=cpus(replicas), model=model(), **settings)
    return parallel, updater_of(batch_size, model=model(), **settings)


def assert_same_updates(ours, whole, updates=3):
    for _ in range(updates):
        assert_close(observed_update(ours), observed_update(whole))
        assert_close(torch.as_tensor(float(ours.weight)), torch.as_tensor(float(whole.weight)))
        assert_close(parameters_of(ours), parameters_of(whole))


@pytest.mark.parametrize(("replicas", "batch_size"), [(n, size) for n in range(1, 5) for size in range(1, 2 * n + 4)])
def test_an_update_is_that_on_the_whole_batch(replicas, batch_size):
    """For every number of replicas and every batch size, with momentum over several updates."""
    assert_same_updates(*pair(batch_size, replicas))


def test_the_gradient_is_the_mean_over_the_batch_and_not_the_sum_over_replicas():
    """Against the formula of the gradient of a mean squared error."""
    updater = updater_of(4, kind=ParallelUpdater, devices=cpus(4))
    weight, bias = parameters_of(updater)
    x, t = (column[:4] for column in regression_data().tensors)
    updater.update()
    errors = x @ weight.T + bias - t
    linear = updater.get_model("main").predictor
    assert_close([linear.weight.grad, linear.bias.grad], [2 * errors.T @ x / 4, 2 * errors.mean(0)])


def test_every_example_counts_alike_in_parts_of_unequal_length():
    """Of three examples over two replicas, the one that is alone in its part has a third of the gradient."""
    x, t = torch.eye(3, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    updater = updater_of(3, kind=ParallelUpdater, devices=cpus(2), data=TensorDataset(x, t))
    weight, bias = parameters_of(updater)
    updater.update()
    assert_close(updater.get_model("main").predictor.weight.grad, 2 * (weight + bias - 1) / 3)


def test_a_batch_smaller_than_the_replicas_uses_fewer():
    """The last batch of five rows in batches of four is one row, of four replicas."""
    ours, whole = pair(4, 4, data=regression_data(5), repeat=False)
    assert_same_updates(ours, whole, updates=2)
    with pytest.raises(StopIteration):
        ours.update()


def test_replica_i_takes_every_nth_example_from_i_on():
    """The main model takes the first part, wherever it stands in the mapping; a short batch is divided by what it has."""
    seen = []

    def convert(batch, device):
        seen.append(list(batch))
        return torch.tensor(batch, dtype=torch.float64)[:, None]

    def loss_func(model, x):
        return model.predictor(x).square().mean()

    model = Regression(1)
    updater = ParallelUpdater(
        SerialIterator(range(8), 5, repeat=False, shuffle=False),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices={"other": "cpu", "third": "cpu", "main": "cpu", "fourth": "cpu"},
        converter=convert,
        loss_func=loss_func,
    )
    updater.update()
    assert seen == [[0, 4], [1], [2], [3]]
    updater.update()
    assert seen[4:] == [[5], [6], [7]]


def test_the_reported_loss_is_that_of_the_whole_batch():
    """Not that of the main model's part; and a run's mean over updates is that over all examples."""
    ours, whole = pair(5, 3, data=regression_data(12), repeat=False, lr=0.0)
    means = []
    for updater in (ours, whole):
        summary = DictSummary()
        for _ in range(3):
            summary.add(observed_update(updater), updater.weight)
        means.append(summary.compute_mean())
    assert list(means[0]) == ["main/loss"]
    assert means[0] == pytest.approx(means[1], rel=1e-14)


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_parts_are_weighted_by_what_the_loss_says_it_counts(replicas, as_number):
    """A mean over unpadded tokens, of which the parts have unequal numbers, also as a tensor that is not read."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, 3, generator=draw, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([4, 1, 3, 4, 1, 1, 1, 2, 1, 1, 4, 1])[:, None]

    def loss_func(model, x, t, mask):
        weight = mask.sum()
        loss = ((model.predictor(x).squeeze(2) - t).square() * mask).sum() / weight
        report({"tokens": (loss * 2, weight)})
        return {"loss": loss, "weight": weight.item() if as_number else weight}

    ours, whole = pair(7, replicas, data=TensorDataset(x, x.sum(2), mask), loss_func=loss_func)
    for _ in range(3):
        seen, expected = observed_update(ours), observed_update(whole)
        assert_close(seen["main/loss"], expected["main/loss"])
        assert_close(seen["tokens"], expected["tokens"])
        assert float(ours.weight) == float(whole.weight)
    assert_close(parameters_of(ours), parameters_of(whole))


def test_a_batch_of_which_nothing_counts_is_divided_evenly():
    """A weight of 0 for all: the plain mean, and no division by zero."""

    def loss_func(model, x, t):
        return {"loss": (model.predictor(x) - t).square().mean(), "weight": 0}

    ours, whole = pair(4, 2, loss_func=loss_func)
    assert_close(observed_update(ours)["main/loss"], observed_update(whole)["main/loss"])
    assert_close(parameters_of(ours), parameters_of(whole))
    assert ours.weight == whole.weight == 0


def test_a_part_that_no_parameter_enters_is_none_of_the_gradient():
    """Its loss is a constant, as of a part without a labelled row; the whole batch has a gradient, so there is one."""

    class Labelled(Regression):
        def forward(self, x, t):
            labelled = t[:, 0] > 0
            total = (
                (self.predictor(x[labelled]) - t[labelled]).square().sum() if labelled.any() else torch.zeros(()).double()
            )
            return total / len(x)

    def model():
        torch.manual_seed(3)
        return Labelled()

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(x, torch.tensor([[-1.0], [1.0]] * 3, dtype=torch.float64))
    assert_same_updates(*pair(6, 2, model=model, data=data))


def test_other_reports_are_averaged_and_of_the_rest_the_last_holds():
    """Numbers by the examples of the parts; a key that only one part reports as it is; a string of the last."""
    calls = iter(range(2))

    def loss_func(model, x, t):
        part = next(calls)
        report({"number": float(part), "name": "ab"[part], f"only {part}": 7})
        return model(x, t)

    seen = observed_update(updater_of(3, kind=ParallelUpdater, devices=cpus(2), loss_func=loss_func))
    assert (seen["number"], seen["name"]) == (pytest.approx(1 / 3), "b")
    assert (seen["only 0"], seen["only 1"]) == (7, 7)


def loader_batches(kind):
    """Batches of five and two rows that are tensors already."""
    x, t = regression_data(7).tensors
    batches = [(x[:5], t[:5]), (x[5:], t[5:])]
    return batches if kind is tuple else [{"x": x, "t": t} for x, t in batches]


@pytest.mark.parametrize("kind", [tuple, dict])
def test_batches_that_are_columns_are_divided_by_rows(kind):
    """Those of a loader at the door, as tuples and as mappings."""
    trained = []
    for make in (lambda *given: ParallelUpdater(*given, devices=cpus(3)), StandardUpdater):
        model = same_regression()
        updater = make(LoaderIterator(loader_batches(kind)), torch.optim.SGD(model.parameters(), lr=0.1), model)
        losses = [observed_update(updater)["main/loss"] for _ in range(4)]
        trained.append([*losses, *parameters_of(updater)])
    assert_close(*trained)


def test_a_failed_update_leaves_nothing_behind():
    """One replica fails after the other's forward: the batch comes again, and the next update is as if nothing had been."""
    fails = [False, True]

    def loss_func(model, x, t):
        if fails and fails.pop(0):
            raise ArithmeticError
        return model(x, t)

    ours, whole = pair(4, 2)
    ours.loss_func = loss_func
    with pytest.raises(ArithmeticError):
        ours.update()
    assert ours.iteration == 0
    assert_same_updates(ours, whole)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (lambda model, x, t: 1.0, TypeError, "the loss is a scalar tensor"),
        (lambda model, x, t: model.predictor(x), ValueError, r"got one of shape \(2, 1\)"),
        (lambda model, x, t: x.mean(), ValueError, "depends on no parameter"),
        (lambda x, t: x.mean(), TypeError, "is called with the model first"),
    ],
)
def test_a_loss_that_is_none_is_refused_as_by_standard_updater(answer, error, text):
    """With the same words."""
    with pytest.raises(error, match=text):
        updater_of(4, kind=ParallelUpdater, devices=cpus(2), loss_func=answer).update()


def test_a_model_of_several_dtypes_and_frozen_parts_is_replicated_as_it_is_now():
    """What is frozen or thawed later is so in every replica."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1).double()

        def forward(self, x, t):
            return (self.head(self.body(x.float()).double().tanh()) - t).square().mean()

    def model():
        torch.manual_seed(0)
        made = Two()
        made.body.requires_grad_(False)
        return made

    ours, whole = pair(5, 2, model=model)
    for frozen, thawed in (("body", "head"), ("head", "body"), ("body", "head")):
        for updater in (ours, whole):
            updater.get_model("main").get_submodule(frozen).requires_grad_(False)
            updater.get_model("main").get_submodule(thawed).requires_grad_(True)
            updater.update()
        torch.testing.assert_close(parameters_of(ours), parameters_of(whole))
        assert all(parameter.grad is None for parameter in ours.get_model("main").get_submodule(frozen).parameters())
