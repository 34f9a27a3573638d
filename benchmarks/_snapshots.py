"""A state of a given size, a training step, and the writers that take the state down while the step goes on."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn.functional import mse_loss

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer
from chainring.training.extension import Extension
from chainring.training.extensions import snapshot

MEMCPY, ASYNCHRONOUS, SYNCHRONOUS = "memcpy", "chainring, asynchronous", "chainring, synchronous"
TORCH_SAVE, DCP = "torch.save, fsync", "DCP async_save, thread"
LIGHTNING, LIGHTNING_LATER = "lightning, synchronous", "lightning, asynchronous"
GROWING = (MEMCPY, ASYNCHRONOUS, TORCH_SAVE, DCP, LIGHTNING_LATER)
"""Those whose growth is shown, with the number of tensors."""
KINDS = {ASYNCHRONOUS: "asynchronous_", SYNCHRONOUS: "synchronous_"}
"""How the names of the snapshots begin."""
LAYERS = 8
PATIENCE = 120.0
"""Seconds after which a write must have failed: a full disk, say, which is told at the end of the run."""
ORDINARY = 20
"""Training steps that are timed before each row, while nothing is written."""

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)

Save = Callable[[Trainer], Callable[[], bool]]
"""Takes the state down; returns what tells whether it is on the disk, asked after every training step."""


@dataclass
class Taken:
    """What one snapshot cost, in milliseconds.

    Attributes:
        stop: while the loop stood still.
        durable: from the beginning until the state was on the disk and had its name, to within one training step.
        steps: the training steps meanwhile, and while the snapshot before it was removed.
    """

    stop: float
    durable: float
    steps: list[float]


class State:
    """Layers and their Adam: ``size`` bytes, a layer in three large tensors, three small ones, and two counters."""

    def __init__(self, size: int, layers: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        width = math.isqrt(size // (layers * 3 * 4))  # a layer is a square of floats, and Adam holds two more of each
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        entries = self.optimizer.state.values()
        return [*self.model.parameters(), *[value for entry in entries for value in entry.values()]]

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Step:
    """A training step of some milliseconds, the same beside every state; it needs Python's lock for each operation."""

    def __init__(self, state: State) -> None:
        torch.manual_seed(0)
        self._wait = state.wait
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(state.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.x, self.t = torch.randn(256, 256, device=state.device), torch.randn(256, 256, device=state.device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        mse_loss(self.model(self.x), self.t).backward()
        self.optimizer.step()
        self._wait()


class Writers:
    """The rows of one size, by name, or some of them; what they write lies in a directory of their own."""

    def __init__(self, state: State, directory: Path, only: Sequence[str] = ()) -> None:
        self.state = state
        self._directory = directory
        pinned = state.device.type != "cpu"  # as a copy from a device is fastest
        self._buffers = [torch.zeros_like(tensor, device="cpu", pin_memory=pinned) for tensor in state.tensors()]
        self._stager = DefaultStager(StagingOptions(pinned, False, False, False))
        self._snapshots = {
            name: snapshot(f"{kind}{{.updater.iteration}}", n_retains=1, asynchronous=name == ASYNCHRONOUS)
            for name, kind in KINDS.items()
        }
        self.rows: dict[str, Save] = {
            MEMCPY: self._copy,
            ASYNCHRONOUS: lambda trainer: self._snapshot(ASYNCHRONOUS, trainer),
            SYNCHRONOUS: lambda trainer: self._snapshot(SYNCHRONOUS, trainer),
            TORCH_SAVE: self._torch_save,
            DCP: self._async_save,
        }
        self._lightning: Any = None
        with contextlib.suppress(ImportError):
            self._add_lightning()
        self.rows = {name: row for name, row in self.rows.items() if name in (only or self.rows)}

    def run(self, rounds: Extension, count: int) -> None:
        """Train as many iterations, after each of which ``rounds`` is called as a snapshot would be."""
        data = SerialIterator(TupleDataset(torch.zeros(1)), 1)
        updater = Idle(data, self.state.optimizer, self.state.model)
        trainer = Trainer(updater, (count, "iteration"), out=str(self._directory / "chainring"))
        for each in self._snapshots.values():
            trainer.extend(each, trigger=lambda trainer: False)  # begun and ended with the run, called by the rounds
        trainer.extend(rounds)
        try:
            trainer.run()
        finally:
            self._stager.close()
            if self._lightning is not None:
                self._lightning.teardown()

    def _copy(self, trainer: Trainer) -> Callable[[], bool]:
        with torch.no_grad():
            for buffer, tensor in zip(self._buffers, self.state.tensors(), strict=True):
                buffer.copy_(tensor, non_blocking=True)
        self.state.wait()
        return lambda: True

    def _snapshot(self, name: str, trainer: Trainer) -> Callable[[], bool]:
        self._snapshots[name](trainer)
        return (Path(trainer.out) / f"{KINDS[name]}{trainer.updater.iteration}").exists

    def _torch_save(self, trainer: Trainer) -> Callable[[], bool]:
        with open(self._directory / "state.pt", "wb") as file:
            torch.save(self.state.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True

    def _async_save(self, trainer: Trainer) -> Callable[[], bool]:
        writer = dcp.FileSystemWriter(self._directory / "dcp")  # which flushes its files
        future: Any = dcp.async_save(self.state.state_dict(), storage_writer=writer, async_stager=self._stager, no_dist=True)

        def is_done() -> bool:
            return bool(future.done()) and future.result() is not None

        return is_done

    def _add_lightning(self) -> None:
        """Its writer in the loop, which is the default, and the one beside it."""
        writers = importlib.import_module("lightning.pytorch.plugins.io")
        saves = 0

        class Flushed(writers.TorchCheckpointIO):  # type: ignore[misc, name-defined]
            """Flushes the file too, which Lightning leaves to the system."""

            def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
                nonlocal saves
                super().save_checkpoint(checkpoint, path, storage_options)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                saves += 1

        def save(writer: Any, trainer: Trainer) -> Callable[[], bool]:
            before = saves
            writer.save_checkpoint(self.state.state_dict(), str(self._directory / "lightning.ckpt"))
            return lambda: saves > before

        self._lightning = writers.AsyncCheckpointIO(Flushed())
        self.rows[LIGHTNING] = partial(save, Flushed())
        self.rows[LIGHTNING_LATER] = partial(save, self._lightning)

    def is_settled(self, trainer: Trainer) -> bool:
        """Whether the snapshots before the last are gone too."""
        names = os.listdir(trainer.out)
        kept = [name for name in names if not name.startswith(".")]
        unfinished = [name for name in names if name.endswith((".tmp", ".old"))]
        return not unfinished and all(sum(name.startswith(kind) for name in kept) <= 1 for kind in KINDS.values())

    def clear(self) -> None:
        """Remove what the other writers have written, which they do not do."""
        shutil.rmtree(self._directory / "dcp", ignore_errors=True)
        for name in ("state.pt", "lightning.ckpt"):
            (self._directory / name).unlink(missing_ok=True)


class Idle(StandardUpdater):
    """Holds the state; the steps are made between the iterations, where they are timed."""

    def update_core(self) -> None:
        self.next_batch()


class Rounds(Extension):
    """In every iteration a round: each row once, every second time backwards, its figures in ``taken``.

    The first round is thrown away: in it the writers get their buffers.
    """

    is_snapshot = True  # called when all else of the iteration has been done, as a snapshot is

    def __init__(self, writers: Writers, say: Callable[[int, str], None]) -> None:
        self._writers = writers
        self._say = say
        self._step = Step(writers.state)
        self.taken: dict[str, list[Taken]] = {name: [] for name in writers.rows}
        self.ordinary: list[list[float]] = []

    def __call__(self, trainer: Trainer) -> None:
        number = trainer.updater.iteration - 1
        names = list(self._writers.rows)
        ordinary: list[float] = []
        for name in names if number % 2 == 0 else reversed(names):
            self._say(number, name)
            ordinary += [self._timed() for _ in range(ORDINARY)]
            taken = self._take(self._writers.rows[name], trainer)
            self._writers.clear()
            if number:
                self.taken[name].append(taken)
        if number:
            self.ordinary.append(ordinary)

    def _take(self, save: Save, trainer: Trainer) -> Taken:
        steps: list[float] = []
        began = time.perf_counter()
        is_done = save(trainer)
        stop = durable = time.perf_counter() - began
        while not is_done():
            steps.append(self._timed())
            durable = time.perf_counter() - began
            _check_patience(durable)
        while not self._writers.is_settled(trainer):
            steps.append(self._timed())
            _check_patience(time.perf_counter() - began)
        return Taken(stop * 1e3, durable * 1e3, steps)

    def _timed(self) -> float:
        began = time.perf_counter()
        self._step()
        return (time.perf_counter() - began) * 1e3


def _check_patience(seconds: float) -> None:
    if seconds > PATIENCE:
        raise TimeoutError(f"a snapshot is on the disk within {PATIENCE:g} s, and this one is not; give a disk by --dir")
