"""Trainings of a few iterations that forget something when they are resumed, each in its own way, and some that do not."""

import numpy as np
import torch
from torch import nn

import chainring
import resume_program
from chainring import iterators, training
from chainring.training import extensions

EXAMPLES, BATCH = 12, 4


class Points(torch.utils.data.Dataset):
    """Twelve points, the same each time."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % 3


class Noisy(Points):
    """Noise from a generator of its own, which no one saves."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        point, label = super().__getitem__(i)
        return point + self.rng.normal(), label


class Net(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, t):
        loss = nn.functional.cross_entropy(self.layer(x), t)
        chainring.report({"loss": loss}, self)
        return loss


class Counting(Net):
    """Scales the loss by a count that is no buffer."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, t):
        self.calls += 1
        return super().forward(x, t) / self.calls


class Averaging(training.StandardUpdater):
    """Pulls the parameters to a mean of them, which its serialize leaves out."""

    mean = None

    def update_core(self):
        super().update_core()
        with torch.no_grad():
            for parameter in self.get_model("main").parameters():
                if parameter.ndim == 2:
                    self.mean = parameter.clone() if self.mean is None else 0.5 * self.mean + 0.5 * parameter
                    parameter.lerp_(self.mean, 0.5)


class Asked:
    """Stops when it has been asked so often."""

    def __init__(self, number):
        self.left = number

    def __call__(self, trainer):
        self.left -= 1
        return self.left < 0


class Shuffled:
    """A loader that begins each pass where its own generator stands."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return EXAMPLES // BATCH

    def __iter__(self):
        order = self.rng.permutation(EXAMPLES)
        for chosen in order.reshape(-1, BATCH):
            yield torch.stack([Points()[i][0] for i in chosen]), torch.as_tensor(chosen) % 3


def build(out, net=Net, data=None, updater=training.StandardUpdater, stop=(3, "epoch")):
    """A trainer over fresh objects."""
    chainring.deterministic(0)
    model = net()
    source = iterators.SerialIterator(Points(), BATCH) if data is None else data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = training.Trainer(updater(source, optimizer, model), stop, out=out)
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    return trainer


def sound(out):
    """Everything that draws, counts or remembers, and is saved."""
    trainer, *_ = resume_program.build(out)
    trainer.extend(extensions.snapshot(autoload=True), trigger=(2, "iteration"))
    return trainer


def counting_model(out):
    return build(out, net=Counting)


def noisy_dataset(out):
    return build(out, data=iterators.SerialIterator(Noisy(), BATCH))


def hidden_schedule(out):
    """An extension halves the learning rate by a count in a closure."""
    calls = 0

    def decay(trainer):
        nonlocal calls
        calls += 1
        if calls == 6:
            trainer.updater.get_optimizer("main").param_groups[0]["lr"] /= 2

    trainer = build(out)
    trainer.extend(decay)
    return trainer


def loader_with_a_generator(out):
    return build(out, data=Shuffled())


def averaging_updater(out):
    return build(out, updater=Averaging)


def unsaved_scheduler(out):
    """Steps a scheduler in an extension that cannot save it, because it was registered before."""
    trainer = build(out)
    trainer.extend(lambda trainer: scheduler.step(), name="schedule")
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.updater.get_optimizer("main"), 3)
    return trainer


def forgetful_rows(out):
    """The training is sound, and a row holds a count that is not."""
    written = []

    def number(row):
        written.append(None)
        row["number"] = len(written)

    trainer = build(out)
    trainer.extend(extensions.LogReport(trigger=(2, "iteration"), postprocess=number, filename="numbered"), name="numbered")
    return trainer


def unseeded(out):
    """Its weights are others each time, and it forgets a count besides."""
    trainer = build(out, net=Counting)
    with torch.no_grad():
        trainer.updater.get_model("main").layer.bias.add_(float(np.random.default_rng().normal()))
    return trainer


def clocked():
    """Reports and writes what no two runs have in common, such as a speed and a date; it takes no out."""
    trainer = build("elsewhere")
    clock = np.random.default_rng()
    trainer.extend(lambda t: chainring.report({"speed": clock.normal()}), name="speed", priority=300)
    dated = extensions.LogReport(
        trigger=(1, "iteration"), filename="dated", postprocess=lambda row: row.update(date=clock.normal())
    )
    trainer.extend(dated, name="dated")
    return trainer


def counting_stop(out):
    """Its stop trigger counts how often it was asked, and does not save that."""
    return build(out, stop=Asked(6))


class Overwriting(nn.Module):
    """A model that puts back other numbers than were saved."""

    def __init__(self):
        super().__init__()
        self.layer = Net()

    def forward(self, x, t):
        return self.layer(x, t)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({name: value.bfloat16() for name, value in state_dict.items()}, strict, assign)


def wrongly_loaded(out):
    return build(out, net=Overwriting)


def failing(out):
    """Raises in its third iteration."""

    def fail(trainer):
        if trainer.updater.iteration == 3:
            raise LookupError("the third iteration")

    trainer = build(out)
    trainer.extend(fail)
    return trainer


def short(out):
    """Ends after three iterations."""
    return build(out, stop=(3, "iteration"))


def no_trainer(out):
    """Forgets to return it."""
    build(out)


def not_loading(out):
    """An extension whose state cannot be put back."""

    class Refusing(training.Extension):
        def __call__(self, trainer):
            pass

        def state_dict(self):
            return {"calls": 1}

        def load_state_dict(self, state):
            raise ValueError("no way back")

    trainer = build(out)
    trainer.extend(Refusing())
    return trainer
