"""Keys that triggers and extensions watch are checked by a rehearsal, which names the nearest one that is reported."""

import re

import pytest
import torch
from counting import CountingUpdater, a_trainer
from torch import nn

from chainring import report, training
from chainring.training import extensions, triggers


class Reporting(CountingUpdater):
    """Reports a loss, and something else in the fifth iteration."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)

    def get_optimizer(self, name):
        return {"main": self.optimizer}[name]

    def update_core(self):
        self.optimizer.step()
        report({"main/loss": 1.0, "main/words": 2})
        if self.iteration == 4:
            report({"main/late": 1.0})


def validate(trainer):
    report({"validation/main/loss": 2.0})


def trainer_of(out, *extended, stop=(6, "iteration")):
    """A trainer with an evaluation, whose trigger does not fire in the first updates, and the extensions given."""
    trainer = a_trainer(out, Reporting(), stop)
    trainer.extend(validate, trigger=(1, "epoch"), priority=training.PRIORITY_WRITER)
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    for extension, trigger in extended:
        trainer.extend(extension, trigger=trigger)
    return trainer


def plateau(key):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    return extensions.LRScheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor=key)


class Own(training.Extension):
    """An extension of a user that says what it needs."""

    def __init__(self, key):
        self.watched_key = key

    @property
    def watched_keys(self):
        return (self.watched_key,)

    def __call__(self, trainer):
        pass


WATCHERS = {
    "a best-value snapshot": lambda key: (extensions.snapshot("best"), triggers.MinValueTrigger(key)),
    "MaxValueTrigger": lambda key: (lambda trainer: None, triggers.MaxValueTrigger(key)),
    "BestValueTrigger": lambda key: (lambda trainer: None, triggers.BestValueTrigger(key, lambda best, new: new < best)),
    "EarlyStoppingTrigger of an extension": lambda key: (
        lambda trainer: None,
        triggers.EarlyStoppingTrigger(monitor=key, mode="min"),
    ),
    "a trigger in a trigger": lambda key: (
        lambda trainer: None,
        triggers.MinValueTrigger("main/loss", triggers.MaxValueTrigger(key)),
    ),
    "BestValue": lambda key: (extensions.MinValue(key), None),
    "LRScheduler": lambda key: (plateau(key), None),
    "PlotReport": lambda key: (extensions.PlotReport(["main/loss", key]), None),
    "PrintReport": lambda key: (extensions.PrintReport(["epoch", "main/loss", key, "elapsed_time"]), None),
    "LogReport": lambda key: (extensions.LogReport(["main/loss", key], filename="other"), None),
    "MicroAverage": lambda key: (extensions.MicroAverage("main/loss", key, "main/perplexity"), None),
    "an extension of one's own": lambda key: (Own(key), None),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_a_watched_key_that_nothing_reports_is_an_error_of_the_rehearsal(tmp_path, watcher):
    """It says who watches which key, and the nearest of all that were reported; all state is put back."""
    trainer = trainer_of(tmp_path, WATCHERS[watcher]("validation/main/los"))
    with pytest.raises(ValueError, match=r"watches 'validation/main/los'; the nearest is 'validation/main/loss'") as caught:
        trainer.rehearse()
    assert "Reported were ['main/loss', " in str(caught.value)
    assert trainer.updater.iteration == 0
    assert trainer.observation == {}
    trainer_of(tmp_path / "right", WATCHERS[watcher]("validation/main/loss")).rehearse()


def test_the_stop_trigger_is_checked_too(tmp_path):
    """And with what it asks in turn."""
    stop = triggers.EarlyStoppingTrigger(monitor="main/accuracy")
    with pytest.raises(
        ValueError, match=r"stop trigger EarlyStoppingTrigger\(.* watches 'main/accuracy'; the nearest is 'main/"
    ):
        trainer_of(tmp_path, stop=stop).rehearse()
    trainer_of(tmp_path, stop=triggers.EarlyStoppingTrigger(monitor="main/loss")).rehearse()


def test_every_unknown_key_is_named_once(tmp_path):
    """With the name of the extension that watches it."""
    trainer = trainer_of(tmp_path, WATCHERS["PlotReport"]("los"), (extensions.snapshot(), triggers.MinValueTrigger("wrods")))
    with pytest.raises(ValueError, match="these keys are needed") as caught:
        trainer.rehearse()
    lines = [line.partition(" watches ") for line in str(caught.value).splitlines() if " watches " in line]
    assert [(watcher.strip(), keys) for watcher, _, keys in lines] == [
        ("extension 'PlotReport'", "'los'; the nearest is 'main/loss'"),
        (
            "trigger MinValueTrigger('wrods', IntervalTrigger(1, 'epoch')) of extension 'snapshot'",
            "'wrods'; the nearest is 'main/words'",
        ),
    ]


def test_keys_that_the_log_adds_are_known_to_a_table(tmp_path):
    """The counters of a row, what a postprocess adds, a learning rate, and what a log leaves out for another."""

    def add(row):
        row["added"] = 1

    trainer = a_trainer(tmp_path, Reporting(), (6, "iteration"))
    trainer.extend(extensions.observe_lr())
    trainer.extend(extensions.LogReport(postprocess=add))
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "elapsed_time", "added", "lr", "main/loss"]))
    trainer.rehearse()


def test_a_key_that_is_reported_later_is_declared_by_what_reports_it(tmp_path):
    """An updater or an extension, also a function; the error says so."""
    watched = extensions.PlotReport("main/late", trigger=(1, "iteration")), None
    with pytest.raises(ValueError, match=re.escape('its attribute reported_keys = ("key",)')):
        trainer_of(tmp_path, watched).rehearse()
    trainer = trainer_of(tmp_path, watched)
    trainer.updater.reported_keys = ("main/late",)
    trainer.rehearse()

    def sometimes(trainer):
        pass

    sometimes.reported_keys = ("main/late",)
    trainer_of(tmp_path, watched, (sometimes, None)).rehearse()


def test_an_attribute_of_another_meaning_is_left_alone(tmp_path):
    """A user's extension or trigger that calls something else watched_keys or reported_keys."""

    class Method(training.Extension):
        def watched_keys(self):
            raise AssertionError

        def __call__(self, trainer):
            pass

    class Number(triggers.Trigger):
        watched_keys = 3
        reported_keys = None

        def ask(self, trainer):
            return False

    trainer_of(tmp_path, (Method(), Number())).rehearse()
