"""An epoch of examples/mnist/train_mnist.py: by hand in PyTorch, through Chainring, and through other libraries.

20,000 images of 784 numbers in memory, batches of 100, a network of two hidden layers, Adam, means of loss and accuracy, an
evaluation of 2,000 images, a row in a file and a line on the screen. Every loop reads the means once an epoch.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _chainring import Lapping
from _turns import lap
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from chainring import iterators, training
from chainring.datasets import TupleDataset
from chainring.nn import Classifier
from chainring.training import extensions

BATCH, EXAMPLES, HELD_OUT = 100, 20_000, 2_000
STEPS = EXAMPLES // BATCH
"""Training steps of an epoch."""
_generator = np.random.default_rng(0)
X = _generator.standard_normal((EXAMPLES + HELD_OUT, 784), dtype=np.float32)
T = _generator.integers(0, 10, EXAMPLES + HELD_OUT)
TRAIN, TEST = (X[:EXAMPLES], T[:EXAMPLES]), (X[EXAMPLES:], T[EXAMPLES:])

Loop = Callable[[int], object]
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def predictor(units: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 10))


def loader(shuffle: bool = True) -> DataLoader[tuple[Tensor, ...]]:
    x, t = TRAIN if shuffle else TEST
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(t)), BATCH, shuffle)


def gathered() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one gather, which is what a careful engineer writes for data in memory."""
    x, t = TRAIN
    order = np.random.permutation(len(x))
    for start in range(0, len(x), BATCH):
        index = order[start : start + BATCH]
        yield torch.from_numpy(x.take(index, 0)), torch.from_numpy(t.take(index, 0))


def sliced() -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, HELD_OUT, BATCH):
        yield torch.from_numpy(TEST[0][start : start + BATCH]), torch.from_numpy(TEST[1][start : start + BATCH])


def by_hand(epochs: int, out: Path, units: int, train: Batches, test: Batches, fused: bool = False) -> None:
    """Train as an engineer would by hand."""
    model = predictor(units)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    with (out / "by_hand.jsonl").open("w") as file, open(os.devnull, "w") as screen:
        for epoch in range(1, epochs + 1):
            model.train()
            sums = torch.zeros(2)
            for x, t in train():
                lap()
                y = model(x)
                loss = cross_entropy(y, t)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    sums += torch.stack([loss, (y.argmax(1) == t).float().mean()])
            model.eval()
            held_out = torch.zeros(2)
            with torch.no_grad():
                for x, t in test():
                    y = model(x)
                    held_out += torch.stack([cross_entropy(y, t), (y.argmax(1) == t).float().mean()])
            means = [*(sums / STEPS).tolist(), *(held_out / (HELD_OUT // BATCH)).tolist()]
            file.write(json.dumps({"epoch": epoch, "means": means}) + "\n")
            print(epoch, *means, file=screen, flush=True)


def chainring(epochs: int, out: Path, units: int, fused: bool = False, **settings: Any) -> None:
    """Train as the script does, but for the data and the screen."""
    model = Classifier(predictor(units))
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    train_iter = iterators.SerialIterator(TupleDataset(*TRAIN), BATCH)
    test_iter = iterators.SerialIterator(TupleDataset(*TEST), BATCH, repeat=False, shuffle=False)
    updater = Lapping(train_iter, optimizer, model, **settings)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=tempfile.mkdtemp(dir=out))
    with open(os.devnull, "w") as screen:
        trainer.extend(extensions.Evaluator(test_iter, model))
        trainer.extend(extensions.dump_graph("main/loss"))
        trainer.extend(extensions.snapshot(n_retains=1), trigger=(1, "epoch"))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"], out=screen))
        trainer.extend(extensions.ProgressBar(out=screen))
        trainer.run()


def lightning(out: Path, units: int) -> Loop:
    lightning = importlib.import_module("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        """The model, its loss and what is logged."""

        def __init__(self) -> None:
            super().__init__()
            self.model = predictor(units)

        def step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
            x, t = batch
            y = self.model(x)
            loss = cross_entropy(y, t)
            values = {f"{stage}_loss": loss, f"{stage}_accuracy": (y.argmax(1) == t).float().mean()}
            self.log_dict(values, on_step=False, on_epoch=True)
            return loss

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            lap()
            return self.step(batch, "train")

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.step(batch, "val")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def run(epochs: int) -> None:
        logger = importlib.import_module("lightning.pytorch.loggers").CSVLogger(tempfile.mkdtemp(dir=out))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, logger=logger, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=str(out),
        )  # fmt: skip
        trainer.fit(Module(), loader(), loader(shuffle=False))

    return run


def ignite(out: Path, units: int) -> Loop:
    engine, metrics = importlib.import_module("ignite.engine"), importlib.import_module("ignite.metrics")

    def run(epochs: int) -> None:
        model = predictor(units)
        optimizer = torch.optim.Adam(model.parameters())

        def step(engine: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            lap()
            x, t = batch
            y = model(x)
            loss = cross_entropy(y, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss.detach(), "accuracy": (y.detach().argmax(1) == t).float().mean()}

        trainer = engine.Engine(step)
        for name in ("loss", "accuracy"):
            metrics.Average(partial(_entry, name)).attach(trainer, name)
        wanted = {"loss": metrics.Loss(cross_entropy), "accuracy": metrics.Accuracy()}
        evaluator = engine.create_supervised_evaluator(model, metrics=wanted)

        @trainer.on(engine.Events.EPOCH_COMPLETED)
        def report(trainer: Any) -> None:
            evaluator.run(loader(shuffle=False))
            with (out / "ignite.jsonl").open("a") as file:
                file.write(json.dumps({**trainer.state.metrics, **evaluator.state.metrics}) + "\n")

        trainer.run(loader(), max_epochs=epochs)

    return run


def _entry(name: str, output: dict[str, Tensor]) -> Tensor:
    return output[name]


def pfn_extras(out: Path, units: int) -> Loop:
    ppe = importlib.import_module("pytorch_pfn_extras")

    def run(epochs: int) -> None:
        model = predictor(units)
        optimizer = torch.optim.Adam(model.parameters())
        batches, screen = loader(), tempfile.mkdtemp(dir=out)
        manager = ppe.training.ExtensionsManager(model, optimizer, epochs, iters_per_epoch=len(batches), out_dir=screen)
        manager.extend(ppe.training.extensions.LogReport())

        def evaluate(x: Tensor, t: Tensor) -> None:
            y = model(x)
            ppe.reporting.report(
                {"val/loss": cross_entropy(y, t).item(), "val/accuracy": float((y.argmax(1) == t).float().mean())}
            )

        manager.extend(
            ppe.training.extensions.Evaluator(loader(shuffle=False), model, eval_func=evaluate), trigger=(1, "epoch")
        )
        while not manager.stop_trigger:
            for x, t in batches:
                lap()
                with manager.run_iteration():
                    y = model(x)
                    loss = cross_entropy(y, t)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    accuracy = (y.detach().argmax(1) == t).float().mean()
                    ppe.reporting.report({"train/loss": loss.item(), "train/accuracy": accuracy.item()})

    return run


PEERS: dict[str, Callable[[Path, int], Loop]] = {
    "lightning": lightning,
    "pytorch-ignite": ignite,
    "pytorch-pfn-extras": pfn_extras,
}
