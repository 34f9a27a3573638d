"""Chainer or Chainring, so that one program runs under both: run as ``python either.py chainer programs out.json``.

Each function of the modules in ``programs`` without an underscore in front of its name is one program. What it returns is
written to ``out.json`` under ``<module>.<function>``. A program takes from here what the two libraries do not name alike.
"""

# ruff: noqa: F401 - programs import the names from here
import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np

LIBRARY = sys.argv[1] if __name__ == "__main__" else os.environ["LIBRARY"]
IS_CHAINER = LIBRARY == "chainer"

if IS_CHAINER:
    import chainer
    from chainer import datasets, iterators, report, serializers, training
    from chainer.dataset import DatasetMixin, concat_examples
    from chainer.reporter import DictSummary, Reporter, Summary
    from chainer.training import extensions, triggers

    class Line(chainer.Chain):
        """The mean squared error of ``x @ w``, which is reported."""

        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.w = chainer.Parameter(np.zeros((2, 1), np.float32))

        def forward(self, x, t):
            loss = chainer.functions.mean_squared_error(chainer.functions.matmul(x, self.w), t)
            report({"loss": loss}, self)
            return loss

    def sgd(model, lr):
        return chainer.optimizers.SGD(lr).setup(model)

    def make_updater(iterator, optimizer, model, **settings):
        return training.updaters.StandardUpdater(iterator, optimizer, **settings)

    def setting(optimizer, name):
        return float(getattr(optimizer, name))

    def to_list(array):
        return np.asarray(getattr(array, "array", array)).tolist()

    def as_input(array):
        return array

    def is_training(model):
        return bool(chainer.config.train)

    def has_graph(loss):
        return loss.creator is not None

    def classifier(weights, bias):
        return chainer.links.Classifier(chainer.links.Linear(*weights.T.shape, initialW=weights, initial_bias=bias))

    BEFORE_TRAINING = "call_before_training"
    LOG_NAME = "log_name"
else:
    import torch
    from torch import nn

    from chainring import DictSummary, Reporter, Summary, datasets, iterators, report, serializers, training
    from chainring.converters import concat_examples
    from chainring.datasets import DatasetMixin
    from chainring.nn import Classifier
    from chainring.training import extensions, triggers

    class Line(nn.Module):
        """The mean squared error of ``x @ w``, which is reported."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 1))

        def forward(self, x, t):
            loss = ((x @ self.w - t) ** 2).mean()
            report({"loss": loss}, self)
            return loss

    def sgd(model, lr):
        return torch.optim.SGD(model.parameters(), lr)

    def make_updater(iterator, optimizer, model, **settings):
        return training.StandardUpdater(iterator, optimizer, model, **settings)

    def setting(optimizer, name):
        return float(optimizer.param_groups[0][name])

    def to_list(array):
        return array.tolist()

    def as_input(array):
        return torch.from_numpy(array)

    def is_training(model):
        return model.training

    def has_graph(loss):
        return loss.grad_fn is not None

    def classifier(weights, bias):
        linear = nn.Linear(*weights.T.shape)
        linear.load_state_dict({"weight": torch.from_numpy(weights), "bias": torch.from_numpy(bias)})
        return Classifier(linear)

    BEFORE_TRAINING = "invoke_before_training"
    LOG_NAME = "filename"


exchange = Path(os.environ["EXCHANGE"])
"""Where the run under Chainer leaves files for the one under Chainring."""


def points(count=10):
    """A dataset of a plane: pairs of x (2 numbers) and t (1)."""
    x = np.random.RandomState(0).rand(count, 2).astype(np.float32)
    return datasets.TupleDataset(x, x @ np.array([[1.0], [-2.0]], np.float32))


def make_trainer(stop, *, count=10, batch_size=4, lr=0.1, out=None, **settings):
    """A trainer of a line, whose data come in their own order: 10 examples, 4 in a batch."""
    model = Line()
    iterator = iterators.SerialIterator(points(count), batch_size, shuffle=False)
    updater = make_updater(iterator, sgd(model, lr), model, **settings)
    return training.Trainer(updater, stop, out=out or tempfile.mkdtemp(dir=".")), model


def trained(trainer):
    """The iterations that a run made."""
    trainer.run()
    return trainer.updater.iteration


def rows(trainer, name="LogReport"):
    """The rows of its log, without the times."""
    log = trainer.get_extension(name).log
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log]


def main():
    _, folder, out = sys.argv[1:]
    os.environ["LIBRARY"] = LIBRARY
    sys.modules["either"] = sys.modules["__main__"]
    sys.path.insert(0, folder)
    results = {}
    home = Path.cwd()
    for path in sorted(Path(folder).glob("*.py")):
        module = importlib.import_module(path.stem)
        for name, program in inspect.getmembers(module, inspect.isfunction):
            if program.__module__ != path.stem or name.startswith("_"):
                continue
            os.chdir(tempfile.mkdtemp(dir=home))
            try:
                results[f"{path.stem}.{name}"] = program()
            except Exception:
                results[f"{path.stem}.{name}"] = {"failed": traceback.format_exc()}
    Path(home, out).write_text(json.dumps(results, default=lambda number: number.item()))


if __name__ == "__main__":
    main()
