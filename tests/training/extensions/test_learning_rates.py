"""find_learning_rate: rates and losses, a suggestion, a picture, and a trainer that is as it was."""

import builtins
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from toys import updater_of

import chainring
import resume_program
from chainring import training
from chainring.datasets import TupleDataset
from chainring.iterators import MultiprocessIterator, SerialIterator
from chainring.training import UpdateCallbacks, extensions
from chainring.training.extensions import find_learning_rate

FEATURES = torch.linspace(-1, 1, 80).reshape(20, 4)
LABELS = torch.arange(20) % 3


class Noisy:
    """Examples with noise of their own; whole arrays would need no worker."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return FEATURES[i] + torch.rand(4), LABELS[i]


LOADERS = {
    "arrays": lambda: SerialIterator(TupleDataset(FEATURES.numpy(), LABELS.numpy()), 6),
    "noise": lambda: SerialIterator(Noisy(), 6),
    "workers": lambda: MultiprocessIterator(Noisy(), 6, n_processes=2),
    "loader": lambda: DataLoader(Noisy(), 6, shuffle=True, num_workers=2),
}
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
}


def outcome(out, loader, optimizer, searches, accumulate=1):
    """All that a run leaves, where the search came before it or not."""
    chainring.deterministic(3)
    model = resume_program.Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    updater = training.StandardUpdater(LOADERS[loader](), made, model, accumulate=accumulate)
    trainer = training.Trainer(updater, (9, "iteration"), str(out))
    trainer.extend(extensions.LRScheduler(torch.optim.lr_scheduler.ExponentialLR(made, 0.9)), trigger=(2, "iteration"))
    trainer.extend(log := extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.observe_lr(), trigger=(1, "iteration"))
    if searches:
        find_learning_rate(trainer, count=30)
        assert not out.exists()
        assert float(made.param_groups[0]["lr"]) == pytest.approx(0.05 if optimizer == "momentum" else 0.01)
    trainer.run()
    rows = [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log.log]
    kept = [model.state_dict(), *made.state_dict()["state"].values()]
    tensors = [{name: torch.as_tensor(value).tolist() for name, value in entries.items()} for entries in kept]
    return rows, tensors, [random.random(), np.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize(
    ("loader", "optimizer", "accumulate"),
    [("arrays", "momentum", 1), ("noise", "Adam", 2), ("workers", "momentum", 2), ("loader", "Adam", 1)],
)
@pytest.mark.filterwarnings("ignore:a run over this DataLoader cannot be resumed")
def test_the_run_after_a_search_is_bit_for_bit_the_run_without_it(tmp_path, loader, optimizer, accumulate):
    """With momentum, BatchNorm, dropout, noise in the data, workers, a schedule, and a rate that is a tensor."""
    settings = loader, optimizer
    expected = outcome(tmp_path / "without", *settings, False, accumulate)
    assert outcome(tmp_path / "with", *settings, True, accumulate) == expected


def test_a_search_before_a_resumed_run_leaves_no_trace(tmp_path):
    """What was loaded, the random generators of the first update included, is still there afterwards."""
    outcomes = []
    for searches in (False, True):
        trainer, data, fired = resume_program.resumed(tmp_path)
        if searches:
            find_learning_rate(trainer, count=20, strict=False)  # its data take down what is asked for
            data.consumed.clear()
        trainer.run()
        outcomes.append(resume_program.outcome(trainer, data, fired))
    assert outcomes[0] == outcomes[1]


def searched(tmp_path, **settings):
    """The search in a linear regression, whose loss breaks at a rate of some units."""
    return find_learning_rate(training.Trainer(updater_of(lr=0.25), None, str(tmp_path)), **settings)


def test_rates_grow_by_a_factor_and_the_loss_falls_fastest_at_the_suggestion(tmp_path):
    """And the updates end when the loss grows without end, before the largest rate."""
    found = searched(tmp_path, smallest=1e-5, largest=1e6, count=111)
    assert found.rates[0] == 1e-5
    growths = [second / first for first, second in itertools.pairwise(found.rates)]
    assert growths == pytest.approx([10**0.1] * len(growths))
    assert len(found.rates) == len(found.losses) < 111
    lowest = found.rates[found.losses.index(min(found.losses))]
    assert 1e-3 < found.suggestion < lowest < 10
    assert found.losses[-1] > found.losses[0]


def test_nothing_is_suggested_where_the_loss_does_not_fall(tmp_path):
    """Because it is level."""
    model = nn.Linear(4, 3)
    data, level = TupleDataset(FEATURES, LABELS), lambda model, x, t: 1 + 0 * model(x).sum()
    updater = updater_of(model=model, data=data, loss_func=level)
    found = find_learning_rate(training.Trainer(updater, None, str(tmp_path)), count=20)
    assert found.suggestion is None
    assert found.losses == [1.0] * 20


def test_groups_keep_their_proportion_and_get_their_rates_back(tmp_path):
    """The largest of them is the one that is tried."""
    model, tried = nn.Linear(4, 3), []
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.4}]
    note = UpdateCallbacks(update_on_start=lambda context: tried.append([group["lr"] for group in optimizer.param_groups]))
    optimizer = torch.optim.SGD(groups)
    iterator = SerialIterator(TupleDataset(FEATURES, LABELS), 5)
    loss = lambda model, x, t: nn.functional.cross_entropy(model(x), t)  # noqa: E731
    updater = training.StandardUpdater(iterator, optimizer, model, callbacks=note, loss_func=loss)
    found = find_learning_rate(training.Trainer(updater, None, str(tmp_path)), count=12)
    assert [rates[1] for rates in tried] == pytest.approx(found.rates)
    assert [rates[0] for rates in tried] == pytest.approx([rate / 4 for rate in found.rates])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]


class Counting(nn.Module):
    """Counts its calls in an attribute that is not saved."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 3), 0

    def forward(self, x, t):
        self.calls += 1
        return nn.functional.cross_entropy(self.linear(x), t) * (1 + self.calls)


def test_what_cannot_be_put_back_is_refused(tmp_path):
    """With the path and the remedy; strict=False returns what was found."""
    trainer = training.Trainer(updater_of(model=Counting(), data=TupleDataset(FEATURES, LABELS)), None, str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot put them back:\n  updater\.model:main\.calls: register_buffer"):
        find_learning_rate(trainer, count=12)
    assert len(find_learning_rate(trainer, count=12, strict=False).rates) == 12


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"smallest": 0}, ValueError, "0 < smallest < largest, got 0, 10.0"),
        ({"smallest": 1.0, "largest": 0.1}, ValueError, "0 < smallest < largest"),
        ({"largest": float("inf")}, ValueError, "0 < smallest < largest"),
        ({"count": 5}, ValueError, "at least 10, got 5"),
        ({"count": "20"}, ValueError, "an integer of at least 10, got '20'"),
        ({"key": "main/los"}, ValueError, r"'main/los' is not reported by an update; reported were \['main/loss'\]"),
        ({"optimizer": "other"}, KeyError, "other"),
        ({"smallest": 1e30, "largest": 1e300, "count": 20}, RuntimeError, "the loss was not finite"),
    ],
)
def test_settings_of_which_nothing_could_be_found_are_refused(tmp_path, settings, error, words):
    """The trainer is as it was, and can run."""
    updater = updater_of(lr=0.25)
    before = [parameter.tolist() for parameter in updater.get_model("main").parameters()]
    trainer = training.Trainer(updater, (2, "iteration"), str(tmp_path))
    with pytest.raises(error, match=words):
        find_learning_rate(trainer, **settings)
    assert [parameter.tolist() for parameter in updater.get_model("main").parameters()] == before
    assert updater.get_optimizer("main").param_groups[0]["lr"] == 0.25
    trainer.run()


def test_data_that_end_are_enough_if_ten_updates_were_made(tmp_path):
    """Otherwise an error says how many there were."""
    found = []
    for batch_size in (1, 4):
        trainer = training.Trainer(updater_of(batch_size, repeat=False), None, str(tmp_path))
        if batch_size == 1:
            found = find_learning_rate(trainer).rates
        else:
            with pytest.raises(RuntimeError, match="after 3 updates the data had run out"):
                find_learning_rate(trainer)
    assert len(found) == 12


def test_it_comes_before_the_run(tmp_path):
    trainer = training.Trainer(updater_of(), (1, "iteration"), str(tmp_path))
    trainer.run()
    with pytest.raises(RuntimeError, match=r"find_learning_rate\(\) must be called before run\(\)"):
        find_learning_rate(trainer)


@pytest.mark.parametrize(("name", "begins"), [("rates.png", b"\x89PNG"), ("rates.svg", b"<?xml")])
def test_it_is_drawn_as_a_picture(tmp_path, name, begins):
    searched(tmp_path, count=20).plot(str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def lacking(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **keywords)

    found = searched(tmp_path, count=20)
    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match=r"pip install 'chainring\[plot\]'"):
        found.plot(str(tmp_path / "rates.png"))
