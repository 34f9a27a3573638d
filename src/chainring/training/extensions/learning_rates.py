"""find_learning_rate: which learning rate a run should begin with, found by updates that are undone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from chainring._checks import is_integer, is_number
from chainring._hints import LEARNING_RATES, hinting
from chainring.training._preview import list_unsaved
from chainring.training._run import prepare
from chainring.training.extensions.lr_scheduler import set_value
from chainring.training.extensions.pictures import figure_class, save_figure
from chainring.training.trainer import Trainer, preserved

_LEAST = 10  # updates of which something can be said
_BROKEN = 3.0  # a loss that is worse than the best by so many times its size only grows


@dataclass(frozen=True)
class LearningRates:
    """What `find_learning_rate` has found.

    Example::

        found = extensions.find_learning_rate(trainer)
        for rate, loss in zip(found.rates, found.losses):
            print(f"{rate:.2g} {loss:.4f}")

    Attributes:
        rates: the learning rates that were tried, in ascending order.
        losses: the loss of the update with each.
        suggestion: the rate at which the loss falls fastest, or ``None`` if it does not fall.
    """

    rates: Sequence[float] = field(repr=False)
    losses: Sequence[float] = field(repr=False)
    suggestion: float | None

    def plot(self, filename: str) -> None:
        """Draw the loss over the learning rate, with a line at the suggestion, as an image; its suffix is the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = figure_class("plot()")()
        axes = figure.add_subplot(111)
        axes.set(xlabel="learning rate", ylabel="loss", xscale="log")
        axes.plot(self.rates, self.losses, color="lightgrey")
        width = max(1, len(self.losses) // 20)
        means = [float(np.mean(self.losses[max(0, i - width) : i + width + 1])) for i in range(len(self.losses))]
        axes.plot(self.rates, means)
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", label=f"{self.suggestion:.2g}")
            axes.legend()
        save_figure(figure, Path(filename))


@hinting(LEARNING_RATES)
def find_learning_rate(
    trainer: Trainer,
    smallest: float = 1e-6,
    largest: float = 10.0,
    count: int = 100,
    *,
    optimizer: str = "main",
    key: str = "main/loss",
    strict: bool = True,
) -> LearningRates:
    """Return how the loss falls while the learning rate grows by the same factor in each update, from smallest to largest.

    The updates are those of the run: its data, batch size, precision and ranks; extensions are not called. They end early
    when the loss is not finite, or grows without end. Then everything is put back: the run that follows has the same bits as
    one without the search. Of several parameter groups the largest rate is tried, and the others keep their proportion.

    Example::

        found = extensions.find_learning_rate(trainer)
        found.plot("learning_rates.png")
        print(found.suggestion)

    Args:
        trainer: one that has not run.
        smallest: the rate of the first update.
        largest: the rate of the last one.
        count: the number of updates.
        optimizer: the name of the optimizer whose rate is tried; others keep theirs.
        key: the reported value that is the loss.
        strict: False to return what was found where updates change what cannot be put back, for a trainer that does not run.

    Raises:
        RuntimeError: the run has started, or the data run out, or the loss is not finite, before 10 updates.
        ValueError: the rates or their number are out of range; the key is not reported; or updates change what is not
            saved, which cannot be put back.
        TypeError: ``trainer`` is none; the optimizer has no learning rate that is a number.
        KeyError: there is no optimizer of that name.
    """
    if not isinstance(trainer, Trainer):
        rule = "find_learning_rate() takes a trainer first, which holds the updater, the model and the data"
        raise TypeError(f"{rule}; got {type(trainer).__name__}: write find_learning_rate(Trainer(updater))")
    if not (is_number(smallest) and is_number(largest) and 0 < smallest < largest < math.inf):
        raise ValueError(f"rates are tried from smallest to largest, 0 < smallest < largest, got {smallest!r}, {largest!r}")
    if not is_integer(count) or count < _LEAST:
        raise ValueError(f"count is the number of updates, an integer of at least {_LEAST}, got {count!r}")
    given = [_rate_of(group, optimizer) for group in trainer.updater.get_optimizer(optimizer).param_groups]
    from chainring.training import _unsaved  # which few programs need

    rates: list[float] = []
    losses: list[float] = []
    seen = [_unsaved.attributes_of(trainer)]
    with preserved(trainer, "find_learning_rate()"), suppress(StopIteration):
        prepare(trainer)
        while len(rates) < count and not _grows_without_end(losses):
            rate = smallest * (largest / smallest) ** (len(rates) / (count - 1))
            _set_rates(trainer, optimizer, [rate * (own / max(given)) if max(given) else rate for own in given])
            loss = _update(trainer, key)
            if not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
            if len(rates) <= 2:
                seen.append(_unsaved.attributes_of(trainer))
    _set_rates(trainer, optimizer, given)
    if strict and len(seen) == 3 and (unsaved := list_unsaved(trainer, *seen)):
        raise ValueError(
            f"find_learning_rate() has changed values that are not saved, and cannot put them back:{unsaved}\nMake another "
            "trainer for the run, and give strict=False here"
        )
    if len(rates) < _LEAST:
        raise RuntimeError(
            f"after {len(rates)} updates the data had run out or the loss was not finite, and {_LEAST} are needed to say "
            "which rate is good; give an iterator that repeats, and a lower smallest rate"
        )
    return LearningRates(rates, losses, _suggest(rates, losses))


def _rate_of(group: dict[str, Any], optimizer: str) -> float:
    rate = group.get("lr")
    if not is_number(rate) and not (isinstance(rate, Tensor) and rate.numel() == 1):
        raise TypeError(f"a learning rate is a number, and that of a parameter group of optimizer {optimizer!r} is {rate!r}")
    return float(rate)


def _set_rates(trainer: Trainer, optimizer: str, rates: list[float]) -> None:
    for group, rate in zip(trainer.updater.get_optimizer(optimizer).param_groups, rates, strict=True):
        set_value(group, "lr", rate)


def _update(trainer: Trainer, key: str) -> float:
    """Return the loss of an update, the mean over ranks."""
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        trainer.updater.update()
    if key not in trainer.observation:
        raise ValueError(f"{key!r} is not reported by an update; reported were {sorted(trainer.observation)}")
    return float(np.mean(trainer.comm.gather_object(float(trainer.observation[key]))))


def _grows_without_end(losses: Sequence[float]) -> bool:
    if len(losses) < _LEAST:
        return False
    best = min(float(np.mean(losses[i : i + 5])) for i in range(len(losses) - 4))
    return float(np.mean(losses[-5:])) > best + _BROKEN * abs(best)


def _suggest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate before and after which the means of a tenth of the losses differ most."""
    width = max(3, len(losses) // 10)
    falls = {
        i: float(np.mean(losses[i - width : i])) - float(np.mean(losses[i : i + width]))
        for i in range(width, len(losses) - width + 1)
    }
    steepest = max(falls, key=falls.__getitem__)
    return rates[steepest] if falls[steepest] > 0 else None
