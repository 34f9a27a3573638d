"""Runs that are saved after every iteration, read back into fresh objects, and compared with the run that went on."""

import contextlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import chainring
from chainring import serializers, training
from chainring.iterators import SerialIterator

SAVED_AFTER = (0, 1, 2, 3)  # iterations
FURTHER = 5  # steps of a resumed run


class Recorder(training.Extension):
    """Notes after every iteration all that a resumed run must have in common, and saves the trainer on request."""

    is_snapshot = True  # last of all, at the boundary at which a run is saved

    def __init__(self, directory=None):
        self.seen = {}
        self.directory = directory

    def __call__(self, trainer):
        self.seen[trainer.updater.iteration] = everything(trainer)
        if self.directory is not None and trainer.updater.iteration in SAVED_AFTER:
            serializers.save(place(self.directory, trainer.updater.iteration), trainer)


class Scheduler(training.Extension):
    """Steps a scheduler of torch after every update."""

    def __init__(self, scheduler, by_loss=False):
        self.scheduler = scheduler
        self.by_loss = by_loss

    def __call__(self, trainer):
        self.scheduler.step(*([trainer.observation["main/loss"]] if self.by_loss else []))

    def serialize(self, serializer):
        serializer.visit("scheduler", self.scheduler)


class Closing(training.StandardUpdater):
    """For an optimizer that evaluates the loss itself."""

    def update_core(self):
        batch, optimizer = self.next_batch(), self.get_optimizer("main")

        def closure():
            optimizer.zero_grad()
            loss = self.get_model("main")(batch)
            loss.backward()
            return loss

        optimizer.step(closure)


class Net(nn.Module):
    """Matrices and, on request, vectors; one parameter is tied, one never gets a gradient, and there is dropout."""

    def __init__(self, bias=True, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=bias, dtype=dtype)
        self.tied = nn.Linear(3, 3, bias=bias, dtype=dtype)
        self.tied.weight = self.first.weight
        self.second = nn.Linear(3, 2, bias=bias, dtype=dtype)
        self.idle = nn.Linear(2, 2, bias=bias, dtype=dtype)

    def forward(self, x):
        hidden = F.dropout(self.tied(self.first(x.to(self.first.weight.dtype)).tanh()), 0.2)
        output = self.second(hidden)
        return (output * output.conj()).real.float().mean()


def groups_of(model):
    """Two groups of parameters with settings of their own."""
    first = {id(parameter) for parameter in model.first.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in first]
    return [{"params": list(model.first.parameters())}, {"params": rest, "weight_decay": 0.05}]


def data(*shape):
    return torch.randn(12, *shape, generator=torch.Generator().manual_seed(1))


def trainer_of(model, optimizer, stop, out, extension=None, inputs=None, kind=training.StandardUpdater):
    """A trainer over shuffled data that does not yet record."""
    updater = kind(SerialIterator(data(3) if inputs is None else inputs, 4), optimizer, model)
    trainer = training.Trainer(updater, (stop, "iteration"), out=str(out))
    if extension is not None:
        trainer.extend(extension, name="scheduler")
    return trainer


def check_every_iteration(directory, build):
    """A run saved after each iteration, 0 included, and continued from the disk goes the way of one never saved.

    Args:
        directory: an empty one.
        build: ``build(stop, out)`` makes a trainer over fresh objects, of which the current seed decides.

    Returns what was seen of the run that was never saved, by iteration and path.
    """
    last = SAVED_AFTER[-1] + FURTHER
    whole = recorded(build, 1, last, directory / "whole")
    saving = recorded(build, 1, last, directory / "saving", saves_to=directory)
    require_same(saving.seen, whole.seen, "saving changed the run")
    for k in SAVED_AFTER:
        resumed = recorded(build, 2, k + FURTHER, directory / f"resumed-{k}", loads=place(directory, k))
        require_same(resumed.seen, {i: whole.seen[i] for i in range(k, k + FURTHER + 1)}, f"resumed after {k} iterations")
    return whole.seen


def require_same(ours, theirs, what):
    found = differences(ours, theirs)
    assert not found, f"{what}, and these differ: {found[:10]}"


def recorded(build, seed, stop, out, saves_to=None, loads=None):
    """Builds, loads if so asked, and runs; what was seen at the start and after every iteration."""
    chainring.deterministic(seed)
    trainer = build(stop, out)
    recorder = Recorder(saves_to)
    trainer.extend(recorder)
    if loads is not None:
        serializers.load(loads, trainer)
    recorder(trainer)
    trainer.run()
    return recorder


def place(directory, iteration) -> Path:
    return directory / f"after-{iteration}"


def everything(trainer):
    """Model, optimizer, learning rates and scheduler as plain values that are equal only if every bit is."""
    model, optimizer = trainer.updater.get_model("main"), trainer.updater.get_optimizer("main")
    parts = {
        "parameters": dict(model.named_parameters(remove_duplicate=False)),
        "buffers": dict(model.named_buffers()),
        "optimizer": optimizer.state_dict(),
    }
    with contextlib.suppress(KeyError):
        parts["scheduler"] = trainer.get_extension("scheduler").scheduler.state_dict()
    return dict(_leaves("", parts))


def differences(ours, theirs):
    """Where two records differ, as iteration and path."""
    found = [f"iteration {i}" for i in sorted(ours.keys() ^ theirs.keys())]
    for i in sorted(ours.keys() & theirs.keys()):
        paths = sorted(ours[i].keys() | theirs[i].keys())
        found += [f"iteration {i}: {path}" for path in paths if ours[i].get(path) != theirs[i].get(path)]
    return found


def _leaves(path, value):
    if isinstance(value, (dict, list, tuple)):
        yield f"{path}:", type(value).__name__
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{path}/{key!r}", item)
    else:
        yield path, bits(value)


def bits(value):
    """What is equal for two values only if type, format, layout and every bit are."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, value.stride(), value.requires_grad, plain.cpu().numpy().tobytes()
    return type(value).__name__, value.hex() if isinstance(value, float) else value
