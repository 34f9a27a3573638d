"""What users write, with every annotation: `mypy --strict` and pyright have nothing to say about it (`make lint`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torch import Tensor, nn

import chainring
from chainring import converters, datasets, iterators, parallel, report, serializers, testing, training, writers
from chainring.nn import Classifier
from chainring.serializers import AbstractSerializer
from chainring.training import (
    Extension,
    ParallelUpdater,
    StandardUpdater,
    Trainer,
    Updater,
    extensions,
    make_extension,
    triggers,
)
from chainring.training.triggers import Trigger


class Regression(nn.Module):
    """A model that computes its loss and reports it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.body(x), t)
        report({"loss": loss}, self)
        return loss


class Sines(datasets.DatasetMixin):
    """A dataset of one's own."""

    def __len__(self) -> int:
        return 30

    def get_example(self, i: int) -> tuple[npt.NDArray[np.float32], int]:
        return np.zeros(16, np.float32), i % 3


class TwoSteps(StandardUpdater):
    """An update of one's own, with a state."""

    def __init__(self, *args: Any, strength: float = 0.1, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.strength = strength

    def update_core(self) -> None:
        batch = self.next_batch()
        with self.autocast():
            loss = self.get_model("main")(*batch)
        self.backward(loss)
        self.step("main")

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self.strength = serializer("strength", self.strength)


class Squares(Updater):
    """What trains without torch."""

    def update_core(self) -> None:
        report({"square": float(self.iteration**2)})


class Odd(Trigger):
    """A trigger of one's own."""

    def __call__(self, trainer: Trainer) -> bool:
        return trainer.updater.iteration % 2 == 1


class Remember(Extension):
    """An extension of one's own, with a state."""

    trigger = 1, "epoch"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def initialize(self, trainer: Trainer) -> None:
        print(trainer.out, trainer.updater.epoch_detail)

    def __call__(self, trainer: Trainer) -> None:
        self.losses.append(float(trainer.observation["main/loss"]))

    def serialize(self, serializer: AbstractSerializer) -> None:
        self.losses = serializer("losses", self.losses)


@make_extension(trigger=(10, "iteration"), priority=training.PRIORITY_READER)
def shout(trainer: Trainer) -> None:
    """A function as an extension."""
    print(trainer.updater.iteration)


class Collected(writers.Writer):
    """A writer of one's own."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def write(self, record: writers.Record) -> None:
        self.rows.append(record.values)


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A dataset of PyTorch, whose base class declares no length."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), index


def pad(batch: Sequence[tuple[npt.NDArray[np.float32], int]], device: torch.device | None) -> tuple[Tensor, Tensor]:
    """A converter of one's own."""
    x, t = converters.concat_examples(batch, device, padding=0)
    return x, t


def loss_func(model: nn.Module, x: Tensor, t: Tensor) -> dict[str, Tensor]:
    """A loss with a weight."""
    return {"loss": nn.functional.cross_entropy(model(x), t), "weight": torch.tensor(1.0)}


def make_trainer(out: str) -> Trainer:
    """The script of the README."""
    chainring.deterministic(0)
    model = Classifier(nn.Sequential(nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    train, test = datasets.get_digits()
    train_iter = iterators.SerialIterator(train, 100, seed=0)
    test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)
    updater = StandardUpdater({"main": train_iter}, optimizer, model, precision="bf16", accumulate=2)
    trainer = Trainer(updater, (20, "epoch"), out=out, config={"lr": 0.1})
    trainer.extend(extensions.Evaluator(test_iter, model), trigger=(0.5, "epoch"))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport(writers=[Collected(), writers.CsvWriter()]))
    trainer.extend(extensions.PrintReport(["epoch", "main/loss"]))
    trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.extend(shout)
    trainer.extend(Remember(), name="remember", trigger=Odd())
    trainer.extend(lambda trainer: print(trainer.elapsed_time), trigger=triggers.MinValueTrigger("validation/main/loss"))
    return trainer


def make_of_anything(model: nn.Module, rows: torch.utils.data.Dataset[Any], device: str) -> Trainer:
    """What is a dataset, an iterator, a device, a trigger or a scheduler."""
    numbers = np.zeros((30, 3), np.float32)
    datasets.TupleDataset(numbers, torch.zeros(30), [1] * 30, range(30), rows)
    datasets.DictDataset(x=numbers, t=Rows())
    train, _ = datasets.split_dataset_random(datasets.TransformDataset(rows, lambda row: row), 20, seed=0)
    iterators.MultiprocessIterator(datasets.ConcatenatedDataset(train, Sines()), 10, n_processes=2, converter=pad)
    for source in (numbers, torch.zeros(30, 3), list(range(30)), Rows(), Sines()):
        iterators.SerialIterator(source, 10)
    loader = torch.utils.data.DataLoader(rows, batch_size=10)
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
    updater = StandardUpdater(
        {"main": loader}, optimizers, {"main": model}, device=device, converter=pad, loss_func=loss_func
    )
    for where in (None, "auto", "cuda:1", 0, -1, torch.device("cpu")):
        StandardUpdater(loader, optimizers["main"], model, device=where)
        extensions.Evaluator(loader, {"main": model}, device=where, loss_func=lambda model, x, t: model(x).sum())
        converters.to_device(where, {"x": numbers})
    ParallelUpdater(loader, optimizers["main"], model, devices={"main": "auto", "second": "cpu"})
    trainer = Trainer(updater, triggers.EarlyStoppingTrigger(mode="min", max_trigger=(50, "epoch")), extensions=[shout])
    trainer.extend(extensions.LRScheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizers["main"], 10)))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["main"])
    trainer.extend(extensions.LRScheduler(plateau, monitor="main/loss"), trigger=(0.5, "epoch"))
    trainer.extend(extensions.snapshot(), trigger=(600, "second"))
    trainer.extend(extensions.ExponentialShift("lr", 0.1), trigger=triggers.ManualScheduleTrigger([10, 20.5], "epoch"))
    trainer.extend(extensions.observe_lr(), trigger=lambda trainer: trainer.updater.is_new_epoch)
    trainer.extend(extensions.ProgressBar((20, "epoch")))
    return trainer


def find(trainer: Trainer) -> None:
    """What `get_extension` returns, by class and by name."""
    assert_type(trainer.get_extension(extensions.LogReport), extensions.LogReport)
    assert_type(trainer.get_extension(Remember), Remember)
    assert_type(trainer.get_extension(extensions.snapshot), extensions.snapshot)
    assert_type(trainer.get_extension(Remember).losses, list[float])
    assert_type(trainer.get_extension("remember"), Any)


def read_back(trainer: Trainer, model: nn.Module) -> None:
    """What a trainer and the serializers return."""
    assert_type(trainer.updater.iteration, int)
    assert_type(trainer.updater.epoch_detail, float)
    assert_type(trainer.elapsed_time, float)
    assert_type(trainer.is_resumed, bool)
    assert_type(trainer.out, str)
    assert_type(trainer.explain(), str)
    serializers.save("model", model)
    serializers.load("result/snapshot_iter_1", trainer)
    replicas: Callable[..., Any] = parallel.DataParallel(model, ["cpu", "cpu"])
    replicas(torch.zeros(3))
    summary = chainring.Summary()
    summary.add(1.0, weight=2)
    assert_type(summary.compute_mean(), float)


def prove() -> None:
    """The checks of one's own parts."""
    testing.check_trigger(Odd)
    testing.check_extension(Remember)
    trainer = Trainer(Squares(), (3, "iteration"), "result")
    trainer.run()
