"""A small run in which one thing may be another, for the tests of what finds the difference.

    python tests/planted.py OUT CHANGES

trains it, with the changes as a JSON object.
"""

import json
import random
import sys
from functools import partial

import numpy as np
import torch
from torch import nn

import chainring
from chainring import iterators, training
from chainring.converters import concat_examples
from chainring.datasets import DatasetMixin
from chainring.training import extensions

LENGTH, DIGESTS, SNAPSHOTS, ROWS = 24, 4, 8, 6  # iterations, and how often each is taken
EXAMPLES, BATCH, WIDTH = 40, 4, 5


class Data(DatasetMixin):
    """Points with noise from torch's generator."""

    def __init__(self, changes):
        self.changes = changes
        self.points = torch.linspace(-1, 1, EXAMPLES * WIDTH).reshape(EXAMPLES, WIDTH)
        if "example" in changes:
            self.points[changes["example"]] = 0.3
        if "pixel" in changes:
            self.points[changes["pixel"], 2] += 1 / 255
        if "label" in changes:
            self.label = changes["label"]

    def __len__(self):
        return self.changes.get("examples", EXAMPLES)

    def get_example(self, i):
        if "draws" in self.changes and i == 7:
            {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "python": random.random}[self.changes["draws"]]()
        x = self.points[i] + self.changes.get("noise", 0.1) * torch.randn(WIDTH)
        return x.to(dtype_of(self.changes)), (i + (i == self.changes.get("label"))) % 3


class Swish(nn.Module):
    """An activation, by one of two kernels that round otherwise."""

    by_hand = False

    def forward(self, x):
        return x * torch.sigmoid(x) if self.by_hand else nn.functional.silu(x)


class Net(nn.Module):
    """Dropout, running statistics, and what a change asks for."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes
        width = changes.get("width", 8)
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width, momentum=changes.get("momentum", 0.1), eps=changes.get("norm_eps", 1e-5))
        self.act = changes.get("activation", Swish)()
        self.drop = nn.Dropout(changes.get("dropout", 0.3))
        self.last = nn.Linear(width, 3, bias=changes.get("bias", True))

    def forward(self, x, t):
        h = self.norm(self.first(x))
        if "kernel" in self.changes:  # from this iteration on
            self.act.by_hand = int(self.norm.num_batches_tracked) >= self.changes["kernel"]
        h = self.last(self.drop(self.act(h)))
        loss = nn.functional.cross_entropy(h, t, label_smoothing=self.changes.get("smoothing", 0.0))
        if "penalty" in self.changes:
            loss = loss + self.changes["penalty"] * self.first.weight.square().sum()
        chainring.report({"loss": loss, "accuracy": (h.argmax(1) == t).float().mean()}, self)
        return loss


def dtype_of(changes):
    return getattr(torch, changes.get("dtype", "float32"))


def make_optimizer(model, changes):
    """AdamW, unless another one is asked for."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if changes.get("optimizer") == "sgd":
        return torch.optim.SGD(parameters, lr=0.02)
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return torch.optim.AdamW(parameters, **{"lr": 0.02, **{name: changes[name] for name in names if name in changes}})


def ulp(tensor, place):
    """Change one number by one unit in the last place."""
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[place] = torch.nextafter(flat[place], torch.full_like(flat[place], 9.0))


def enlarge(tensor, place):
    """Change one number so much that what follows from it does not depend on how a processor rounds."""
    with torch.no_grad():
        tensor.view(-1)[place] *= 1.1


def at(iteration, change):
    """An extension that does something once."""

    @training.make_extension(trigger=(iteration, "iteration"))
    def once(trainer):
        if trainer.updater.iteration == iteration:
            change(trainer)

    return once


def make_trainer(out, recorded=True, length=LENGTH, comm=None, wrap=None, **changes):
    """A trainer that has not run; the changes are those of the keys of this file."""
    chainring.deterministic(changes.get("seed", 0))
    torch.set_num_threads(changes.get("threads", 1))
    model = Net(changes).to(dtype_of(changes))
    if changes.get("init"):
        nn.init.zeros_(model.last.weight)
    if "ulp" in changes:
        ulp(model.get_parameter(changes["ulp"]), changes.get("place", 1))
    if "frozen" in changes:
        getattr(model, changes["frozen"]).requires_grad_(False)
    net = model if wrap is None else wrap(model)
    optimizer = make_optimizer(model, changes)
    batches = iterators.SerialIterator(
        Data(changes), changes.get("batch", BATCH), seed=changes.get("order", 1), shuffle=changes.get("shuffle", True)
    )
    names = ("converter", "accumulate", "precision", "virtual_ranks")
    given = {name: changes[name] for name in names if name in changes}
    updater = training.StandardUpdater(batches, optimizer, net, comm=comm, **given)
    trainer = training.Trainer(updater, (length, "iteration"), out=out, config=changes.get("config"))
    add_extensions(trainer, net, optimizer, recorded, changes)
    return trainer


def add_extensions(trainer, model, optimizer, recorded, changes):
    """A schedule, an average, a log, snapshots, and a recorder."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, changes.get("step", 10), changes.get("gamma", 0.8))
    trainer.extend(extensions.LRScheduler(schedule), trigger=(1, "iteration"))
    trainer.extend(extensions.ExponentialMovingAverage(model, changes.get("decay", 0.9)))
    if "evaluated" in changes:
        trainer.extend(at(changes["evaluated"], lambda trainer: chainring.report({"score": changes["score"]})))
    if "later" in changes:
        iteration, name = changes["later"]
        trainer.extend(at(iteration, LATER[name]))
    trainer.extend(extensions.LogReport(trigger=(changes.get("rows", ROWS), "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(changes.get("every", SNAPSHOTS), "iteration"))
    if recorded:
        trainer.extend(extensions.Recorder((DIGESTS, "iteration")))


FIRST, LAST, BIAS = (f"updater/model:main/{name}" for name in ("first/weight", "last/weight", "last/bias"))
AVERAGE = "extensions/ExponentialMovingAverage/model/first/weight"
MEAN, VARIANCE = (f"updater/model:main/norm/{name}" for name in ("running_mean", "running_var"))
MOMENT = "updater/optimizer:main/state/main/last/bias/exp_avg"


def doubled(batch, device=None):
    """A converter."""
    x, t = concat_examples(batch, device)
    return 2 * x, t


def model_of(trainer):
    return trainer.updater.get_model("main")


def optimizer_of(trainer):
    return trainer.updater.get_optimizer("main")


def decay_more(trainer):
    optimizer_of(trainer).param_groups[0]["weight_decay"] = 0.5


NUMBERS = {  # of a trainer: a tensor, and a place in it
    "weight": lambda trainer: (model_of(trainer).last.weight, 3),
    "variance": lambda trainer: (model_of(trainer).norm.running_var, 3),
    "moment": lambda trainer: (optimizer_of(trainer).state[model_of(trainer).last.bias]["exp_avg"], 0),
}


def change(how, name, trainer):
    """Change one number, by `ulp` or by `enlarge`."""
    how(*NUMBERS[name](trainer))


def draw(trainer):
    """Draw a number that dropout and augmentation would have got."""
    torch.rand(1)


def draw_in_vain(trainer):
    """Draw a number of a generator that nothing else uses."""
    np.random.rand()


LATER = {  # by names, for changes in JSON
    "decay_more": decay_more,
    "draw": draw,
    "draw_in_vain": draw_in_vain,
    **{f"{how.__name__} {name}": partial(change, how, name) for how in (ulp, enlarge) for name in NUMBERS},
}

# What is changed; the first iteration that differs, what differs there, and the first tensor that does, of those that are
# recorded after every fourth iteration; a part of the name of a setting that differs.
DIFFERENCES = {
    "learning rate": ({"lr": 0.021}, 2, "loss", FIRST, "lr"),
    "momentum of the optimizer": ({"betas": (0.9, 0.99)}, 3, "loss", FIRST, "betas"),
    "epsilon": ({"eps": 1e-7}, 2, "loss", FIRST, "eps"),
    "weight decay": ({"weight_decay": 0.02}, 2, "loss", FIRST, "weight_decay"),
    "variant of the optimizer": ({"amsgrad": True}, 3, "loss", FIRST, "amsgrad"),
    "another optimizer": ({"optimizer": "sgd"}, 2, "loss", FIRST, "momentum"),
    "one example": ({"example": 7}, 1, "loss", FIRST, ""),
    "one pixel": ({"pixel": 7}, 1, "loss", FIRST, ""),
    "one pixel that comes later": ({"pixel": 3}, 10, "loss", FIRST, ""),
    "one label": ({"label": 7}, 1, "loss", FIRST, ""),
    "the seed": ({"seed": 1}, 0, "tensor", FIRST, "seeds.torch"),
    "the order of the data": ({"order": 2}, 1, "batch", FIRST, "seeds.iterators"),
    "data that are not shuffled": ({"shuffle": False}, 1, "batch", FIRST, ""),
    "the size of batches": ({"batch": 5}, 1, "batch", FIRST, "batch_size"),
    "an example less": ({"examples": 39}, 6, "batch", FIRST, "iterator:main.size"),
    "augmentation": ({"noise": 0.1001}, 1, "loss", FIRST, ""),
    "an example that draws more": ({"draws": "torch"}, 1, "loss", FIRST, ""),
    "one ulp of a weight": ({"ulp": "first.weight"}, 0, "tensor", FIRST, ""),
    "one ulp of a bias": ({"ulp": "last.bias"}, 0, "tensor", BIAS, ""),
    "one ulp of a scale": ({"ulp": "norm.weight"}, 0, "tensor", "updater/model:main/norm/weight", ""),
    "a weight in the middle": ({"later": (13, "enlarge weight")}, 14, "loss", FIRST, "once"),
    "a buffer in the middle": ({"later": (9, "enlarge variance")}, 12, "tensor", VARIANCE, "once"),
    "a moment in the middle": ({"later": (5, "enlarge moment")}, 7, "loss", FIRST, "once"),
    "weight decay in the middle": ({"later": (11, "decay_more")}, 12, "tensor", FIRST, "once"),
    "a number drawn in the middle": ({"later": (17, "draw")}, 18, "loss", FIRST, "once"),
    "a number that nothing uses": ({"later": (17, "draw_in_vain")}, 24, "generators", None, "once"),
    "a kernel": ({"kernel": True}, 4, "", FIRST, ""),  # in which iteration the loss shows it depends on the processor
    "an activation": ({"activation": nn.Tanh}, 1, "loss", FIRST, ""),
    "the rate of dropout": ({"dropout": 0.31}, 1, "loss", FIRST, ""),
    "no dropout": ({"dropout": 0.0}, 1, "loss", FIRST, ""),
    "the momentum of running statistics": ({"momentum": 0.2}, 4, "tensor", MEAN, ""),
    "the epsilon of a norm": ({"norm_eps": 1e-6}, 1, "loss", FIRST, ""),
    "the width of a layer": ({"width": 9}, 0, "tensor", FIRST, "models.main.parameters.first/weight"),
    "a layer without a bias": ({"bias": False}, 0, "tensor", BIAS, "models.main.parameters.last/bias"),
    "a loss": ({"smoothing": 0.01}, 1, "loss", FIRST, ""),
    "a penalty": ({"penalty": 1e-6}, 1, "loss", FIRST, ""),
    "the initial values": ({"init": True}, 0, "tensor", LAST, ""),
    "a frozen layer": ({"frozen": "first"}, 2, "loss", FIRST, "frozen"),
    "another frozen layer": ({"frozen": "last"}, 2, "loss", FIRST, "frozen"),
    "the steps of a schedule": ({"step": 9}, 11, "loss", FIRST, ""),
    "the factor of a schedule": ({"gamma": 0.7}, 12, "loss", FIRST, ""),
    "the decay of an average": ({"decay": 0.99}, 8, "tensor", AVERAGE, ""),
    "the precision": ({"precision": "bf16"}, 1, "loss", FIRST, "settings.precision"),
    "a converter": ({"converter": doubled}, 1, "loss", FIRST, ""),
    "accumulation": ({"accumulate": 2}, 1, "batch", FIRST, "settings.accumulate"),
    "virtual ranks": ({"virtual_ranks": 2}, 1, "loss", FIRST, "settings.virtual_ranks"),
}  # fmt: skip

if __name__ == "__main__":
    make_trainer(sys.argv[1], **json.loads(sys.argv[2])).run()
