"""A run on a device that is not the current one is the same as on the current one: saved, resumed, checked and repeated."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from chainring import iterators, serializers, training
from chainring.converters import concat_examples
from chainring.datasets import TupleDataset
from chainring.nn import Classifier
from chainring.training import StandardUpdater, Trainer, extensions
from chainring.training.extensions import FailOnNonNumber

OTHER = "cuda:1"  # while cuda:0 is the current one


def make_data():
    generator = torch.Generator().manual_seed(2)
    return TupleDataset(torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator))


def move_batch(device, batch, _):
    return concat_examples(batch, device)


def make_updater(kind, device):
    torch.cuda.init()
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3)))
    optimizer, iterator = torch.optim.SGD(model.parameters(), 0.1), iterators.SerialIterator(make_data(), 16, seed=1)
    if kind == "replicas":
        return training.updaters.ParallelUpdater(iterator, optimizer, model, devices=device)
    if kind == "moved by the script":
        return StandardUpdater(iterator, optimizer, model.to(device), converter=partial(move_batch, device))
    virtual_ranks = 3 if kind == "virtual ranks" else None
    return StandardUpdater(iterator, optimizer, model, device=device, virtual_ranks=virtual_ranks)


def train(out, kind, device, until, resume=None):
    """The parameters after so many iterations."""
    trainer = Trainer(make_updater(kind, device), (until, "iteration"), out=str(out))
    trainer.extend(extensions.snapshot(), trigger=(3, "iteration"))
    trainer.extend(extensions.Recorder())
    if resume is not None:
        serializers.load(resume, trainer)
        for index in range(2):  # what a script draws before it runs does not count
            torch.rand(5, device=f"cuda:{index}")
    trainer.run()
    return [parameter.tolist() for parameter in trainer.updater.get_model("main").parameters()]


REPLICAS = {"main": "cuda:0", "second": OTHER}
CASES = {
    "by number": ("plain", OTHER, OTHER),
    "moved by the script": ("moved by the script", OTHER, OTHER),
    "virtual ranks": ("virtual ranks", OTHER, OTHER),
    "two replicas": ("replicas", REPLICAS, REPLICAS),
    "on another device": ("plain", OTHER, "cuda:0"),
    "two replicas on others": ("replicas", REPLICAS, {"main": OTHER, "second": "cuda:0"}),
}


@pytest.mark.parametrize(("kind", "device", "then"), CASES.values(), ids=CASES)
def test_dropout_on_any_device_continues_bit_for_bit(kind, device, then, tmp_path):
    """Also where the run continues on another one; the recorder has the same digests of generators."""
    whole = train(tmp_path / "whole", kind, device, until=7)
    train(tmp_path / "cut", kind, device, until=3)
    assert train(tmp_path / "cut", kind, then, until=7, resume=tmp_path / "cut" / "snapshot_iter_3") == whole
    if device == then:
        files = [tmp_path / name / "recorder.bin" for name in ("whole", "cut")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_examples_that_are_drawn_leave_the_generators_of_all_devices_alone():
    """A `FunctionIterator` seeds all of them for each call."""
    iterator = iterators.FunctionIterator(lambda i: [torch.randn(3) for _ in range(4)], seed=1)
    next(iterator)
    before = torch.cuda.get_rng_state(OTHER)
    next(iterator)
    assert torch.equal(torch.cuda.get_rng_state(OTHER), before)


@pytest.mark.parametrize("device", ["cuda:0", OTHER])
def test_the_flag_of_an_update_is_there_when_it_is_read(device, tmp_path):
    """No false alarm, and the iteration of a NaN is named; a flag that is read before it has arrived is a race."""
    trainer = Trainer(make_updater("plain", device), (6, "iteration"), out=str(tmp_path / "sound"))
    trainer.extend(FailOnNonNumber())
    trainer.run()
    updater = make_updater("plain", device)
    trainer = Trainer(updater, (6, "iteration"), out=str(tmp_path / "bad"))
    trainer.extend(FailOnNonNumber())

    def spoil(trainer):
        next(updater.get_model("main").parameters()).data.fill_(math.nan)

    trainer.extend(spoil, trigger=(3, "iteration"))
    with pytest.raises(extensions.NonNumberError, match="iteration 4"):
        trainer.run()


def test_a_bad_update_of_replicas_is_repeated_on_their_devices(tmp_path):
    updater = make_updater("replicas", REPLICAS)
    next(updater.get_model("main").parameters()).data.fill_(math.nan)
    trainer = Trainer(updater, (1, "iteration"), out=str(tmp_path))
    trainer.extend(FailOnNonNumber("skip"))
    trainer.run()
    again = make_updater("replicas", REPLICAS)
    FailOnNonNumber.replay(tmp_path / "non_number_iter_1", again)
    gradient = next(again.get_model("main").parameters()).grad
    assert gradient.device == torch.device("cuda:0")
    assert gradient.isnan().any()
