"""The loss of each example of an update, as `chainring batch --losses` tells it."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import chainring
from chainring import iterators, training
from chainring.converters import concat_examples
from chainring.testing.replay import BatchIndices, ExampleLosses, NoReplay
from chainring.training.updaters import UpdateCallbacks

SIZE, BATCH, UPDATE = 22, 6, 4
functional = nn.functional


class Pairs(torch.utils.data.Dataset):
    """Inputs and targets, as tuples or by name."""

    def __init__(self, kind=tuple):
        generator = torch.Generator().manual_seed(0)
        self.x, self.t, self.kind = torch.randn(SIZE, 3, generator=generator), torch.arange(SIZE) % 2, kind

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        pair = {"x": self.x[index], "t": self.t[index]}
        return tuple(pair.values()) if self.kind is tuple else pair


class Texts(torch.utils.data.Dataset):
    """Tokens, of 1 to 5, without 0."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.arange(1, 2 + index % 5)


class Net(nn.Module):
    """A layer that is trained with dropout and statistics of the batch, which an evaluation does without."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(3, 2), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x):
        return self.layer(self.dropout(self.norm(x)))


class Words(nn.Module):
    """Learns each token from itself, in a mean over the tokens that are there, which it returns as the weight."""

    def __init__(self, is_weighted):
        super().__init__()
        self.table, self.is_weighted = nn.Linear(6, 6), is_weighted

    def forward(self, tokens):
        scores = self.table(functional.one_hot(tokens, 6).float())
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens.flatten(), ignore_index=0)
        return {"loss": loss, "weight": (tokens != 0).sum()} if self.is_weighted else loss


def cross_entropy(model, x, t):
    return functional.cross_entropy(model(x), t)


def serial(dataset):
    return iterators.SerialIterator(dataset, BATCH, seed=1)


def updater_of(iterator, model, cls=training.StandardUpdater, **settings):
    return cls(iterator, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model, **settings)


def pad(batch, device):
    return concat_examples(batch, device, padding=0)


PROGRAMS = {
    "tuples": lambda: updater_of(serial(Pairs()), Net(), loss_func=cross_entropy),
    "mappings": lambda: updater_of(serial(Pairs(dict)), Net(), loss_func=cross_entropy),
    "columns": lambda: updater_of(
        serial(chainring.datasets.TupleDataset(Pairs().x, Pairs().t)), Net(), loss_func=cross_entropy
    ),
    "Classifier": lambda: updater_of(serial(Pairs()), chainring.nn.Classifier(Net())),
    "workers": lambda: updater_of(
        iterators.MultiprocessIterator(Pairs(), BATCH, seed=1, n_processes=1), Net(), loss_func=cross_entropy
    ),
    "DataLoader": lambda: updater_of(DataLoader(Pairs(), BATCH, shuffle=True), Net(), loss_func=cross_entropy),
    "virtual ranks": lambda: updater_of(serial(Pairs()), Net(), loss_func=cross_entropy, virtual_ranks=3),
    "accumulation": lambda: updater_of(serial(Pairs()), Net(), loss_func=cross_entropy, accumulate=3),
    "virtual ranks that accumulate": lambda: updater_of(
        serial(Pairs()), Net(), loss_func=cross_entropy, virtual_ranks=2, accumulate=2
    ),
    "an update that ends with its epoch": lambda: updater_of(
        serial(Pairs()), Net(), loss_func=cross_entropy, accumulate=3, accumulate_across_epochs=False
    ),
    "replicas": lambda: updater_of(
        serial(Pairs()), Net(), training.ParallelUpdater, loss_func=cross_entropy, devices={"main": -1, "other": -1}
    ),
}


def run(make, out):
    """The losses of the examples of an update, and the updater after it."""
    chainring.deterministic(0)
    updater = make()
    trainer = training.Trainer(updater, (UPDATE, "iteration"), out=str(out))
    losses = ExampleLosses(updater, UPDATE)
    trainer.watch(losses)
    trainer.run()
    return losses.result(), updater


def run_without(make):
    """The model before an update in evaluation mode, the indices of its examples, and the updater after it."""
    chainring.deterministic(0)
    updater = make()
    indices = BatchIndices(updater)
    for _ in range(UPDATE - 1):
        indices.mark()
        updater.update()
    model = copy.deepcopy(updater.get_model("main")).eval()
    indices.mark()
    updater.update()
    updater.finalize()
    return model, indices.taken()["main"], updater


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_what_the_model_before_the_update_says_of_the_example_alone(name, tmp_path):
    """In evaluation mode; their mean is the loss of the batch there, and the run goes on as it would have."""
    model, indices, expected = run_without(PROGRAMS[name])
    result, updater = run(PROGRAMS[name], tmp_path)
    x, t = Pairs().x, Pairs().t
    with torch.no_grad():
        by_hand = [functional.cross_entropy(getattr(model, "predictor", model)(x[[i]]), t[[i]]).item() for i in indices]
    assert result["losses"] == pytest.approx(by_hand, rel=1e-6)
    assert result["mean"] == pytest.approx(math.fsum(by_hand) / len(by_hand), rel=1e-6)
    assert result["batch"] == pytest.approx(result["mean"], rel=1e-5)
    assert result["is_mean"]
    assert updater.get_model("main").training
    assert repr(updater.state_dict()) == repr(expected.state_dict())
    assert torch.rand(()).item() == (run_without(PROGRAMS[name]), torch.rand(()).item())[1]


@pytest.mark.parametrize("is_weighted", [True, False])
def test_texts_that_are_padded_are_weighted_by_what_the_loss_counts(is_weighted, tmp_path):
    """Alone, a text has no padding. A mean over tokens is that of the texts if it comes with their number."""

    def make():
        return updater_of(serial(Texts()), Words(is_weighted), converter=pad)

    model, indices, _ = run_without(make)
    result, _ = run(make, tmp_path)
    losses, tokens = [], []
    with torch.no_grad():
        for index in indices:
            text = Texts()[index]
            losses.append(functional.cross_entropy(model.table(functional.one_hot(text, 6).float()), text).item())
            tokens.append(len(text) if is_weighted else 1)
    assert result["losses"] == pytest.approx(losses, rel=1e-6)
    assert result["mean"] == pytest.approx(sum(map(float.__mul__, losses, map(float, tokens))) / sum(tokens), rel=1e-6)
    assert result["is_mean"] == is_weighted


def total(model, x, t):
    return functional.cross_entropy(model(x), t, reduction="sum")


def contrast(model, x, t):
    return cross_entropy(model, x - x.mean(0), t)


@pytest.mark.parametrize("loss_func", [total, contrast])
def test_a_loss_of_a_batch_that_is_not_the_mean_of_its_examples_is_told(loss_func, tmp_path):
    """One that is summed over them, and one in which they are compared."""
    result, _ = run(lambda: updater_of(serial(Pairs()), Net(), loss_func=loss_func), tmp_path)
    assert not result["is_mean"]
    if loss_func is total:
        assert result["batch"] == pytest.approx(math.fsum(result["losses"]), rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_which_nothing_but_rounding_is_left_is_still_told_from_a_sum(reduction, tmp_path):
    """A row alone is rounded in another way than in a batch, which is much of the loss of a model that has learnt."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 1)
            nn.init.ones_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)

        def forward(self, x):
            x = torch.cat([(x + i) * (1 - 2 * (i % 4 == 0)) for i in range(22)], 1)[:, :64]
            return functional.mse_loss(self.layer(x)[:, 0], x.double().sum(1).float(), reduction=reduction)

    data = torch.randn(100, 3)

    def make():
        model = Sums()
        rows = iterators.SerialIterator(data, 50, seed=1)  # so many that their sum is far from their mean
        return training.StandardUpdater(rows, torch.optim.SGD(model.parameters(), lr=0.0), model)

    result, _ = run(make, tmp_path)
    assert 0 < result["mean"] < 1e-6
    assert result["mean"] != pytest.approx(result["batch"], rel=1e-3)
    assert result["is_mean"] == (reduction == "mean")


def test_an_example_that_is_not_a_number_is_in_the_mean_and_in_the_batch(tmp_path):
    """Which are then the same."""

    def loss_func(model, x, t):
        return cross_entropy(model, x, t) * (math.nan if not model.training and (t == 1).any() else 1.0)

    result, _ = run(lambda: updater_of(serial(Pairs()), Net(), loss_func=loss_func), tmp_path)
    is_nan = list(map(math.isnan, result["losses"]))
    assert any(is_nan)
    assert not all(is_nan)
    assert math.isnan(result["batch"])
    assert result["is_mean"]


class Doubled(training.StandardUpdater):
    def update_core(self):
        super().update_core()


class Mixed(training.StandardUpdater):
    def next_batch(self, name="main"):
        return super().next_batch(name)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Pairs())


def replace(context):
    context.batch = tuple(x.clone() for x in context.batch)


def write(context):
    context.batch[0].div_(2)


def squeezed(model, x, t):
    return functional.mse_loss(model(x).squeeze()[:, 0], t.float())


class Predicts(nn.Module):
    """Returns a loss in training only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, t):
        y = self.layer(x)[:, 0]
        return functional.mse_loss(y, t.float()) if self.training else y


def with_callback(function):
    return lambda: updater_of(
        serial(Pairs()), Net(), loss_func=cross_entropy, callbacks=UpdateCallbacks(batch_on_finish=function)
    )


REFUSED = {
    "an update_core": (
        lambda: updater_of(serial(Pairs()), Net(), Doubled, loss_func=cross_entropy),
        "Doubled has its own update_core",
    ),
    "a next_batch": (
        lambda: updater_of(serial(Pairs()), Net(), Mixed, loss_func=cross_entropy),
        "Mixed has its own next_batch",
    ),
    "a stream": (
        lambda: updater_of(DataLoader(Stream(), BATCH), Net(), loss_func=cross_entropy),
        "updates from LoaderIterator 'main' have no examples of a dataset",
    ),
    "packed texts": (
        lambda: updater_of(iterators.PackingIterator(Texts(), 8, BATCH), Words(False)),
        "updates from PackingIterator 'main' have no examples",
    ),
    "no data": (
        lambda: updater_of(None, Net(), loss_func=lambda model: model.layer.weight.sum()),
        "updates without an iterator",
    ),
    "a batch that is replaced": (with_callback(replace), "a callback of batch_on_finish changes batches"),
    "a batch that is written": (with_callback(write), "a callback of batch_on_finish changes batches"),
    "no loss in evaluation mode": (
        lambda: updater_of(iterators.SerialIterator(Pairs(), 1, seed=1), Predicts()),
        "evaluation mode: TypeError: there the model returns a Tensor of shape (1,), and no loss",
    ),
    "no batch of one": (
        lambda: updater_of(serial(Pairs()), Net(), loss_func=squeezed),
        "the loss of an example alone cannot be computed in evaluation mode: IndexError",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_loss_of_one_example_is_refused(name, tmp_path):
    """With a remedy, and without an error of the run."""
    make, text = REFUSED[name]
    with pytest.raises(NoReplay, match=re.escape(text)) as refused:
        run(make, tmp_path)
    assert "chainring.testing.replay(make_trainer, RUN, K - 1)" in str(refused.value)


def test_a_callback_that_only_looks_at_batches_is_none_that_changes_them(tmp_path):
    """It is called for those of the update alone."""
    seen = []
    result, _ = run(with_callback(lambda context: seen.append(len(context.batch[1]))), tmp_path)
    assert len(result["losses"]) == BATCH
    assert seen == [BATCH] * UPDATE
