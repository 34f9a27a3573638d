"""The bare work through other libraries, each in the loop that its documentation shows.

All get the same batches from the same plain iterable, which is kinder to most than the loader that they would bring
along, and everything that can be switched off is: what remains is the price of the loop.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _loops import BATCH, EPOCH, Loss, T, X, sgd
from _turns import lap
from torch import Tensor

Loop = Callable[[int], object]


class Batches:
    """One epoch of batches, gathered as the raw loop gathers them."""

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = np.random.permutation(len(X))
        for start in range(0, len(X), BATCH):
            lap()
            index = order[start : start + BATCH]
            yield torch.from_numpy(X[index]), torch.from_numpy(T[index])


def pfn_extras(out: Path) -> Loop:
    ppe = importlib.import_module("pytorch_pfn_extras")

    def run(epochs: int) -> None:
        model = Loss()
        optimizer = sgd(model)
        manager = ppe.training.ExtensionsManager(model, optimizer, epochs, iters_per_epoch=EPOCH, out_dir=str(out))
        while not manager.stop_trigger:
            for x, t in Batches():
                with manager.run_iteration():
                    optimizer.zero_grad()
                    loss = model(x, t)
                    loss.backward()
                    optimizer.step()

    return run


def ignite(out: Path) -> Loop:
    engine = importlib.import_module("ignite.engine")

    def run(epochs: int) -> None:
        model = Loss()
        optimizer = sgd(model)

        def step(engine: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        engine.Engine(step).run(Batches(), max_epochs=epochs, epoch_length=EPOCH)

    return run


def fabric(out: Path) -> Loop:
    lightning = importlib.import_module("lightning")

    def run(epochs: int) -> None:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model = Loss()
        model, optimizer = fabric.setup(model, sgd(model))
        for _ in range(epochs):
            for x, t in Batches():
                optimizer.zero_grad()
                loss = model(x, t)
                fabric.backward(loss)
                optimizer.step()

    return run


def lightning(out: Path) -> Loop:
    lightning = importlib.import_module("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        """The loss as Lightning's training step."""

        def __init__(self) -> None:
            super().__init__()
            self.loss = Loss()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return self.loss(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    def run(epochs: int) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(out),
        )
        trainer.fit(Module(), Batches())

    return run


def accelerate(out: Path) -> Loop:
    accelerate = importlib.import_module("accelerate")

    def run(epochs: int) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        model = Loss()
        model, optimizer, batches = accelerator.prepare(model, sgd(model), Batches())
        for _ in range(epochs):
            for x, t in batches:
                optimizer.zero_grad()
                loss = model(x, t)
                accelerator.backward(loss)
                optimizer.step()

    return run


PEERS: dict[str, Callable[[Path], Loop]] = {
    "pytorch-pfn-extras": pfn_extras,
    "pytorch-ignite": ignite,
    "lightning Fabric": fabric,
    "lightning Trainer": lightning,
    "accelerate": accelerate,
}


def version(name: str) -> str:
    """Return the installed version of the distribution that a peer comes with."""
    return importlib.import_module("importlib.metadata").version(name.split()[0])


def installed(out: Path) -> tuple[dict[str, Loop], list[str]]:
    """Return the loops of the peers that are there, and the names of those that are not."""
    loops: dict[str, Loop] = {}
    missing: list[str] = []
    for name, make in PEERS.items():
        try:
            with warnings.catch_warnings(action="ignore"):
                loops[f"{name} {version(name)}"] = make(out)
        except ImportError:
            missing.append(name)
    return loops, missing
