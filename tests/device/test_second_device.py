"""A run on a device that is not the current one is the same as on the current one: saved, resumed, checked and repeated."""

import gc
import math
import re
from functools import partial

import pytest
import torch
from stand_in import native
from torch import nn

from chainring import Reporter, iterators, parallel, report, serializers, training
from chainring.converters import concat_examples, to_device
from chainring.datasets import TupleDataset
from chainring.nn import Classifier, model_summary
from chainring.training import StandardUpdater, Trainer, extensions
from chainring.training.extensions import FailOnNonNumber
from rank_pair import on_ranks

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


class Making(nn.Module):
    """Makes tensors on "cuda", a weight and a buffer that grows, and reports."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x, t):
        offset = torch.ones(len(x), device="cuda")
        self.seen = torch.cat([self.seen, offset])
        loss = nn.functional.cross_entropy(self.layer(x) + offset[:, None] + self.seen.sum(), t)
        report({"norm": x.norm()}, self)
        return {"loss": loss, "weight": (t >= 0).sum()}


def updates(update, model):
    """The parameters after three updates, and what was reported in the last."""
    reporter, observation = Reporter(), {}
    reporter.add_observers("main", model.named_modules())
    for _ in range(3):
        with reporter.scope(observation):
            update()
    return [parameter.tolist() for parameter in model.parameters()], {key: float(observation[key]) for key in observation}


def test_replicas_on_two_devices_train_as_on_one():
    """What a replica makes on "cuda", its weight, its buffer and its report are on its device."""

    def on(second):
        torch.manual_seed(0)
        model = Making()
        optimizer, iterator = torch.optim.SGD(model.parameters(), 0.1), iterators.SerialIterator(make_data(), 15, seed=1)
        devices = {"main": "cuda:0", "second": second}
        return updates(training.ParallelUpdater(iterator, optimizer, model, devices=devices).update, model)

    assert on(OTHER) == on("cuda:0")


@pytest.mark.parametrize("returns", ["loss", "mapping"])
def test_a_parallel_module_on_two_devices_computes_as_on_one(returns):
    """The first of them may be named without its number."""

    def on(*devices):
        torch.manual_seed(0)
        module = Making()
        if returns == "loss":
            module.register_forward_hook(lambda module, inputs, output: output["loss"])
        model = parallel.DataParallel(module, devices)
        optimizer, iterator = torch.optim.SGD(model.parameters(), 0.1), iterators.SerialIterator(make_data(), 16, seed=1)
        return updates(StandardUpdater(iterator, optimizer, model, device="cuda:0").update, model)

    assert on("cuda", OTHER) == on("cuda:0", "cuda:0")


class Halves(nn.Module):
    """A model of which each device has a half."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16).to("cuda:0"), nn.Linear(16, 3).to(OTHER)

    def forward(self, x, t):
        return nn.functional.cross_entropy(self.last(self.first(x.to("cuda:0")).relu().to(OTHER)), t.to(OTHER))


def test_a_model_on_two_devices_continues_bit_for_bit(tmp_path):
    """Its snapshots wait for both, and so do its digests."""

    def train(out, until, resume=None):
        torch.manual_seed(0)
        model = Halves()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        updater = StandardUpdater(iterators.SerialIterator(make_data(), 16, seed=1), optimizer, model)
        trainer = Trainer(updater, (until, "iteration"), out=str(out))
        trainer.extend(extensions.snapshot(), trigger=(3, "iteration"))
        trainer.extend(extensions.Recorder())
        if resume is not None:
            serializers.load(resume, trainer)
        trainer.run()
        return [parameter.tolist() for parameter in model.parameters()]

    train(tmp_path / "cut", 3)
    assert train(tmp_path / "cut", 7, tmp_path / "cut" / "snapshot_iter_3") == train(tmp_path / "whole", 7)


@pytest.mark.parametrize("draws", ["with the update", "at the end"])
def test_the_recorder_sees_what_is_drawn_on_the_device_of_the_model(draws, tmp_path):
    """Both where a block of 32 rows is complete and where the run ends in one."""
    length, files = 32 if draws == "with the update" else 5, []
    for number in range(2):
        updater = make_updater("plain", OTHER)
        trainer = Trainer(updater, (length, "iteration"), out=str(tmp_path / str(number)))
        trainer.extend(extensions.Recorder((1000, "iteration")))

        def draw(context, number=number):
            if number and context.iteration == length - 1:
                torch.rand(1, device=OTHER)

        updater.callbacks.add("update_on_finish", draw)
        trainer.run()
        files.append((tmp_path / str(number) / "recorder.bin").read_bytes())
    assert files[0] != files[1]


def test_memory_that_is_reported_is_that_of_the_model(tmp_path):
    """Not that of the current device, which has more here."""
    on_current = torch.empty(2**26, device="cuda:0")
    trainer = Trainer(make_updater("plain", OTHER), (4, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.Throughput((4, "iteration")))
    trainer.extend(extensions.SystemMetrics((4, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    torch.cuda.reset_peak_memory_stats(OTHER)
    trainer.run()
    (row,) = trainer.get_extension("LogReport").log
    for key in ("throughput/peak_memory_mib", "system/accelerator_memory_mib"):
        assert 0 < row[key] < 100 < on_current.nbytes / 2**20, key


def test_a_rehearsal_predicts_the_memory_of_the_device_of_the_model(tmp_path, capsys):
    """Whatever has been there before, and is on the current device."""
    said = []
    for size in (0, 2**20):
        gc.collect()
        beside = torch.empty(size, device="cuda:0")  # noqa: F841 - its memory is
        torch.empty(size, device=OTHER)
        Trainer(make_updater("plain", OTHER), (4, "iteration"), out=str(tmp_path / str(size))).rehearse()
        said.append(re.findall(r"an update ([\d.]+) MiB", capsys.readouterr().out))
    assert said[0] == said[1] != []


def test_an_error_tells_the_memory_of_the_device_of_the_model(tmp_path):
    gc.collect()
    updater = make_updater("plain", OTHER)
    native.set_capacity(1, 2**22)
    trainer = Trainer(updater, (4, "iteration"), out=str(tmp_path))
    trainer.extend(lambda trainer: torch.empty(2**23, device=OTHER), trigger=(1, "iteration"), name="too large")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.run()
    assert "cuda:1 has 4.00 MiB" in caught.value.__notes__[-1]


class Looking(StandardUpdater):
    """Notes where a tensor without a number is made, and how it is computed with."""

    def update_core(self):
        layer = nn.Linear(1, 1, device="cuda")
        self.seen.append((layer.weight.device.index, layer(torch.ones(1, 1, device="cuda")).dtype))
        self.backward(self.get_model("main")(*self.next_batch()))
        self.step()


def test_virtual_ranks_compute_where_and_how_the_update_does():
    """Each has a thread of its own, where PyTorch begins with the first device and without autocast."""
    model = Classifier(nn.Linear(8, 3))
    iterator, optimizer = iterators.SerialIterator(make_data(), 16, seed=1), torch.optim.SGD(model.parameters())
    updater = Looking(iterator, optimizer, model, device=OTHER, virtual_ranks=2)
    updater.seen = []
    with torch.cuda.device(OTHER), torch.autocast("cuda", torch.bfloat16):
        updater.start()
        updater.update()
    assert updater.seen == [(1, torch.bfloat16)] * 2


class Growing(nn.Module):
    """Has a buffer from its first batch on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("last", None)

    def forward(self, x, t):
        self.last = x.mean(0)
        return self.layer(x - self.last).square().mean()


def test_a_buffer_that_a_snapshot_has_beside_others_comes_back_on_the_device(tmp_path):
    def make(until):
        model = Growing()
        iterator, optimizer = iterators.SerialIterator(make_data(), 16, seed=1), torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(StandardUpdater(iterator, optimizer, model, device=OTHER), (until, "iteration"), out=str(tmp_path))
        trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
        return trainer

    make(2).run()
    trainer = make(2)
    serializers.load(tmp_path / "snapshot_iter_2", trainer)
    assert trainer.updater.get_model("main").last.device == torch.device(OTHER)


class Dropping(Making):
    def forward(self, x, t):
        return super().forward(nn.functional.dropout(x), t)


def test_a_summary_runs_on_the_device_of_the_model_and_leaves_its_generator_as_it_was():
    model = Dropping().to(OTHER)
    before = torch.cuda.get_rng_state(OTHER)
    assert "[2, 3]" in model_summary(model, (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)))
    assert torch.equal(torch.cuda.get_rng_state(OTHER), before)


def test_a_device_is_named_by_its_number():
    assert [to_device(number, torch.ones(1)).device.index for number in range(2)] == [0, 1]


def current_device(comm):
    return comm.device.index, torch.empty(0, device="cuda").device.index


def test_the_device_of_a_rank_is_its_current_one():
    assert on_ranks(2, current_device, device=None) == [(0, 0), (1, 1)]
