"""The bare work through other libraries, each in the loop that its documentation shows.

All get the same batches from the same plain iterable, which is kinder to most than the loader that they would bring
along, and everything that can be switched off is: what remains is the price of the loop. Of ``keys`` so many numbers are
reported in every iteration, and their means logged each epoch; of ``extensions`` so many that do nothing are called at the
end of each epoch.
"""

from __future__ import annotations

import importlib
import logging
import operator
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _loops import BATCH, COMMITS, EPOCH, Loss, T, X, sgd
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


def pfn_extras(out: Path, keys: int = 0, extensions: int = 0) -> Loop:
    ppe = importlib.import_module("pytorch_pfn_extras")

    def run(epochs: int) -> None:
        model = Loss()
        optimizer = sgd(model)
        manager = ppe.training.ExtensionsManager(model, optimizer, epochs, iters_per_epoch=EPOCH, out_dir=str(out))
        for number in range(extensions):
            manager.extend(_nothing, name=f"idle{number}", trigger=(1, "epoch"))
        if keys:
            manager.extend(ppe.training.extensions.LogReport())
        while not manager.stop_trigger:
            for x, t in Batches():
                with manager.run_iteration():
                    optimizer.zero_grad()
                    loss = model(x, t)
                    loss.backward()
                    optimizer.step()
                    if keys:
                        ppe.reporting.report({f"{number}": loss.item() for number in range(keys)})

    return run


def ignite(out: Path, keys: int = 0, extensions: int = 0) -> Loop:
    engine, metrics = importlib.import_module("ignite.engine"), importlib.import_module("ignite.metrics")

    def run(epochs: int) -> None:
        model = Loss()
        optimizer = sgd(model)

        def step(engine: Any, batch: tuple[Tensor, Tensor]) -> Any:
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            return {f"{number}": loss.detach() for number in range(keys)} if keys else loss.detach()

        trainer = engine.Engine(step)
        for number in range(keys):
            metrics.Average(operator.itemgetter(f"{number}")).attach(trainer, f"{number}")
        for _ in range(extensions):
            trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, _nothing)
        trainer.run(Batches(), max_epochs=epochs, epoch_length=EPOCH)

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


def _nothing(trainer: Any) -> None:
    """Stand for an extension."""


def lightning(out: Path, keys: int = 0, extensions: int = 0) -> Loop:
    lightning = importlib.import_module("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        """The loss as Lightning's training step."""

        def __init__(self) -> None:
            super().__init__()
            self.loss = Loss()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.loss(*batch)
            if keys:
                self.log_dict({f"{number}": loss for number in range(keys)}, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    class Idle(lightning.Callback):
        """Does nothing at the end of an epoch."""

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            _nothing(trainer)

    def run(epochs: int) -> None:
        loggers = importlib.import_module("lightning.pytorch.loggers")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            logger=loggers.CSVLogger(tempfile.mkdtemp(dir=out)) if keys else False,
            callbacks=[Idle() for _ in range(extensions)],
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


def rows_of_log(counts: Sequence[int], out: Path, rounds: int) -> dict[int, list[float]]:
    """Return, of pytorch-pfn-extras, the milliseconds of an iteration with a row of the log after so many rows."""
    ppe = importlib.import_module("pytorch_pfn_extras")
    model, found = torch.nn.Linear(4, 1), {count: list[float]() for count in counts}
    optimizer = sgd(model)
    manager = ppe.training.ExtensionsManager(model, optimizer, 1, iters_per_epoch=max(counts), out_dir=str(out))
    manager.extend(ppe.training.extensions.LogReport(trigger=(1, "iteration")))
    while not manager.stop_trigger:
        began = time.perf_counter()
        with manager.run_iteration():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            ppe.reporting.report({"loss": loss.item()})
        for count in counts:
            if count - rounds < manager.iteration <= count:
                found[count].append((time.perf_counter() - began) * 1e3)
    return found


def pfn_extras_saving(out: Path, kept: int) -> Loop:
    """Save in every iteration and keep so many; all are there when the first step begins."""
    ppe = importlib.import_module("pytorch_pfn_extras")

    def run(epochs: int) -> None:
        model, steps = torch.nn.Linear(4, 1), kept + epochs * COMMITS
        optimizer = torch.optim.Adam(model.parameters())
        folder = tempfile.mkdtemp(dir=out)
        manager = ppe.training.ExtensionsManager(model, optimizer, 1, iters_per_epoch=steps, out_dir=folder)
        manager.extend(ppe.training.extensions.snapshot(n_retains=kept), trigger=(1, "iteration"))
        for step in range(steps):
            if step >= kept:
                lap()
            with manager.run_iteration():
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()

    return run


def ignite_saving(out: Path, kept: int) -> Loop:
    """Do the same through Ignite."""
    engine, handlers = importlib.import_module("ignite.engine"), importlib.import_module("ignite.handlers")

    def run(epochs: int) -> None:
        model, steps = torch.nn.Linear(4, 1), kept + epochs * COMMITS
        optimizer = torch.optim.Adam(model.parameters())

        def step(engine: Any, number: int) -> None:
            if number >= kept:
                lap()
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        trainer = engine.Engine(step)
        state = {"trainer": trainer, "model": model, "optimizer": optimizer}
        saving = handlers.Checkpoint(state, tempfile.mkdtemp(dir=out), n_saved=kept)
        trainer.add_event_handler(engine.Events.ITERATION_COMPLETED, saving)
        trainer.run(range(steps), max_epochs=1)

    return run


PEERS: dict[str, Callable[..., Loop]] = {
    "pytorch-pfn-extras": pfn_extras,
    "pytorch-ignite": ignite,
    "lightning Fabric": fabric,
    "lightning Trainer": lightning,
    "accelerate": accelerate,
}


GROWING = {name: PEERS[name] for name in ("pytorch-pfn-extras", "pytorch-ignite", "lightning Trainer")}
"""Those that have extensions and a log."""
SAVING: dict[str, Callable[..., Loop]] = {"pytorch-pfn-extras": pfn_extras_saving, "pytorch-ignite": ignite_saving}
"""Those that keep as many snapshots as they are told; neither flushes them to the disk."""


def version(name: str) -> str:
    """Return the installed version of the distribution that a peer comes with."""
    return importlib.import_module("importlib.metadata").version(name.split()[0])


def installed(
    out: Path, peers: Mapping[str, Callable[..., Loop]] = PEERS, **settings: int
) -> tuple[dict[str, Loop], list[str]]:
    """Return the loops of the peers that are there, with the ``settings``, and the names of those that are not."""
    loops: dict[str, Loop] = {}
    missing: list[str] = []
    for name, make in peers.items():
        try:
            with warnings.catch_warnings(action="ignore"):
                loops[f"{name} {version(name)}"] = make(out, **settings)
        except ImportError:
            missing.append(name)
    return loops, missing
