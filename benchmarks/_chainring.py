"""The same work through Chainring."""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _loops import BATCH, COMMITS, T_TEST, X_TEST, Loss, Predictor, T, X, sgd
from _snapshots import Idle
from _turns import lap
from torch import Tensor, nn

from chainring.datasets import TupleDataset
from chainring.iterators import FunctionIterator, SerialIterator
from chainring.nn import Classifier
from chainring.serializers import load
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, make_extension
from chainring.training.extensions import Evaluator, LogReport, PrintReport, ProgressBar, Recorder, snapshot

IDLE = 64
"""Idle extensions in the row that prices them."""


class Lapping(StandardUpdater):
    """Says when its updates begin, as every loop of the table does."""

    def update(self) -> None:
        lap()
        super().update()


class _InStages(Lapping):
    """Has stages of its own, which are those of the class."""

    def update_core(self) -> None:
        super().update_core()


def bare(epochs: int, out: Path, **settings: Any) -> None:
    """No extension; ``settings`` are the number of layers and the updater's."""
    _trainer(epochs, out, **settings).run()


def with_callback(epochs: int, out: Path) -> None:
    """Train with a callback."""
    bare(epochs, out, callbacks=UpdateCallbacks(update_on_start=lambda context: None))


def staged(epochs: int, out: Path) -> None:
    """Train by an ``update_core`` that does what that of the class does, stage by stage."""
    bare(epochs, out, updater_class=_InStages)


def recorded(epochs: int, out: Path) -> None:
    """Record every iteration, and digests of the parameters each epoch."""
    trainer = _trainer(epochs, out)
    trainer.extend(Recorder())
    trainer.run()


class _TimedRecorder(Recorder):
    """Adds up the seconds in its own calls, by epoch; the ledger of each epoch ends with digests of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.whole, self._spent = list[float](), list[float](), 0.0
        self._start = time.perf_counter()

    def observe(self, trainer: Trainer) -> None:
        start = time.perf_counter()
        super().observe(trainer)
        self._spent += time.perf_counter() - start

    def __call__(self, trainer: Trainer) -> None:
        start = time.perf_counter()
        super().__call__(trainer)
        end = time.perf_counter()
        self.inside.append(self._spent + end - start)
        self.whole.append(end - self._start)
        self._spent, self._start = 0.0, end


def recorder_percent(iterations: int, epochs: int, out: Path) -> float:
    """Train a perceptron of a million parameters by batches of 100, and return what a recorder takes of an iteration.

    It is the median of the epochs after the first, in percent of the time without the recorder. Both are taken in the same
    iterations, so that a machine that grows faster or slower changes them together.
    """
    torch.manual_seed(0)
    rows = 100 * iterations
    train = TupleDataset(np.random.default_rng(0).random((rows, 784), np.float32), np.arange(rows) % 10)
    model = Classifier(nn.Sequential(nn.Linear(784, 1_000), nn.ReLU(), nn.Linear(1_000, 210), nn.ReLU(), nn.Linear(210, 10)))
    updater = StandardUpdater(SerialIterator(train, 100), torch.optim.Adam(model.parameters()), model)
    trainer, recorder = Trainer(updater, (epochs + 1, "epoch"), out=_fresh(out)), _TimedRecorder()
    trainer.extend(recorder)
    trainer.run()
    pairs = zip(recorder.inside[1:], recorder.whole[1:], strict=True)
    return statistics.median(100 * inside / (whole - inside) for inside, whole in pairs)


def idle(epochs: int, out: Path, count: int = IDLE) -> None:
    """Extensions that do nothing, once an epoch."""
    trainer = _trainer(epochs, out)
    for number in range(count):
        trainer.extend(lambda trainer: None, name=f"idle{number}", trigger=(1, "epoch"))
    trainer.run()


def with_keys(epochs: int, out: Path, keys: int) -> None:
    """Log so many numbers, each reported in every iteration."""

    def loss_func(model: Loss, *inputs: Tensor) -> dict[str, Tensor]:
        loss = model(*inputs)
        return {"loss": loss} | {f"{number}": loss for number in range(keys - 1)}

    trainer = _trainer(epochs, out, loss_func=loss_func)
    trainer.extend(LogReport())
    trainer.run()


def with_log(epochs: int, out: Path, saves: bool = False) -> None:
    """Train with the script's extensions but `dump_graph`, and `snapshot` where it ``saves``."""
    with open(os.devnull, "w") as screen:
        trainer = _script(Lapping, (epochs, "epoch"), out, screen)
        if saves:
            trainer.extend(snapshot(n_retains=1))
        trainer.run()


def unending(iterations: Sequence[int], out: Path, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Train without the end of an epoch; return what a snapshot costs after so many iterations, by unit.

    Ten keys are in an open interval, and another log has a row every ten iterations.
    """
    model = nn.Linear(4, 1)
    found: dict[int, dict[str, list[float]]] = {number: {"ms": [], "kB": [], "MB of memory": []} for number in iterations}
    taken = snapshot("measured_{.updater.iteration}", n_retains=1, asynchronous=False)

    def loss_func(model: nn.Linear, x: Tensor) -> dict[str, Tensor]:
        loss = model(x).square().mean()
        return {"loss": loss, **{f"{number}": loss for number in range(9)}}

    def save(trainer: Trainer) -> None:
        number = max((number for number in iterations if trainer.updater.iteration >= number), default=None)
        if number is not None and len(found[number]["ms"]) < rounds:
            began = time.perf_counter()
            taken(trainer)
            found[number]["ms"].append((time.perf_counter() - began) * 1e3)
            files = (Path(trainer.out) / f"measured_{trainer.updater.iteration}").iterdir()
            found[number]["kB"].append(sum(file.stat().st_size for file in files) / 1e3)
            found[number]["MB of memory"].append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)

    iterator = FunctionIterator(lambda index: torch.ones(1, 4))
    optimizer = torch.optim.Adam(model.parameters())
    updater = StandardUpdater(iterator, optimizer, model, loss_func=loss_func)
    trainer = Trainer(updater, (max(iterations) + rounds, "iteration"), out=str(out))
    trainer.extend(LogReport(trigger=(2 * max(iterations), "iteration")))
    trainer.extend(LogReport(filename="rows"), name="rows", trigger=(10, "iteration"))
    trainer.extend(taken, trigger=lambda trainer: False)
    saving = make_extension(default_name="measure", priority=-1000)(save)
    trainer.extend(saving)
    trainer.run()
    return found


def rows_of_log(counts: Sequence[int], out: Path, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return the milliseconds of an iteration with a row of the log after so many, and then those of snapshots."""
    found: dict[int, dict[str, list[float]]] = {count: {"an iteration": [], "a snapshot": []} for count in counts}
    taken, ended = snapshot(n_retains=1, asynchronous=False), time.perf_counter()

    def save(trainer: Trainer) -> None:
        nonlocal ended
        spent = time.perf_counter() - ended
        for count in counts:
            if count - rounds < trainer.updater.iteration <= count:
                found[count]["an iteration"].append(1e3 * spent)
            if count < trainer.updater.iteration <= count + rounds:
                found[count]["a snapshot"].append(1e3 * _seconds(lambda: taken(trainer)))
        ended = time.perf_counter()

    trainer = _trainer_of_ones((max(counts) + rounds, "iteration"), out)
    trainer.extend(LogReport(trigger=(1, "iteration")))
    trainer.extend(taken, trigger=lambda trainer: False)
    trainer.extend(make_extension(default_name="measure", priority=-1000)(save))
    trainer.run()
    return found


def _trainer_of_ones(stop: tuple[int, str], out: Path) -> Trainer:
    """Return one with next to nothing to train, and no epoch."""
    model, iterator = nn.Linear(4, 1), FunctionIterator(lambda index: torch.ones(1, 4))
    optimizer = torch.optim.Adam(model.parameters())
    updater = StandardUpdater(iterator, optimizer, model, loss_func=_sum_of)
    return Trainer(updater, stop, out=_fresh(out))


def _sum_of(model: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    return {"loss": model(x).sum()}


def committing(out: Path, kept: int, removes: bool, epochs: int) -> None:
    """Take a snapshot in each iteration where so many are there already; the oldest is then removed where it ``removes``."""
    taken = snapshot(n_retains=kept if removes else -1, asynchronous=False)

    def save(trainer: Trainer) -> None:
        if trainer.updater.iteration > kept:
            lap()
        taken(trainer)

    trainer = _trainer_of_ones((kept + epochs * COMMITS, "iteration"), out)
    trainer.extend(taken, trigger=lambda trainer: False)
    trainer.extend(make_extension(default_name="measure", priority=-1000)(save))
    trainer.run()


def of_many_tensors(tensors: int, out: Path, rounds: int, loads: bool = True) -> dict[str, list[float]]:
    """Return the seconds for which a snapshot of so many tensors stops the loop, its megabytes, and the seconds to load it.

    Beside them are those of PyTorch's own file of the same states, which is written to the end.
    """
    found: dict[str, list[float]] = {"stop, s": [], "torch.save, s": []}
    taken, states = snapshot("small", n_retains=1), out / "states.pt"

    def save(trainer: Trainer) -> None:
        found["stop, s"].append(_seconds(lambda: taken(trainer)))
        taken.wait()
        found["torch.save, s"].append(_seconds(lambda: torch.save(_state_dicts(trainer), states)))

    trainer = _trainer_of_small(tensors, (rounds + 1, "iteration"), out)
    trainer.extend(taken, trigger=lambda trainer: False)
    trainer.extend(make_extension(default_name="measure", priority=-1000)(save))
    trainer.run()
    size = sum(file.stat().st_size for file in (out / "small").iterdir())
    found = {unit: times[1:] for unit, times in found.items()}
    found["text, MB"] = [(size - 13 * 4 * (tensors // 4)) / 1e6]
    return found | (_loads(tensors, out, rounds) if loads else {})


def _loads(tensors: int, out: Path, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"load, s": [], "torch.load, s": []}
    for _ in range(rounds):
        trainer = _trainer_of_small(tensors, (rounds + 1, "iteration"), out)
        found["torch.load, s"].append(_seconds(partial(_load_state_dicts, trainer, out / "states.pt")))
        found["load, s"].append(_seconds(partial(load, out / "small", trainer)))
    return found


def _trainer_of_small(tensors: int, stop: tuple[int, str], out: Path) -> Trainer:
    """Return one of parameters of four numbers each, of which Adam has three tensors more."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(tensors // 4)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones(4)
    optimizer.step()
    return Trainer(Idle(SerialIterator(TupleDataset(torch.zeros(1)), 1), optimizer, model), stop, out=str(out))


def _state_dicts(trainer: Trainer) -> list[dict[str, Any]]:
    return [trainer.updater.get_model("main").state_dict(), trainer.updater.get_optimizer("main").state_dict()]


def _load_state_dicts(trainer: Trainer, file: Path) -> None:
    states = torch.load(file)
    trainer.updater.get_model("main").load_state_dict(states[0])
    trainer.updater.get_optimizer("main").load_state_dict(states[1])


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def time_to_first_update(out: Path) -> float:
    """Milliseconds from ``run()`` to the first update of the script."""
    started: list[float] = []

    class Watched(StandardUpdater):
        """Notes when its updates begin."""

        def update(self) -> None:
            started.append(time.perf_counter())
            super().update()

    with open(os.devnull, "w") as screen:
        trainer = _script(Watched, (1, "iteration"), out, screen)
        began = time.perf_counter()
        trainer.run()
    return (started[0] - began) * 1e3


def _fresh(out: Path) -> str:
    """Return a directory that no run has written to: what one has written would be moved away first."""
    return tempfile.mkdtemp(dir=out)


def _trainer(
    epochs: int, out: Path, layers: int = 2, updater_class: type[StandardUpdater] = Lapping, **settings: Any
) -> Trainer:
    model = Loss(layers)
    updater = updater_class(SerialIterator(TupleDataset(X, T), BATCH), sgd(model), model, **settings)
    return Trainer(updater, (epochs, "epoch"), out=_fresh(out))


def _script(updater_class: type[StandardUpdater], stop: tuple[int, str], out: Path, screen: Any) -> Trainer:
    model = Classifier(Predictor())
    train_iter = SerialIterator(TupleDataset(X, T), BATCH)
    test_iter = SerialIterator(TupleDataset(X_TEST, T_TEST), BATCH, repeat=False, shuffle=False)
    trainer = Trainer(updater_class(train_iter, sgd(model), model), stop, out=_fresh(out))
    trainer.extend(Evaluator(test_iter, model))
    trainer.extend(LogReport())
    keys = ["epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time"]
    trainer.extend(PrintReport(keys, out=screen))
    trainer.extend(ProgressBar(out=screen))
    return trainer
