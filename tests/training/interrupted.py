"""A small training of any part, cut after every iteration: what happens in it, and how it ends."""

import shutil

import numpy as np
import torch

import chainring
from chainring import iterators, serializers, training
from chainring.converters import concat_examples
from chainring.training import extensions
from chainring.training._entry import Observer
from resume_program import Net, Noisy

LENGTH = 7
BATCH = 8
_TICK = 0.625  # seconds, that a forward takes by the test's clock


class Made:
    """Everything of one training, made anew.

    Args:
        out: its directory.
        clock: a `chainring.testing.ManualClock`, which goes on by each forward of training.
        data: returns a dataset.
        iterate: makes an iterator of it.
        update: makes an updater of iterator, optimizer and model, and of all other settings.
        extra: makes the extensions, of model and optimizer; each alone, or with its trigger.
        stop: makes the stop trigger.
        takes: whether the state is taken down after every iteration.
    """

    def __init__(self, out, clock, *, data=Noisy, iterate=None, update=None, extra=None, stop=None, takes=False, **settings):
        self.out, self.clock, self.seen = out, clock, []
        net = self.watched(Net())
        optimizer = torch.optim.SGD([{"params": net.parameters(), "own": 1.0}], lr=0.05, momentum=0.5)
        iterator = (iterate or in_order)(data())
        updater = (update or training.StandardUpdater)(iterator, optimizer, net, **settings)
        self.trainer = training.Trainer(updater, stop() if stop else (LENGTH, "iteration"), out=str(out))
        self.watch = Watch(self.seen, takes)
        self.trainer.extend(self.watch)
        self.trainer.extend(extensions.LogReport(trigger=(3, "iteration"), filename=None), "rows")
        self.extensions = []
        for number, each in enumerate(extra(net, optimizer) if extra else ()):
            extension, trigger = each if isinstance(each, tuple) else (each, None)
            self.extensions.append(extension)
            self.trainer.extend(extension, None if hasattr(extension, "default_name") else f"part{number}", trigger)

    def watched(self, net):
        """The model, of which every batch that it is called with is noted."""

        def note(module, inputs):
            self.seen.append(frozen(inputs))
            self.clock.advance(_TICK if module.training else 0.0)

        net.register_forward_pre_hook(note)
        return net

    def run(self):
        """Trains to the end, and takes down how it was."""
        self.trainer.run()
        self.end, self.files = self._end(), self._files()
        return self

    def _end(self):
        """All that the end of an interrupted run must have in common with that of an uninterrupted one."""
        state = frozen(self.trainer.state_dict())
        models = {
            name: frozen(each.model.state_dict()) for name, each in enumerate(self.extensions) if hasattr(each, "model")
        }
        shown = [each.shown.getvalue() for each in self.extensions if hasattr(each, "shown")]
        return {**state, "models": models, "shown": shown, "rows": frozen(self.trainer.get_extension("rows").log)}

    def _files(self):
        """What it has written, by name; without what says when and where it was written."""
        times = ("run.json", "profile.txt", "profile.json", "rank_times.json", "manifest.json", ".lock")
        paths = {path.relative_to(self.out).as_posix(): path for path in self.out.rglob("*") if path.name not in times}
        own = {name: path for name, path in paths.items() if path.is_file() and not name.startswith("abandoned/")}
        return {name: path.read_bytes() for name, path in own.items()}


class Watch(training.Extension):
    """At the end of each iteration: what was reported in it, and which batches the models have seen; and the state."""

    priority = -1000
    is_snapshot = invoke_before_training = skip_on_resume = True

    def __init__(self, seen, takes):
        self.seen = seen
        self.takes = takes
        self.rows = []
        self.states = []

    def __call__(self, trainer):
        if self.takes:
            self.states.append(trainer.state_dict())
        if trainer.updater.iteration:
            self.rows.append({**frozen(trainer.observation), "batches seen": list(self.seen)})
            self.seen.clear()


def in_order(data):
    return iterators.SerialIterator(data, BATCH)


class Cut(Observer):
    """Ends a run after an iteration, and leaves its stop trigger alone."""

    def __init__(self, last):
        self.last = last

    def ends(self, trainer, ends):
        return trainer.updater.iteration == self.last or ends()


def assert_resumes_everywhere(out, clock, **settings):
    """A run that is cut after every iteration, none included, and goes on in fresh objects of another seed, is the whole.

    Each piece begins with the state of the piece before, so that the error of one cut stays. Returns the whole run.
    """
    whole = made(out / "whole", clock, **settings).run()
    state, rows = None, []
    for k in range(len(whole.watch.rows) + 2):
        piece = made(out / str(k), clock, seed=100 + k if k else 0, takes=True, **settings)
        if state is not None:
            piece.trainer.load_state_dict(state)
            torch.rand(k), np.random.rand(k)  # a script may draw between load and run
        if k <= len(whole.watch.rows):
            piece.trainer.watch(Cut(k))
            piece.trainer.run()
            state = piece.watch.states[-1]
            rows += piece.watch.rows
    piece.watch.rows = rows
    assert_continued(piece.run(), whole, 0)
    return whole


def assert_resumes_from_the_disk(out, clock, **settings):
    """The same from the snapshot of each iteration, in a directory where a run has gone on after it."""
    whole = made(out / "whole", clock, **settings).run()
    for k in range(1, LENGTH + 1):
        shutil.copytree(whole.out, out / str(k), symlinks=True)
        resumed = made(out / str(k), clock, seed=100 + k, **settings)
        serializers.load(resumed.out / f"snapshot_iter_{k}", resumed.trainer)
        assert_continued(resumed.run(), whole, k)
        assert resumed.files.keys() == whole.files.keys()


def made(out, clock, seed=0, **settings):
    """A training from a seed of its own."""
    chainring.deterministic(seed)
    return Made(out, clock, **settings)


def assert_continued(resumed, whole, k):
    """The second part is that of the uninterrupted run, and so is the end."""
    rows = zip(resumed.watch.rows, whole.watch.rows[k:], strict=True)
    found = [f"iteration {k + n + 1}: {_differing(*pair)}" for n, pair in enumerate(rows) if pair[0] != pair[1]]
    found += _differing(resumed.end, whole.end)
    found += [name for name, text in resumed.files.items() if whole.files.get(name) != text]
    assert not found, f"cut after iteration {k}, this differs: {found}"


def _differing(one, other):
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def frozen(value):
    """A copy to be compared bit for bit: NaN equals itself, and 0.0 is not -0.0."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).cpu().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items() if key != "elapsed_time"}
    if isinstance(value, (list, tuple)):
        return [frozen(each) for each in value]
    return repr(value)


def loss_of(model, *inputs, **named):
    """The loss of a model of four inputs and three classes, whatever form the examples have."""
    x, *rest = inputs or named.values()
    x = x.float().reshape(len(x), -1)[:, :4]
    labels = rest[0] if rest else x.sum(1).long()
    return model(x, labels.long() % 3)


def letters(batch, device):
    """Lines of four letters as numbers; of several files, those of the first."""
    lines = [line if isinstance(line, str) else line[0] for line in batch]
    return concat_examples([[float(ord(letter)) / 100 for letter in line] for line in lines], device)
