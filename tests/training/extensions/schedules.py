"""A small real training whose every step says with which settings it was made."""

import torch
from torch import nn

from chainring import report, serializers, training
from chainring.iterators import SerialIterator

PER_EPOCH = 3


class Line(nn.Module):
    """A line through twelve points; it reports its loss."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.offset = nn.Parameter(torch.tensor(-0.25, dtype=torch.float64))

    def forward(self, x):
        loss = (self.slope * x + self.offset - x.sin()).square().mean()
        report({"loss": loss}, self)
        return loss


class Settings(training.Extension):
    """Notes the settings of every group with which each update was made, and at last those that stand."""

    priority = 1000

    def __init__(self, optimizer, *attrs):
        self.optimizer = optimizer
        self.attrs = attrs
        self.used = []
        optimizer.register_step_pre_hook(lambda *_: self.used.append(self.now()))

    def now(self):
        return [[_plain(group[attr]) for attr in self.attrs if attr in group] for group in self.optimizer.param_groups]

    def __call__(self, trainer):
        pass


def sgd(model, *, split=False, **settings):
    """SGD with a momentum; ``split`` gives each parameter a group."""
    settings = {"lr": 0.1, "momentum": 0.9, **settings}
    parameters = list(model.parameters())
    groups = [{"params": [each]} for each in parameters] if split else [{"params": parameters}]
    return torch.optim.SGD(groups, **settings)


def updater_of(model, optimizer, **settings):
    points = torch.linspace(-1, 1, 4 * PER_EPOCH, dtype=torch.float64)
    return training.StandardUpdater(SerialIterator(points, 4, shuffle=False), optimizer, model, **settings)


def trainer_of(out, stop, *extensions, optimizer=None, model=None, **settings):
    """A trainer of so many iterations."""
    model = Line() if model is None else model
    updater = updater_of(model, sgd(model, **settings) if optimizer is None else optimizer(model))
    return training.Trainer(updater, (stop, "iteration"), out=str(out), extensions=extensions)


def run(out, stop, *extensions, attr="lr", **settings):
    """Trains; returns what the first group had at each update, and afterwards."""
    trainer = trainer_of(out, stop, *extensions, **settings)
    settings = Settings(trainer.updater.get_optimizer("main"), attr)
    trainer.run()
    return [groups[0][0] for groups in [*settings.used, settings.now()]]


ATTRIBUTES = "lr", "momentum", "initial_lr", "max_lr", "weight_decay"
WAYS = ("extend, load", "load, extend", "file")


def resumed(out, stop, k, build, way, change=None):
    """Trains k iterations, goes on with fresh objects; settings of all updates, then of the end, and the parameters.

    Args:
        out: a directory.
        stop: iterations of the whole.
        k: iterations of the first part; ``None`` does it in one.
        build: ``build(out, stop)`` returns a trainer, and a function that makes the extensions and registers them.
        way: whether state is loaded before or after that, or comes from a file.
        change: takes the place of ``build`` in the second part.
    """
    first, extend = build(out / f"first-{k}", stop if k is None else k)
    extend()
    settings = Settings(first.updater.get_optimizer("main"), *ATTRIBUTES)
    first.run()
    if k is None:
        return settings.used, settings.now(), parameters(first)
    second, extend = (change or build)(out / f"second-{k}", stop)
    later = Settings(second.updater.get_optimizer("main"), *settings.attrs)
    if way != "load, extend":
        extend()
    if way == "file":
        serializers.save(out / f"saved-{k}", first)
        serializers.load(out / f"saved-{k}", second)
    else:
        second.load_state_dict(first.state_dict())
    if way == "load, extend":
        extend()
    second.run()
    return settings.used + later.used, later.now(), parameters(second)


def chained(out, stop, build, way):
    """Trains as `resumed`, one iteration with fresh objects after another; before the first there is a run of none."""
    used, before = [], None
    for k in range(stop + 1):
        trainer, extend = build(out / f"part-{k}", k)
        settings = Settings(trainer.updater.get_optimizer("main"), *ATTRIBUTES)
        if before is None or way != "load, extend":
            extend()
        if before is not None and way == "file":
            serializers.save(out / f"saved-{k}", before)
            serializers.load(out / f"saved-{k}", trainer)
        elif before is not None:
            trainer.load_state_dict(before.state_dict())
        if before is not None and way == "load, extend":
            extend()
        trainer.run()
        used, before = used + settings.used, trainer
    return used, settings.now(), parameters(before)


def parameters(trainer):
    return [value.item() for value in trainer.updater.get_model("main").parameters()]


def _plain(value):
    return value.item() if isinstance(value, torch.Tensor) else value
