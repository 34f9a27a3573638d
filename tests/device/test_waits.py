"""An iteration waits for the device no more than a loop by hand with the same optimizer, whatever runs in it."""

import io

import pytest
import torch
from stand_in import counting
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.reporting.media import report_histogram
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks

WINDOW = range(20, 40)  # the iterations in which is counted


def weighted(model, x, t):
    """A loss with a weight that the device has computed."""
    return {"loss": model(x, t), "weight": (t >= 0).sum()}


def make_trainer(out, device, comm=None, optimizer=None, wrap=None, data_on="cpu", loads=False, **settings):
    model = Classifier(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)))
    model = model if wrap is None else wrap(model.to(device))
    x, t = torch.randn(64, 8, device=data_on), torch.randint(3, (64,), device=data_on)
    updater = StandardUpdater(
        DataLoader(TensorDataset(x, t), 16) if loads else SerialIterator(TupleDataset(x, t), 16, seed=1),
        torch.optim.Adam(model.parameters(), **(optimizer or {})),
        model,
        device=device,
        comm=comm,
        **settings,
    )
    trainer = Trainer(updater, (WINDOW.stop + 1, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1000, "iteration")))
    trainer.extend(extensions.ProgressBar(out=io.StringIO()))
    trainer.extend(extensions.observe_lr())
    return trainer


def waits_of(trainer):
    """What the iterations of the window wait for, all of them together."""
    block = counting()

    def count(trainer):
        if trainer.updater.iteration == WINDOW.start:
            trainer.counts = block.__enter__()
        elif trainer.updater.iteration == WINDOW.stop:
            block.__exit__(None, None, None)

    trainer.extend(count, trigger=(1, "iteration"), priority=-10_000)
    trainer.run()
    return trainer.counts.waits


NUMBER = len(WINDOW)
SETTINGS = {
    "the README's": ({}, {}),
    "bf16": ({"precision": "bf16"}, {}),
    "fp16, whose scaler asks whether a step is left out": ({"precision": "fp16"}, {"number": NUMBER}),
    "fp16, fused": ({"precision": "fp16", "optimizer": {"fused": True}}, {}),
    "accumulation": ({"accumulate": 2}, {}),
    "weights on the device": ({"accumulate": 2, "loss_func": weighted}, {}),
    "data on the device": ({"data_on": "cuda"}, {}),
    "virtual ranks": ({"virtual_ranks": 4}, {}),
    "virtual ranks, accumulation": ({"virtual_ranks": 4, "accumulate": 2}, {}),
}


@pytest.mark.parametrize(("settings", "waits"), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_an_updater_wait_for_nothing(settings, waits, tmp_path, device):
    assert waits_of(make_trainer(tmp_path, device, **settings)) == waits


EXTENSIONS = {
    "EMA": (lambda model: extensions.ExponentialMovingAverage(model, 0.99), {}),
    "ParameterStatistics, at the end of an epoch": (extensions.ParameterStatistics, {"to_host": NUMBER // 4}),
    "Throughput, at the end of an epoch": (lambda model: extensions.Throughput(), {"synchronize_device": NUMBER // 4}),
    "RankTimes, at the end of an epoch": (lambda model: extensions.RankTimes(), {}),
    "FailOnNonNumber, for the iteration before": (lambda model: extensions.FailOnNonNumber(), {"synchronize_event": NUMBER}),
    "FailOnNonNumber that skips": (lambda model: extensions.FailOnNonNumber("skip"), {"number": NUMBER}),
}


@pytest.mark.parametrize(("make", "waits"), EXTENSIONS.values(), ids=EXTENSIONS)
def test_extensions_wait_for_nothing_that_they_do_not_need(make, waits, tmp_path, device):
    trainer = make_trainer(tmp_path, device)
    trainer.extend(make(trainer.updater.get_model("main")))
    assert waits_of(trainer) == waits


def test_a_histogram_is_read_once(tmp_path, device):
    trainer = make_trainer(tmp_path, device)
    weight = next(trainer.updater.get_model("main").parameters())
    trainer.extend(lambda trainer: report_histogram("weight", weight), trigger=(1, "iteration"), name="histogram")
    assert waits_of(trainer) == {"to_host": NUMBER}


def test_a_recorder_reads_no_batch_that_a_loader_gives_on_the_device(tmp_path, device):
    """But once in 32 iterations what it has noted."""
    trainer = make_trainer(tmp_path, device, data_on=device, loads=True)
    trainer.extend(extensions.Recorder())
    assert waits_of(trainer) == {"to_host": 1}


def test_a_row_of_the_log_is_one_copy(tmp_path, device):
    trainer = make_trainer(tmp_path, device)
    trainer.extend(
        extensions.LogReport(trigger=((WINDOW.start + WINDOW.stop) // 2, "iteration"), filename="rows"), name="rows"
    )
    assert waits_of(trainer) == {"to_host": 1}


def evaluator(trainer):
    x, t = torch.randn(64, 8), torch.randint(3, (64,))
    passes = SerialIterator(TupleDataset(x, t), 16, repeat=False, shuffle=False)
    return extensions.Evaluator(passes, trainer.updater.get_model("main"), device=trainer.updater.device)


ONCE = {
    "an evaluation of four batches": (evaluator, {"to_host": 1}),
    "a snapshot, in which is what the log has so far": (
        lambda trainer: extensions.snapshot(),
        {"synchronize_device": 1, "to_host": 1},
    ),
}


@pytest.mark.parametrize(("make", "waits"), ONCE.values(), ids=ONCE)
def test_what_runs_once_waits_once(make, waits, tmp_path, device):
    trainer = make_trainer(tmp_path, device)
    trainer.extend(make(trainer), trigger=(WINDOW.start + 5, "iteration"))
    assert waits_of(trainer) == waits


def waits_of_rank(comm, out, settings):
    wrap = None
    if settings.pop("ddp", False):
        wrap = lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[comm.device.index])  # noqa: E731
    return waits_of(make_trainer(out, comm.device, comm=comm, wrap=wrap, **settings))


RANKS = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "virtual ranks": {"virtual_ranks": 4},
    "virtual ranks dealt by speed": {"virtual_ranks": 4, "balance": "speed"},
    "DDP": {"ddp": True},
}


@pytest.mark.parametrize("settings", RANKS.values(), ids=RANKS)
def test_ranks_wait_for_nothing(settings, tmp_path):
    """DDP is made as PyTorch's tutorials write it, with ``device_ids``."""
    assert on_ranks(2, waits_of_rank, str(tmp_path), settings, device=None) == [{}, {}]
