"""Memory of the device: a run that is too large for it, and the peaks that a rehearsal predicts."""

import gc
import re

import pytest
import torch
from stand_in import native
from torch import nn

import chainring
from chainring import iterators, training
from chainring.datasets import TupleDataset
from chainring.nn import Classifier
from chainring.training import extensions


def mlp(width, depth, *layers):
    hidden = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), *(make(width) for make in layers))
    ]
    return nn.Sequential(nn.Linear(32, width), *hidden, nn.Linear(width, 10))


def convolutions(channels):
    layers = [nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * channels, 10)
    )


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 16)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32, 10))


MODELS = {
    "narrow and deep": lambda: mlp(64, 12),
    "wide and shallow": lambda: mlp(512, 1),
    "batch norm": lambda: mlp(128, 4, nn.BatchNorm1d),
    "layer norm": lambda: mlp(128, 4, nn.LayerNorm),
    "dropout": lambda: mlp(128, 4, lambda _: nn.Dropout(0.2)),
    "convolutions": lambda: convolutions(16),
    "more convolutions": lambda: convolutions(48),
    "transformer": transformer,
    "one layer": lambda: nn.Linear(32, 10),
    "mostly parameters": lambda: mlp(768, 2),
}


def make_trainer(out, make, *, batch_size=512, optimizer_class=torch.optim.Adam, updates=4, **settings):
    gc.collect()  # what other trainers have left there
    chainring.deterministic(0)
    model = Classifier(make()).to("cuda")
    data = TupleDataset(torch.randn(2048, 32), torch.arange(2048) % 10)
    optimizer = optimizer_class(model.parameters(), lr=0.001)
    train = iterators.SerialIterator(data, batch_size)
    updater = training.StandardUpdater(train, optimizer, model, device="cuda", **settings)
    trainer = training.Trainer(updater, (updates, "iteration"), out=str(out))
    passes = iterators.SerialIterator(data, batch_size, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(passes, model, device="cuda"), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
    return trainer


def result_of(trainer):
    model = trainer.updater.get_model("main")
    rows = [
        {key: value for key, value in row.items() if key != "elapsed_time"} for row in trainer.get_extension("LogReport").log
    ]
    return {name: value.cpu() for name, value in model.state_dict().items()}, rows


def sizes_in(text):
    return {name: float(number) * 2**20 for name, number in re.findall(r"(an update|'\w+') ([\d.]+) MiB", text)}


@pytest.mark.parametrize("settings", [{}, {"virtual_ranks": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rehearsal_predicts_the_peak_of_an_update_and_of_an_evaluation_within_5_percent(
    tmp_path, name, settings, device, capsys
):
    """Of each apart: the run counts the peak around every update and evaluation."""
    gc.collect()  # what other tests have left on the device would be counted
    trainer = make_trainer(tmp_path / "a", MODELS[name], **settings)
    trainer.rehearse()
    said = capsys.readouterr().out
    predicted = sizes_in(said)
    assert re.search(r"a batch of 512 takes [\d.]+ MiB beside model and optimizer, and about [\d,]+ would fit", said), said
    del trainer
    gc.collect()
    trainer, counted = make_trainer(tmp_path / "b", MODELS[name], **settings), {"an update": 0, "'validation'": 0}

    def count(key):
        counted[key] = max(counted[key], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    trainer.extend(lambda _: count("an update"), name="after update", priority=10**6)
    trainer.extend(lambda _: count("'validation'"), name="after evaluation", priority=150)
    trainer.run()
    for key, size in counted.items():
        assert predicted[key] == pytest.approx(size, rel=0.05), (key, predicted, counted)


def test_model_that_is_half_too_large_trains_to_the_same_bits(tmp_path, device, capsys):
    """With saved tensors on the host, which one line says; without virtual ranks the error has numbers and a remedy."""
    make = lambda: mlp(128, 12, nn.BatchNorm1d, lambda _: nn.Dropout(0.1))  # noqa: E731
    trainer = make_trainer(tmp_path / "a", make, virtual_ranks=1)
    torch.cuda.reset_peak_memory_stats()
    trainer.run()
    peak, expected = torch.cuda.max_memory_allocated(), result_of(trainer)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    native.set_capacity(0, int(peak / 1.5))
    trainer = make_trainer(tmp_path / "b", make, virtual_ranks=1)
    trainer.run()
    state, rows = result_of(trainer)
    assert rows == expected[1]
    assert all(torch.equal(value, expected[0][name]) for name, value in state.items())
    said = capsys.readouterr().out
    assert said.count("with its saved tensors on the host") == 1, said
    del trainer
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(tmp_path / "c", make).run()
    assert "hint: cuda:0 has " in caught.value.__notes__[-1]
    assert "with virtual_ranks=1" in caught.value.__notes__[-1]


@pytest.mark.parametrize("count", [1, 2])
def test_update_of_virtual_ranks_leaves_nothing_on_the_device_until_the_collector_comes(tmp_path, count, device):
    """Its objects do not refer to one another afterwards."""
    updater = make_trainer(tmp_path, MODELS["batch norm"], virtual_ranks=count).updater
    updater.start()
    updater.update()
    gc.collect()
    gc.disable()
    try:
        updater.update()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            updater.update()
        # Autograd's thread of the device gives back the graph of the last update a moment after `backward` returns.
        batch = 512 * (32 * 4 + 8)
        assert torch.cuda.memory_allocated() - before < 2 * batch
    finally:
        gc.enable()


def test_rehearsal_warns_above_90_percent(tmp_path, device, capsys):
    trainer = make_trainer(tmp_path, MODELS["batch norm"])
    trainer.rehearse()
    native.set_capacity(0, int(sizes_in(capsys.readouterr().out)["an update"] * 1.05))
    with pytest.warns(UserWarning, match="an update takes 9.% of the memory of cuda:0"):
        trainer.rehearse()
