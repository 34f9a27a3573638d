"""A rehearsal names what two updates have changed and no state holds, and nothing else."""

import functools
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from chainring import iterators, training
from chainring.nn import Classifier
from chainring.training import extensions


class Encoder(nn.Module):
    """Counts in an attribute that a test gives it."""

    def __init__(self, kept=None, change=None):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.kept = kept
        self.change = change

    def forward(self, x):
        if self.change is not None:
            self.change(self)
        return self.layer(x)


class Points(torch.utils.data.Dataset):
    """Twelve points, and what a test does when one is asked for."""

    kept = 0

    def __init__(self, change=None):
        self.change = change
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if self.change is not None:
            self.change(self)
        return torch.full((4,), float(i)), i % 3


def made(tmp_path, encoder=None, data=None, updater=training.StandardUpdater, loader=None):
    """A trainer over such parts."""
    model = Classifier(nn.Sequential(encoder or Encoder(), nn.BatchNorm1d(3), nn.Dropout()))
    optimizer = torch.optim.Adam(model.parameters())
    source = loader or iterators.SerialIterator(data or Points(), 4, seed=0)
    return training.Trainer(updater(source, optimizer, model), (1, "epoch"), out=str(tmp_path / "out"))


def named(trainer):
    """The paths that its rehearsal warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.rehearse()
    lines = "\n".join(str(each.message) for each in caught if "that are not saved" in str(each.message)).splitlines()
    return [line.partition(":  ")[0].strip().rpartition(": ")[0] for line in lines[1:]]


def count(holder):
    holder.kept += 1


def test_a_count_in_a_module_is_named_by_its_path_with_a_remedy(tmp_path):
    """Once, in one warning."""
    trainer = made(tmp_path, Encoder(0, count))
    with pytest.warns(UserWarning, match="changed values that are not saved") as caught:
        trainer.rehearse()
    assert len(caught) == 1
    assert "updater.model:main.predictor.0.kept: register_buffer, or a serialize(serializer)" in str(caught[0].message)


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (None, lambda module: setattr(module, "kept", module.layer.weight.new_ones(()) + (module.kept or 0))),
        (torch.zeros(2000), lambda module: module.kept.add_(1)),
        ([0], lambda module: module.kept.append(1)),
        ({"steps": 0}, lambda module: module.kept.update(steps=module.kept["steps"] + 1)),
        (np.random.default_rng(0), lambda module: module.kept.normal()),
        (False, lambda module: setattr(module, "kept", True)),
    ],
    ids=["a carried state", "an array filled in place", "a list that grows", "a count in a dict", "a generator", "a flag"],
)
def test_every_kind_of_attribute_is_looked_at(tmp_path, kept, change):
    """Whatever holds it."""
    assert [path.removesuffix("['steps']") for path in named(made(tmp_path, Encoder(kept, change)))] == [
        "updater.model:main.predictor.0.kept"
    ]


def test_what_is_filled_on_a_device_is_looked_at(tmp_path, device):
    kept = torch.zeros(2000, device=device)
    assert named(made(tmp_path, Encoder(kept, lambda module: module.kept.add_(1)))) == [
        "updater.model:main.predictor.0.kept"
    ]


def test_a_dataset_a_sampler_and_a_loader_are_looked_into(tmp_path):
    """A generator of the dataset's own, and a count of the sampler's."""

    class Sampler:
        kept = 0

        def __iter__(self):
            while True:
                self.kept += 1
                yield self.kept % 12

        def __len__(self):
            return 12

    data = Points(lambda data: data.rng.normal())
    assert named(made(tmp_path, data=data)) == ["updater.iterator:main.dataset.rng"]
    loader = torch.utils.data.DataLoader(Points(count), 4, sampler=Sampler())
    with warnings.catch_warnings():
        found = named(made(tmp_path, loader=loader))
    assert "updater.iterator:main.loader.dataset.kept" in found
    assert "updater.iterator:main.loader.sampler.kept" in found


def test_extensions_are_looked_into_with_the_variables_of_functions(tmp_path):
    """An attribute, a best value that was None, a count of a closure, and no scheduler."""

    class Best(training.Extension):
        best = None

        def __call__(self, trainer):
            self.best = float(trainer.observation["main/loss"])

    calls, collected = 0, []

    def counting(trainer):
        nonlocal calls
        calls += 1
        collected.append(calls)

    trainer = made(tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(trainer.updater.get_optimizer("main"), 3)
    trainer.extend(Best())
    trainer.extend(counting)
    trainer.extend(lambda _: schedule.step(), name="schedule")
    found = named(trainer)
    assert found[:2] == ["extensions.Best.best", "extensions.counting, variable 'calls'"]
    assert not any(path.startswith("extensions.schedule") for path in found)  # a scheduler is saved with the function


def test_an_updaters_own_attribute_optimizer_and_second_network_are_named(tmp_path):
    """Also where their names are those of attributes elsewhere in the library."""

    class Own(training.StandardUpdater):
        state = None

        def __init__(self, *args):
            super().__init__(*args)
            self.other = nn.Linear(3, 3)
            self.second = torch.optim.Adam(self.other.parameters())

        def update_core(self):
            super().update_core()
            self.state = torch.randn(3)
            self.second.zero_grad()
            self.other(self.state).sum().backward()
            self.second.step()

    assert set(named(made(tmp_path, updater=Own))) == {
        "updater.state", "updater.second", "updater.other.weight", "updater.other.bias"
    }  # fmt: skip


def test_what_is_saved_is_not_named(tmp_path):
    """Buffers, a serialize of one's own, the PyTorch pair in an extension, and all that the library keeps."""

    class Saved(Encoder):
        def __init__(self):
            super().__init__(0, count)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

        def serialize(self, serializer):
            self.kept = serializer("kept", self.kept)

    class Pair(training.Extension):
        calls = 0

        def __call__(self, trainer):
            self.calls += 1

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    trainer = made(tmp_path, Saved())
    schedule = torch.optim.lr_scheduler.StepLR(trainer.updater.get_optimizer("main"), 3)
    trainer.extend(Pair())
    trainer.extend(extensions.LRScheduler(schedule))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(autoload=True))
    assert named(trainer) == []


def test_what_a_script_puts_on_modules_of_torch_is_named(tmp_path):
    """Attributes, and buffers that are not persistent."""

    def change(encoder):
        encoder.layer.calls += 1
        encoder.layer.seen[0] += 1
        encoder.layer.recent.append(len(encoder.layer.recent))

    encoder = Encoder(change=change)
    encoder.layer.calls, encoder.layer.recent = 0, []
    encoder.layer.register_buffer("seen", torch.zeros(1), persistent=False)
    trainer = made(tmp_path, encoder)
    trainer.updater.get_model("main").predictor.updates = 0

    def count_updates(trainer):
        trainer.updater.get_model("main").predictor.updates += 1

    trainer.extend(count_updates, trigger=(1, "iteration"))
    layer = "updater.model:main.predictor.0.layer"
    assert set(named(trainer)) == {
        "updater.model:main.predictor.updates",
        *(f"{layer}.{name}" for name in ("calls", "recent", "seen (a buffer with persistent=False)")),
    }


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm, parametrizations.weight_norm])
def test_weights_that_torch_computes_before_each_forward_are_not_named(tmp_path, wrap):
    """They follow from the parameters."""
    encoder = Encoder()
    wrap(encoder.layer)
    assert named(made(tmp_path, encoder)) == []


def test_times_caches_and_results_collected_by_a_script_are_not_named(tmp_path):
    """They are no part of what a resumed run must know."""

    @functools.lru_cache
    def squared(number):
        return number * number

    def change(module):
        squared(len(vars(module)))
        module.kept["began"] = time.perf_counter()
        module.kept["ended"] = time.time()
        module.elapsed_seconds = getattr(module, "elapsed_seconds", 0.0) + 0.01
        module.mask = torch.ones(3)
        module.cache = {**getattr(module, "cache", {}), time.time(): 1}

    encoder = Encoder({"began": 0.5, "ended": 0.5}, change)
    encoder.kept = {"began": time.perf_counter(), "ended": time.time()}
    losses = []
    trainer = made(tmp_path, encoder)
    trainer.extend(lambda t: losses.append(float(t.observation["main/loss"])), name="collect")
    assert named(trainer) == []


def test_a_set_of_the_same_items_in_another_order_is_not_named(tmp_path):
    """The hashes of strings, and with them the order, are others in each process."""
    order = [8, 0]
    first, then = {0, 8}, set(order)
    assert list(first) != list(then)

    def change(module):
        module.kept = set(order)

    assert named(made(tmp_path, Encoder(first, change))) == []


def test_the_run_is_not_warned_of_what_a_rehearsal_has_named(tmp_path):
    """And trains as it would have."""
    trainer = made(tmp_path, Encoder(0, count))
    assert named(trainer) == ["updater.model:main.predictor.0.kept"]
    trainer.run()
    assert trainer.updater.iteration == 3
