"""docs/migration/ignite.md is true: an Engine and a Trainer train the same model, and differ where the page says."""

import json
import re

import pytest
import torch
from pages import DOCS, run_script, script_of
from torch import nn

from chainring import report, training
from chainring.training import extensions
from chainring.training.triggers import EarlyStoppingTrigger

ignite = pytest.importorskip("ignite", reason="Ignite is not installed: make migration installs it")
from ignite.engine import Engine, Events, create_supervised_trainer  # noqa: E402
from ignite.handlers import EarlyStopping  # noqa: E402
from ignite.metrics import RunningAverage  # noqa: E402

PAGE = "migration/ignite.md"
SAVE = """
import json
torch.save(model.state_dict(), "model.pt")
json.dump({}, open("last.json", "w"))
"""
THEIRS = "[trainer.state.epoch, *[evaluator.state.metrics[key] for key in ('loss', 'accuracy')]]"
ROW = "trainer.get_extension('LogReport').log[-1]"
OURS = f"[{ROW}[key] for key in ('epoch', 'validation/main/loss', 'validation/main/accuracy')]"


class Reporting(training.Updater):
    """Reports one of these values an iteration."""

    def __init__(self, values):
        self.values = values

    def update_core(self):
        report({"x": self.values[self.iteration]})


def test_both_scripts_stop_after_the_same_epoch_with_the_same_bits(tmp_path):
    """Early, with the rows in order; evaluations agree up to rounding, and the page names the version."""
    assert f"Ignite {ignite.__version__}" in (DOCS / PAGE).read_text()
    last = []
    for heading, values in (("Before", THEIRS), ("After", OURS)):
        script = script_of(PAGE, "The data and the model of both", heading)
        assert "shuffle=True" in script
        folder = run_script(tmp_path / heading, script.replace("shuffle=True", "shuffle=False") + SAVE.format(values))
        last.append((torch.load(folder / "model.pt"), json.loads((folder / "last.json").read_text())))
    (their_model, theirs), (our_model, ours) = last
    assert all(torch.equal(value, our_model[name]) for name, value in their_model.items())
    assert theirs[0] == ours[0] < 30
    assert theirs[1:] == pytest.approx(ours[1:], rel=1e-6)


def test_an_iteration_of_an_accumulation_is_a_batch_there_and_an_update_here(tmp_path):
    """Four batches, two steps."""
    batches, counts = [(torch.ones(2, 1), torch.ones(2, 1))] * 4, []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    theirs = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=2)
    counts.append(theirs.run(batches, max_epochs=1).iteration)
    updater = training.StandardUpdater(
        batches, optimizer, model, loss_func=lambda model, x, t: nn.functional.mse_loss(model(x), t), accumulate=2
    )
    training.Trainer(updater, (1, "epoch"), out=str(tmp_path)).run()
    assert [*counts, updater.iteration] == [4, 2]


def test_a_running_average_begins_with_the_first_value_there(tmp_path):
    """Of 0 and 1, each weighing half of the next."""
    engine = Engine(lambda engine, batch: batch)
    RunningAverage(alpha=0.5, output_transform=float).attach(engine, "average")
    theirs = engine.run([0.0, 1.0]).metrics["average"]
    trainer = training.Trainer(Reporting([0.0, 1.0]), (2, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.RunningAverage("x", decay=0.5, trigger=(1, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    ours = trainer.get_extension("LogReport").log[-1]["x/average"]
    text = re.search(r"of 0, 1 is ([\d.]+):.*`decay=0.5`: ([\d.]+),", (DOCS / PAGE).read_text())
    assert (theirs, round(ours, 2)) == (float(text[1]), float(text[2]))


@pytest.mark.parametrize(("settings", "stops_at"), [({}, 3), ({"cumulative": True}, 6)])
def test_a_least_improvement_is_that_of_a_cumulative_one(tmp_path, settings, stops_at):
    """By 0.06 in each epoch: two of them are more than 0.1."""
    scores = [0.06 * epoch for epoch in range(6)]
    trainer, evaluator, seen = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None), iter(scores)
    stop = EarlyStopping(2, lambda engine: next(seen), trainer, threshold=0.1, **settings)
    evaluator.add_event_handler(Events.COMPLETED, stop)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run([0]) and None)
    assert trainer.run([0], max_epochs=6).epoch == stops_at
    ours = EarlyStoppingTrigger((1, "iteration"), "x", 2, "max", max_trigger=(6, "iteration"), min_delta=0.1)
    updater = Reporting(scores)
    training.Trainer(updater, ours, out=str(tmp_path)).run()
    assert updater.iteration == 6


def test_a_batch_of_three_needs_a_function_there(tmp_path):
    """Here they are arguments of the loss function."""
    batch, model = (torch.ones(2, 1), torch.ones(2, 1), torch.ones(2, 1)), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="too many values to unpack"):
        create_supervised_trainer(model, optimizer, nn.functional.mse_loss).run([batch])
    updater = training.StandardUpdater(
        [batch], optimizer, model, loss_func=lambda model, x, t, weight: (weight * (model(x) - t) ** 2).mean()
    )
    training.Trainer(updater, (1, "iteration"), out=str(tmp_path)).run()
    assert updater.iteration == 1
