"""A small run whose rows go to writers, and what the services' own readers find of it."""

import math

import torch

from chainring import report, report_histogram, report_image, report_text, training
from chainring.training import extensions

LENGTH = 8
OFTEN = (2, "iteration")


class Losing(training.Updater):
    """Reports the iteration itself, a key that comes later, and what is no finite number."""

    def update_core(self):
        k = self.iteration + 1
        late = {} if k <= 4 else {"main/late": -float(k)}
        report({"main/loss": float(k), "odd": {6: math.nan, 8: math.inf}.get(k, 0.5), **late})


class KilledError(RuntimeError):
    """Ends the run."""


def train(out, *writers, length=LENGTH, kill=None, config=None, load=None, updater=None, **settings):
    """Trains with a row every second iteration, from the newest snapshot there is; returns the log's extension."""

    def killed(trainer):
        if trainer.updater.iteration == kill:
            raise KilledError

    log = extensions.LogReport(trigger=OFTEN, writers=writers, **settings)
    trainer = training.Trainer(updater or Losing(), (length, "iteration"), str(out), [log, killed], config=config)
    # Not beside the training: a process that is killed two iterations later shall have left it.
    trainer.extend(extensions.snapshot(autoload=True, asynchronous=False), trigger=(4, "iteration"))
    if load is not None:
        load(trainer)
    trainer.run()
    return log


LOSSES = [(2, 1.5), (4, 3.5), (6, 5.5), (8, 7.5)]
LATE = [(6, -5.5), (8, -7.5)]


class Showing(Losing):
    """Reports besides an image, a text and a histogram, one of them under the key of a value."""

    def update_core(self):
        super().update_core()
        k = self.iteration + 1
        report_image("seen/image", torch.full((3, 2, 4), k / 51))
        report_text("main/loss", f"<b> of {k}")
        report_histogram("weights", torch.arange(float(k)))


SEEN = [2, 4, 6, 8]
