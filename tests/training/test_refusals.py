"""Bad input is refused where it is given, by an error that gives the rule, the value and the remedy.

The table holds what the issue of the whole vocabulary names, and what no part's own tests hold.
"""

import argparse

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from chainring import datasets, iterators, training
from chainring.iterators import SerialIterator
from chainring.training import UpdateCallbacks, extensions, triggers

NET = nn.Linear(2, 3)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
NEVER = (0, "epoch")


def updater(**settings):
    return training.StandardUpdater(SerialIterator(torch.ones(4, 2), 2), SGD, NET, loss_func=loss, **settings)


def loss(model, x):
    return model(x).sum()


def evaluator(**settings):
    return extensions.Evaluator(SerialIterator(torch.ones(4, 2), 2, repeat=False), NET, **settings)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class OnlyWrites:
    def write(self, record):
        pass


REFUSED = {
    # updaters
    "no micro-batches": (
        ValueError,
        "accumulate is the number of micro-batches in an update, at least 1, got 0",
        lambda: updater(accumulate=0),
    ),
    "a precision": (ValueError, 'precision is "fp32", "bf16" or "fp16", got \'fp64\'', lambda: updater(precision="fp64")),
    "a callback": (
        TypeError,
        "update_on_start is a callable of one context, or an iterable of them; got 3",
        lambda: UpdateCallbacks(update_on_start=3),
    ),
    "no iterators": (ValueError, "at least one iterator is needed", lambda: training.StandardUpdater({}, SGD, NET)),
    "no optimizers": (ValueError, "at least one optimizer", lambda: training.StandardUpdater([torch.ones(1)], {}, NET)),
    # trainer
    "a config that is a namespace": (
        TypeError,
        r"config is a mapping of settings, such as vars\(args\); got Namespace",
        lambda: training.Trainer(updater(), config=argparse.Namespace()),
    ),
    # triggers
    "a period of zero": (ValueError, "the period of an interval is above 0, got 0", lambda: triggers.get_trigger(NEVER)),
    "no patience": (ValueError, "at least 1; got 0", lambda: triggers.EarlyStoppingTrigger(patience=0)),
    "a length that is none": (
        ValueError,
        "a finite number is needed",
        lambda: triggers.ReachedTrigger(float("nan"), "epoch"),
    ),
    "a trigger of three": (TypeError, "a trigger is None, a callable", lambda: triggers.get_trigger((1, "epoch", 2))),
    # extensions
    "a trigger of Throughput": (ValueError, "is above 0, got 0", lambda: extensions.Throughput(NEVER)),
    "a trigger of SystemMetrics": (ValueError, "is above 0, got 0", lambda: extensions.SystemMetrics(NEVER)),
    "a trigger of PlotReport": (ValueError, "is above 0, got 0", lambda: extensions.PlotReport("loss", trigger=NEVER)),
    "a trigger of ParameterStatistics": (
        ValueError,
        "is above 0, got 0",
        lambda: extensions.ParameterStatistics(NET, trigger=NEVER),
    ),
    "a trigger of LogReport": (ValueError, "is above 0, got 0", lambda: extensions.LogReport(trigger=NEVER)),
    "a trigger of make_extension": (ValueError, "is above 0, got 0", lambda: training.make_extension(NEVER)),
    "no models": (ValueError, "models is a model, or a mapping", lambda: extensions.ParameterStatistics({})),
    "keys that are numbers": (
        TypeError,
        r"keys is an iterable of keys, such as \[.*got \[1\]",
        lambda: extensions.LogReport([1]),
    ),
    "keys that are one": (TypeError, "keys is an iterable of keys.*got 3", lambda: extensions.LogReport(3)),
    "a postprocess": (TypeError, "postprocess is a function of a row, got 3", lambda: extensions.LogReport(postprocess=3)),
    "a name of a log": (TypeError, "or None for no file; got 3", lambda: extensions.LogReport(filename=3)),
    "an empty name of a log": (TypeError, "or None for no file; got ''", lambda: extensions.LogReport(filename="")),
    "a writer": (TypeError, r"writers is a list of Writers.*; got \[3\]", lambda: extensions.LogReport(writers=[3])),
    "a writer without close": (TypeError, "OnlyWrites", lambda: extensions.LogReport(writers=[OnlyWrites()])),
    "one writer": (TypeError, "writers is a list of Writers.*got <", lambda: extensions.LogReport(writers=OnlyWrites())),
    "columns that are numbers": (
        TypeError,
        r"entries is an iterable of keys.*got \[1\]",
        lambda: extensions.PrintReport([1]),
    ),
    "a log that is none": (TypeError, 'such as "LogReport"; got 3', lambda: extensions.PrintReport(log_report=3)),
    "an out of PrintReport": (TypeError, "out is a text stream, or None.*got 'a'", lambda: extensions.PrintReport(out="a")),
    "an out of ProgressBar": (TypeError, "out is a text stream, or None.*got 'a'", lambda: extensions.ProgressBar(out="a")),
    "a length without end": (
        ValueError,
        "a finite number above 0.*got .inf",
        lambda: extensions.ProgressBar((float("inf"), "epoch")),
    ),
    "a decay that is no number": (
        ValueError,
        "decay is from 0 to less than 1.*got 'a'",
        lambda: extensions.ExponentialMovingAverage(NET, "a"),
    ),
    "a decay that is a flag": (ValueError, "got False", lambda: extensions.ExponentialMovingAverage(NET, False)),
    "a converter of Evaluator": (
        TypeError,
        "converter of an Evaluator is a function, got None",
        lambda: evaluator(converter=None),
    ),
    "a hook of Evaluator": (TypeError, "eval_hook of an Evaluator is a function, got 3", lambda: evaluator(eval_hook=3)),
    "a function of Evaluator": (TypeError, "eval_func of an Evaluator is a function, got 3", lambda: evaluator(eval_func=3)),
    "an iterator of Evaluator": (ValueError, 'needs an iterator "main"', lambda: extensions.Evaluator({}, NET)),
    "a shift of what no group has": (
        ValueError,
        "group 0 of SGD has no 'rate'; group 0 has",
        lambda: extensions.ExponentialShift("rate", 0.5, optimizer=SGD),
    ),
    # iterators
    "a batch of nothing": (
        ValueError,
        "a batch size is an integer of at least 1, got 0",
        lambda: iterators.MultiprocessIterator([1], 0),
    ),
    "a negative prefetch": (ValueError, "at least 0, got -1", lambda: iterators.MultiprocessIterator([1], 1, n_prefetch=-1)),
    "the class of a sampler": (
        TypeError,
        "got the class NoRepeatOrderSampler: make one",
        lambda: SerialIterator([1], 1, order_sampler=iterators.NoRepeatOrderSampler),
    ),
    "a stream for an iterator": (
        TypeError,
        "got Stream; .*LoaderIterator",
        lambda: iterators.MultiprocessIterator(Stream(), 1),
    ),
    # datasets
    "columns of unequal length": (
        ValueError,
        r"same length, got \[2, 3\]",
        lambda: datasets.TupleDataset([1, 2], [1, 2, 3]),
    ),
    "named columns of unequal length": (ValueError, "same length, got {", lambda: datasets.DictDataset(x=[1], t=[1, 2])),
    "a number in a TupleDataset": (
        TypeError,
        "a TupleDataset combines datasets.*got int",
        lambda: datasets.TupleDataset([1], 3),
    ),
    "a number in a DictDataset": (
        TypeError,
        "a DictDataset combines datasets.*got int",
        lambda: datasets.DictDataset(x=3),
    ),
    "a generator in a ConcatenatedDataset": (
        TypeError,
        "got list_iterator.*Make a list",
        lambda: datasets.ConcatenatedDataset([1], iter([1])),
    ),
    "a stream in a TransformDataset": (TypeError, "got Stream", lambda: datasets.TransformDataset(Stream(), print)),
    "the class of a dataset": (TypeError, "got the class list", lambda: datasets.SubDataset(list, 0, 1)),
    "a share as a position": (
        TypeError,
        r"positions are integers, got 1.5; round .* with int",
        lambda: datasets.split_dataset([1, 2], 1.5),
    ),
}


@pytest.mark.parametrize(("error", "message", "make"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_at_construction(error, message, make):
    """Not in the first epoch, nor after hours."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "updater_of",
    [training.StandardUpdater, lambda *parts: training.ParallelUpdater(*parts, devices={"main": "cpu"})],
    ids=["StandardUpdater", "ParallelUpdater"],
)
def test_a_model_that_does_not_take_the_batch_is_explained_at_the_first_update(updater_of):
    """What a first script forgets: a model of torch returns an output, and no loss."""
    first = updater_of(SerialIterator([(torch.ones(2), 1)], 1), SGD, NET)
    words = r"without a loss_func the model is called with 2 inputs, .* Linear\.forward.* chainring\.nn\.Classifier\(model\)"
    with pytest.raises(TypeError, match=words):
        first.update()


def test_an_error_within_the_model_stays_what_it_is():
    """A TypeError of its own is not taken for one of its call."""

    class Adds(nn.Linear):
        def forward(self, x, t):
            return "text" + 1

    model = Adds(2, 3)
    first = training.StandardUpdater(SerialIterator([(torch.ones(2), 1)], 1), torch.optim.SGD(model.parameters()), model)
    with pytest.raises(TypeError, match="can only concatenate str"):
        first.update()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: extensions.observe_lr("other"), KeyError, r"no optimizer 'other'; registered: \['main'\]"),
        (
            lambda: extensions.StepShift("lr", 0.5, 1, optimizer="other"),
            KeyError,
            r"no optimizer 'other'; registered: \['main'\]",
        ),
        (lambda: extensions.StepShift("rate", 0.5, 1), ValueError, "group 0 of SGD has no 'rate'; group 0 has"),
        (lambda: extensions.PrintReport(log_report="other"), KeyError, "'other'"),
    ],
)
def test_what_only_the_trainer_knows_is_refused_before_the_first_update(tmp_path, make, error, message):
    """The extension is made before it meets an updater; the run ends before anything is trained."""
    trainer = training.Trainer(updater(), (1, "iteration"), out=str(tmp_path), extensions=[make()])
    with pytest.raises(error, match=message):
        trainer.run()
    assert trainer.updater.iteration == 0
